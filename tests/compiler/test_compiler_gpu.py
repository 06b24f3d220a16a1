"""Kernels for GPUs compute what the model does; an emulator runs their CUDA code on the CPU."""

import struct
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import onnx
import pytest
import tvm
from tvm import relax, tirx

from support import scale
from support.arrays import onnxruntime_outputs
from support.gpu import EmulatedModel, Emulation, Launch
from tvmflow.arrays import Array
from tvmflow.compiler import BuildOptions, build, can_build, import_onnx, lower
from tvmflow.compiler.choices import Choices
from tvmflow.compiler.gpu import definitions, schedules, tiling
from tvmflow.compiler.gpu.code import compile_kernels, with_code
from tvmflow.compiler.gpu.kernels import product_kernel
from tvmflow.compiler.gpu.passes import lower_attention
from tvmflow.compiler.gpu.schedules import schedule_functions
from tvmflow.compiler.gpu.tiling import Tile, choose_tile, gpu_of
from tvmflow.compiler.passes import lower_passes
from tvmflow.errors import BuildError, TargetError
from tvmflow.hardware.target import resolve

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
    """A convolution with each tile, most in float16, and with some in clusters of each size.

    A normal run takes some tiles of each size of clusters and type.
    """
    small = Convolution((1, 7, 5, 40), 40)
    alone = {"float16": lambda tile: True, "float32": lambda tile: (tile.rows, tile.columns) in {(64, 64), (16, 32)}}
    together = {(2, 64, 64), (4, 16, 64), (8, 32, 32)}
    tiles = {
        (tile, dtype)
        for dtype, is_tested in alone.items()
        for tile in tiling._tiles(GPU, 40 * 9, dtype)
        if (is_tested(tile) if tile.cluster == 1 else (tile.cluster, tile.rows, tile.columns) in together)
    }
    chosen: list[tuple[Tile, str]] = []
    for kind in sorted({(tile.cluster, dtype) for tile, dtype in tiles}):
        alike = sorted((item for item in tiles if (item[0].cluster, item[1]) == kind), key=str)
        chosen += scale.spread(alike, scale.count(normal=4 if kind == (1, "float16") else 1, long=len(alike)))
    return [replace(small, tile=tile, dtype=dtype) for tile, dtype in chosen]


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
# How a kernel reads its operands' types is nothing to the geometry: a normal run has both types for a third of them.
CASES = [
    replace(case, dtype=dtype)
    for place, case in enumerate(CONVOLUTIONS)
    for dtype in ("float16", *["float32"] * scale.choose(normal=place % 4 == 0, long=True))
] + every_tile()


def require_nvcc() -> None:
    """Skip the test where this machine cannot build for the GPU."""
    try:
        can_build(HOPPER)
    except TargetError as error:
        pytest.skip(str(error))


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


@pytest.mark.few(9)
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
    # An infinity is one in float32, too, whose numbers are split in two. CUDA's ReLU makes 0 of their difference.
    data[0] = np.inf
    result = run(emulation, number, case, data, bias, packed[case_id(case)])[0]
    assert not np.isfinite(result[result != 0.0]).any()


@dataclass(frozen=True)
class Heads:
    """Attention of `queries` to `keys`; `mask` is the shape of a mask, and `free` lets both lengths be free."""

    batch: int
    queries: int
    keys: int
    heads: int
    channels: int
    mask: tuple[int, ...] | None = None
    free: bool = False


HEADS = [
    Heads(1, 70, 100, 2, 64, mask=(1, 1, 70, 100)),
    Heads(2, 37, 37, 2, 32),
    Heads(2, 5, 9, 1, 8, mask=(2, 1, 1, 9)),
    Heads(1, 33, 33, 2, 40, mask=(1, 2, 33, 33)),
    Heads(2, 21, 34, 2, 128, free=True),
]


