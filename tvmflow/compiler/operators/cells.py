"""LSTM, GRU and RNN as an operator of Relax, the cell of which each computes a step, and its activation functions."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from tvm import relax, tirx

from tvmflow.compiler import extensions, vectormath

GATES = {"lstm": 4, "gru": 3, "rnn": 1}
ZERO = tirx.const(0.0, "float32")


def _elu(x: Any, alpha: float, _beta: float) -> Any:
    return tirx.Select(x >= ZERO, x, alpha * (vectormath.exp(x) - 1.0))


def _softplus(x: Any, _alpha: float, _beta: float) -> Any:
    return tirx.Select(x > ZERO, x, ZERO) + tirx.log(vectormath.exp(ZERO - tirx.abs(x)) + 1.0)


def _hard_sigmoid(x: Any, alpha: float, beta: float) -> Any:
    return tirx.max(ZERO, tirx.min(tirx.const(1.0, "float32"), alpha * x + beta))


@dataclass(frozen=True)
class Activation:
    """An activation function of x, alpha and beta.

    `parameters` is 0 if it uses neither alpha nor beta, 1 if it uses alpha alone, 2 if it uses both.
    """

    parameters: int
    function: Callable[[Any, float, float], Any]


ACTIVATIONS: dict[str, Activation] = {
    "Affine": Activation(2, lambda x, alpha, beta: alpha * x + beta),
    "Elu": Activation(1, _elu),
    "HardSigmoid": Activation(2, _hard_sigmoid),
    "LeakyRelu": Activation(1, lambda x, alpha, _: tirx.Select(x >= ZERO, x, alpha * x)),
    "Relu": Activation(0, lambda x, *_: tirx.Select(x > ZERO, x, ZERO)),
    "ScaledTanh": Activation(2, lambda x, alpha, beta: alpha * vectormath.tanh(beta * x)),
    "Sigmoid": Activation(0, lambda x, *_: vectormath.sigmoid(x)),
    "Softplus": Activation(0, _softplus),
    "Softsign": Activation(0, lambda x, *_: x / (1.0 + tirx.abs(x))),
    "Tanh": Activation(0, lambda x, *_: vectormath.tanh(x)),
    "ThresholdedRelu": Activation(1, lambda x, alpha, _: tirx.Select(x > alpha, x, ZERO)),
}


def recurrence(operands: Mapping[str, relax.Expr], **attrs: Any) -> relax.Call:
    """Return a Relax call that stands for an LSTM, GRU or RNN until a pass lowers it.

    `operands` are those of the ONNX operator, without absent ones, by name: `x` [steps, batch, inputs], `w`
    [directions, gates * units, inputs], `r` [directions, gates * units, units], and `bias`, `lengths`, `initial_h`,
    `initial_c` and `peepholes` in ONNX's shapes. With `r_scale` [directions, gates * units], `r` is a constant of int8,
    whose rows are multiplied by these scales. With `x_scale`, `x_zero` and `w_scale`, `x` is uint8, with that one scale
    and zero point of uint8, and `w` is a constant of int32, whose rows are multiplied by the scales `w_scale`
    [directions, gates * units]. `attrs` are the fields of `Cell`; in the place of its `activations`
    stand three lists: `activations` with the names, `alphas` and `betas`. The result is a float32 tuple: all outputs
    [steps, directions, batch, units], those of the last step [directions, batch, units] and, of an LSTM, the last cell
    state of the same shape.
    """
    return extensions.call("recurrence", list(operands.values()), operands=list(operands), **attrs)


def _infer(call: relax.Call) -> relax.TupleType:
    operands = dict(zip((str(name) for name in call.attrs["operands"]), call.args, strict=True))
    steps, batch, _ = operands["x"].ty.shape.values
    directions, _, units = operands["r"].ty.shape.values
    state = relax.TensorType([directions, batch, units], "float32")
    count = 2 if str(call.attrs["kind"]) == "lstm" else 1
    return relax.TupleType([relax.TensorType([steps, directions, batch, units], "float32"), *[state] * count])


extensions.register("recurrence", _infer)


@dataclass(frozen=True)
class Cell:
    """The computation of one step, as ONNX defines it: `kind` is lstm, gru or rnn.

    `activations` are (name, alpha, beta) of the first direction, then of the second. The operands of activations are
    clamped to the range from `-clip` to `clip`; 0 means no clamp. With `quantised`, the outputs of the previous
    step are rounded to one of 256 levels between the least and the greatest of the whole batch, with zero, before they
    are multiplied. The other fields are ONNX's attributes of the same names.
    """

    kind: str
    direction: str
    activations: tuple[tuple[str, float, float], ...]
    clip: float
    input_forget: bool
    linear_before_reset: bool
    quantised: bool = False

    @classmethod
    def of(cls, attrs: Any) -> "Cell":
        """Return the cell that the attributes of a call of `recurrence` describe."""
        names, alphas, betas = (list(attrs[key]) for key in ("activations", "alphas", "betas"))
        return cls(
            kind=str(attrs["kind"]),
            direction=str(attrs["direction"]),
            activations=tuple(
                (str(name), float(alpha), float(beta)) for name, alpha, beta in zip(names, alphas, betas, strict=True)
            ),
            clip=float(attrs["clip"]),
            input_forget=bool(int(attrs["input_forget"])),
            linear_before_reset=bool(int(attrs["linear_before_reset"])),
            quantised=bool(int(attrs["quantised"])),
        )

    @property
    def directions(self) -> int:
        """The number of directions, 1 or 2."""
        return 2 if self.direction == "bidirectional" else 1

    @property
    def gates(self) -> int:
        """The number of gates: 4 of an LSTM, 3 of a GRU, 1 of an RNN."""
        return GATES[self.kind]

    @property
    def phases(self) -> tuple[tuple[int, ...], ...]:
        """The gates that each phase of a step computes, as their indices in ONNX's order.

        The gates of the second phase, if there is one, need gates of the first phase of the same step.
        """
        if self.kind == "gru" and not self.linear_before_reset:
            return ((0, 1), (2,))
        return (tuple(range(self.gates)),)

    @property
    def splits_bias(self) -> bool:
        """Whether the last gate adds its recurrent bias in every step, because the reset gate multiplies that bias.

        Otherwise the bias is added to the products of the inputs before the recurrence.
        """
        return self.kind == "gru" and self.linear_before_reset
