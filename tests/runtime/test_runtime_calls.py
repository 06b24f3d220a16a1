"""Calling a loaded bundle gives the outputs of the original."""

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
from onnx import helper

from support.models import save_model
from support.steps import compile_by_steps
from tvmflow import runtime
from tvmflow.arrays import NamedArrays
from tvmflow.errors import InputError
from tvmflow.runtime import CompiledModel
from tvmflow.runtime.model import _DirectCall

MakeInputs = Callable[[int], NamedArrays]
Reference = Callable[[NamedArrays], NamedArrays]


def assert_same(actual: NamedArrays, expected: NamedArrays) -> None:
    assert list(actual) == list(expected)
    for name, array in expected.items():
        assert actual[name].dtype == array.dtype
        np.testing.assert_allclose(actual[name], array, rtol=1e-5, atol=1e-6)


@pytest.fixture(params=[1 << 20, 0], ids=["small", "large"])
def model(bundle: Path, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[CompiledModel]:
    """The model, first with inputs small enough to be copied, then with large ones, copied only if necessary."""
    monkeypatch.setattr("tvmflow.runtime.model._LARGEST_COPY", request.param)
    with runtime.load(bundle) as loaded:
        yield loaded


@pytest.mark.few(4)
@pytest.mark.parametrize("batch", [1, 2, 5, 8])
def test_inputs_by_name_give_the_originals_outputs_by_name(
    model: CompiledModel, inputs: MakeInputs, reference: Reference, batch: int
) -> None:
    arrays = inputs(batch)
    assert_same(model(**dict(reversed(arrays.items()))), reference(arrays))


def test_inputs_in_order_give_the_same(model: CompiledModel, inputs: MakeInputs, reference: Reference) -> None:
    arrays = inputs(3)
    assert_same(model(*arrays.values()), reference(arrays))


def test_order_and_names_may_be_mixed(model: CompiledModel, inputs: MakeInputs, reference: Reference) -> None:
    arrays = inputs(3)
    assert_same(model(arrays["x"], scale=arrays["scale"], y=arrays["y"]), reference(arrays))


def test_outputs_stay_as_they_are_when_the_model_is_called_again(model: CompiledModel, inputs: MakeInputs) -> None:
    first = model(**inputs(2))
    copies = {name: array.copy() for name, array in first.items()}
    model(**{name: array + 1 for name, array in inputs(2).items()})
    assert_same(first, copies)


def test_large_outputs_are_the_memory_that_the_model_wrote(
    model: CompiledModel, inputs: MakeInputs, request: pytest.FixtureRequest
) -> None:
    is_large = request.node.callspec.params["model"] == 0
    assert [array.flags.owndata for array in model(**inputs(2)).values()] == [not is_large] * 2


def test_outputs_that_are_inputs_constants_or_each_other_are_copied(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    names = {"same": "x", "constant": "c", "relu": "r", "again": "r", "view": "flat"}
    nodes = [
        helper.make_node("Relu", ["x"], ["r"]),
        helper.make_node("Reshape", ["x", "shape"], ["flat"]),
        *(helper.make_node("Identity", [value], [name]) for name, value in names.items()),
    ]
    weights = {"c": np.arange(4, dtype=np.float32), "shape": np.array([-1], np.int64)}
    outputs = [(name, [4] if name == "constant" else [8] if name == "view" else [2, 4]) for name in names]
    save_model(tmp_path / "model.onnx", nodes, [("x", [2, 4])], outputs, weights)
    bundle = compile_by_steps({"name": "shared", "model": {"onnx": "model.onnx"}}, tmp_path, tmp_path / "state")
    monkeypatch.setattr("tvmflow.runtime.model._LARGEST_COPY", 0)
    x = np.arange(-4, 4, dtype=np.float32).reshape(2, 4)
    with runtime.load(bundle) as model:
        first = model(x)
        expected = {name: array.copy() for name, array in first.items()}
        for array in first.values():
            array += 1
        assert_same(first, {name: array + 1 for name, array in expected.items()})
        np.testing.assert_array_equal(x, np.arange(-4, 4).reshape(2, 4))
        assert_same(model(x), expected)


def test_large_inputs_beside_small_outputs_are_read_wherever_they_lie(tmp_path: Path) -> None:
    nodes = [helper.make_node("ReduceMax", ["x", "axes"], ["m"]), helper.make_node("Add", ["m", "scale"], ["y"])]
    shapes = [("scale", [1]), ("x", ["rows", 1 << 13])]
    save_model(tmp_path / "model.onnx", nodes, shapes, [("y", ["rows", 1])], {"axes": np.array([1], np.int64)})
    bundle = compile_by_steps({"name": "maxima", "model": {"onnx": "model.onnx"}}, tmp_path, tmp_path / "state")
    memory = np.random.default_rng(0).standard_normal((1 << 14) + 16).astype("float32")
    with runtime.load(bundle) as model:
        for start, scale in ((0, 0), (1, 1), (4, 2)):
            x = memory[start : start + (1 << 14)].reshape(2, -1)
            x.flags.writeable = start != 4
            y = model(scale=np.array([scale], np.float32), x=x)["y"]
            np.testing.assert_array_equal(y, x.max(axis=1, keepdims=True) + np.float32(scale))
            assert any(isinstance(call, _DirectCall) for call in model._local.calls.values())


def test_outputs_of_sizes_with_names_of_their_own_need_no_virtual_machine(tmp_path: Path) -> None:
    nodes = [helper.make_node("Concat", ["a", "b"], ["c"], axis=1), helper.make_node("Softmax", ["c"], ["y"])]
    save_model(tmp_path / "model.onnx", nodes, [("a", ["n", 4]), ("b", ["m", 4])], [("y", ["rows", 8])])
    bundle = compile_by_steps({"name": "joined", "model": {"onnx": "model.onnx"}}, tmp_path, tmp_path / "state")
    with runtime.load(bundle) as model:
        for rows in (2, 3, 2):
            a, b = (np.random.default_rng(seed).standard_normal((rows, 4), np.float32) for seed in range(2))
            exponentials = np.exp(np.hstack([a, b]))
            expected = exponentials / exponentials.sum(axis=1, keepdims=True)
            assert_same(model(a=a, b=b), {"y": expected})
        assert all(isinstance(call, _DirectCall) for call in model._local.calls.values())
        with pytest.raises(InputError, match=r"does not run with inputs of the shapes a \[3, 4\], b \[2, 4\]"):
            model(a=np.zeros((3, 4), np.float32), b=np.zeros((2, 4), np.float32))


def test_sizes_that_contradict_each_other_are_named_where_the_virtual_machine_runs(tmp_path: Path) -> None:
    # An output of this size has no direct form.
    nodes = [helper.make_node("Reshape", ["x", "rows"], ["r"]), helper.make_node("Softmax", ["r"], ["y"])]
    save_model(tmp_path / "model.onnx", nodes, [("x", ["n", "m"])], ["y"], {"rows": np.array([1, 8192])})
    dimensions = {"n": {"measure": [2]}, "m": {"measure": [4096]}}
    configuration = {"name": "rows", "model": {"onnx": "model.onnx"}, "dimensions": dimensions}
    with runtime.load(compile_by_steps(configuration, tmp_path, tmp_path / "state")) as model:
        assert model(x=np.zeros((2, 4096), np.float32))["y"].shape == (1, 8192)
        with pytest.raises(InputError, match=r"x \[3, 4096\]: two sizes that must be equal are 12288 and 8192$"):
            model(x=np.zeros((3, 4096), np.float32))


def test_calls_of_many_shapes_in_turn_give_each_its_own_result(
    model: CompiledModel, inputs: MakeInputs, reference: Reference, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tvmflow.runtime.model._CALL_CACHE_SIZE", 3)
    for batch in (1, 2, 3, 1, 4, 5, 3, 1, 1):
        assert_same(model(**inputs(batch)), reference(inputs(batch)))


def test_lists_are_taken_like_arrays(model: CompiledModel, inputs: MakeInputs, reference: Reference) -> None:
    arrays = inputs(2)
    feed = {**arrays, "x": [list(row) for row in arrays["x"]]}
    assert_same(model(**feed), reference(arrays))


def test_a_wrong_dtype_is_refused_after_calls_with_the_right_one(model: CompiledModel, inputs: MakeInputs) -> None:
    model(**inputs(2))
    with pytest.raises(InputError, match="input 'x' is str, expected float32"):
        model(x=[["1"]])
    with pytest.raises(InputError, match="input 'x' is str, expected float32"):
        model(x=np.array([["1"]], object))
    with pytest.raises(InputError, match="input 'x' is float64, expected float32"):
        model(**{**inputs(2), "x": inputs(2)["x"].astype(np.float64)})


def test_inputs_are_left_as_they_were(model: CompiledModel, inputs: MakeInputs) -> None:
    arrays = inputs(4)
    model(**arrays)
    assert_same(arrays, inputs(4))


def test_an_array_that_is_not_contiguous_is_taken_right(
    model: CompiledModel, inputs: MakeInputs, reference: Reference
) -> None:
    arrays = inputs(4)
    spread = np.zeros((8, 16), np.float32)
    spread[::2, ::2] = arrays["x"]
    turned = np.asfortranarray(arrays["y"])
    assert_same(model(x=spread[::2, ::2], y=turned, scale=arrays["scale"]), reference(arrays))


def test_a_reversed_array_is_taken_right(model: CompiledModel, inputs: MakeInputs, reference: Reference) -> None:
    arrays = inputs(4)
    assert_same(model(**{**arrays, "x": arrays["x"][::-1]}), reference({**arrays, "x": arrays["x"][::-1].copy()}))


def test_a_big_endian_array_is_taken_right(model: CompiledModel, inputs: MakeInputs, reference: Reference) -> None:
    arrays = inputs(4)
    swapped = {name: array.astype(array.dtype.newbyteorder(">")) for name, array in arrays.items()}
    assert_same(model(**swapped), reference(arrays))


def test_an_unaligned_array_is_taken_right(model: CompiledModel, inputs: MakeInputs, reference: Reference) -> None:
    arrays = inputs(4)
    shifted = np.frombuffer(b"\0" + arrays["x"].tobytes(), np.uint8)[1:].view(np.float32).reshape(4, 8)
    assert not shifted.flags.aligned
    assert_same(model(**{**arrays, "x": shifted}), reference(arrays))


def test_a_read_only_array_is_taken(model: CompiledModel, inputs: MakeInputs, reference: Reference) -> None:
    arrays = inputs(4)
    for array in arrays.values():
        array.flags.writeable = False
    assert_same(model(**arrays), reference(arrays))


def test_four_threads_at_once_get_right_results(model: CompiledModel, inputs: MakeInputs, reference: Reference) -> None:
    together = threading.Barrier(4, timeout=60)

    def work(batch: int) -> list[NamedArrays]:
        together.wait()
        return [model(**inputs(batch)) for _ in range(20)]

    with ThreadPoolExecutor(4) as pool:
        for batch, results in zip(range(1, 5), pool.map(work, range(1, 5)), strict=True):
            expected = reference(inputs(batch))
            for result in results:
                assert_same(result, expected)


def test_weights_apart_give_the_same(bundle_apart: Path, inputs: MakeInputs, reference: Reference) -> None:
    with runtime.load(bundle_apart) as apart:
        assert apart.manifest.weights == "apart"
        assert "mod.params" in apart.manifest.files
        assert_same(apart(**inputs(5)), reference(inputs(5)))


def test_two_bundles_can_be_open_at_once(
    model: CompiledModel, bundle_apart: Path, inputs: MakeInputs, reference: Reference
) -> None:
    with runtime.load(bundle_apart) as apart:
        assert_same(apart(**inputs(2)), reference(inputs(2)))
        assert_same(model(**inputs(2)), reference(inputs(2)))


def test_the_golden_sample_holds_inputs_and_the_originals_outputs(model: CompiledModel, reference: Reference) -> None:
    arrays, expected = model.sample
    assert list(arrays) == ["x", "y", "scale"]
    assert_same(expected, reference(arrays))


def test_a_model_knows_its_signature(model: CompiledModel) -> None:
    description = [(item.name, item.shape, item.dtype) for item in (*model.inputs, *model.outputs)]
    assert description == [
        ("x", ("batch", 8), "float32"),
        ("y", ("batch", 4), "float32"),
        ("scale", (), "float32"),
        ("sum", ("batch", 4), "float32"),
        ("positive", ("batch", 4), "float32"),
    ]


def test_a_closed_model_says_so(bundle: Path, inputs: MakeInputs) -> None:
    with runtime.load(bundle) as model:
        model(**inputs(1))
    model.close()
    with pytest.raises(ValueError, match="model 'small' is closed"):
        model(**inputs(1))


def test_an_output_may_be_empty(tmp_path: Path) -> None:
    nodes = [helper.make_node("Slice", ["x", "start", "end", "axis"], ["y"])]
    weights = {name: np.array([number]) for name, number in (("start", 3), ("end", 1 << 40), ("axis", 1))}
    file = save_model(tmp_path / "rest.onnx", nodes, [("x", ["rows", "columns"])], ["y"], weights)
    document = {
        "name": "rest",
        "model": {"onnx": str(file)},
        "dimensions": {"rows": {"min": 1}, "columns": {"min": 1, "measure": [8]}},
    }
    with runtime.load(compile_by_steps(document, tmp_path, tmp_path / "state")) as model:
        for columns in (8, 3, 1, 5):
            x = np.ones((2, columns), np.float32)
            np.testing.assert_array_equal(model(x)["y"], x[:, 3:])
