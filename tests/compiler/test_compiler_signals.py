"""Fourier transforms, and operators that fold, reverse and multiply along a dimension, beside ONNX Runtime."""

import math
import re
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from onnx import TensorProto, helper

from support.arrays import normal
from tvmflow.compiler import CompiledModel, build, import_onnx, lower, workloads
from tvmflow.errors import UnsupportedOperatorError
from tvmflow.hardware.target import Target

MakeModel = Callable[..., Path]
_node = helper.make_node


def test_fourier_transforms_of_all_lengths_equal_onnx_runtime(
    make_model: MakeModel, assert_same_as_onnxruntime: Callable[..., CompiledModel]
) -> None:
    nodes = [
        _node("DFT", ["real"], ["whole"]),
        _node("DFT", ["real", "longer"], ["half"], onesided=1),
        _node("DFT", ["real", "shorter", "one"], ["short"]),
        _node("DFT", ["complex", "", "one"], ["inverse"], inverse=1),
    ]
    weights = {name: np.array(value, "int64") for name, value in (("one", 1), ("longer", 15), ("shorter", 4))}
    path = make_model(
        nodes, [("real", [2, 7, 12, 1]), ("complex", [2, 7, 3, 2])], ["whole", "half", "short", "inverse"], weights,
        opset=20,
    )  # fmt: skip
    assert_same_as_onnxruntime(path, {"real": normal(2, 7, 12, 1), "complex": normal(2, 7, 3, 2)})


@pytest.mark.long
def test_fourier_transforms_along_a_free_dimension_equal_onnx_runtime(
    make_model: MakeModel, assert_same_as_onnxruntime: Callable[..., CompiledModel]
) -> None:
    nodes = [
        _node("DFT", ["real"], ["whole"], axis=1),
        _node("DFT", ["real"], ["half"], axis=1, onesided=1),
        _node("DFT", ["complex"], ["inverse"], axis=1, inverse=1),
    ]
    inputs = [("real", [2, "size", 3, 1]), ("complex", [2, "size", 3, 2])]
    path = make_model(nodes, inputs, ["whole", "half", "inverse"])
    feeds = [{"real": normal(2, size, 3, 1), "complex": normal(2, size, 3, 2, seed=1)} for size in (1, 8, 30)]
    assert_same_as_onnxruntime(path, *feeds)


def test_lengths_that_the_model_takes_from_a_shape_equal_onnx_runtime(
    make_model: MakeModel, assert_same_as_onnxruntime: Callable[..., CompiledModel]
) -> None:
    nodes = [
        _node("Shape", ["real"], ["vector"], start=1, end=2),
        _node("Squeeze", ["vector"], ["size"]),
        _node("Div", ["size", "two"], ["shorter"]),
        _node("Add", ["size", "two"], ["longer"]),
        _node("DFT", ["real", "size", "one"], ["half"], onesided=1),
        _node("DFT", ["half", "size", "one"], ["again"], inverse=1, onesided=1),
        _node("DFT", ["real", "shorter", "one"], ["cut"]),
        _node("DFT", ["real", "longer", "one"], ["filled"]),
        _node("DFT", ["real", "eight", "one"], ["fixed"], onesided=1),
    ]
    weights = {name: np.array(value, "int64") for name, value in (("one", 1), ("two", 2), ("eight", 8))}
    outputs = ["half", "again", "cut", "filled", "fixed"]
    path = make_model(nodes, [("real", [2, "size", 3, 1])], outputs, weights, opset=20)
    assert_same_as_onnxruntime(path, *({"real": normal(2, size, 3, 1)} for size in (2, 8, 13)))


@pytest.mark.long
@pytest.mark.few(1)
@pytest.mark.parametrize("more", [-3, 2])
def test_a_signal_of_another_length_than_its_spectrum_is_that_of_numpy(
    more: int, make_model: MakeModel, target: Target, run_built: Any
) -> None:
    nodes = [
        _node("Shape", ["real"], ["vector"], start=1, end=2),
        _node("Squeeze", ["vector"], ["size"]),
        _node("Add", ["size", "more"], ["length"]),
        _node("DFT", ["real", "size", "one"], ["half"], onesided=1),
        _node("DFT", ["half", "length", "one"], ["y"], inverse=1, onesided=1),
    ]
    weights = {"one": np.array(1, "int64"), "more": np.array(more, "int64")}
    path = make_model(nodes, [("real", [2, "size", 3, 1])], ["y"], weights, opset=20)
    model = build(import_onnx(path), target)
    for size in (8, 13):
        x = normal(2, size, 3, 1)
        expected = np.fft.irfft(np.fft.rfft(x, axis=1), size + more, axis=1)
        np.testing.assert_allclose(run_built(model, x)[0], expected, rtol=1e-3, atol=1e-5)


