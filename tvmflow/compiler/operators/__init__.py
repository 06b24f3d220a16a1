"""Definitions of tensor operators as loops over packed weights, which the schedule rules recognise.

Activations are NHWC. Weights are packed into `[CO/v][KH][KW][CI][v]` for vectors of v lanes, padded with zeros to whole
vectors; a dense layer is the 1x1 case, `[N/v][K][v]`. Every product is computed into a buffer of whole tiles, so the
inner loops have constant extents for every shape. A last stage copies the result out of that buffer. The stages carry
the annotations of `tvmflow.compiler.annotations`.
"""

from collections.abc import Callable
from functools import partial

from tvm import relax

from tvmflow.compiler.choices import Choices
from tvmflow.compiler.machine import Machine
from tvmflow.compiler.operators import (
    convolution,
    elementwise,
    indices,
    norms,
    planes,
    pooling,
    products,
    reductions,
    reshape,
    resize,
    rowwise,
    sampling,
    scatter,
)
from tvmflow.compiler.operators.common import Legalization, or_default

_Definition = Callable[[relax.BlockBuilder, relax.Call, Machine], relax.Expr | None]

_OPERATORS: dict[str, _Definition] = {
    **{f"relax.{name}": reductions.legalize for name in ("sum", "mean", "max", "min", "prod", "variance", "std")},
    "relax.nn.max_pool2d": partial(pooling.legalize, largest=True),
    "relax.nn.avg_pool2d": partial(pooling.legalize, largest=False),
    "relax.nn.max_pool3d": partial(planes.legalize, largest=True),
    "relax.nn.avg_pool3d": partial(planes.legalize, largest=False),
    "relax.image.grid_sample": sampling.legalize,
    "relax.image.resize2d": resize.legalize,
    "relax.nn.softmax": rowwise.legalize_softmax,
    "relax.nn.log_softmax": partial(rowwise.legalize_softmax, logarithm=True),
    "relax.nn.layer_norm": rowwise.legalize_norm,
    "relax.nn.rms_norm": rowwise.legalize_norm,
    "relax.reshape": reshape.legalize,
    "relax.nn.instance_norm": norms.legalize,
    "relax.nn.group_norm": norms.legalize,
    "relax.maximum": partial(elementwise.legalize_extreme, largest=True),
    "relax.minimum": partial(elementwise.legalize_extreme, largest=False),
    **{f"relax.{name}": partial(elementwise.legalize_logical, name=name) for name in elementwise.LOGICAL},
    "relax.divide": elementwise.legalize_division,
    "relax.mod": elementwise.legalize_remainder,
    "relax.scatter_nd": scatter.legalize,
    "relax.scatter_elements": scatter.legalize_elements,
    "tvmflow.indices": indices.legalize,
    "relax.nn.leakyrelu": elementwise.legalize_leaky_relu,
    "relax.nn.prelu": elementwise.legalize_prelu,
    "relax.quantize": elementwise.legalize_quantize,
    **{name: partial(elementwise.legalize, function=function) for name, function in elementwise.FUNCTIONS.items()},
    **{name: partial(elementwise.legalize_class, function=test) for name, test in elementwise.CLASSES.items()},
    "relax.nn.relu": elementwise.legalize_relu,
}


def legalizations(machine: Machine, choices: Choices, fast: bool) -> dict[str, Legalization]:
    """Return this project's definitions of operators for one machine, by the operator's name, for `LegalizeOps`.

    A call that no definition here fits gets TVM's own definition. `choices` takes the decisions about operators; `fast`
    allows Winograd's algorithm for convolutions.
    """
    operators: dict[str, _Definition] = {
        **_OPERATORS,
        "relax.nn.conv2d": partial(convolution.legalize, choices=choices, fast=fast),
        "relax.permute_dims": partial(convolution.legalize_transpose, choices=choices),
        "relax.matmul": partial(products.legalize, choices=choices),
    }

    def for_machine(definition: _Definition) -> Legalization:
        return or_default(lambda builder, call: definition(builder, call, machine))

    return {name: for_machine(definition) for name, definition in operators.items()}
