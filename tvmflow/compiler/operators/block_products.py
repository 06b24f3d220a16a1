"""Matrix products with weights of 4 or 8 bits in blocks: calls that stand for them until a pass lowers them.

The weights stay as small as in the file until it is known whether the target reads them so.
"""

import math

from tvm import relax

from tvmflow.compiler import extensions
from tvmflow.compiler.dotproduct import Dot
from tvmflow.compiler.machine import Machine
from tvmflow.compiler.operators.common import constant, numbers_of, static
from tvmflow.compiler.operators.narrow_products import Functions, NarrowProduct, multiply, pays
from tvmflow.compiler.operators.rounded_products import RoundedProduct
from tvmflow.compiler.operators.widening import BlockWeight


def block_product(x: relax.Expr, weight: BlockWeight, *, rounds: bool = False) -> relax.Call:
    """Return a Relax call that stands for a product until a pass lowers it.

    `x` is float32 `[..., K]`; the weight is a matrix `[K, N]` in blocks along K, the result `[..., N]`. With `rounds`,
    the weight has 4 bits, and a program may round the rows to 8 bits.
    """
    return extensions.call("block_product", [x, *map(constant, weight.parts)], bits=weight.bits, rounds=int(rounds))


def _infer(call: relax.Call) -> relax.TensorType:
    x, numbers = call.args[:2]
    return relax.TensorType([*x.ty.shape.values[:-1], numbers.ty.shape.values[-1]], "float32")


extensions.register("block_product", _infer)


def lower(
    builder: relax.BlockBuilder,
    call: relax.Call,
    machine: Machine | None,
    unit: Dot | None,
    functions: Functions,
    *,
    widens: bool,
) -> relax.Expr:
    """Lower a call of `block_product` to a function for a machine with the dot product `unit` of integers.

    `functions` has those that were made for the machine and the unit. Rows are rounded where the call and a `unit`
    allow it. Else the function widens the weights on the way, if `widens` allows that and it is faster. Where neither
    is so, as on a GPU, which is no `machine`, the product is one of floats.
    """
    x, *parts = call.args
    numbers, offsets, scales = (numbers_of(part) for part in parts)
    weight = BlockWeight(numbers, offsets, scales, 0, int(call.attrs["bits"]))
    rows = math.prod(x.ty.shape.values[:-1])
    if machine is not None and static(rows) != 0:
        if int(call.attrs["rounds"]) and unit is not None:
            return multiply(builder, x, RoundedProduct(weight, rows, machine, unit), functions)
        if widens and pays(numbers.size * 8 // weight.bits, rows, machine):
            return multiply(builder, x, NarrowProduct(weight, rows, machine), functions)
    return relax.op.matmul(x, constant(weight.floats()))
