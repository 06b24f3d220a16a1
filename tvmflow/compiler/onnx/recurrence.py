"""Recurrent networks: LSTM, GRU and RNN."""

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

import numpy as np
from tvm import relax

from tvmflow.compiler.onnx.node import Converter, FreeSizeError, Node, UnsupportedFormError
from tvmflow.compiler.onnx.quantised import quantise_dynamically
from tvmflow.compiler.onnx.values import const, dims_of, dtype_of, is_static
from tvmflow.compiler.operators.cells import ACTIVATIONS, GATES, recurrence

_DEFAULTS = {"LSTM": ("Sigmoid", "Tanh", "Tanh"), "GRU": ("Sigmoid", "Tanh"), "RNN": ("Tanh",)}
# The operands that an operator has after its input and its two matrices.
_OPTIONAL = ("bias", "lengths", "initial_h", "initial_c", "peepholes")
# Activations whose parameters have the defaults of the ONNX operators of their names.
_PARAMETERS = {"Elu": (1.0,), "HardSigmoid": (0.2, 0.5), "LeakyRelu": (0.01,), "ThresholdedRelu": (1.0,)}


def convert_recurrence(
    operator: str, *, quantised: Mapping[str, relax.Expr] | None = None, dtypes: Mapping[str, str] | None = None
) -> Converter:
    """Return the converter of `operator`, which is LSTM, GRU or RNN; it emits the operator `tvmflow.recurrence`.

    With `quantised`, the hidden states are rounded before they are multiplied, as `Cell` says. Its entries are more
    operands of `recurrence`. `dtypes` are the element types of operands that are not float32, by the operand's name.

    The converter returns a tuple of the outputs of all steps, the last hidden state and, for LSTM, the last cell state.
    It raises UnsupportedFormError for element types other than float32, unknown activations or directions, and weights
    whose sizes contradict each other. It raises FreeSizeError for operands of unknown shape and symbolic weights.
    """

    def convert(node: Node) -> relax.Expr:
        operands = {name: node.input(place) for place, name in enumerate(("x", "w", "r", *_OPTIONAL))}
        present = {name: expr for name, expr in operands.items() if expr is not None}
        _check(operator, present, dtypes={"lengths": "int32", **(dtypes or {})})
        direction = node.text("direction", "forward")
        if direction not in ("forward", "reverse", "bidirectional"):
            raise UnsupportedFormError(f"direction {direction!r}")
        is_batch_first = bool(node.attrs.get("layout", 0))
        if is_batch_first:
            for name in ("x", "initial_h", "initial_c"):
                if name in present:
                    present[name] = node.emit(relax.op.permute_dims(present[name], [1, 0, 2]))
        directions = 2 if direction == "bidirectional" else 1
        for name, shape in _shapes(operator, present, directions).items():
            if name in present:
                present[name] = node.with_sizes(present[name], shape)
        activations = list(_activations(node, _DEFAULTS[operator], directions))
        result = node.emit(
            recurrence(
                present | dict(quantised or {}),
                kind=operator.lower(),
                direction=direction,
                activations=[name for name, _, _ in activations],
                alphas=[alpha for _, alpha, _ in activations],
                betas=[beta for _, _, beta in activations],
                clip=float(node.attrs.get("clip", 0.0)),
                input_forget=int(node.attrs.get("input_forget", 0)),
                linear_before_reset=int(node.attrs.get("linear_before_reset", 0)),
                quantised=int(quantised is not None),
            )
        )
        outputs = [node.emit(relax.TupleGetItem(result, place)) for place in range(3 if operator == "LSTM" else 2)]
        if is_batch_first:
            axes = [[2, 0, 1, 3], [1, 0, 2], [1, 0, 2]]
            pairs = zip(outputs, axes, strict=False)
            outputs = [node.emit(relax.op.permute_dims(output, order)) for output, order in pairs]
        return relax.Tuple(outputs)

    return convert