@pytest.mark.few(1)
@pytest.mark.parametrize("length", [1024, 2310])
def test_long_transforms_are_made_of_short_ones(
    length: int, make_model: MakeModel, target: Target, run_built: Any
) -> None:
    nodes = [
        _node("DFT", ["real", "", "one"], ["half"], onesided=1),
        _node("DFT", ["half", "length", "one"], ["again"], inverse=1, onesided=1),
        _node("DFT", ["complex", "", "one"], ["whole"]),
        _node("DFT", ["whole", "", "one"], ["back"], inverse=1),
    ]
    weights = {"one": np.array(1, "int64"), "length": np.array(length, "int64")}
    inputs = [("real", ["n", length, 3, 1]), ("complex", [2, length, 2])]
    path = make_model(nodes, inputs, ["half", "again", "whole", "back"], weights, opset=20)
    imported = import_onnx(path)
    real, complex_ = normal(2, length, 3, 1), normal(2, length, 2)
    half, again, whole, back = run_built(build(imported, target), real, complex_)
    spectrum = np.fft.fft(complex_[..., 0] + 1j * complex_[..., 1], axis=1)
    close = partial(np.testing.assert_allclose, rtol=1e-3, atol=1e-3)
    close(half[..., 0] + 1j * half[..., 1], np.fft.rfft(real[..., 0], axis=1))
    close(whole[..., 0] + 1j * whole[..., 1], spectrum)
    close(again, real)
    close(back, complex_)


def test_a_transform_of_a_large_prime_number_of_samples_is_refused(make_model: MakeModel) -> None:
    path = make_model([_node("DFT", ["x"], ["y"], axis=1)], [("x", [1, 100_003, 1])], ["y"])
    with pytest.raises(UnsupportedOperatorError, match="a transform of 100003 numbers, which has a factor that is too"):
        import_onnx(path)


def test_a_free_length_has_a_largest_size(make_model: MakeModel, target: Target) -> None:
    path = make_model([_node("DFT", ["x"], ["y"], axis=1)], [("x", [1, "samples", 1])], ["y"])
    with pytest.raises(RuntimeError, match="match_cast error"):
        build(import_onnx(path), target).load().run(np.zeros((1, 8193, 1), "float32"))


def test_frames_of_a_signal_of_free_length_are_transformed(
    make_model: MakeModel, assert_same_as_onnxruntime: Callable[..., CompiledModel]
) -> None:
    window = np.hanning(16).astype("float32")
    nodes = [
        _node("STFT", ["x", "step", "window"], ["y"]),
        _node("STFT", ["x", "step", "", "length"], ["z"], onesided=0),
    ]
    weights = {"step": np.array(5, "int64"), "window": window, "length": np.array(12, "int64")}
    path = make_model(nodes, [("x", [2, "samples", 1])], ["y", "z"], weights)
    assert_same_as_onnxruntime(path, {"x": normal(2, 64, 1)}, {"x": normal(2, 51, 1, seed=1)})


def test_columns_and_sequences_equal_onnx_runtime(
    make_model: MakeModel, assert_same_as_onnxruntime: Callable[..., CompiledModel]
) -> None:
    nodes = [
        _node("Col2Im", ["c", "image", "block"], ["y"], strides=[2, 1], pads=[1, 0, 1, 2], dilations=[1, 2]),
        _node("ReverseSequence", ["s", "lengths"], ["z"], time_axis=1, batch_axis=0),
    ]
    weights = {"image": np.array([9, 8], "int64"), "block": np.array([3, 2], "int64")}
    feeds = {"c": normal(2, 18, 40), "s": normal(3, 6, 4), "lengths": np.array([6, 1, 4], "int64")}
    inputs = [("c", [2, 18, 40]), ("s", [3, 6, 4]), ("lengths", [3], TensorProto.INT64)]
    assert_same_as_onnxruntime(make_model(nodes, inputs, ["y", "z"], weights), feeds)


