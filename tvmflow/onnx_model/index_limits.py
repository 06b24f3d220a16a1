"""The values that the integers of an ONNX model's inputs may have, where the model uses them as indices."""

from typing import TYPE_CHECKING

from tvmflow.onnx_model.external_data import array_inside
from tvmflow.onnx_model.graph import readers_of, writers_of

if TYPE_CHECKING:
    import onnx

# Operators whose result holds the elements of their first operand, or some of them.
_MOVING = {
    *("Cast", "Expand", "Flatten", "Identity", "Reshape", "Slice", "Split", "Squeeze", "Tile", "Transpose"),
    "Unsqueeze",
}
# Those of them that may leave elements out.
_SELECTING = {"Slice", "Split"}
# Operators that keep the sizes of a table, though not its numbers.
_SAME_SIZES = {"Cast", "DequantizeLinear", "Identity"}
# For com.microsoft's EmbedLayerNormalization, the operands that are indices, and the tables that they look up.
_EMBEDDINGS = {0: 2, 1: 4, 8: 3}


def index_limits(model: "onnx.ModelProto") -> dict[str, int]:
    """Return how many values each input may have whose integers, from 0 on, are indices; by the input's name.

    These are the rows of the smallest table of weights in which the model looks them up, such as the tokens of a
    vocabulary, or the classes of a one-hot encoding. Inputs that the model uses in another way are left out.
    """
    graph = _Graph(model)
    return {value.name: limit for value in model.graph.input if (limit := graph.limit_of(value.name)) is not None}


def index_ranges(model: "onnx.ModelProto") -> dict[str, tuple[int, int]]:
    """Return the least and the largest integer of each input of which all integers are looked up in a table of weights.

    Inputs of other types than 32-bit and 64-bit integers are left out. ONNX Runtime refuses to run the model with an
    integer that a table lacks; a bundle would read the nearest row in its place. Gather counts negative ones from the
    end of the table.
    """
    graph = _Graph(model)
    inputs = [value.name for value in model.graph.input if _holds_indices(value.type.tensor_type.elem_type)]
    return {name: limits for name in inputs if (limits := graph.range_of(name)) is not None}


def _holds_indices(element: int) -> bool:
    """Whether one of ONNX's types holds all indices: a conversion to another type changes those that do not fit."""
    from onnx import TensorProto

    return element in (TensorProto.INT32, TensorProto.INT64)


class _Graph:
    """The readers of each value of a model's graph, and its weights."""

    def __init__(self, model: "onnx.ModelProto") -> None:
        self._readers = readers_of(model.graph)
        self._writers = writers_of(model.graph)
        self._weights = {tensor.name: tensor for tensor in model.graph.initializer}
        for node in model.graph.node:
            for item in node.attribute:
                if node.op_type == "Constant" and item.name == "value":
                    self._weights[node.output[0]] = item.t

    def limit_of(self, name: str) -> int | None:
        """The smallest limit of those that read a value; None where there is none, or an inner graph reads it."""
        limits: list[int] = []
        for node in self._readers[name]:
            if name not in node.input:
                return None
            limit = self._limit_at(node, name)
            if limit is not None:
                limits.append(limit)
        return min(limits, default=None)

    def range_of(self, name: str) -> tuple[int, int] | None:
        """The integers that all tables have in which all elements of a value are looked up; None without a table."""
        ranges = [
            limits
            for node in self._readers[name]
            for place, item in enumerate(node.input)
            if item == name and (limits := self._range_at(node, place)) is not None
        ]
        return (max(low for low, _ in ranges), min(high for _, high in ranges)) if ranges else None

    def _range_at(self, node: "onnx.NodeProto", place: int) -> tuple[int, int] | None:
        if node.op_type in _MOVING - _SELECTING and place == 0:
            types = [item.i for item in node.attribute if item.name == "to"]
            return self.range_of(node.output[0]) if all(map(_holds_indices, types)) else None
        rows = self._rows_at(node, place)
        if rows is None:
            return None
        return (-rows if node.op_type == "Gather" else 0), rows - 1

    def _rows_at(self, node: "onnx.NodeProto", place: int) -> int | None:
        """The rows of the table in which a node looks up an operand; None for other nodes and operands."""
        if node.op_type == "Gather" and place == 1:
            axis = next((item.i for item in node.attribute if item.name == "axis"), 0)
            return self._size(node.input[0], axis)
        if node.op_type == "EmbedLayerNormalization" and place in _EMBEDDINGS and len(node.input) > _EMBEDDINGS[place]:
            return self._size(node.input[_EMBEDDINGS[place]], 0)
        return None

    def _limit_at(self, node: "onnx.NodeProto", name: str) -> int | None:
        place = list(node.input).index(name)
        if node.op_type in _MOVING:
            limits = [self.limit_of(output) for output in node.output] if place == 0 else []
            return min((limit for limit in limits if limit is not None), default=None)
        rows = self._rows_at(node, place)
        if rows is not None:
            return rows
        if node.op_type == "OneHot" and place == 0:
            depth = array_inside(self._weights, node.input[1])
            return None if depth is None else int(depth.ravel()[0])
        if node.op_type == "Equal":
            # A one-hot encoding is a comparison with all classes; a comparison with one number, such as that of the
            # padding, limits nothing.
            classes = array_inside(self._weights, node.input[1 - place])
            return None if classes is None or classes.size <= 2 else int(classes.max()) + 1
        return None

    def _size(self, name: str, axis: int) -> int | None:
        """The size of a table of weights along an axis; None for what the model computes."""
        while name not in self._weights:
            writer = self._writers.get(name)
            if writer is None or writer.op_type not in _SAME_SIZES:
                return None
            name = writer.input[0]
        sizes = self._weights[name].dims
        return int(sizes[axis]) if -len(sizes) <= axis < len(sizes) else None