def attention_model(case: Heads) -> tvm.IRModule:
    """A model that computes attention as exporters write it: products, a mask, a softmax."""
    queries, keys = (tirx.Var(name, "int64") for name in ("q", "k")) if case.free else (case.queries, case.keys)
    shapes = [
        (case.batch, case.heads, queries, case.channels),
        (case.batch, case.heads, keys, case.channels),
        (case.batch, case.heads, keys, case.channels),
        *([case.mask] if case.mask else []),
    ]
    variables = [relax.Var(f"x{i}", relax.TensorType(shape, "float32")) for i, shape in enumerate(shapes)]
    builder = relax.BlockBuilder()
    with builder.function("main", variables):
        with builder.dataflow():
            turned = builder.emit(relax.op.permute_dims(variables[1], [0, 1, 3, 2]))
            scores = builder.emit(relax.op.matmul(variables[0], turned))
            scores = builder.emit(relax.op.multiply(scores, relax.const(np.float32(case.channels**-0.5))))
            for mask in variables[3:]:
                scores = builder.emit(relax.op.add(scores, mask))
            weights = builder.emit(relax.op.nn.softmax(scores, axis=-1))
            result = builder.emit_output(builder.emit(relax.op.matmul(weights, variables[2])))
        builder.emit_func_output(result)
    return builder.get()


def lowered(mod: tvm.IRModule, precision: Any = "fp16") -> tvm.IRModule:
    """A module lowered for the GPU, with all functions scheduled; the rules' names are its attribute `rules`."""
    with TVM_TARGET, tvm.transform.PassContext(opt_level=3):
        mod = tvm.transform.Sequential(lower_passes(HOPPER, Choices(), precision))(mod)
    scheduled, rules = schedule_functions(mod, HOPPER)
    return scheduled.with_attr("rules", dict(rules))


@pytest.mark.few(2)
@pytest.mark.parametrize("case", HEADS, ids=str)
def test_attention_is_one_kernel_and_right(case: Heads, tmp_path: Path) -> None:
    mod = lowered(attention_model(case))
    assert [name for name, rule in mod.attrs["rules"].items() if rule == "tensor_cores" and "attention" in name]
    assert not any("softmax" in str(name) for name in mod.attrs["rules"])
    generator = np.random.default_rng(0)
    inputs = [
        generator.standard_normal((case.batch, case.heads, count, case.channels)).astype("float32")
        for count in (case.queries, case.keys, case.keys)
    ]
    if case.mask:
        # Some keys are masked, but none of a query's are all masked.
        mask = np.where(generator.random(case.mask) < 0.3, -1e9, generator.random(case.mask)).astype("float32")
        mask[..., 0] = 0.0
        inputs.append(mask)
    query, key, value = (item.astype("float16").astype("float64") for item in inputs[:3])
    scores = np.einsum("bhqc,bhkc->bhqk", query, key) * case.channels**-0.5 + (inputs[3] if case.mask else 0.0)
    weights = np.exp(scores - scores.max(-1, keepdims=True))
    expected = np.einsum("bhqk,bhkc->bhqc", weights / weights.sum(-1, keepdims=True), value)
    (result,) = EmulatedModel(mod, TVM_TARGET, tmp_path)(*inputs)
    assert np.abs(result - expected).max() <= 2e-3 * np.abs(expected).max()


