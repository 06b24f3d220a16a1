"""Reshapes of tensors with symbolic sizes, and those that only add or remove axes of one element, axis by axis.

TVM's own definition computes the flat index of each element, and divides it by every size of the input.
"""

from collections.abc import Iterator, Sequence
from functools import reduce
from operator import mul
from typing import Any

import tvm
from tvm import relax, te, tirx

from tvmflow.compiler.annotations import RESHAPE
from tvmflow.compiler.machine import Machine
from tvmflow.compiler.operators.common import static

# Axes of the input and of the result that hold the same elements.
_Group = tuple[list[int], list[int]]


def legalize(builder: relax.BlockBuilder, call: relax.Call, _machine: Machine) -> relax.Expr | None:
    """Define a reshape of symbolic sizes or of axes of one element; None for others and for unknown shapes."""
    before, after = (getattr(ty, "shape", None) for ty in (call.args[0].ty, call.ty))
    if not isinstance(before, relax.ShapeExpr) or not isinstance(after, relax.ShapeExpr):
        return None
    inputs, outputs = list(before.values), list(after.values)
    if all(static(size) for size in [*inputs, *outputs]) and _long(inputs) != _long(outputs):
        return None
    groups = list(_groups(inputs, outputs))

    def compute(data: te.Tensor, sizes: Sequence[Any]) -> te.Tensor:
        # The function has variables of its own for the sizes.
        inputs, outputs = list(data.shape), list(sizes)

        def element(*index: Any) -> Any:
            source: list[Any] = [0] * len(inputs)
            for axes, places in groups:
                position: Any = 0
                for place in places:
                    if static(outputs[place]) != 1:
                        position = position * outputs[place] + index[place]
                for axis in axes[:0:-1]:
                    source[axis] = te.indexmod(position, inputs[axis])
                    position = te.indexdiv(position, inputs[axis])
                if axes:
                    source[axes[0]] = position
            return data[tuple(source)]

        return te.compute(outputs, element, name="reshape")

    return builder.call_te(compute, call.args[0], after, primfunc_name_hint="reshape", primfunc_attrs={RESHAPE: 1})


def _long(sizes: Sequence[Any]) -> list[int | None]:
    """The sizes of the axes of more than one element."""
    return [static(size) for size in sizes if static(size) != 1]


def _groups(inputs: Sequence[Any], outputs: Sequence[Any]) -> Iterator[_Group]:
    """The smallest groups of axes with provably as many elements before as after; at last the rest of the axes.

    Axes of one element are left out of the input's.
    """
    analyzer = tvm.sym.Analyzer()
    axis, place = 0, 0
    for end in range(1, len(inputs) + 1):
        for stop in range(place + 1, len(outputs) + 1):
            if analyzer.can_prove_equal(_product(inputs[axis:end]), _product(outputs[place:stop])):
                yield [item for item in range(axis, end) if static(inputs[item]) != 1], list(range(place, stop))
                axis, place = end, stop
                break
    yield [item for item in range(axis, len(inputs)) if static(inputs[item]) != 1], list(range(place, len(outputs)))


def _product(sizes: Sequence[Any]) -> Any:
    return reduce(mul, sizes, tirx.IntImm("int64", 1))
