"""Ties: integers and bools of an ONNX model's outputs that rounding decides.

A class is the index of the largest score. Where two scores differ by no more than the bounds on the error of scores,
either index is a right answer, and so is either answer of a comparison of two such numbers. Two programs for one model
add the same numbers in different orders, so they give different ones.
"""

import math
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import numpy as np
import numpy.typing as npt

from tvmflow.arrays import Array
from tvmflow.errors import ExportError
from tvmflow.onnx_model.external_data import load, save
from tvmflow.onnx_model.graph import writers_of
from tvmflow.onnx_model.session import open_session, run_session
from tvmflow.tolerance import Bounds

if TYPE_CHECKING:
    import onnx
    import onnxruntime


# Operators that keep the order of the elements of their first operand.
_KEEPS_ORDER = frozenset({"Identity", "Cast", "Squeeze", "Unsqueeze", "Reshape", "Flatten"})
_COMPARISONS = frozenset({"Greater", "GreaterOrEqual", "Less", "LessOrEqual"})
_CLASSIFIERS = frozenset({"TreeEnsembleClassifier", "LinearClassifier"})


@dataclass(frozen=True)
class _Decision:
    """How an output follows from tensors of floats.

    `index`: each integer is the index of one of the largest or smallest `scores[0]` along `axis`, or, if there are
    `labels`, the label at that index. `comparison`: each bool compares two numbers, one of each of `scores`.
    """

    kind: Literal["index", "comparison"]
    scores: tuple[str, ...]
    axis: int = -1
    labels: tuple[int, ...] | None = None


class Ties:
    """The outputs of a model that are indices of scores, or comparisons; falsy where there are none."""

    def __init__(self, path: Path) -> None:
        """Read the model in the ONNX file `path`, which must be valid."""
        import onnx

        model = onnx.load(str(path), load_external_data=False)
        writers = writers_of(model.graph)
        constants = _constants(model.graph)
        decisions = {item.name: _decision_of(item.name, writers, constants) for item in model.graph.output}
        self._decisions = {name: decision for name, decision in decisions.items() if decision is not None}
        self._path = path
        self._session: onnxruntime.InferenceSession | None = None

    def __bool__(self) -> bool:
        return bool(self._decisions)

    def settle(
        self, inputs: Mapping[str, Array], expected: Mapping[str, Array], actual: Mapping[str, Array], bounds: Bounds
    ) -> dict[str, Array]:
        """Return the outputs `actual` with the expected answer wherever theirs is as right within `bounds`.

        `expected` are the original's outputs for `inputs`, all by name. An output whose scores ONNX Runtime cannot
        compute stays as it is.
        """
        settled = dict(actual)
        for name, decision in self._decisions.items():
            answer, other = expected[name], actual[name]
            if answer.shape != other.shape or np.array_equal(answer, other):
                continue
            scores = self._scores(inputs, decision)
            if scores is not None:
                is_tie = _is_tie(decision, scores, answer, other, bounds)
                settled[name] = np.where(is_tie.reshape(answer.shape), answer, other)
        return settled

    def find_undecided(
        self, inputs: Mapping[str, Array], outputs: Mapping[str, Array], bounds: Bounds
    ) -> dict[str, npt.NDArray[np.bool_]]:
        """Return, for each output that has some, which elements may be other ones within `bounds`, as masks by name.

        `outputs` are the original's for `inputs`, both by name. An output whose scores ONNX Runtime cannot compute has
        no mask.
        """
        masks = {}
        for name, decision in self._decisions.items():
            scores = self._scores(inputs, decision)
            if scores is not None:
                mask = _may_differ(decision, scores, outputs[name], bounds).reshape(outputs[name].shape)
                if mask.any():
                    masks[name] = mask
        return masks

    def _scores(self, inputs: Mapping[str, Array], decision: _Decision) -> "list[Array] | None":
        """The scores that a decision is about; None where they are integers, which have no error, or not computed."""
        try:
            if self._session is None:
                self._session = self._open()
            values = {**inputs, **run_session(self._session, dict(inputs))}
        except ExportError:
            return None
        scores = [np.asarray(values[name]) for name in decision.scores]
        return scores if all(item.dtype.kind == "f" for item in scores) else None

    def _open(self) -> "onnxruntime.InferenceSession":
        """ONNX Runtime's session of the model with the scores as further outputs."""
        import onnx

        model = load(self._path)
        present = {item.name for item in (*model.graph.output, *model.graph.input)}
        names = dict.fromkeys(name for decision in self._decisions.values() for name in decision.scores)
        model.graph.output.extend(onnx.ValueInfoProto(name=name) for name in names if name not in present)
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "model.onnx"
            save(model, path)
            return open_session(path, prints_errors=False)


