"""Kernels for GPUs compute what the model does; an emulator runs their CUDA code on the CPU."""

from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest
import tvm
from tvm import relax, tirx

from support.gpu import Emulation
from tvmflow.compiler.gpu import definitions, tiling
from tvmflow.compiler.gpu.kernels import product_kernel
from tvmflow.compiler.gpu.tiling import Tile, gpu_of
from tvmflow.target import resolve

Array = np.ndarray[Any, Any]
HOPPER = resolve("cuda-sm90")
GPU = gpu_of(HOPPER)
TVM_TARGET = tvm.target.Target(HOPPER.tvm)
# The relative error of sums of products of random numbers, by the type of the operands; the sums are float32.
BOUNDS = {"float16": 1e-5, "float32": 2e-6}


@dataclass(frozen=True)
class Convolution:
    """A convolution of NHWC images, a bias, a residual and a ReLU; `tile` overrides the choice."""

    images: tuple[int, int, int, int]
    units: int
    kernel: int = 3
    stride: int = 1
    padding: int = 1
    dilation: int = 1
    groups: int = 1
    dtype: str = "float16"
    tile: Tile | None = None
    free: bool = False


def every_tile() -> list[Convolution]:
    """A convolution with each tile, alone and in clusters of each size."""
    small = Convolution((1, 7, 7, 72), 40)
    tiles = {
        (tile, dtype)
        for dtype in ("float16", "float32")
        for tile in tiling._tiles(GPU, 72 * 9, dtype)
        if tile.cluster in (1, 4) or (tile.cluster == 8 and tile.rows == 32)
    }
    return [replace(small, tile=tile, dtype=dtype) for tile, dtype in sorted(tiles, key=str)]


CONVOLUTIONS = [
    Convolution((2, 9, 8, 16), 24),
    Convolution((1, 20, 19, 3), 10, kernel=7, stride=2, padding=3),
    Convolution((1, 13, 12, 20), 33, stride=2),
    Convolution((1, 12, 14, 8), 17, dilation=3, padding=2),
    Convolution((3, 5, 5, 64), 130, kernel=1, padding=0),
    Convolution((1, 9, 9, 24), 48, groups=3),
    Convolution((1, 6, 7, 18), 27, groups=3, kernel=2, padding=0),
    Convolution((1, 1, 1, 512), 40, kernel=1, padding=0),
    Convolution((2, 10, 11, 8), 16, free=True),
]
CASES = [replace(case, dtype=dtype) for case in CONVOLUTIONS for dtype in ("float16", "float32")] + every_tile()


def case_id(case: Convolution) -> str:
    """The name of a case as a test's parameter."""
    tile = "" if case.tile is None else "-".join(map(str, vars(case.tile).values()))
    return f"{case.dtype}-{'x'.join(map(str, case.images))}-{case.units}-k{case.kernel}-{tile or 'chosen'}"


def fused_function(case: Convolution, monkeypatch: pytest.MonkeyPatch) -> tuple[Any, Array]:
    """The fused, unscheduled function of a case, and its packed weights."""
    if case.tile is not None:
        monkeypatch.setattr(definitions, "choose_tile", lambda *_: case.tile)
    builder = relax.BlockBuilder()
    sizes = [tirx.Var("n", "int64"), tirx.Var("h", "int64"), tirx.Var("w", "int64")] if case.free else case.images[:3]
    data = relax.Var("data", relax.TensorType((*sizes, case.images[3]), case.dtype))
    bias = relax.Var("bias", relax.TensorType((1, 1, 1, case.units), "float32"))
    with builder.function("main", [data, bias]):
        with builder.dataflow():
            result = builder.emit_output(emit_convolution(builder, case, data, bias))
        builder.emit_func_output(result)
    passes = [
        relax.transform.LegalizeOps(),
        relax.transform.AnnotateTIROpPattern(),
        relax.transform.FuseOps(),
        relax.transform.FuseTIR(),
        relax.transform.DeadCodeElimination(),
    ]
    mod = tvm.transform.Sequential(passes)(builder.get())
    (function,) = [
        item for _, item in mod.functions_items() if isinstance(item, tirx.PrimFunc) and len(item.params) == 4
    ]
    constants: list[Array] = []
    relax.analysis.post_order_visit(
        mod["main"], lambda node: constants.append(node.value.numpy()) if isinstance(node, tvm.ir.GenericConst) else 0
    )
    (packed,) = [item for item in constants if item.ndim == 3]
    return function, packed