def test_joint_keys_and_values_are_read_beside_a_query_of_another_tensor(tmp_path: Path) -> None:
    """The query is a slice of a tensor of five dimensions, as the joint result of the two dense layers is one."""
    generator = np.random.default_rng(0)
    weights = [generator.standard_normal((16, 32)).astype("float32") / 4 for _ in range(2)]
    stored = relax.Var("stored", relax.TensorType((2, 7, 3, 2, 16), "float32"))
    data = relax.Var("data", relax.TensorType((2, 9, 16), "float32"))
    builder = relax.BlockBuilder()
    with builder.function("main", [stored, data]):
        with builder.dataflow():
            piece = relax.op.strided_slice(stored, [2], [1], [2])
            query = builder.emit(relax.op.permute_dims(builder.emit(relax.op.squeeze(piece, [2])), [0, 2, 1, 3]))
            key, value = (
                builder.emit(relax.op.permute_dims(builder.emit(relax.op.reshape(product, (2, 9, 2, 16))), axes))
                for weight, axes in zip(weights, ([0, 2, 3, 1], [0, 2, 1, 3]), strict=True)
                for product in [builder.emit(relax.op.matmul(data, relax.const(weight)))]
            )
            shares = builder.emit(relax.op.nn.softmax(builder.emit(relax.op.matmul(query, key)), axis=-1))
            result = builder.emit_output(relax.op.matmul(shares, value))
        builder.emit_func_output(result)
    mod = lowered(builder.get())
    assert len([name for name in mod.attrs["rules"] if "dense" in str(name)]) == 1
    arrays = [generator.standard_normal(shape).astype("float32") for shape in ((2, 7, 3, 2, 16), (2, 9, 16))]
    (output,) = EmulatedModel(mod, TVM_TARGET, tmp_path)(*arrays)
    keys, values = ((arrays[1] @ weight).reshape(2, 9, 2, 16) for weight in weights)
    scores = np.exp(np.einsum("bqhc,bkhc->bhqk", arrays[0][:, :, 1], keys))
    expected = np.einsum("bhqk,bkhc->bhqc", scores / scores.sum(-1, keepdims=True), values)
    assert np.abs(output - expected).max() <= 5e-3 * np.abs(expected).max()


@pytest.mark.parametrize("causal_mask", [None, "TopLeft"])
def test_causal_attention_is_not_lowered_without_its_mask(causal_mask: str | None) -> None:
    query, key, value = (relax.Var(name, relax.TensorType((1, 5, 2, 16), "float32")) for name in ("q", "k", "v"))
    builder = relax.BlockBuilder()
    with builder.function("main", [query, key, value]):
        with builder.dataflow():
            attention = relax.op.nn.attention(query, key, value, scale=0.25, causal_mask=causal_mask)
            result = builder.emit_output(attention)
        builder.emit_func_output(result)
    with TVM_TARGET:
        mod = lower_attention(GPU)(builder.get())
    assert ("nn.attention" in mod.script()) == (causal_mask is not None)


NETWORK = """<ir_version: 9, opset_import: ["" : 18]>
network (float[n, 3, 20, 18] image) => (float[n, 10] y) {
  a = Conv<strides=[2, 2], pads=[1, 1, 1, 1]>(image, w0, b0)
  b = Sigmoid(a)
  c = Mul(a, b)
  d = Conv<group=24, pads=[1, 1, 1, 1]>(c, w1)
  e = MaxPool<kernel_shape=[3, 3], strides=[2, 2], pads=[1, 1, 1, 1]>(d)
  f = Conv<group=2, pads=[1, 1, 1, 1]>(e, w2, b2)
  g = Relu(f)
  h = GlobalAveragePool(g)
  i = Flatten(h)
  y = Gemm<transB=1>(i, w3, b3)
}"""
LAYER = """<ir_version: 9, opset_import: ["" : 18]>
layer (float[2, 20, 48] x, float[2, 1, 1, 20] mask) => (float[2, 20, 48] y) {
  heads = Constant<value_ints=[0, 0, 2, 24]>()
  width = Constant<value_ints=[0, 0, 48]>()
  scale = Constant<value_float=0.2>()
  q0 = MatMul(x, wq)
  q1 = Add(q0, bq)
  q2 = Reshape(q1, heads)
  q = Transpose<perm=[0, 2, 1, 3]>(q2)
  k0 = MatMul(x, wk)
  k1 = Add(k0, bk)
  k2 = Reshape(k1, heads)
  k = Transpose<perm=[0, 2, 3, 1]>(k2)
  v0 = MatMul(x, wv)
  v1 = Add(v0, bv)
  v2 = Reshape(v1, heads)
  v = Transpose<perm=[0, 2, 1, 3]>(v2)
  s0 = MatMul(q, k)
  s1 = Mul(s0, scale)
  s2 = Add(s1, mask)
  s3 = Softmax<axis=-1>(s2)
  m0 = MatMul(s3, v)
  m1 = Transpose<perm=[0, 2, 1, 3]>(m0)
  m2 = Reshape(m1, width)
  m3 = MatMul(m2, wo)
  m4 = Add(m3, x)
  y = LayerNormalization<axis=-1>(m4, gain)
}"""


