"""Winograd's convolution of 8-bit integers where pairs of 16-bit integers are multiplied: exact, or not used."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from onnx import TensorProto, helper

from support import scale
from support.builds import rule_counts
from support.guarded import assert_within_buffers
from support.machines import AVX2, simple_target
from tvmflow.arrays import Array
from tvmflow.compiler import BuildOptions, build, import_onnx, lower, winograd, workloads
from tvmflow.compiler.choices import Choices
from tvmflow.compiler.dotproduct import BF16, INT8, PAIRS, integer_dot
from tvmflow.compiler.machine import machine
from tvmflow.compiler.schedules import complete, variants

RunBuilt = Callable[..., list[Array]]
MakeModel = Callable[..., Path]

pytestmark = pytest.mark.skipif(integer_dot(simple_target()) is not PAIRS, reason="x86-64 alone multiplies pairs")

# Strides and the sides of output tiles whose transforms are whole numbers.
_EXACT = [(1, 2), (2, 2), (2, 3)]


def _model(make_model: MakeModel, shape: list[Any], weights: list[Array], stride: int) -> Path:
    """A convolution of uint8 with a computed zero point for each array of weights, of int8 or uint8."""
    nodes, values = [], {}
    for place, weight in enumerate(weights):
        values |= {f"w{place}": weight, f"zero{place}": np.array(100 if weight.dtype == np.uint8 else 0, weight.dtype)}
        names = ["x", f"w{place}", "zero", f"zero{place}"]
        nodes.append(helper.make_node("ConvInteger", names, [f"y{place}"], pads=[1, 0, 1, 1], strides=[stride] * 2))
    inputs = [("x", shape, TensorProto.UINT8), ("zero", [], TensorProto.UINT8)]
    return make_model(nodes, inputs, [(f"y{place}", None, TensorProto.INT32) for place in range(len(weights))], values)


def _expected(x: Array, zero: int, weight: Array, stride: int) -> Array:
    wide = np.pad(x.astype("int64") - zero, ((0, 0), (0, 0), (1, 1), (0, 1)))
    windows = np.lib.stride_tricks.sliding_window_view(wide, (3, 3), axis=(2, 3))[:, :, ::stride, ::stride]
    kernel = weight.astype("int64") - (100 if weight.dtype == np.uint8 else 0)
    return np.einsum("nchwyx,ocyx->nohw", windows, kernel)


def _weights(channels: int) -> list[Array]:
    rng = np.random.default_rng(channels)
    return [
        rng.integers(-128, 128, (33, channels, 3, 3)).astype("int8"),
        rng.integers(0, 256, (16, channels, 3, 3)).astype("uint8"),
        np.full((8, channels, 3, 3), -128, "int8"),
    ]


@pytest.mark.few(2)
@pytest.mark.parametrize(
    ("is_free", "stride", "size"),
    scale.choose(
        normal=[(False, 1, 2), (False, 2, 3), (True, 2, 2)],
        long=[(is_free, *case) for is_free in (False, True) for case in _EXACT],
    ),
)
def test_sums_are_exact(
    is_free: bool,
    stride: int,
    size: int,
    make_model: MakeModel,
    run_built: RunBuilt,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(winograd, "rank_sizes", lambda *_: [size])
    weights = _weights(16)
    shapes = [(1, 16, 13, 9), (3, 16, 8, 30)] if is_free else [(2, 16, 13, 10)]
    path = _model(make_model, ["n", 16, "h", "w"] if is_free else list(shapes[0]), weights, stride)
    model = build(import_onnx(path), simple_target())
    assert rule_counts(model)["dot_winograd"] == len(weights)
    for shape in shapes:
        some = np.random.default_rng(0).integers(0, 256, shape).astype("uint8")
        for zero, x in ((0, np.full(shape, 255, "uint8")), (255, np.zeros(shape, "uint8")), (77, some)):
            results = run_built(model, x, np.array(zero, "uint8"))
            for weight, actual in zip(weights, results, strict=True):
                np.testing.assert_array_equal(actual, _expected(x, zero, weight, stride))


def test_a_convolution_whose_sums_could_overflow_is_direct(
    make_model: MakeModel, run_built: RunBuilt, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(winograd, "rank_sizes", lambda *_: [2])
    depth = 4096
    signs = np.random.default_rng(1).choice(np.array([-1, 1], "int8"), (8, depth, 3, 3))
    weights = [np.full((8, depth, 3, 3), 127, "int8"), signs]
    path = _model(make_model, [1, depth, 2, 3], weights, 1)
    model = build(import_onnx(path), simple_target())
    assert (rule_counts(model)["dot_conv2d"], rule_counts(model)["dot_winograd"]) == (1, 1)
    x = np.full((1, depth, 2, 3), 255, "uint8")
    for weight, actual in zip(weights, run_built(model, x, np.array(0, "uint8")), strict=True):
        np.testing.assert_array_equal(actual, _expected(x, 0, weight, 1))


def test_of_several_sizes_those_whose_sums_fit_are_used(
    make_model: MakeModel, run_built: RunBuilt, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(winograd, "rank_sizes", lambda *_: [3, 2, None])
    (weight,) = weights = [np.full((8, 512, 3, 3), 127, "int8")]
    assert [winograd.is_exact(weight, size, 2, 255) for size in (2, 3)] == [True, False]
    model = build(import_onnx(_model(make_model, [1, 512, 4, 5], weights, 2)), simple_target())
    assert rule_counts(model)["dot_winograd"] == 1
    x = np.full((1, 512, 4, 5), 255, "uint8")
    np.testing.assert_array_equal(run_built(model, x, np.array(0, "uint8"))[0], _expected(x, 0, weight, 2))


def test_a_convolution_that_must_be_direct_is_no_choice(make_model: MakeModel) -> None:
    for value, count in ((127, 0), (1, 1)):
        choices = Choices()
        path = _model(make_model, [1, 4096, 14, 14], [np.full((32, 4096, 3, 3), value, "int8")], 1)
        lower(import_onnx(path), simple_target(), choices=choices)
        assert sum(site.kind == "algorithm" for site in choices.sites.values()) == count, value


def test_without_fast_algorithms_and_with_an_odd_depth_convolutions_are_direct(make_model: MakeModel) -> None:
    for channels, is_fast, rule in ((64, True, "dot_winograd"), (64, False, "dot_conv2d"), (65, True, "dot_conv2d")):
        weights = [np.random.default_rng(0).integers(-128, 128, (64, channels, 3, 3)).astype("int8")]
        imported = import_onnx(_model(make_model, [1, channels, 28, 28], weights, 1))
        model = build(imported, simple_target(), BuildOptions(fast_algorithms=is_fast))
        assert rule_counts(model)[rule] == 1, (channels, is_fast)


def test_tiles_are_those_of_which_the_transforms_are_whole_numbers() -> None:
    shapes = [(1, winograd.Shape(28, 28, 64, 64, 1, PAIRS)), (2, winograd.Shape(28, 28, 64, 64, 2, PAIRS))]
    assert [(stride, size) for stride, shape in shapes for size in shape.sizes] == _EXACT
    assert winograd.Shape(28, 28, 63, 64, 1, PAIRS).sizes == []
    assert [winograd.whole_factor(size, stride) for stride, size in _EXACT] == [2, 1, 2]
    assert winograd.whole_factor(4, 1) is None
    # bfloat16 may have the others too, whose products are in float32.
    assert winograd.Shape(28, 28, 64, 64, 1, BF16).sizes == [2, 4]
    assert not winograd.takes_narrow(INT8, 2, 1, 64)


@pytest.mark.parametrize(("stride", "size"), scale.choose(normal=_EXACT[2:], long=_EXACT))
def test_integers_stay_within_their_buffers(
    stride: int, size: int, make_model: MakeModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(winograd, "rank_sizes", lambda *_: [size])
    target = simple_target()
    functions = {}
    for width in (34, 97):
        path = _model(make_model, [1, 32, 9, width], [_weights(32)[0]], stride)
        (func,) = (item.func for item in workloads(lower(import_onnx(path), target)) if "winograd" in item.name)
        schedules = variants(func, replace(machine(target), cores=16, region=0), scale.count(normal=2, long=16))
        functions |= {f"w{width}_{place}": complete(item.mod["main"]) for place, item in enumerate(schedules)}
    assert_within_buffers(functions, target)


def test_a_task_takes_as_many_tiles_of_a_line_as_the_cache_holds() -> None:
    room = int(0.75 * AVX2.own_cache)
    for columns, rows, tile_bytes, count in (
        (32, 4, room // 32, 32),
        (32, 4, room // 31, 16),
        (30, 5, room // 12, 10),
        # No multiple of 8 divides 20, and not even a register tile fits.
        (20, 8, room // 12, 20),
        (32, 4, room // 3, 32),
    ):
        assert winograd.tiles_of_task(columns, rows, tile_bytes, AVX2) == count