def emit_convolution(builder: relax.BlockBuilder, case: Convolution, data: Any, bias: Any) -> Any:
    """The result of a case as an expression."""
    call = builder.normalize(
        relax.op.nn.conv2d(
            builder.emit(relax.op.astype(data, "float32")),
            relax.const(weights(case)),
            strides=case.stride,
            padding=case.padding,
            dilation=case.dilation,
            groups=case.groups,
            data_layout="NHWC",
            kernel_layout="OIHW",
            out_layout="NHWC",
        )
    )
    value = builder.emit(definitions.convolve(builder, call, data, GPU, case.dtype, "conv2d"))
    return builder.emit(relax.op.nn.relu(builder.emit(relax.op.add(value, bias))))


def weights(case: Convolution) -> Array:
    """The weights of a case, in OIHW."""
    depth = case.images[3] // case.groups
    values = np.random.default_rng(1).standard_normal((case.units, depth, case.kernel, case.kernel))
    return (values / np.sqrt(depth * case.kernel**2)).astype(case.dtype).astype("float32")


def convolve(case: Convolution, data: Array, bias: Array) -> Array:
    """The result of a case in float64."""
    weight, step, (count, height, width, depth) = weights(case).astype("float64"), case.stride, case.images
    reach = case.dilation * (case.kernel - 1)
    padded = np.pad(
        data.astype("float64"), [(0, 0), (case.padding, case.padding), (case.padding, case.padding), (0, 0)]
    )
    lines, pixels = ((size + 2 * case.padding - reach - 1) // step + 1 for size in (height, width))
    result = np.zeros((count, lines, pixels, case.units))
    units, inner = case.units // case.groups, depth // case.groups
    for group in range(case.groups):
        for y in range(case.kernel):
            for x in range(case.kernel):
                top, left = y * case.dilation, x * case.dilation
                part = padded[:, top : top + lines * step : step, left : left + pixels * step : step]
                part = part[:, :lines, :pixels, group * inner : (group + 1) * inner]
                result[..., group * units : (group + 1) * units] += np.einsum(
                    "nyxc,oc->nyxo", part, weight[group * units : (group + 1) * units, :, y, x]
                )
    return np.maximum(result + bias, 0.0)


@pytest.fixture(scope="module")
def kernels(tmp_path_factory: pytest.TempPathFactory) -> tuple[Emulation, dict[str, Array]]:
    """The kernels of all cases in one emulation, and their packed weights."""
    functions, packed = {}, {}
    for case in CASES:
        with pytest.MonkeyPatch.context() as patch:
            function, packed[case_id(case)] = fused_function(case, patch)
        kernel = product_kernel(function)
        assert kernel is not None, case
        functions[f"case{len(functions)}"] = kernel
    return Emulation(tvm.IRModule(functions), TVM_TARGET, tmp_path_factory.mktemp("kernels")), packed


def run(emulation: Emulation, number: int, case: Convolution, data: Array, bias: Array, packed: Array) -> Array:
    """Emulate a case."""
    output = np.full(convolve(case, data, bias).shape, np.nan, "float32")
    *parameters, _ = emulation.functions[f"case{number}"].params
    arrays = {"data": data, "bias": bias}
    ordered = [*(arrays.get(str(item.name), packed) for item in parameters), output]
    emulation.run(f"case{number}", *ordered)
    return output


@pytest.mark.parametrize(("number", "case"), list(enumerate(CASES)), ids=list(map(case_id, CASES)))
def test_a_convolution_is_right(number: int, case: Convolution, kernels: tuple[Emulation, dict[str, Array]]) -> None:
    emulation, packed = kernels
    generator = np.random.default_rng(number)
    data = generator.standard_normal(case.images).astype(case.dtype)
    bias = generator.standard_normal((1, 1, 1, case.units)).astype("float32")
    expected = convolve(case, data, bias)
    result = run(emulation, number, case, data, bias, packed[case_id(case)])
    assert np.abs(result - expected).max() <= BOUNDS[case.dtype] * np.abs(expected).max()


@pytest.mark.parametrize("number", [0, 1], ids=["float16", "float32"])
def test_the_images_of_a_batch_are_apart(number: int, kernels: tuple[Emulation, dict[str, Array]]) -> None:
    emulation, packed = kernels
    case = CASES[number]
    data = np.random.default_rng(0).standard_normal(case.images).astype(case.dtype)
    bias = np.zeros((1, 1, 1, case.units), "float32")
    usual = run(emulation, number, case, data, bias, packed[case_id(case)])
    for value in (np.nan, np.inf, -np.inf):
        other = data.copy()
        other[0] = value
        result = run(emulation, number, case, other, bias, packed[case_id(case)])
        np.testing.assert_array_equal(result[1], usual[1])
        assert not np.array_equal(result[0], usual[0])
    # An infinity is an infinity in float32, too, whose numbers are split in two.
    data[0] = np.inf
    assert not np.isfinite(run(emulation, number, case, data, bias, packed[case_id(case)])[0]).any()