# Operators that TVM defines as kernels or with several results, conditions after a product, and single numbers.
CORNERS = """<ir_version: 9, opset_import: ["" : 18]>
corners (float[2, 3, 8, 8] image, int64[2, 4] places) =>
    (float[2, 8, 4, 4] a, int64[2, 1, 4, 4] b, float[] c, float[2, 8, 4, 4] d, float[2, 4] e, float[2, 4] f) {
  a0 = Conv<strides=[2, 2], pads=[1, 1, 1, 1]>(image, w0)
  a = LeakyRelu(a0)
  b = ArgMax<axis=1>(a)
  c = ReduceMean<keepdims=0>(image)
  d0 = Conv<group=8, pads=[1, 1, 1, 1]>(a, w1)
  gain = Constant<value_floats=[1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0, 8.0]>()
  d = InstanceNormalization(d0, gain, gain)
  one = Constant<value_ints=[1, 1]>()
  zero = Constant<value_ints=[0]>()
  ends = Constant<value_ints=[0, 0, 0]>()
  starts = Constant<value_ints=[1, 1, 1]>()
  axes = Constant<value_ints=[1, 2, 3]>()
  e0 = Slice(image, ends, starts, axes)
  shape = Constant<value_ints=[2, 1]>()
  e1 = Reshape(e0, shape)
  four = Constant<value_ints=[2, 4]>()
  e2 = Expand(e1, four)
  e = ScatterElements<axis=1>(e2, places, updates)
  last = Constant<value_ints=[1]>()
  rows = Reshape(last, one)
  f0 = Slice(updates, zero, last)
  f = ScatterND<reduction="max">(e, rows, f0)
}"""
# One size by several expressions: a product whose factors change places, and a sum of two numbers.
SIZES = """<ir_version: 9, opset_import: ["" : 18]>
sizes (float[n, 6, 1, t] x, float[n, u] z) => (float[n, s, 3, 5] y, float[n, 7, v] spectrum) {
  b = Conv<strides=[1, 8]>(x, w0)
  two = Constant<value_ints=[2]>()
  c = Squeeze(b, two)
  d = Transpose<perm=[0, 2, 1]>(c)
  heads = Constant<value_ints=[0, -1, 3, 5]>()
  e = Reshape(d, heads)
  q = Transpose<perm=[0, 2, 1, 3]>(e)
  k = Transpose<perm=[0, 2, 3, 1]>(e)
  f = MatMul(q, k)
  shape = Shape(f)
  rows = Flatten<axis=3>(f)
  shares = Softmax<axis=-1>(rows)
  g = Reshape(shares, shape)
  h = MatMul(g, q)
  y = Transpose<perm=[0, 2, 1, 3]>(h)
  around = Constant<value_ints=[0, 10, 0, 10]>()
  z0 = Pad(z, around)
  z1 = Mul(z0, z0)
  after = Constant<value_ints=[0, 0, 0, 11]>()
  z2 = Pad(z1, after)
  one = Constant<value_ints=[1]>()
  z3 = Unsqueeze(z2, one)
  spectrum = Conv<strides=[4]>(z3, w1)
}"""


def with_weights(text: str, **shapes: tuple[int, ...]) -> onnx.ModelProto:
    """The model of a text with random weights of these shapes."""
    model, generator = onnx.parser.parse_model(text), np.random.default_rng(0)
    for name, shape in shapes.items():
        spread = np.sqrt(max(np.prod(shape[1:]), 1)) if len(shape) != 2 else np.sqrt(shape[0])
        values = (generator.standard_normal(shape) / spread).astype("float32")
        model.graph.initializer.append(onnx.numpy_helper.from_array(values, name))
    return model


def network() -> tuple[onnx.ModelProto, dict[str, Array]]:
    """A convolutional network with pooling, groups and filters of single channels, and two images."""
    model = with_weights(
        NETWORK,
        w0=(24, 3, 3, 3),
        b0=(24,),
        w1=(24, 1, 3, 3),
        w2=(32, 12, 3, 3),
        b2=(32,),
        w3=(10, 32),
        b3=(10,),
    )
    return model, {"image": np.random.default_rng(1).standard_normal((2, 3, 20, 18)).astype("float32")}