def _decision_of(
    name: str, writers: "Mapping[str, onnx.NodeProto]", constants: Mapping[str, Array]
) -> _Decision | None:
    """How a tensor follows from scores; None where it does not."""
    import onnx

    labels: tuple[int, ...] | None = None
    while name in writers:
        node = writers[name]
        attributes = {item.name: onnx.helper.get_attribute_value(item) for item in node.attribute}
        table = constants.get(node.input[0]) if node.op_type in ("Gather", "ArrayFeatureExtractor") else None
        if node.op_type in _KEEPS_ORDER:
            name = node.input[0]
        elif table is not None and labels is None and table.dtype.kind in "iu":
            labels, name = tuple(map(int, table.reshape(-1))), node.input[1]
        elif node.op_type in ("ArgMax", "ArgMin"):
            return _Decision("index", (node.input[0],), attributes.get("axis", 0), labels)
        elif node.op_type == "TopK" and name == node.output[1]:
            return _Decision("index", (node.input[0],), attributes.get("axis", -1), labels)
        elif node.op_type in _COMPARISONS and labels is None:
            return _Decision("comparison", (node.input[0], node.input[1]))
        elif node.op_type in _CLASSIFIERS and name == node.output[0] and labels is None:
            names = attributes.get("classlabels_int64s") or attributes.get("classlabels_ints") or ()
            return _Decision("index", (node.output[1],), 1, tuple(names)) if names else None
        else:
            return None
    return None


def _constants(graph: "onnx.GraphProto") -> dict[str, Array]:
    """The vectors of a graph that are known before it runs, by name."""
    from onnx import numpy_helper

    tensors = {item.name: item for item in graph.initializer}
    for node in graph.node:
        if node.op_type == "Constant" and node.attribute and node.attribute[0].name == "value":
            tensors[node.output[0]] = node.attribute[0].t
    return {
        name: numpy_helper.to_array(item)
        for name, item in tensors.items()
        if item.data_location != item.EXTERNAL and max(item.dims, default=1) == math.prod(item.dims)
    }


def _is_tie(decision: _Decision, scores: list[Array], expected: Array, actual: Array, bounds: Bounds) -> Array:
    """Which elements of two results are right answers both."""
    if decision.kind == "comparison":
        return _may_differ(decision, scores, expected, bounds)
    table, shape = _table_of(decision, scores[0])
    indices, others = (_indices_of(decision, result, shape) for result in (expected, actual))
    count = table.shape[-1]
    is_index = (indices >= 0) & (others >= 0) & (indices < count) & (others < count)
    own, other = (np.take_along_axis(table, np.clip(item, 0, count - 1), axis=-1) for item in (indices, others))
    # Of several indices, each must be another one.
    ordered = np.sort(others, axis=-1)
    is_index &= (ordered[:, 1:] != ordered[:, :-1]).all(axis=-1, keepdims=True)
    is_tie = is_index & (np.abs(own - other) <= bounds.tolerance(own, scores[0]))
    return _to_order_of_result(is_tie, decision, shape)


def _may_differ(decision: _Decision, scores: list[Array], result: Array, bounds: Bounds) -> Array:
    """Which elements of a result are undecided."""
    if decision.kind == "comparison":
        one, other = (item.astype(np.float64) for item in np.broadcast_arrays(*scores))
        with np.errstate(invalid="ignore"):
            return np.asarray(np.abs(one - other) <= bounds.tolerance(other, scores[1]))
    table, shape = _table_of(decision, scores[0])
    indices = _indices_of(decision, result, shape)
    own = np.take_along_axis(table, np.clip(indices, 0, table.shape[-1] - 1), axis=-1)
    tolerance = bounds.tolerance(own, scores[0])
    near = [
        (np.abs(table - own[:, [index]]) <= tolerance[:, [index]]).sum(axis=-1) > 1 for index in range(own.shape[1])
    ]
    return _to_order_of_result(np.stack(near, axis=-1), decision, shape)


def _table_of(decision: _Decision, scores: Array) -> tuple[Array, tuple[int, ...]]:
    """The scores as rows [rows, indices], and the sizes of the other dimensions than that of the indices."""
    moved = np.moveaxis(scores.astype(np.float64), decision.axis, -1)
    return moved.reshape(-1, moved.shape[-1]), moved.shape[:-1]


def _indices_of(decision: _Decision, result: Array, shape: tuple[int, ...]) -> Array:
    """The indices that a result names, [rows, indices of a row]; -1 for what is none of the labels."""
    values = result.astype(np.int64)
    if decision.labels is not None:
        labels = np.asarray(decision.labels)
        order = np.argsort(labels)
        nearest = np.clip(np.searchsorted(labels[order], values), 0, len(labels) - 1)
        values = np.where(labels[order][nearest] == values, order[nearest], -1)
    axis = decision.axis % (len(shape) + 1)
    moved = np.moveaxis(values.reshape(*shape[:axis], -1, *shape[axis:]), axis, -1)
    return moved.reshape(-1, moved.shape[-1])


def _to_order_of_result(mask: Array, decision: _Decision, shape: tuple[int, ...]) -> Array:
    """A mask [rows, indices of a row] with its elements in the order of the result."""
    return np.moveaxis(mask.reshape(*shape, -1), -1, decision.axis % (len(shape) + 1)).reshape(-1)