def test_an_image_as_long_as_the_stride_has_columns_of_all_its_blocks(
    assert_all_same: Callable[..., CompiledModel],
) -> None:
    """The remainder of a padded pixel is limited by the length of the block, and its dividend by that of the image."""
    cases = []
    for block in (1, 2, 3):
        node = _node("Col2Im", ["c", "image", "block"], ["y"], strides=[3], pads=[1, 1])
        shape = (2, 4 * block, (5 - block) // 3 + 1)
        weights = {"image": np.array([3]), "block": np.array([block])}
        cases += [(([node], [("c", own)], ["y"], weights), {"c": normal(*shape)}) for own in (shape, ["n", *shape[1:]])]
    assert_all_same(cases)


@pytest.mark.parametrize(
    ("block", "strides", "iterations"), [((3, 3), [2, 2], 1), ((2, 5), [2, 2], 1), ((7, 5), [3, 2], 9)], ids=str
)
def test_a_pixel_asks_only_for_the_elements_that_its_stride_lets_cover_it(
    block: tuple[int, int],
    strides: list[int],
    iterations: int,
    assert_all_same: Callable[..., CompiledModel],
    make_model: MakeModel,
    target: Target,
) -> None:
    node = _node("Col2Im", ["c", "image", "block"], ["y"], strides=strides, pads=[1, 0, 2, 1])
    size = (11, 14)
    counts = [(size[axis] + 3 - 2 * axis - block[axis]) // strides[axis] + 1 for axis in (0, 1)]
    shape = (2, 3 * math.prod(block), math.prod(counts))
    weights = {"image": np.array(size), "block": np.array(block)}
    forms = [([node], [("c", own)], ["y"], weights) for own in (shape, ["n", shape[1], shape[2]])]
    assert_all_same([(form, {"c": normal(*shape)}) for form in forms])
    for form in forms:
        (function,) = (item.func for item in workloads(lower(import_onnx(make_model(*form)), target)))
        found = re.search(r"in T.grid\((.*)\)", function.script())
        assert found is not None
        extents = re.findall(r"(?:T.int64\()?(\w+)", found[1].replace("T.int64(", "("))
        assert math.prod(map(int, extents[4:])) == iterations


def test_columns_of_an_image_of_free_or_computed_size_are_folded(
    make_model: MakeModel, assert_same_as_onnxruntime: Callable[..., CompiledModel], target: Target
) -> None:
    nodes = [
        _node("Shape", ["image"], ["size"], start=2),
        _node("Col2Im", ["c", "size", "block"], ["y"], strides=[2, 1], pads=[1, 0, 1, 2], dilations=[1, 2]),
        _node("Col2Im", ["d", "given", "block"], ["z"]),
    ]
    inputs = [
        ("image", [1, 1, "rows", "columns"]),
        ("c", ["batch", 18, "blocks"]),
        ("d", [1, 12, "others"]),
        ("given", [2], TensorProto.INT64),
    ]
    path = make_model(nodes, inputs, ["y", "z"], {"block": np.array([3, 2], "int64")})

    def feeds(batch: int, rows: int, columns: int, given: tuple[int, int]) -> dict[str, Any]:
        blocks, others = ((rows + 1) // 2) * columns, (given[0] - 2) * (given[1] - 1)
        arrays = {"image": (1, 1, rows, columns), "c": (batch, 18, blocks), "d": (1, 12, others)}
        return {**{name: normal(*shape) for name, shape in arrays.items()}, "given": np.array(given, "int64")}

    model = assert_same_as_onnxruntime(path, feeds(2, 9, 8, (4, 7)), feeds(1, 4, 5, (6, 3)))
    wrong = {**feeds(1, 4, 5, (6, 3)), "given": np.array((9, 9), "int64")}
    with pytest.raises(RuntimeError, match="match_cast error"):
        model.load().run(*wrong.values())


@pytest.mark.parametrize(
    ("node", "message"),
    [
        (_node("DFT", ["x", "n"], ["y"], axis=1), "a length that is computed from data"),
        (_node("STFT", ["x", "n", "", "n"], ["y"]), "a step that is computed"),
        (_node("Col2Im", ["x", "two", "blocks"], ["y"]), "a block whose shape is computed"),
    ],
    ids=["DFT", "STFT", "Col2Im"],
)
def test_transforms_of_unknown_size_are_refused(node: Any, message: str, make_model: MakeModel) -> None:
    inputs = [("x", [1, "size", 1]), *([("n", [], TensorProto.INT64)] if "n" in node.input else [])]
    inputs += [("blocks", [2], TensorProto.INT64)] if "blocks" in node.input else []
    weights = {"two": np.array([4, 4], "int64")} if "two" in node.input else {}
    with pytest.raises(UnsupportedOperatorError, match=message):
        import_onnx(make_model([node], inputs, [("y", None)], weights))