def convert_dynamic_quantize_lstm(node: Node) -> relax.Expr:
    """Return the Relax expression of DynamicQuantizeLSTM: an LSTM with dequantised weights.

    The input is quantised by its own range, and so are the hidden states of the batch in each step; then both are
    dequantised. ONNX Runtime does so on one thread. Where several threads share a batch, each quantises the states of
    its own sequences, and the results depend on the number of threads. Raises UnsupportedFormError for weights, scales
    or zero points that are not constant, and the errors of the LSTM converter that `convert_recurrence` returns.
    """
    matrices, scales = [], []
    for place, scale_place in ((1, 8), (2, 10)):
        matrix, scale, zero = (node.constant(position) for position in (place, scale_place, scale_place + 1))
        if matrix is None or scale is None or (zero is None and node.input(scale_place + 1) is not None):
            raise UnsupportedFormError("weights that are computed")
        # A number for each direction, or for each of its columns.
        scale, zero = (
            item.reshape(len(matrix), 1, -1)
            for item in (scale, np.zeros(len(matrix), "int32") if zero is None else zero)
        )
        matrices.append((matrix.astype("int32") - zero.astype("int32")).transpose(0, 2, 1))
        scales.append(np.broadcast_to(scale[:, 0].astype("float32"), (len(matrix), matrix.shape[-1])))
    x, x_scale, x_zero = quantise_dynamically(node, node.inputs[0])
    more = {"x_scale": x_scale, "x_zero": x_zero, "w_scale": const(scales[0], "float32")}
    dtypes = {"x": "uint8", "w": "int32"}
    of_states = matrices[1]
    if np.array_equal(of_states, of_states.astype("int8")):
        dtypes["r"], more["r_scale"] = "int8", const(scales[1], "float32")
        of_states = of_states.astype("int8")
    else:
        of_states = of_states.astype("float32") * scales[1][..., None]
    operands = [x, const(matrices[0], "int32"), const(of_states), *(node.input(place) for place in range(3, 8))]
    return convert_recurrence("LSTM", quantised=more, dtypes=dtypes)(replace(node, inputs=operands))


def _check(operator: str, operands: dict[str, relax.Expr], dtypes: Mapping[str, str]) -> None:
    """Refuse element types other than float32, or than those of `dtypes`, and matrices of unknown sizes."""
    for name, expr in operands.items():
        if dtype_of(expr) != dtypes.get(name, "float32"):
            raise UnsupportedFormError(f"operands of {dtype_of(expr)}: only float32 is supported")
        dims = dims_of(expr)
        if dims is None or (name in ("w", "r") and not all(is_static(dim) for dim in dims)):
            raise FreeSizeError("operands of unknown shape")
    hidden = dims_of(operands["r"])[-1]  # type: ignore[index]
    if dims_of(operands["r"])[1] != GATES[operator.lower()] * hidden:  # type: ignore[index]
        raise UnsupportedFormError("a recurrence matrix whose sizes contradict each other")


def _shapes(operator: str, operands: dict[str, relax.Expr], directions: int) -> dict[str, list[Any]]:
    """The shape that each operand must have, by the sizes of the input and of the matrices."""
    steps, batch, _ = dims_of(operands["x"])  # type: ignore[misc]
    hidden, inputs = dims_of(operands["r"])[-1], dims_of(operands["w"])[-1]  # type: ignore[index]
    columns = GATES[operator.lower()] * hidden
    state = [directions, batch, hidden]
    return {
        "x": [steps, batch, inputs],
        "bias": [directions, 2 * columns],
        "lengths": [batch],
        "initial_h": state,
        "initial_c": state,
        "peepholes": [directions, 3 * hidden],
    }


def _activations(node: Node, defaults: tuple[str, ...], directions: int) -> Iterator[tuple[str, float, float]]:
    """Yield each activation, by direction, with its parameters alpha and beta."""
    names = [_decode(value) for value in node.attrs.get("activations", defaults * directions)]
    if len(names) != len(defaults) * directions:
        raise UnsupportedFormError(f"{len(names)} activations, expected {len(defaults) * directions}")
    values = [iter(node.attrs.get(f"activation_{parameter}", ())) for parameter in ("alpha", "beta")]
    canonical = {name.lower(): name for name in ACTIVATIONS}
    for word in names:
        name = canonical.get(word.lower())
        if name is None:
            raise UnsupportedFormError(f"activation {word!r}")
        parameters = [0.0, 0.0]
        for place in range(ACTIVATIONS[name].parameters):
            default = dict(enumerate(_PARAMETERS.get(name, ()))).get(place)
            value = next(values[place], default)
            if value is None:
                raise UnsupportedFormError(f"activation {name} without {('alpha', 'beta')[place]}")
            parameters[place] = float(value)
        yield name, parameters[0], parameters[1]


def _decode(value: Any) -> str:
    return value.decode() if isinstance(value, bytes) else str(value)
