"""Blocks of convolutions: fused where the cost model says so, and equal to ONNX Runtime."""

from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import helper
from tvm import tirx
from tvm.s_tir import SBlockRealize

from support import scale
from support.arrays import onnxruntime_outputs
from support.builds import rule_counts
from support.machines import on_two_cores
from support.models import join_models, joined_name, save_model
from tvmflow.arrays import Array
from tvmflow.compiler import BuildOptions, CompiledModel, build, import_onnx, lower, winograd, workloads
from tvmflow.compiler.inspection import Inspection
from tvmflow.compiler.machine import machine
from tvmflow.compiler.operators import block_plans
from tvmflow.compiler.schedules import kernels_of, schedule
from tvmflow.compiler.schedules.common import substitute
from tvmflow.hardware.target import Target

Check = Callable[..., CompiledModel]


@pytest.fixture
def always(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fuse every block that can be, however small: the schedule must be right for all of them."""

    def apart(costs: Any) -> float:
        return 1e12 * sum(part is not None for part in (costs._block.first, costs._block.last))

    monkeypatch.setattr(block_plans._Costs, "apart", apart)
    # Of free sizes, those of these tests are several patches then.
    monkeypatch.setattr(winograd, "INPUT_PIXELS", 16)


class _Graph:
    """Nodes and weights of a chain of convolutions."""

    def __init__(self) -> None:
        self.rng = np.random.default_rng(0)
        self.nodes: list[Any] = []
        self.weights: dict[str, Array] = {"low": np.array(0, "float32"), "high": np.array(6, "float32")}

    def conv(
        self,
        x: str,
        channels: int,
        out: int,
        *,
        kernel: int,
        stride: int = 1,
        pads: list[int],
        groups: int = 1,
        dilation: int = 1,
    ) -> str:
        name = f"c{len(self.nodes)}"
        scale = np.sqrt(channels // groups * kernel * kernel)
        self.weights[f"{name}w"] = (self.rng.standard_normal((out, channels // groups, kernel, kernel)) / scale).astype(
            "float32"
        )
        self.weights[f"{name}b"] = self.rng.standard_normal(out).astype("float32")
        self.nodes.append(
            helper.make_node(
                "Conv",
                [x, f"{name}w", f"{name}b"],
                [name],
                strides=[stride] * 2,
                pads=pads,
                group=groups,
                dilations=[dilation] * 2,
            )
        )
        return name

    def normal(self, *shape: int) -> Array:
        return self.rng.standard_normal(shape).astype("float32")

    def then(self, x: str, operator: str, *operands: str) -> str:
        name = f"t{len(self.nodes)}"
        self.nodes.append(helper.make_node(operator, [x, *operands], [name]))
        return name


# channels in, between and out, kernel and stride of the depthwise convolution, height, width, activation
_BLOCKS = [
    (16, 96, 24, 3, 2, 32, 30, "Clip"),
    (24, 48, 24, 3, 1, 14, 28, "Relu"),
    (8, 32, 70, 5, 1, 12, 24, "Sigmoid"),
    (40, 80, 16, 5, 2, 24, 36, "Silu"),
    (3, 16, 16, 3, 1, 20, 10, ""),
]


def _activate(graph: _Graph, x: str, activation: str) -> str:
    if activation == "Clip":
        return graph.then(x, "Clip", "low", "high")
    if activation == "Silu":
        return graph.then(x, "Mul", graph.then(x, "Sigmoid"))
    return graph.then(x, activation) if activation else x


def _block(case: tuple[Any, ...], graph: _Graph, x: str = "x") -> str:
    channels, between, out, kernel, stride, _, _, activation = case
    x = _activate(graph, graph.conv(x, channels, between, kernel=1, pads=[0] * 4), activation)
    pad = (kernel - 1) // 2
    x = graph.conv(x, between, between, kernel=kernel, stride=stride, pads=[pad] * 4, groups=between)
    return graph.conv(_activate(graph, x, activation), between, out, kernel=1, pads=[0] * 4)


@pytest.mark.usefixtures("always")
@pytest.mark.parametrize("batch", scale.choose(normal=[3], long=[1, 3]))
def test_whole_blocks_equal_onnx_runtime(batch: int, assert_all_same: Check) -> None:
    cases = []
    for case in scale.choose(normal=_BLOCKS[1:4:2], long=_BLOCKS):
        graph = _Graph()
        output = graph.then(_block(case, graph), "Relu")
        channels, _, _, _, _, height, width, _ = case
        shape = [batch, channels, height, width]
        cases.append(((graph.nodes, [("x", shape)], [output], graph.weights), {"x": graph.normal(*shape)}))
    assert rule_counts(assert_all_same(cases))["block"] == len(cases)


@pytest.mark.usefixtures("always")
def test_a_block_adds_its_own_input_and_serves_every_batch(make_model: Any, assert_same_as_onnxruntime: Check) -> None:
    graph = _Graph()
    case = (24, 48, 24, 3, 1, 14, 28, "Relu")
    graph.then(_block(case, graph), "Add", "x")
    path = make_model(graph.nodes, [("x", ["n", 24, 14, 28])], [graph.nodes[-1].output[0]], graph.weights)
    feeds = [{"x": graph.rng.standard_normal((batch, 24, 14, 28)).astype("float32")} for batch in (1, 2, 5)]
    assert rule_counts(assert_same_as_onnxruntime(path, *feeds))["block"] == 1


@pytest.mark.few(2)
@pytest.mark.usefixtures("always")
@pytest.mark.parametrize("activation", ["Relu", "Clip", "Silu", "Sigmoid"])
def test_nan_stays_nan_in_a_block(activation: str, make_model: Any, target: Target) -> None:
    graph = _Graph()
    output = graph.then(_block((8, 32, 24, 3, 1, 12, 24, activation), graph), "Relu")
    path = make_model(graph.nodes, [("x", [1, 8, 12, 24])], [output], graph.weights)
    image = graph.normal(1, 8, 12, 24)
    image[0, 3, 5, 7] = np.nan
    model = build(import_onnx(path), target)
    assert rule_counts(model)["block"] == 1
    expected = onnxruntime_outputs(path, {"x": image})[output]
    assert 0 < np.isnan(expected).sum() < expected.size
    np.testing.assert_allclose(model.load().run(image)[0], expected, rtol=1e-4, atol=1e-5)


@pytest.mark.usefixtures("always")
def test_a_strided_convolution_with_uneven_padding_may_come_first(
    make_model: Any, assert_same_as_onnxruntime: Check
) -> None:
    graph = _Graph()
    x = graph.then(graph.conv("x", 3, 32, kernel=3, stride=2, pads=[0, 1, 1, 0]), "Relu")
    x = graph.then(graph.conv(x, 32, 32, kernel=3, pads=[1, 1, 1, 1], groups=32), "Relu")
    graph.conv(x, 32, 16, kernel=1, pads=[0] * 4)
    path = make_model(graph.nodes, [("x", [1, 3, 32, 40])], [graph.nodes[-1].output[0]], graph.weights)
    feed = {"x": graph.rng.standard_normal((1, 3, 32, 40)).astype("float32")}
    assert rule_counts(assert_same_as_onnxruntime(path, feed)) == {"block": 1, "fallback": 2}


@pytest.mark.few(1)
@pytest.mark.usefixtures("always")
@pytest.mark.parametrize("where", ["before", "after"])
def test_a_depthwise_convolution_takes_its_one_neighbour(
    where: str, make_model: Any, assert_same_as_onnxruntime: Check
) -> None:
    graph = _Graph()
    x = graph.then(graph.conv("x", 16, 32, kernel=1, pads=[0] * 4), "Relu") if where == "before" else "x"
    x = graph.then(graph.conv(x, 32, 32, kernel=3, pads=[1] * 4, groups=32), "Relu")
    if where == "after":
        graph.conv(x, 32, 24, kernel=1, pads=[0] * 4)
    channels = 16 if where == "before" else 32
    path = make_model(graph.nodes, [("x", [1, channels, 14, 28])], [graph.nodes[-1].output[0]], graph.weights)
    feed = {"x": graph.rng.standard_normal((1, channels, 14, 28)).astype("float32")}
    assert rule_counts(assert_same_as_onnxruntime(path, feed)) == {"block": 1, "fallback": 2}


@pytest.mark.usefixtures("always")
def test_what_is_used_elsewhere_stays_out_of_the_block(make_model: Any, assert_same_as_onnxruntime: Check) -> None:
    graph = _Graph()
    expanded = graph.then(graph.conv("x", 16, 32, kernel=1, pads=[0] * 4), "Relu")
    filtered = graph.then(graph.conv(expanded, 32, 32, kernel=3, pads=[1] * 4, groups=32), "Relu")
    graph.then(filtered, "Add", expanded)
    path = make_model(graph.nodes, [("x", [1, 16, 14, 28])], [graph.nodes[-1].output[0]], graph.weights)
    feed = {"x": graph.rng.standard_normal((1, 16, 14, 28)).astype("float32")}
    assert "block" not in rule_counts(assert_same_as_onnxruntime(path, feed))


@pytest.mark.parametrize(
    ("level", "channels", "size", "functions"),
    [
        ("x86-64-v3", 16, 112, 1),
        ("x86-64-v4", 16, 112, 1),
        ("x86-64-v3", 96, 7, 3),
        ("x86-64-v4", 96, 7, 2),
        ("x86-64-v3", 16, 61, 3),
        ("x86-64-v4", 16, 61, 3),
    ],
)
def test_large_images_are_fused_small_ones_in_part_at_most_and_awkward_widths_are_not(
    level: str, channels: int, size: int, functions: int, make_model: Any
) -> None:
    graph = _Graph()
    _block((channels, 6 * channels, 24, 3, 1, size, size, "Clip"), graph)
    path = make_model(graph.nodes, [("x", [1, channels, size, size])], [graph.nodes[-1].output[0]], graph.weights)
    target = on_two_cores(level)
    lowered = workloads(lower(import_onnx(path), target))
    rules = Counter(schedule(workload.func, machine(target))[1] for workload in lowered)
    assert rules.total() - rules["fallback"] == functions
    assert rules["block"] == (functions < 3)


def test_the_pass_can_be_disabled(make_model: Any, assert_same_as_onnxruntime: Check) -> None:
    graph = _Graph()
    _block((16, 96, 24, 3, 1, 112, 112, "Clip"), graph)
    path = make_model(graph.nodes, [("x", [1, 16, 112, 112])], [graph.nodes[-1].output[0]], graph.weights)
    feed = {"x": graph.rng.standard_normal((1, 16, 112, 112)).astype("float32")}
    model = assert_same_as_onnxruntime(path, feed, options=BuildOptions(disabled_passes=("FuseBlocks",)))
    assert "block" not in rule_counts(model)


# channels in, between and out, kernel, stride and dilation of the middle one, height, width, fast algorithm
_BOTTLENECKS = [
    (32, 32, 70, 3, 1, 1, 16, 24, "winograd"),
    (24, 64, 64, 3, 2, 1, 24, 24, "winograd"),
    (64, 32, 96, 3, 1, 1, 28, 28, ""),
    (20, 32, 32, 3, 1, 2, 12, 28, ""),
    (64, 48, 48, 5, 2, 1, 24, 28, ""),
]


_PARTS = ["first and last", "first", "last"]


def _bottleneck(case: tuple[Any, ...], parts: str) -> tuple[Any, ...]:
    channels, between, out, kernel, stride, dilation, height, width, _ = case
    graph, x = _Graph(), "x"
    if "first" in parts:
        x = graph.then(graph.conv("x", channels, between, kernel=1, pads=[0] * 4), "Relu")
    else:
        channels = between
    pads = [dilation * (kernel - 1) // 2] * 4
    x = graph.then(graph.conv(x, between, between, kernel=kernel, stride=stride, pads=pads, dilation=dilation), "Relu")
    if "last" in parts:
        x = graph.conv(x, between, out, kernel=1, pads=[0] * 4)
    output = graph.then(x, "Sigmoid")
    feeds = [{"x": graph.normal(batch, channels, height, width)} for batch in (1, 3)]
    return (graph.nodes, [("x", ["n", channels, height, width])], [output], graph.weights), *feeds


# Heights and widths of less than a patch, of a whole number of patches, and others.
_FREE_SIZES = [(5, 7), (16, 32), (37, 66)]


def _free(case: tuple[Any, ...], added: bool = False) -> tuple[Any, ...]:
    """A block with a free batch, height and width, and inputs for it; `added` adds the block's own input."""
    graph, channels = _Graph(), case[0]
    output = _block(case, graph)
    output = graph.then(output, "Add", "x") if added else graph.then(output, "Relu")
    feeds = [{"x": graph.normal(place + 1, channels, *size)} for place, size in enumerate(_FREE_SIZES)]
    return (graph.nodes, [("x", ["n", channels, "h", "w"])], [output], graph.weights), *feeds


@pytest.mark.long
@pytest.mark.usefixtures("always")
def test_blocks_of_free_height_and_width_equal_onnx_runtime(assert_all_same: Check) -> None:
    cases = [_free(case) for case in _BLOCKS[:: scale.count(normal=3, long=1)]]
    cases.append(_free((24, 48, 24, 3, 1, 0, 0, "Relu"), added=True))
    assert rule_counts(assert_all_same(cases))["block"] == len(cases)


@pytest.mark.long
@pytest.mark.few(1)
@pytest.mark.usefixtures("always")
@pytest.mark.parametrize("algorithm", ["winograd", ""])
def test_bottlenecks_of_free_height_and_width_equal_onnx_runtime(algorithm: str, assert_all_same: Check) -> None:
    cases = []
    bottlenecks = [case for case in _BOTTLENECKS if case[-1] == algorithm]
    # A normal run takes two of them, and has each kind of parts with one algorithm or the other.
    first = 0 if algorithm else 1
    for place, case in enumerate(scale.choose(normal=bottlenecks[-2:], long=bottlenecks)):
        for parts in scale.choose(normal=[_PARTS[(first + place) % len(_PARTS)]], long=_PARTS):
            (nodes, inputs, outputs, weights), *_ = _bottleneck(case, parts)
            channels = inputs[0][1][1]
            normal = np.random.default_rng(place).standard_normal
            feeds = [{"x": normal((2, channels, *size)).astype("float32")} for size in _FREE_SIZES]
            cases.append(((nodes, [("x", ["n", channels, "h", "w"])], outputs, weights), *feeds))
    model = assert_all_same(cases, BuildOptions(fast_algorithms=bool(algorithm)))
    assert rule_counts(model)["block"] == len(cases)
    assert set(model.algorithms) == ({algorithm} if algorithm else set())


def _places(func: Any, name: str, sizes: dict[Any, int]) -> Iterator[list[int]]:
    """The values of the variables of the block `name` of a scheduled function, each time it runs with these `sizes`.

    Of loops that are unrolled or vectorised, only the first iteration counts.
    """

    def run(statement: Any, values: dict[Any, Any]) -> Iterator[list[int]]:
        if isinstance(statement, tirx.For):
            is_whole = statement.kind in (tirx.ForKind.SERIAL, tirx.ForKind.PARALLEL)
            for place in range(int(substitute(statement.extent, values)) if is_whole else 1):
                yield from run(statement.body, {**values, statement.loop_var: tirx.const(place, "int64")})
        elif isinstance(statement, tirx.SeqStmt):
            for item in statement.seq:
                yield from run(item, values)
        elif isinstance(statement, SBlockRealize) and not statement.block.iter_vars:
            yield from run(statement.block.body, values)
        elif statement.block.name_hint == name and substitute(statement.predicate, values):
            yield [int(substitute(value, values)) for value in statement.iter_values]

    return run(func.body, {variable: tirx.const(size, "int64") for variable, size in sizes.items()})


@pytest.mark.usefixtures("always")
@pytest.mark.parametrize("height", [3, 14, 23])
def test_the_patches_of_a_free_image_have_even_heights_and_end_with_the_image(height: int, make_model: Any) -> None:
    graph, target = _Graph(), on_two_cores("x86-64-v3")
    output = _block((8, 16, 8, 3, 1, 0, 0, "Relu"), graph)
    path = make_model(graph.nodes, [("x", [1, 8, "h", 8])], [output], graph.weights)
    (func,) = (
        item.func for item in workloads(lower(import_onnx(path), target)) if "block.last" in kernels_of(item.func)
    )
    scheduled, _ = schedule(func, machine(target))
    (free,) = (size for size in scheduled.params[0].shape if not isinstance(size, tirx.IntImm))

    written = {(place[-2], place[1]) for place in _places(scheduled, "T_add", {free: height})}
    assert [line for _, line in sorted(written)] == [*range(height)]
    lines = Counter(strip for strip, _ in written)
    assert max(lines.values()) - min(lines.values()) <= len(lines)
    # A line of the result reads three of the first convolution.
    computed = {(place[1], place[3]) for place in _places(scheduled, "expanded", {free: height})}
    assert Counter(strip for strip, _ in computed) == {strip: count + 2 for strip, count in lines.items()}


@pytest.mark.few(1)
@pytest.mark.parametrize("level", ["x86-64-v3", "x86-64-v4", "aarch64-neoverse-n1"])
def test_a_block_near_a_free_input_is_whole_and_one_that_few_pixels_reach_is_apart(level: str, make_model: Any) -> None:
    graph, target = _Graph(), on_two_cores(level)
    x = graph.then(_block((16, 96, 32, 3, 2, 0, 0, "Clip"), graph), "Relu")
    x = graph.then(graph.conv(x, 32, 320, kernel=5, stride=64, pads=[2] * 4), "Relu")
    output = _block((320, 1920, 320, 3, 1, 0, 0, "Clip"), graph, x)
    path = make_model(graph.nodes, [("x", ["n", 16, "h", "w"])], [output], graph.weights)
    lowered = workloads(lower(import_onnx(path), target))
    rules = [schedule(workload.func, machine(target))[1] for workload in lowered]
    assert [rule for rule in rules if rule in ("block", "depthwise")] == ["block", "depthwise"]


@pytest.mark.usefixtures("always")
@pytest.mark.parametrize("algorithm", ["winograd", ""])
def test_whole_bottlenecks_equal_onnx_runtime(algorithm: str, assert_all_same: Check) -> None:
    bottlenecks = [case for case in _BOTTLENECKS if case[-1] == algorithm]
    # A normal run takes one kind of parts for each, the last kind for the last.
    step = (len(_PARTS) - 1) // (len(bottlenecks) - 1)
    cases = [
        _bottleneck(case, parts)
        for place, case in enumerate(bottlenecks)
        for parts in scale.choose(normal=_PARTS[place * step : place * step + 1], long=_PARTS)
    ]
    model = assert_all_same(cases, BuildOptions(fast_algorithms=bool(algorithm)))
    assert rule_counts(model)["block"] == len(cases)
    assert set(model.algorithms) == ({algorithm} if algorithm else set())


@pytest.mark.usefixtures("always")
def test_blocks_in_bfloat16_are_as_exact_as_their_convolutions_apart(
    bf16: Target, run_built: Callable[..., list[Array]], tmp_path: Path
) -> None:
    cases = [_free(case) for case in _BLOCKS[:: scale.count(normal=8, long=1)]]
    cases.append(_free((24, 48, 24, 3, 1, 0, 0, "Relu"), added=True))
    bottlenecks = list(zip(_BOTTLENECKS[2:], _PARTS, strict=True))
    cases += [_bottleneck(case, parts) for case, parts in bottlenecks[:: scale.count(normal=3, long=1)]]
    joined = join_models(
        [onnx.load(save_model(tmp_path / "model.onnx", *arguments)) for arguments, *_ in cases],
    )
    onnx.save(joined, tmp_path / "model.onnx")
    feed = {joined_name(place, "x"): feeds[-1]["x"] for place, (_, *feeds) in enumerate(cases)}
    expected = onnxruntime_outputs(tmp_path / "model.onnx", feed).values()
    errors = []
    for disabled in ((), ("FuseBlocks",)):
        options = BuildOptions(precision="bf16", fast_algorithms=False, disabled_passes=disabled)
        model = build(import_onnx(tmp_path / "model.onnx"), bf16, options, inspect=Inspection(code=("tir",)))
        assert rule_counts(model)["block"] == (0 if disabled else len(cases))
        # A residual is read as it is stored; no loop widens it before.
        assert 'sblock("widen' not in model.inspected.code["tir"]
        outputs = run_built(model, *feed.values())
        errors.append(
            [
                np.abs(actual - value).max() / np.abs(value).max()
                for actual, value in zip(outputs, expected, strict=True)
            ]
        )
    whole, apart = (np.array(values) for values in errors)
    assert (apart <= 2e-2).all(), apart
    assert (whole <= 1.5 * apart).all(), (whole, apart)
