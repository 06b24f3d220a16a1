"""Every kind of kernel stays within its buffers, run in parallel, for every size and schedule drawn."""

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
import tvm
from onnx import NodeProto, helper
from tvm import te, tirx

from support import scale
from support.guarded import assert_within_buffers
from support.machines import require_level, runnable_levels
from support.models import make_model
from tvmflow.arrays import Array
from tvmflow.compiler import BuildOptions, import_onnx, lower, winograd, workloads
from tvmflow.compiler.choices import Choices, shape_text
from tvmflow.compiler.machine import Machine, machine
from tvmflow.compiler.operators.packing import packing_of
from tvmflow.compiler.schedules import complete, guards, schedule, variants
from tvmflow.hardware.target import Precision, Target, resolve

# So many schedules of a function are computed at most, and one of them is drawn.
_SCHEDULES = scale.count(normal=4, long=16)


@dataclass
class Drawn:
    """A small model under construction, whose numbers a generator draws."""

    rng: np.random.Generator
    nodes: list[NodeProto] = field(default_factory=list)
    inputs: list[tuple[str, list[Any]]] = field(default_factory=list)
    weights: dict[str, Array] = field(default_factory=dict)
    # The option of each decision that is fixed, by the decision's kind; other decisions are drawn.
    decisions: dict[str, str] = field(default_factory=dict)
    precision: Precision = "fp32"

    def integer(self, low: int, high: int) -> int:
        return int(self.rng.integers(low, high + 1))

    def choice(self, *options: Any) -> Any:
        return options[self.integer(0, len(options) - 1)]

    def input(self, *shape: int) -> str:
        self.inputs.append((f"x{len(self.inputs)}", list(shape)))
        return self.inputs[-1][0]

    def weight(self, *shape: int) -> str:
        return self.array(self.rng.standard_normal(shape).astype("float32"))

    def array(self, value: Any) -> str:
        self.weights[f"w{len(self.weights)}"] = np.asarray(value)
        return f"w{len(self.weights) - 1}"

    def node(self, operator: str, *operands: str, outputs: int = 1, **attributes: Any) -> str:
        names = [f"v{len(self.nodes)}_{place}" for place in range(outputs)]
        self.nodes.append(helper.make_node(operator, operands, names, **attributes))
        return names[0]

    def conv(self, x: str, channels: int, out: int, kernel: int = 1, **attributes: Any) -> str:
        weight = self.weight(out, channels // attributes.get("group", 1), kernel, kernel)
        attributes.setdefault("pads", [(kernel - 1) // 2] * 4)
        return self.node("Relu", self.node("Conv", x, weight, self.weight(out), **attributes))

    def proto(self) -> onnx.ModelProto:
        read = {name for node in self.nodes for name in node.input}
        outputs = [name for node in self.nodes for name in node.output if name not in read]
        return make_model(self.nodes, self.inputs, outputs, self.weights, opset=20)


def _pooling(model: Drawn) -> None:
    channels = model.choice(16, 19, 32, 70)
    height, width = model.integer(3, 20), model.integer(3, 20)
    kernel = [model.integer(1, min(7, size)) for size in (height, width)]
    pads = [model.integer(0, size - 1) for size in kernel * 2]
    x = model.conv(model.input(model.integer(1, 2), 3, height, width), 3, channels)
    for operator, more in (
        ("MaxPool", {}),
        ("AveragePool", {"count_include_pad": 0}),
        ("AveragePool", {"count_include_pad": 1}),
    ):
        strides = [model.integer(1, 3)] * 2
        y = model.node(operator, x, kernel_shape=kernel, pads=pads, strides=strides, **more)
        model.conv(y, channels, 16)


def _convolutions(model: Drawn) -> None:
    groups = model.choice(1, 1, 1, 2)
    channels, out = model.integer(1, 35) * groups, model.integer(1, 50) * groups
    kernel, dilation = model.choice(1, 3, 5), model.choice(1, 1, 2, 5)
    size = [model.integer(dilation * (kernel - 1) + 1, 24) for _ in range(2)]
    model.decisions = {"algorithm": "direct", "block": "apart"}
    pads, strides = [model.integer(0, 2 * dilation) for _ in range(4)], [model.integer(1, 3)] * 2
    x = model.input(model.integer(1, 2), channels, *size)
    model.conv(x, channels, out, kernel, group=groups, pads=pads, strides=strides, dilations=[dilation] * 2)


def _depthwise(model: Drawn) -> None:
    group = model.choice(1, 1, 2, 4, 8)
    channels, kernel = group * model.integer(1, 9) * model.choice(1, 4), model.choice(3, 5, 7)
    dilation = model.choice(1, 1, 2, 9) if kernel == 3 else 1
    span = dilation * (kernel - 1) + 1
    pads, strides = [model.integer(0, span // 2) for _ in range(4)], [model.integer(1, 2)] * 2
    x = model.input(model.integer(1, 2), channels, model.integer(span, 20), model.integer(span, 20))
    model.conv(
        x, channels, channels, kernel, group=channels // group, pads=pads, strides=strides, dilations=[dilation] * 2
    )


def _winograd(model: Drawn) -> None:
    groups, stride = model.choice(1, 2, 9), model.choice(1, 2)
    channels, out = (groups * model.integer(8, 40) for _ in range(2))
    if groups > 1:
        # Groups whose output channels fill no vectors of any machine are direct.
        out = groups * 8 * model.integer(1, 4)
    model.decisions = {"algorithm": f"winograd {model.choice(2, 4)}", "block": "apart"}
    x = model.input(model.integer(1, 2), channels, model.integer(4, 20), model.integer(4, 20))
    pads = [model.integer(0, 2) for _ in range(4)]
    model.conv(x, channels, out, 3, group=groups, pads=pads, strides=[stride] * 2)


def _blocks(model: Drawn) -> None:
    channels, between, out = model.integer(8, 24), 16 * model.integer(1, 3), model.integer(8, 40)
    is_depthwise, stride = model.choice(True, False), model.choice(1, 2)
    height, width = 4 * model.integer(2, 5), 4 * model.integer(2, 7)
    model.decisions = {"block": "whole"}
    # In bfloat16, Winograd's algorithm, which takes kernels of 3x3, is in no block.
    kernel = 3 if is_depthwise or model.precision == "fp32" else 5
    x = model.conv(model.input(model.integer(1, 2), channels, height, width), channels, between)
    x = model.conv(x, between, between, kernel, group=between if is_depthwise else 1, strides=[stride] * 2)
    model.conv(x, between, out)


def _attention(model: Drawn) -> None:
    batch, heads, rows, keys, depth = (model.integer(1, high) for high in (2, 3, 40, 40, 40))
    query, value = model.input(batch, heads, rows, depth), model.input(batch, heads, keys, depth)
    key = model.node("Transpose", model.input(batch, heads, keys, depth), perm=[0, 1, 3, 2])
    scores = model.node("MatMul", query, key)
    if model.choice(True, False):
        scores = model.node("Add", scores, model.input(batch, 1, model.choice(1, rows), keys))
    model.node("MatMul", model.node("Softmax", scores, axis=-1), value)


def _products(model: Drawn) -> None:
    model.decisions = {"algorithm": "direct"}
    rows, depth, units = (model.integer(1, 70) for _ in range(3))
    x = model.node("MatMul", model.input(rows, depth), model.weight(depth, units))
    model.node("Add", x, model.weight(units))
    left, right = model.input(2, rows, depth), model.input(2, depth, units)
    model.node("MatMul", left, right)
    # More rows than the two that are multiplied one by one.
    count, width = model.integer(3, 40), model.integer(1, 70)
    key = model.node("Transpose", model.input(2, units, width), perm=[0, 2, 1])
    model.node("MatMul", model.input(2, count, width), key)


def _norms(model: Drawn) -> None:
    size, channels = model.integer(1, 200), 2 * model.integer(1, 40)
    x = model.input(3, model.integer(1, 5), size)
    model.node(model.choice("Softmax", "LogSoftmax"), x, axis=-1)
    model.node("LayerNormalization", x, model.weight(size), model.weight(size))
    axis = model.array(np.array([model.integer(0, 2)], "int64"))
    model.node(model.choice("ReduceMean", "ReduceMax", "ReduceSum"), x, axis, keepdims=1)
    # So many numbers are added in parts.
    model.node("ReduceSum", model.input(2, model.integer(129, 400), channels), model.array(np.array([1])), keepdims=0)
    image = model.input(2, channels, model.integer(1, 12), model.integer(1, 12))
    model.node("InstanceNormalization", image, model.weight(channels), model.weight(channels))
    model.node("GlobalAveragePool", model.conv(image, channels, channels))


def _movement(model: Drawn) -> None:
    sizes = [model.integer(1, 40) for _ in range(4)]
    x = model.input(*sizes)
    model.node("Transpose", x, perm=[int(place) for place in model.rng.permutation(4)])
    axis = model.integer(0, 3)
    other = [*sizes]
    other[axis] = model.integer(1, 40)
    model.node("Concat", x, model.input(*other), x, axis=axis)
    pads = [model.integer(0, 2) for _ in range(8)]
    model.node("Pad", x, model.array(np.array(pads, "int64")), mode=model.choice("constant", "edge"))
    image = model.input(1, model.integer(1, 20), model.integer(2, 12), model.integer(2, 12))
    scales = np.array([1, 1, *(model.choice(0.5, 1.5, 2, 3) for _ in range(2))], "float32")
    for mode in ("nearest", "linear", "cubic"):
        model.node("Resize", image, "", model.array(scales), mode=mode)
    model.node("Slice", x, *(model.array(np.array([value], "int64")) for value in (0, sizes[axis], axis, 2)))


def _sampling(model: Drawn) -> None:
    batch, channels, *sizes = (model.integer(1, high) for high in (3, 20, 12, 12))
    # Some points are beyond the image.
    grid = model.node(
        "Mul", model.input(batch, *(model.integer(1, 12) for _ in range(2)), 2), model.array(np.float32(3))
    )
    for mode in ("linear", "nearest"):
        model.node(
            "GridSample",
            model.input(batch, channels, *sizes),
            grid,
            mode=mode,
            padding_mode=model.choice("zeros", "border", "reflection"),
            align_corners=model.choice(0, 1),
        )


def _bfloat16(model: Drawn) -> None:
    model.precision = "bf16"
    model.choice(_convolutions, _depthwise, _winograd, _products)(model)


def _bfloat16_blocks(model: Drawn) -> None:
    model.precision = "bf16"
    _blocks(model)


def _bfloat16_attention(model: Drawn) -> None:
    model.precision = "bf16"
    _attention(model)


@dataclass(frozen=True)
class Kind:
    """How models of a kind of kernel are drawn, how many in a normal run, and a name that one of its functions has."""

    draw: Callable[[Drawn], None]
    count: int
    function: str


KINDS = {
    "pooling": Kind(_pooling, 1, "avg_pool2d"),
    "convolutions": Kind(_convolutions, 2, "conv2d"),
    "depthwise convolutions": Kind(_depthwise, 1, "conv2d"),
    "winograd": Kind(_winograd, 1, "winograd"),
    "blocks": Kind(_blocks, 1, "conv2d_block"),
    "attention": Kind(_attention, 1, "attention"),
    "products": Kind(_products, 1, "dense"),
    "norms": Kind(_norms, 1, "layer_norm"),
    "movement": Kind(_movement, 1, "concatenate"),
    "sampling": Kind(_sampling, 1, "grid_sample"),
    "bfloat16": Kind(_bfloat16, 3, ""),
    "blocks in bfloat16": Kind(_bfloat16_blocks, 1, "conv2d_block"),
    "attention in bfloat16": Kind(_bfloat16_attention, 1, "attention"),
}
# The levels of x86-64 below the best one, with fewer registers and narrower vectors; none on another architecture.
_LESSER = runnable_levels()[:-1]
# Every kind at the best level, and in float32 at a lesser one: in a normal run some by turns, in a long run all at all.
CASES = [(kind, "") for kind in KINDS] + [
    (kind, level)
    for place, kind in enumerate(kind for kind in KINDS if "bfloat16" not in kind)
    for level in scale.choose(normal=_LESSER[place % 8 // 4 :][: place % 4 == 0], long=_LESSER)
]
# The precisions at the best level and, in a long run, float32 at the lesser ones.
PRECISIONS_AND_LEVELS: list[tuple[Precision, str]] = [
    ("fp32", ""),
    ("bf16", ""),
    *scale.choose(normal=[], long=[("fp32", level) for level in _LESSER]),
]
# Functions that every image model begins and ends with.
_AT_THE_ENDS = ("transpose", "round", "widen")


def _target(precision: Precision, level: str = "") -> Target:
    """A level of x86-64, by default the best that this machine runs; this machine where it is no x86-64."""
    level = "x86-64-v4-bf16" if precision == "bf16" else level or "".join(runnable_levels()[-1:])
    if level:
        require_level(level)
    return resolve(level or "native")


def _always_parallel(target: Target, cores: int) -> Machine:
    return replace(machine(target), cores=cores, region=0)


def _functions(model: Drawn, target: Target, folder: Path) -> dict[str, tirx.PrimFunc]:
    """The scheduled functions of a model by descriptive names; decisions that the model leaves open are drawn."""
    path = folder / "model.onnx"
    onnx.save(model.proto(), path)
    imported, options, choices = import_onnx(path), BuildOptions(precision=model.precision), Choices()
    lower(imported, target, options, choices)
    options_by_key = {
        site.key: model.decisions.get(site.kind) or model.choice(*site.options) for site in choices.sites.values()
    }
    # With many cores, loops are split in a second dimension.
    processor = _always_parallel(target, model.choice(2, 16, 64))
    lowered = lower(imported, target, options, Choices(options_by_key))
    functions = {
        f"{variable.name_hint}_{shape_text(func.params[0].shape)}": schedule(func, processor)[0]
        for variable, func in lowered.functions_items()
        if packing_of(func) is not None
    }
    for workload in workloads(lowered):
        schedules = variants(workload.func, processor, _SCHEDULES)
        scheduled = (
            complete(model.choice(*schedules).mod["main"]) if schedules else schedule(workload.func, processor)[0]
        )
        shapes = "_".join(shape_text(parameter.shape) for parameter in workload.func.params)
        functions[f"{workload.name}_{shapes}"] = scheduled
    return functions


@pytest.mark.few(8)
@pytest.mark.parametrize(("kind", "level"), CASES)
def test_kernels_stay_within_their_buffers(kind: str, level: str, tmp_path: Path) -> None:
    functions: dict[str, tirx.PrimFunc] = {}
    for seed in range(scale.count(normal=1 if level else KINDS[kind].count, long=24)):
        model = Drawn(np.random.default_rng([seed, *kind.encode()]))
        KINDS[kind].draw(model)
        target = _target(model.precision, level)
        functions |= _functions(model, target, tmp_path)
    if kind != "movement":
        functions = {name: func for name, func in functions.items() if not name.startswith(_AT_THE_ENDS)}
    assert any(KINDS[kind].function in name for name in functions), sorted(functions)
    assert_within_buffers(functions, target)


@pytest.mark.few(1)
@pytest.mark.parametrize("count_include_pad", [0, 1])
@pytest.mark.parametrize("size", scale.choose(normal=[35], long=[5, 14, 35, 71, 113]))
def test_padded_average_pooling_between_convolutions_stays_within_its_buffers(
    size: int, count_include_pad: int, tmp_path: Path
) -> None:
    model = Drawn(np.random.default_rng(0))
    x = model.conv(model.input(1, 32, size, size), 32, 192)
    x = model.node("AveragePool", x, kernel_shape=[3, 3], pads=[1] * 4, count_include_pad=count_include_pad)
    model.conv(x, 192, 32)
    functions = _functions(model, _target("fp32"), tmp_path)
    assert_within_buffers({name: func for name, func in functions.items() if "pool" in name}, _target("fp32"))


def _shifted(offset: int, guarded: bool) -> tirx.PrimFunc:
    """A vectorised function that reads `offset` elements further along, up to the end of its input if `guarded`."""
    x = te.placeholder((4096,), "float32", name="x")
    zero = tirx.const(0, "float32")
    y = te.compute((4096,), lambda i: tirx.Select(i + offset < 4096, x[i + offset], zero) if guarded else x[i + offset])
    sch = tvm.s_tir.Schedule(te.create_prim_func([x, y]))
    (loop,) = sch.get_loops(sch.get_sblock("compute"))
    sch.vectorize(sch.split(loop, [None, 8])[1])
    return sch.mod["main"]


@pytest.mark.parametrize("offset", [-16, 16])
def test_a_read_beyond_either_end_is_found_by_the_name_of_its_function(offset: int) -> None:
    with pytest.raises(AssertionError, match="shifted"):
        assert_within_buffers({"shifted": _shifted(offset, guarded=False)}, _target("fp32"))


def test_a_select_that_may_read_out_of_bounds_becomes_a_branch_and_others_stay() -> None:
    unsafe, safe = _shifted(16, guarded=True), _shifted(0, guarded=True)
    assert "Select" not in guards.guard_reads(unsafe).script()
    assert guards.guard_reads(safe).same_as(safe)
    assert_within_buffers({"guarded": guards.guard_reads(unsafe)}, _target("fp32"))


@pytest.mark.parametrize("upper", [0, 1])
def test_a_triangle_of_a_free_width_stays_within_its_buffers(upper: int, tmp_path: Path) -> None:
    node = helper.make_node("Trilu", ["x"], ["y"], upper=upper)
    onnx.save(make_model([node], [("x", [3, "width"])], ["y"]), tmp_path / "model.onnx")
    (workload,) = workloads(lower(import_onnx(tmp_path / "model.onnx"), _target("fp32")))
    function = schedule(workload.func, _always_parallel(_target("fp32"), 2))[0]
    assert_within_buffers({"triangle": function}, _target("fp32"), *({"width": width} for width in (1, 3, 9, 20)))


@pytest.mark.few(1)
@pytest.mark.parametrize(
    ("stride", "groups", "precision", "level"),
    [
        (stride, groups, *case)
        for stride, groups in scale.choose(normal=[(2, 1), (1, 3)], long=[(1, 1), (2, 1), (1, 3), (2, 3)])
        for case in PRECISIONS_AND_LEVELS
        # In bfloat16, groups of free sizes are direct.
        if groups == 1 or case[0] == "fp32"
    ],
)
def test_winograd_of_free_sizes_stays_within_its_buffers(
    stride: int, groups: int, precision: Precision, level: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # In bfloat16, output tiles of two multiply narrow numbers.
    monkeypatch.setattr(winograd, "rank_sizes", lambda *_: [4 if precision == "fp32" else 2])
    model, target = Drawn(np.random.default_rng(stride)), _target(precision, level)
    channels = 32 if groups == 1 else 36
    x = model.input(0, channels, 0, 0)
    model.inputs = [(x, ["n", channels, "h", "w"])]
    model.conv(x, channels, 48, 3, group=groups, strides=[stride] * 2, pads=[1, 0, 2, 1])
    onnx.save(model.proto(), tmp_path / "model.onnx")
    lowered = lower(import_onnx(tmp_path / "model.onnx"), target, BuildOptions(precision=precision))
    (func,) = (item.func for item in workloads(lowered) if "winograd" in item.name)
    schedules = variants(func, _always_parallel(target, 16), scale.count(normal=1, long=64))
    functions = {f"winograd_{place}": complete(item.mod["main"]) for place, item in enumerate(schedules)}
    chosen = []
    for n, h, w in ((1, 2, 3), (3, 9, 34)):
        high, wide = h // stride + 1, (w - 2) // stride + 1
        results = {"size0": high, "size1": wide} if stride > 1 else {"result0": high, "result1": wide}
        chosen.append({"n": n, "h": h, "w": w, **results})
    assert_within_buffers(functions, target, *chosen)


@pytest.mark.few(2)
@pytest.mark.parametrize(
    ("is_depthwise", "precision", "level"),
    [(is_depthwise, *case) for is_depthwise in (True, False) for case in PRECISIONS_AND_LEVELS],
)
def test_blocks_of_free_sizes_stay_within_their_buffers(
    is_depthwise: bool, precision: Precision, level: str, tmp_path: Path
) -> None:
    model, target = Drawn(np.random.default_rng(is_depthwise)), _target(precision, level)
    x = model.input(0, 12, 0, 0)
    model.inputs = [(x, ["n", 12, "h", "w"])]
    # In bfloat16, Winograd's algorithm, which takes kernels of 3x3, is in no block.
    kernel = 3 if is_depthwise or precision == "fp32" else 5
    y = model.conv(model.conv(x, 12, 48), 48, 48, kernel, group=48 if is_depthwise else 1)
    model.node("Add", model.node("Conv", y, model.weight(12, 48, 1, 1)), x)
    onnx.save(model.proto(), tmp_path / "model.onnx")
    choices = Choices()
    imported, options = import_onnx(tmp_path / "model.onnx"), BuildOptions(precision=precision)
    lower(imported, target, options, choices)
    whole = {site.key: "whole" for site in choices.sites.values() if site.kind == "block"}
    lowered = lower(imported, target, options, Choices(whole))
    (func,) = (item.func for item in workloads(lowered) if "block" in item.name)
    schedules = variants(func, _always_parallel(target, 16), scale.count(normal=1, long=64))
    functions = {f"block_{place}": complete(item.mod["main"]) for place, item in enumerate(schedules)}
    assert_within_buffers(functions, target, {"n": 1, "h": 2, "w": 3}, {"n": 3, "h": 9, "w": 37})


def _products_of_bfloat16(model: Drawn) -> None:
    """Convolutions, dense layers and products of activations, some of which AMX computes."""
    model.precision = "bf16"
    model.choice(_convolutions, _products)(model)


@pytest.mark.few(2)
@pytest.mark.usefixtures("cheap_tiles")
@pytest.mark.parametrize("draw", [_products_of_bfloat16, _bfloat16_attention])
def test_kernels_of_amx_stay_within_their_buffers(
    draw: Callable[[Drawn], None], tmp_path: Path, amx_target: Target, emulated_amx: Path
) -> None:
    functions: dict[str, tirx.PrimFunc] = {}
    for seed in range(scale.count(normal=2, long=48)):
        model = Drawn(np.random.default_rng(seed))
        draw(model)
        drawn = _functions(model, amx_target, tmp_path)
        functions |= {name: func for name, func in drawn.items() if "tvmflow_amx" in func.script()}
    assert functions
    assert_within_buffers(functions, amx_target, preload=emulated_amx)


@pytest.mark.usefixtures("cheap_tiles")
def test_attention_of_free_sizes_by_amx_stays_within_its_buffers(
    tmp_path: Path, amx_target: Target, emulated_amx: Path
) -> None:
    function, sizes = _free_attention("bf16", amx_target, tmp_path)
    assert "tvmflow_amx" in function.script()
    assert_within_buffers({"attention": function}, amx_target, *sizes, preload=emulated_amx)


@pytest.mark.parametrize(("precision", "level"), PRECISIONS_AND_LEVELS)
def test_attention_of_free_sizes_stays_within_its_buffers(precision: Precision, level: str, tmp_path: Path) -> None:
    target = _target(precision, level)
    function, sizes = _free_attention(precision, target, tmp_path)
    assert_within_buffers({"attention": function}, target, *sizes)


def _free_attention(precision: Precision, target: Target, folder: Path) -> tuple[tirx.PrimFunc, list[dict[str, int]]]:
    """The schedule of attention of free sizes, and sizes for it."""
    model = Drawn(np.random.default_rng(0))
    query, key, value, mask = (model.input(0) for _ in range(4))
    shapes = (["n", 2, "rows", 24], ["n", 2, 24, "keys"], ["n", 2, "keys", 24], ["n", 1, "rows", "keys"])
    model.inputs = list(zip((query, key, value, mask), shapes, strict=True))
    scores = model.node("Add", model.node("MatMul", query, key), mask)
    model.node("MatMul", model.node("Softmax", scores, axis=-1), value)
    onnx.save(model.proto(), folder / "model.onnx")
    lowered = lower(import_onnx(folder / "model.onnx"), target, BuildOptions(precision=precision))
    (func,) = (item.func for item in workloads(lowered) if "attention" in item.name)
    sizes = [{"n": 1, "rows": 1, "keys": 3}, {"n": 2, "rows": 5, "keys": 70}]
    return schedule(func, _always_parallel(target, 16))[0], sizes


@pytest.mark.few(1)
@pytest.mark.parametrize("order", [(0, 2, 1), (2, 1, 0)])
def test_a_transpose_of_free_sizes_stays_within_its_buffers(order: tuple[int, ...], tmp_path: Path) -> None:
    node = helper.make_node("Transpose", ["x"], ["y"], perm=order)
    onnx.save(make_model([node], [("x", ["a", "b", "c"])], ["y"]), tmp_path / "model.onnx")
    (workload,) = workloads(lower(import_onnx(tmp_path / "model.onnx"), _target("fp32")))
    function = schedule(workload.func, _always_parallel(_target("fp32"), 2))[0]
    sizes = [dict(zip("abc", values, strict=True)) for values in ((1, 1, 3), (2, 5, 7), (33, 18, 20))]
    assert_within_buffers({"transpose": function}, _target("fp32"), *sizes)


@pytest.mark.parametrize("axes", [[1], [1, 2]], ids=["line", "image"])
def test_sums_of_free_sizes_stay_within_their_buffers(axes: list[int], tmp_path: Path) -> None:
    shape = ["n", "h", "w", 19] if len(axes) > 1 else ["n", "h", 19]
    node = helper.make_node("ReduceMean", ["x", "axes"], ["y"])
    onnx.save(make_model([node], [("x", shape)], ["y"], {"axes": np.array(axes)}), tmp_path / "model.onnx")
    (workload,) = workloads(lower(import_onnx(tmp_path / "model.onnx"), _target("fp32")))
    function = schedule(workload.func, _always_parallel(_target("fp32"), 16))[0]
    sizes = [{"n": 1, "h": 1, "w": 3}, {"n": 2, "h": 131, "w": 9}]
    assert_within_buffers({"mean": function}, _target("fp32"), *sizes)


@pytest.mark.parametrize("channels", [24, 7, "c"], ids=str)
def test_products_by_transposes_of_free_sizes_stay_within_their_buffers(channels: int | str, tmp_path: Path) -> None:
    nodes = [
        helper.make_node("Transpose", ["k"], ["t"], perm=[0, 2, 1]),
        helper.make_node("MatMul", ["q", "t"], ["y"]),
    ]
    shapes = [("q", ["n", "rows", channels]), ("k", ["n", "keys", channels])]
    onnx.save(make_model(nodes, shapes, ["y"]), tmp_path / "model.onnx")
    (workload,) = workloads(lower(import_onnx(tmp_path / "model.onnx"), _target("fp32")))
    function = schedule(workload.func, _always_parallel(_target("fp32"), 16))[0]
    sizes = [dict(zip(("n", "rows", "keys", "c"), values, strict=True)) for values in ((1, 1, 3, 5), (2, 9, 50, 70))]
    assert_within_buffers({"product": function}, _target("fp32"), *sizes)