def layer() -> tuple[onnx.ModelProto, dict[str, Array]]:
    """The attention of a transformer, and two texts, of which one is shorter."""
    square = dict.fromkeys(("wq", "wk", "wv", "wo"), (48, 48))
    model = with_weights(LAYER, **square, **dict.fromkeys(("bq", "bk", "bv", "gain"), (48,)))
    mask = np.zeros((2, 1, 1, 20), "float32")
    mask[1, :, :, 12:] = -1e9
    return model, {"x": np.random.default_rng(1).standard_normal((2, 20, 48)).astype("float32"), "mask": mask}


def corners() -> tuple[onnx.ModelProto, dict[str, Array]]:
    """Operators that a GPU's general schedules fail on, and two images."""
    model = with_weights(CORNERS, w0=(8, 3, 3, 3), w1=(8, 1, 3, 3), updates=(2, 4))
    generator = np.random.default_rng(1)
    places = np.argsort(generator.random((2, 4)), axis=1)
    return model, {"image": generator.standard_normal((2, 3, 8, 8)).astype("float32"), "places": places}


def sizes() -> tuple[onnx.ModelProto, dict[str, Array]]:
    """Attention without a kernel for it over a text of free length, and filters over a signal."""
    model, generator = with_weights(SIZES, w0=(15, 6, 1, 5), w1=(7, 1, 12)), np.random.default_rng(1)
    shapes = {"x": (2, 6, 1, 37), "z": (2, 30)}
    return model, {name: generator.standard_normal(shape).astype("float32") for name, shape in shapes.items()}


@pytest.mark.few(2)
@pytest.mark.parametrize("precision", ["fp16", "fp32"])
@pytest.mark.parametrize("make", [network, layer, corners, sizes])
def test_a_whole_model_gives_the_outputs_of_onnx_runtime(
    make: Callable[[], tuple[onnx.ModelProto, dict[str, Array]]], precision: Any, tmp_path: Path
) -> None:
    model, inputs = make()
    onnx.save(model, tmp_path / "model.onnx")
    mod = lower(import_onnx(tmp_path / "model.onnx"), HOPPER, BuildOptions(precision=precision))
    scheduled, rules = schedule_functions(mod, HOPPER)
    names = [name for name, rule in rules if rule == "tensor_cores"]
    # Queries, keys and values are one dense layer; the attention reads its result in place.
    dense = [name for name in names if "dense" in name]
    assert len(dense) == (2 if (make, precision) == (layer, "fp16") else len(dense)), rules
    assert names
    outputs = EmulatedModel(scheduled, TVM_TARGET, tmp_path)(*inputs.values())
    expected = onnxruntime_outputs(tmp_path / "model.onnx", inputs)
    bound = {"fp16": 3e-3, "fp32": 5e-6}[precision]
    for output, value in zip(outputs, expected.values(), strict=True):
        assert np.abs(output - value).max() <= bound * np.abs(value).max()


WINDOWS = """<ir_version: 9, opset_import: ["" : 18]>
windows (float[2, 8, 13, 24] image) => (float[2, 8, 13, 24] y, float[2, 12, 4, 12] z) {
  a = Conv<group=8, pads=[2, 2, 2, 2]>(image, w0)
  b = Relu(a)
  y = Add(b, image)
  z = Conv<group=4, strides=[3, 2], pads=[0, 1, 0, 1]>(image, w1)
}"""


