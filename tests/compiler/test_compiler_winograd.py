"""Winograd's convolution beside ONNX Runtime, and the rule that says when it pays."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from onnx import helper
from tvm import tirx

from support import scale
from support.arrays import normal
from support.builds import Preferring, rule_counts
from support.machines import AVX2, AVX512, on_two_cores
from tvmflow.compiler import BuildOptions, CompiledModel, build, import_onnx, lower, winograd, workloads
from tvmflow.compiler.annotations import WINOGRAD
from tvmflow.compiler.machine import Machine, of_profile
from tvmflow.compiler.operators.common import typical_pixels
from tvmflow.compiler.schedules import schedule
from tvmflow.hardware.profiles import named, shipped
from tvmflow.hardware.target import resolve

Check = Callable[..., CompiledModel]


def _convolution(make_model: Any, case: tuple[int, ...], stride: int = 1) -> Any:
    return make_model(*_case(case, [1], stride)[0])


def _case(case: tuple[int, ...], batches: list[int], stride: int = 1, groups: int = 1) -> tuple[Any, ...]:
    """A convolution and ReLU for a batch, or for any of several, and what to run it on."""
    channels, out, height, width, *pads = case
    nodes = [
        helper.make_node("Conv", ["x", "w", "b"], ["c"], pads=pads, strides=[stride, stride], group=groups),
        helper.make_node("Relu", ["c"], ["y"]),
    ]
    weights = {"w": normal(out, channels // groups, 3, 3), "b": normal(out)}
    batch = "batch" if len(batches) > 1 else batches[0]
    feeds = [{"x": normal(count, channels, height, width)} for count in batches]
    return (nodes, [("x", [batch, channels, height, width])], ["y"], weights), *feeds


# channels in and out, height, width, padding before (height, width) and after
_CASES = [
    (64, 64, 56, 56, 1, 1, 1, 1),
    (32, 33, 9, 30, 1, 1, 1, 1),
    (37, 70, 14, 13, 0, 0, 0, 0),
    (70, 37, 5, 6, 2, 2, 2, 2),
    (40, 48, 28, 17, 0, 1, 1, 0),
    (33, 32, 4, 4, 1, 1, 1, 1),
    (128, 160, 28, 28, 1, 1, 1, 1),
    (256, 64, 14, 14, 1, 1, 1, 1),
]


def test_winograd_equals_onnx_runtime(assert_all_same: Check) -> None:
    cases = [_case(case, [1]) for case in scale.choose(normal=_CASES[1:4:2], long=_CASES)]
    assert rule_counts(assert_all_same(cases))["winograd"] == len(cases)


# Channels in and out, padding before (height, width) and after, strides, height and width ("h", "w": free).
_FREE_CASES = [
    (32, 48, 1, 1, 1, 1, 1, "h", "w"),
    (64, 128, 1, 0, 2, 1, 2, "h", "w"),
    (160, 160, 1, 1, 1, 1, 1, "h", 11),
    (33, 64, 0, 1, 0, 1, 1, 9, "w"),
]


@pytest.mark.long
@pytest.mark.parametrize("size", scale.choose(normal=[4], long=[2, 4]))
def test_winograd_of_free_sizes_equals_onnx_runtime(
    size: int, assert_all_same: Check, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(winograd, "rank_sizes", lambda *_: [size])
    cases = []
    # The first one's like is below, and on protected pages in test_compiler_guarded.py.
    for channels, out, *pads, stride, height, width in _FREE_CASES[scale.count(normal=1, long=0) :]:
        (nodes, _, outputs, weights), *_ = _case((channels, out, 8, 8, *pads), [1], stride)
        feeds = [
            {"x": normal(count, channels, h if height == "h" else height, w if width == "w" else width)}
            for count, h, w in ((1, 3, 3), (2, 9, 14), (1, 21, 40))
        ]
        cases.append(((nodes, [("x", ["n", channels, height, width])], outputs, weights), *feeds))
    assert rule_counts(assert_all_same(cases))["winograd"] == len(cases)


# Groups, channels in and out of a group, height and width ("h", "w": free), stride. Groups of 24 and 40 channels fill
# halves of a vector of 16. The weights of 288 channels exceed the second-level cache: all groups go through each stage
# together.
_GROUPED_CASES = [
    (9, 48, 48, 14, 14, 1),
    (9, 16, 24, 9, 13, 1),
    (3, 20, 32, 15, 8, 2),
    (10, 24, 40, "h", "w", 1),
    (2, 288, 288, 8, 8, 1),
    (2, 17, 16, "h", "w", 2),
]


@pytest.mark.few(1)
@pytest.mark.parametrize("size", scale.choose(normal=[4], long=[2, 4]))
def test_winograd_of_groups_equals_onnx_runtime(
    size: int, assert_all_same: Check, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(winograd, "rank_sizes", lambda *_: [size])
    cases = []
    for groups, depth, per_group, height, width, stride in _GROUPED_CASES[: scale.count(normal=4, long=6)]:
        channels, out, is_free = groups * depth, groups * per_group, height == "h"
        (nodes, _, outputs, weights), *_ = _case((channels, out, 8, 8, 1, 0, 1, 2), [1], stride, groups)
        sizes = [(1, 5, 3), (2, 9, 22)] if is_free else [(1, height, width), (3, height, width)]
        feeds = [{"x": normal(count, channels, high, wide)} for count, high, wide in sizes]
        cases.append(((nodes, [("x", ["n", channels, height, width])], outputs, weights), *feeds))
    assert rule_counts(assert_all_same(cases))["winograd"] == len(cases)


def test_sizes_that_a_model_computes_from_free_ones_are_convolved_by_winograd(
    assert_all_same: Check, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(winograd, "rank_sizes", lambda *_: [4])
    before = [
        helper.make_node("Conv", ["x", "w"], ["halves"], pads=[1] * 4, strides=[2, 2]),
        helper.make_node("Conv", ["halves", "w"], ["valid"]),
    ]
    nodes = [
        *scale.choose(normal=[], long=before),
        helper.make_node(
            "MaxPool",
            [scale.choose(normal="x", long="valid")],
            ["pooled"],
            kernel_shape=[3, 3],
            strides=[2, 2],
            pads=[1] * 4,
        ),
        helper.make_node("Conv", ["pooled", "w"], ["narrow"], pads=[1] * 4),
        helper.make_node("Resize", ["narrow", "", "scales"], ["wide"], mode="nearest"),
        helper.make_node("Conv", ["wide", "w"], ["y"], pads=[1] * 4),
    ]
    weights = {"w": normal(32, 32, 3, 3) / 9, "scales": np.array([1, 1, 2, 2], "float32")}
    feeds = [{"x": normal(1, 32, *size)} for size in ((11, 8), (30, 47))]
    case = ((nodes, [("x", ["n", 32, "h", "w"])], ["y"], weights), *feeds)
    assert rule_counts(assert_all_same([case]))["winograd"] == scale.count(normal=2, long=4)


@pytest.mark.few(1)
@pytest.mark.parametrize(
    ("stride", "size"), scale.choose(normal=[(1, 4), (2, 3)], long=[(1, 2), (1, 4), (2, 2), (2, 3), (2, 4)])
)
def test_every_tile_size_serves_every_batch(
    stride: int, size: int, assert_all_same: Check, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(winograd, "rank_sizes", lambda *_: [size])
    shapes = scale.choose(normal=[(8, 13), (29, 5)], long=[(7, 7), (8, 13), (29, 5)])
    cases = [_case((3, 21, *shape, 1, 1, 0, 1), [1, 2, 5], stride) for shape in shapes]
    assert rule_counts(assert_all_same(cases))["winograd"] == len(cases)


@pytest.mark.long  # Errors are compared with the bound that a build states below.
@pytest.mark.parametrize(
    ("stride", "size", "bound"),
    [(1, 2, 2e-6), (1, 4, 4e-6), (2, 2, 2e-6), (2, 3, 2e-6), (2, 4, 4e-6)],
)
def test_the_error_stays_within_the_algorithms_bound(
    stride: int, size: int, bound: float, make_model: Any, target: Any, run_built: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(winograd, "rank_sizes", lambda *_: [size])
    case = (128, 128, 16, 16, 0, 0, 0, 0)
    x, weight, bias = normal(1, 128, 16, 16), normal(128, 128, 3, 3), normal(128)
    (actual,) = run_built(build(import_onnx(_convolution(make_model, case, stride=stride)), target), x)
    windows = np.lib.stride_tricks.sliding_window_view(x.astype("float64"), (3, 3), axis=(2, 3))
    windows = windows[:, :, ::stride, ::stride]
    exact = np.einsum("nchwyx,ocyx->nohw", windows, weight) + bias[:, None, None]
    assert np.abs(actual - np.maximum(exact, 0)).max() < bound * np.abs(exact).max()


def test_residuals_fuse_into_winograd(make_model: Any, assert_same_as_onnxruntime: Check) -> None:
    nodes = [
        helper.make_node("Conv", ["x", "w"], ["a"], pads=[1, 1, 1, 1]),
        helper.make_node("Relu", ["a"], ["b"]),
        helper.make_node("Conv", ["b", "w"], ["c"], pads=[1, 1, 1, 1]),
        helper.make_node("Add", ["c", "b"], ["d"]),
        helper.make_node("Relu", ["d"], ["y"]),
    ]
    path = make_model(nodes, [("x", [2, 48, 15, 15])], ["y"], {"w": normal(48, 48, 3, 3) / 10})
    model = assert_same_as_onnxruntime(path, {"x": normal(2, 48, 15, 15)})
    assert rule_counts(model) == {"winograd": 2, "fallback": 2}  # the two others are the layout changes at both ends


@pytest.mark.parametrize("groups", [1, 2])
@pytest.mark.parametrize("name", ["x86-64-v2", "x86-64-v3", "aarch64-cortex-a72"])
def test_other_processors_get_winograd(name: str, groups: int, make_model: Any) -> None:
    imported = import_onnx(make_model(*_case((64, 64, 28, 28, 1, 1, 1, 1), [1], groups=groups)[0]))
    assert any("winograd" in item.name for item in workloads(lower(imported, resolve(name))))


@pytest.mark.parametrize(("width", "is_moved"), [(64, True), (56, False), ("w", True)])
def test_taps_that_would_share_one_set_of_the_cache_are_moved_apart(
    width: int | str, is_moved: bool, make_model: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(winograd, "rank_sizes", lambda *_: [4])
    weights = {"w": normal(64, 64, 3, 3)}
    node = helper.make_node("Conv", ["x", "w"], ["y"], pads=[1] * 4)
    imported = import_onnx(make_model([node], [("x", [1, 64, 64, width])], ["y"], weights))
    target = resolve("llvm -mcpu=x86-64-v4 -num-cores=2")
    (func,) = (item.func for item in workloads(lower(imported, target)) if "winograd" in item.name)
    # A line of 16 tiles with 64 channels of float32 is as long as a way of the cache, and one of 14 tiles is not.
    assert ("buffer_dim_align" in schedule(func, AVX512)[0].script()) is is_moved


@pytest.mark.parametrize(
    ("groups", "depth", "per_group", "is_fast"),
    [
        (9, 48, 48, True),
        (32, 16, 16, True),
        (14, 24, 24, True),
        (32, 8, 16, True),
        (32, 4, 4, False),
        (9, 48, 36, False),
    ],
)
def test_groups_that_fill_vectors_or_halves_use_winograd(
    groups: int, depth: int, per_group: int, is_fast: bool
) -> None:
    shape = winograd.Shape(14, 14, groups * depth, groups * per_group, groups=groups)
    ranked = winograd.rank_sizes(shape, AVX512)
    assert (ranked[0] is not None) is is_fast
    assert set(ranked) == ({None, 2, 4} if is_fast else {None})


def test_groups_cost_as_much_as_so_many_convolutions() -> None:
    one = winograd.Shape(28, 28, 48, 48)
    for size in (None, 2, 4):
        cycles = winograd.cycles(size, replace(one, channels=144, out_channels=144, groups=3), AVX512)
        assert cycles == pytest.approx(3 * winograd.cycles(size, one, AVX512))


def test_the_weights_of_a_group_are_fetched_while_the_group_before_is_computed(make_model: Any) -> None:
    # In an image of 7 by 7 pixels the tasks of a group are too few to hide the fetch.
    for pixels, is_fetched in ((28, True), (7, False)):
        case = _case((432, 432, pixels, pixels, 1, 1, 1, 1), [1], groups=9)[0]
        choices = Preferring(option="winograd 2")
        lowered = lower(import_onnx(make_model(*case)), on_two_cores("x86-64-v4"), choices=choices)
        (func,) = (item.func for item in workloads(lowered) if "winograd" in item.name)
        assert ("T.prefetch(" in schedule(func, AVX512)[0].script()) is is_fetched


@pytest.mark.parametrize("machine", [AVX512, AVX2], ids=["avx512", "avx2"])
@pytest.mark.parametrize(
    ("height", "channels", "size"), [(56, 64, 4), (112, 32, 4), (14, 4, None), (224, 3, None), (1, 256, None)]
)
def test_the_tile_size_follows_the_shape(machine: Machine, height: int, channels: int, size: int | None) -> None:
    assert winograd.rank_sizes(winograd.Shape(height, height, channels, channels), machine)[0] == size


@pytest.mark.parametrize("name", ["x86-64-v3", "zen3", "zen4", "zen5", "ice-lake-sp", "sapphire-rapids"])
@pytest.mark.parametrize(("height", "channels"), [(56, 64), (28, 128)])
def test_two_cores_use_large_tiles_for_images_of_a_few_lines_of_tiles(name: str, height: int, channels: int) -> None:
    machine = of_profile(named(name), ("avx", "avx512bw", "avx512f"), 2)
    assert winograd.rank_sizes(winograd.Shape(height, height, channels, channels), machine)[0] == 4


@pytest.mark.parametrize("name", sorted(shipped()))
def test_all_cores_of_a_processor_use_winograd_for_images_that_occupy_them(name: str) -> None:
    profile = named(name)
    features = {"x86_64": ("avx", "avx512bw", "avx512f"), "aarch64": ("neon",)}[profile.arch]
    for cores in (1, profile.cores.count):
        machine = of_profile(profile, features, cores)
        assert winograd.rank_sizes(winograd.Shape(112, 112, 64, 64), machine)[0] is not None, cores


@pytest.mark.parametrize(("height", "channels"), [(14, 256), (7, 512)])
def test_large_weights_get_small_tiles(height: int, channels: int) -> None:
    assert winograd.rank_sizes(winograd.Shape(height, height, channels, channels), AVX512)[0] == 2


def test_the_tuner_has_a_search_space_for_winograd(make_model: Any, target: Any) -> None:
    from tvmflow.tuning.space import make_search
    from tvmflow.tuning.traces import normalize

    imported = import_onnx(_convolution(make_model, (64, 64, 28, 28, 1, 1, 1, 1)))
    (function,) = (item.func for item in workloads(lower(imported, target)) if "winograd" in item.name)
    search = make_search(normalize(function), target.canonical, "random", batch=2, seed=1, cost_model=None)
    assert search.propose()


@pytest.mark.parametrize(("stride", "size"), [(1, 2), (1, 4), (2, 2), (2, 3), (2, 4)])
def test_the_transforms_make_a_convolution(stride: int, size: int) -> None:
    inputs, kernel, output = winograd.transforms(size, stride)
    tile, weights = normal(winograd.side_of(size, stride)), normal(3)
    np.testing.assert_allclose(
        output @ ((inputs @ tile) * (kernel @ weights)), np.correlate(tile, weights)[::stride], rtol=1e-5, atol=1e-6
    )
    assert np.array_equal(inputs, inputs.astype("float32"))
    assert np.array_equal(output, output.astype("float32"))


@pytest.mark.parametrize(
    ("level", "height", "channels", "pays"),
    [
        ("llvm -mcpu=x86-64-v4 -model=sapphire-rapids", 56, 128, True),
        ("llvm -mcpu=x86-64-v4 -model=sapphire-rapids", 14, 32, False),
        ("x86-64-v3", 28, 4, False),
        ("x86-64-v4", 28, 4, False),
    ],
)
def test_stride_two_pays_with_enough_channels(
    level: str, height: int, channels: int, pays: bool, make_model: Any
) -> None:
    path = _convolution(make_model, (channels, channels, height, height, 1, 1, 1, 1), stride=2)
    names = [item.name for item in workloads(lower(import_onnx(path), on_two_cores(level)))]
    assert any("winograd" in name for name in names) is pays


def test_winograd_can_be_forbidden(make_model: Any, assert_same_as_onnxruntime: Check) -> None:
    path = _convolution(make_model, (64, 64, 28, 28, 1, 1, 1, 1))
    options = BuildOptions(fast_algorithms=False)
    model = assert_same_as_onnxruntime(path, {"x": normal(1, 64, 28, 28)}, options=options)
    assert "winograd" not in rule_counts(model)
    assert model.algorithms == {}


def test_a_build_says_what_is_computed_by_winograd_and_its_bound(make_model: Any, target: Any) -> None:
    model = build(import_onnx(_convolution(make_model, (64, 64, 56, 56, 1, 1, 1, 1))), target)
    assert model.algorithms["winograd"].functions == 1
    assert model.algorithms["winograd"].bound == winograd.error_bound(4, 1, 64)


@pytest.mark.few(1)
@pytest.mark.parametrize(
    ("size", "stride", "groups"),
    scale.choose(
        normal=[(4, 1, 1), (3, 2, 2)],
        long=[(2, 1, 1), (4, 1, 1), (4, 1, 2), (2, 2, 1), (3, 2, 1), (3, 2, 2), (4, 2, 1)],
    ),
)
def test_errors_are_below_the_bound_that_is_known_before(
    size: int, stride: int, groups: int, make_model: Any, target: Any, run_built: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(winograd, "rank_sizes", lambda *_: [size])
    depth, out = 40 // groups, 16 * groups
    x, weight = normal(1, 40, 12, 12), normal(out, depth, 3, 3)
    nodes = [helper.make_node("Conv", ["x", "w"], ["y"], strides=[stride, stride], group=groups)]
    model = build(import_onnx(make_model(nodes, [("x", x.shape)], ["y"], {"w": weight})), target)
    assert rule_counts(model)["winograd"] == 1
    windows = np.lib.stride_tricks.sliding_window_view(x.astype("float64"), (3, 3), axis=(2, 3))
    windows = windows[:, :, ::stride, ::stride]
    windows = windows.reshape(groups, depth, *windows.shape[2:])
    exact = np.einsum("gchwyx,gocyx->gohw", windows, weight.reshape(groups, -1, depth, 3, 3))
    exact = exact.reshape(1, out, *exact.shape[2:])
    largest = np.abs(x).max() * np.abs(weight).sum(axis=(1, 2, 3)).max()
    error = np.abs(run_built(model, x)[0] - exact).max() / largest
    assert 0 < error < winograd.error_bound(size, stride, depth)
    assert model.algorithms["winograd"].bound == winograd.error_bound(size, stride, depth)


def test_a_size_within_a_network_counts_as_it_is_for_a_typical_input() -> None:
    height = tirx.Var("height", "int64")
    assert [typical_pixels(size) for size in (7, height, (height + 31) // 32, height * 2)] == [7, 256, 8, 512]


def test_a_line_that_is_filled_up_to_whole_register_tiles_costs_what_it_computes() -> None:
    def cost(width: int, rows: int = 1) -> float:
        return winograd.cycles(4, winograd.Shape(8, width, 512, 512, rows=rows), AVX512)

    assert cost(8, rows=4) == cost(16) > cost(8)


def test_deep_within_a_network_of_free_sizes_a_line_of_output_tiles_is_short(make_model: Any) -> None:
    nodes = [
        helper.make_node("MaxPool", ["i"], ["x"], kernel_shape=[32, 32], strides=[32, 32]),
        helper.make_node("Conv", ["x", "w"], ["y"], pads=[1, 1, 1, 1]),
    ]
    model = make_model(nodes, [("i", [1, 512, "h", "w"])], ["y"], {"w": normal(512, 512, 3, 3)})
    functions = [item.func.script() for item in workloads(lower(import_onnx(model), on_two_cores("x86-64-v4")))]
    assert not any(f'"{WINOGRAD}": 4' in function for function in functions)