@pytest.mark.long
@pytest.mark.few(1)
@pytest.mark.parametrize("neighbours", [(4, 2), ()], ids=["several pixels", "one pixel"])
def test_a_thread_computes_neighbouring_pixels(
    neighbours: tuple[int, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Filters of one channel, and groups of few, on images that a GPU is not too large for."""
    monkeypatch.setattr(schedules, "_BUSY_SHARE", GPU.threads * GPU.processors[1])
    monkeypatch.setattr(schedules, "_NEIGHBOURS", neighbours)
    onnx.save(with_weights(WINDOWS, w0=(8, 1, 5, 5), w1=(12, 2, 3, 3)), tmp_path / "model.onnx")
    mod = lower(import_onnx(tmp_path / "model.onnx"), HOPPER)
    scheduled, rules = schedule_functions(mod, HOPPER)
    assert [rule for name, rule in rules if "conv2d" in name] == ["threads", "threads"]
    # Four times as many blocks of threads, with one pixel each.
    blocks = [int(launch.extents["blockIdx.x"]) for launch in launches_of(scheduled, "conv2d", tmp_path)]
    assert sorted(blocks) == ([2, 5] if neighbours else [5, 20])
    inputs = {"image": np.random.default_rng(1).standard_normal((2, 8, 13, 24)).astype("float32")}
    outputs = EmulatedModel(scheduled, TVM_TARGET, tmp_path)(*inputs.values())
    expected = onnxruntime_outputs(tmp_path / "model.onnx", inputs)
    for output, value in zip(outputs, expected.values(), strict=True):
        assert np.abs(output - value).max() <= 5e-6 * np.abs(value).max()


def launches_of(mod: tvm.IRModule, part: str, folder: Path) -> list[Launch]:
    """The launches of the functions with this part in their names."""
    emulation = Emulation(mod, TVM_TARGET, folder)
    return [launch for name in sorted(emulation.launches) if part in name for launch in emulation.launches[name]]


REDUCTIONS = """<ir_version: 9, opset_import: ["" : 18]>
reductions (float[n, 30, 40] x, float[m, 5] few) =>
    (float[1, 1, 1] a, int64[n, 30] b, float[n, 1, 1] c, float[n] d, float[] e, float[] f, float[1, 1] g,
     float[n, 30] h) {
  a = ReduceMax(x)
  b = ArgMax<axis=2, keepdims=0>(x)
  two = Constant<value_ints=[2]>()
  last = Constant<value_ints=[1, 2]>()
  c0 = ReduceMean(x, last)
  c = Sqrt(c0)
  d = ReduceL2<keepdims=0>(x, last)
  e = ReduceSum<keepdims=0>(x)
  f = ReduceMin<keepdims=0>(few)
  g = ReduceProd(few)
  infinity = Constant<value_float=-inf>()
  nothing = Mul(x, infinity)
  h = ReduceMax<keepdims=0>(nothing, two)
}"""


@pytest.mark.long
@pytest.mark.few(1)
@pytest.mark.parametrize("longest", [64, 8])
def test_a_block_of_threads_reduces_to_one_number(
    longest: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(schedules, "_LONGEST_REDUCTION", longest)
    model = with_weights(REDUCTIONS)
    onnx.save(model, tmp_path / "model.onnx")
    scheduled, rules = schedule_functions(lower(import_onnx(tmp_path / "model.onnx"), HOPPER), HOPPER)
    assert "serial" not in dict(rules).values()
    x = np.abs(np.random.default_rng(1).standard_normal((3, 30, 40))).astype("float32")
    x[2, 29, 39] = 9.0
    inputs = {"x": x, "few": x[0, :3, :5] + 1.0}
    outputs = EmulatedModel(scheduled, TVM_TARGET, tmp_path)(*inputs.values())
    expected = onnxruntime_outputs(tmp_path / "model.onnx", inputs)
    for output, value in zip(outputs, expected.values(), strict=True):
        np.testing.assert_allclose(output, value, rtol=2e-6)


def test_a_block_of_threads_computes_no_element_of_a_matrix_product(tmp_path: Path) -> None:
    """Integers have no kernel for tensor cores; TVM's schedules compute tiles of their products."""
    text = """<ir_version: 9, opset_import: ["" : 18]>
    products (int32[n, k] x, int32[k, m] w, float[n, k] z) => (int32[n, m] y, float[n] s) {
      y = MatMul(x, w)
      last = Constant<value_ints=[1]>()
      s = ReduceSum<keepdims=0>(z, last)
    }"""
    onnx.save(onnx.parser.parse_model(text), tmp_path / "model.onnx")
    _, rules = schedule_functions(lower(import_onnx(tmp_path / "model.onnx"), HOPPER), HOPPER)
    assert dict(rules) == {"matmul": "dlight", "sum": "threads"}


@pytest.mark.few(2)
@pytest.mark.parametrize("dtype", ["float16", "float32"])
@pytest.mark.parametrize("sizes", [(2, 3, 33, 40, 24), (1, 1, 17, 19, 21), (0, 2, 20, 16, 40)], ids=str)
def test_a_batch_of_products_is_right(sizes: tuple[int, ...], dtype: str, tmp_path: Path) -> None:
    """The batch, the rest of it, the rows, the depth and the columns; a batch of 0 is a free one of 2."""
    batch, rest, rows, depth, columns = sizes
    first = batch or tirx.Var("n", "int64")
    left = relax.Var("left", relax.TensorType((first, rest, rows, depth), dtype))
    right = relax.Var("right", relax.TensorType((first, rest, depth, columns), dtype))
    builder = relax.BlockBuilder()
    with builder.function("main", [left, right]):
        with builder.dataflow():
            product = definitions.multiply(builder, left, right, GPU, dtype, "matmul")
            result = builder.emit_output(builder.emit(product))
        builder.emit_func_output(result)
    mod, rules = schedule_functions(builder.get(), HOPPER)
    assert [rule for _, rule in rules] == ["tensor_cores"]
    generator = np.random.default_rng(0)
    arrays = [
        generator.standard_normal((batch or 2, rest, *matrix)).astype(dtype)
        for matrix in ((rows, depth), (depth, columns))
    ]
    (output,) = EmulatedModel(mod, TVM_TARGET, tmp_path)(*arrays)
    expected = np.matmul(*(array.astype("float64") for array in arrays))
    assert np.abs(output - expected).max() <= BOUNDS[dtype] * np.abs(expected).max()


def product_of_batches(batch: int, rows: int) -> tvm.IRModule:
    """A module of one function, which multiplies `batch` pairs of matrices of `rows` rows."""
    left = relax.Var("left", relax.TensorType((batch, rows, 16), "float16"))
    right = relax.Var("right", relax.TensorType((batch, 16, 16), "float16"))
    builder = relax.BlockBuilder()
    with builder.function("main", [left, right]):
        with builder.dataflow():
            product = definitions.multiply(builder, left, right, GPU, "float16", "matmul")
            result = builder.emit_output(builder.emit(product))
        builder.emit_func_output(result)
    return builder.get()


def test_any_number_of_matrices_fits_a_grid(tmp_path: Path) -> None:
    mod, _ = schedule_functions(product_of_batches(70_000, 20), HOPPER)
    (launch,) = Emulation(mod, TVM_TARGET, tmp_path).launches["matmul"]
    assert int(launch.extents["blockIdx.x"]) >= 70_000
    # The most blocks that a GPU launches along these axes.
    assert all(int(launch.extents[axis]) <= 65_535 for axis in ("blockIdx.y", "blockIdx.z"))


def test_a_tensor_that_needs_indices_of_64_bits_gets_no_kernel_of_32() -> None:
    for rows, has_kernel in ((1 << 20, True), (1 << 28, False)):
        kernel = product_kernel(product_of_batches(1, rows)["matmul"])
        assert (kernel is not None) == has_kernel


@pytest.mark.parametrize("dtype", ["float16", "float32"])
@pytest.mark.parametrize("name", ["cuda-sm80", "cuda-sm90"])
def test_every_product_has_a_tile_that_fits_the_gpu(name: str, dtype: str) -> None:
    gpu = gpu_of(resolve(name))
    size = {"float16": 2, "float32": 4}[dtype]
    for rows, columns, depth in [(1, 1, 1), (1, 1000, 2048), (49, 512, 4608), (3136, 64, 64), (100_000, 2048, 512)]:
        tile = choose_tile(gpu, rows, columns, depth, 1, dtype)
        assert tile.shared_bytes(size) <= gpu.shared_per_block
        assert tile.cluster in gpu.processors
        assert tile.threads <= 1024
    # A product of few rows is shared out to many thread blocks, where they can work together.
    few = choose_tile(gpu, 49, 512, 4608, 1, dtype)
    assert (few.cluster > 1) == (8 in gpu.processors)


def test_a_gpu_that_nobody_measured_takes_the_numbers_of_the_one_before() -> None:
    assert gpu_of(resolve({"kind": "cuda", "arch": "sm_86"})) == gpu_of(resolve("cuda-sm80"))
    assert gpu_of(resolve({"kind": "cuda", "arch": "sm_120"})) == gpu_of(resolve("cuda-sm90"))
    assert gpu_of(resolve({"kind": "cuda", "arch": "sm_75"})) == gpu_of(resolve("cuda-sm80"))


@pytest.mark.long
def test_a_library_holds_machine_code_in_the_place_of_source(tmp_path: Path) -> None:
    require_nvcc()
    model, _ = network()
    onnx.save(model, tmp_path / "model.onnx")
    options = BuildOptions(precision="fp16")
    compiled = build(import_onnx(tmp_path / "model.onnx"), HOPPER, options, cache=tmp_path / "cache")
    compiled.export(tmp_path / "mod.so")
    content = (tmp_path / "mod.so").read_bytes()
    assert b"__global__" not in content
    ((source, code),) = compiled.kernels.items()
    assert "tvmflow::product<half" in source
    assert code in content
    # Equal models give equal bytes, from the cache and without it.
    for cache in (tmp_path / "cache", None):
        again = build(import_onnx(tmp_path / "model.onnx"), HOPPER, options, cache=cache)
        again.export(tmp_path / "again.so")
        assert (tmp_path / "again.so").read_bytes() == content


@pytest.mark.parametrize(
    ("target", "message"),
    [
        ({"kind": "cuda"}, "names no compute capability; name one such as cuda-sm90"),
        ("cuda-sm75", "GPUs of a compute capability below 8.0 lack what the kernels use"),
        ("cuda-sm999", "this nvcc knows no 'sm_999'; it knows .*sm_90"),
    ],
)
def test_a_gpu_that_cannot_be_built_for_is_refused(target: Any, message: str) -> None:
    require_nvcc()
    with pytest.raises(TargetError, match=message):
        can_build(resolve(target))


def test_code_that_nvcc_does_not_compile_is_an_error_in_one_sentence(tmp_path: Path) -> None:
    require_nvcc()
    library = SimpleNamespace(imports=[SimpleNamespace(kind="cuda", imports=[], inspect_source=lambda: "no code")])
    with pytest.raises(BuildError, match=r"nvcc does not compile the kernels for sm_90: .*error"):
        compile_kernels(library, "sm_90", tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_without_nvcc_a_build_says_what_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "")
    library = SimpleNamespace(imports=[SimpleNamespace(kind="cuda", imports=[], inspect_source=lambda: "")])
    with pytest.raises(BuildError, match="need nvcc, which is not installed; install NVIDIA's CUDA toolkit"):
        compile_kernels(library, "sm_90", None)


@pytest.mark.parametrize(
    "packed",
    [
        b"",
        struct.pack("<Q", 3) + b"abc",
        struct.pack("<QQQQ", 24, 2, 0, 1),
        struct.pack("<QQQQQQ", 4 * 8 + 40, 2, 0, 1, 0, 4) + b"cuda" + struct.pack("<Q", 20) + b"x" * 20,
    ],
    ids=["empty", "short", "cut off", "unknown"],
)
def test_serialised_modules_of_another_form_are_refused(packed: bytes) -> None:
    with pytest.raises(BuildError, match="in an unknown form"):
        with_code(packed, {"source": b"code"})


def test_machine_code_takes_the_place_of_its_source() -> None:
    def text(value: bytes) -> bytes:
        return struct.pack("<Q", len(value)) + value

    functions = b"what the functions are"
    tree = struct.pack("<QQQQQQ", 3, 0, 1, 1, 1, 1)
    before = tree + text(b"_lib") + text(b"cuda") + text(text(b"cuda") + functions + text(b"source"))
    after = tree + text(b"_lib") + text(b"cuda") + text(text(b"fatbin") + functions + text(b"code"))
    assert with_code(text(before), {"other": b"", "source": b"code"}) == text(after)
