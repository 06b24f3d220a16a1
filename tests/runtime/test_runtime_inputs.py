"""Inputs that do not fit are one sentence that names the input and what was expected."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from onnx import helper

from support.models import save_counter, save_lookup, save_model, save_text
from support.steps import compile_by_steps
from tvmflow import runtime
from tvmflow.arrays import NamedArrays
from tvmflow.errors import InputError
from tvmflow.runtime import CompiledModel

MakeInputs = Callable[[int], NamedArrays]
SIGNATURE = r"x float32\[batch, 8\], y float32\[batch, 4\], scale float32\[\]"


def test_an_unknown_name_is_refused(model: CompiledModel, inputs: MakeInputs) -> None:
    with pytest.raises(InputError, match=f"'small'.*'z'.*{SIGNATURE}"):
        model(**inputs(2), z=np.ones(3))


def test_the_name_self_is_as_unknown_as_any(model: CompiledModel, inputs: MakeInputs) -> None:
    with pytest.raises(InputError, match="has no input 'self'"):
        model(**{**inputs(2), "self": np.ones(3)})


def test_a_missing_input_is_refused(model: CompiledModel, inputs: MakeInputs) -> None:
    arrays = inputs(2)
    del arrays["y"]
    with pytest.raises(InputError, match=f"'y'.*missing.*{SIGNATURE}"):
        model(**arrays)


def test_an_input_given_twice_is_refused(model: CompiledModel, inputs: MakeInputs) -> None:
    with pytest.raises(InputError, match=r"'x'.*twice"):
        model(inputs(2)["x"], **inputs(2))


def test_too_many_inputs_are_refused(model: CompiledModel, inputs: MakeInputs) -> None:
    with pytest.raises(InputError, match=r"^4 inputs.*x float32"):
        model(*inputs(2).values(), np.ones(3))


@pytest.mark.parametrize("dtype", ["float64", "float16", "int32", "bool", "complex64", "datetime64[s]", "S4", "O"])
def test_a_wrong_dtype_is_refused(model: CompiledModel, inputs: MakeInputs, dtype: str) -> None:
    arrays = inputs(2)
    with pytest.raises(InputError, match=r"'x'.*float32"):
        model(**{**arrays, "x": np.zeros((2, 8), dtype)})


@pytest.mark.parametrize("shape", [(8,), (1, 2, 8), ()])
def test_a_wrong_rank_is_refused(model: CompiledModel, inputs: MakeInputs, shape: tuple[int, ...]) -> None:
    with pytest.raises(InputError, match=r"'x'.*\[batch, 8\]"):
        model(**{**inputs(2), "x": np.zeros(shape, np.float32)})


def test_a_vector_is_no_scalar(model: CompiledModel, inputs: MakeInputs) -> None:
    with pytest.raises(InputError, match=r"'scale'.*\[1\].*\[\]"):
        model(**{**inputs(2), "scale": np.ones(1, np.float32)})


def test_a_wrong_size_is_refused(model: CompiledModel, inputs: MakeInputs) -> None:
    with pytest.raises(InputError, match=r"'x'.*\[2, 9\].*\[batch, 8\]"):
        model(**{**inputs(2), "x": np.zeros((2, 9), np.float32)})


@pytest.mark.parametrize("batch", [0, 9, 1000])
def test_a_symbolic_dimension_out_of_range_is_refused(model: CompiledModel, inputs: MakeInputs, batch: int) -> None:
    with pytest.raises(InputError, match=f"'x'.*'batch' is {batch}, .*1 to 8"):
        model(**inputs(batch))


def test_inputs_that_disagree_on_a_dimension_are_refused(model: CompiledModel, inputs: MakeInputs) -> None:
    with pytest.raises(InputError, match=r"'y'.*'batch' is 3.* 2 "):
        model(**{**inputs(2), "y": inputs(3)["y"]})


def test_ragged_rows_are_refused(model: CompiledModel, inputs: MakeInputs) -> None:
    with pytest.raises(InputError, match=r"'x'.*array"):
        model([[1.0, 2.0], [3.0]], inputs(2)["y"], inputs(2)["scale"])


def test_the_model_runs_on_after_a_refused_input(model: CompiledModel, inputs: MakeInputs) -> None:
    with pytest.raises(InputError):
        model(**inputs(9))
    assert model(**inputs(2))["sum"].shape == (2, 4)


def test_torch_tensors_are_taken_like_arrays(model: CompiledModel, inputs: MakeInputs) -> None:
    import torch

    arrays = inputs(3)
    tensors = {name: torch.from_numpy(array.copy()) for name, array in arrays.items()}
    expected = model(**arrays)
    for result in (model(**tensors), model(tensors["x"].T.contiguous().T, arrays["y"], tensors["scale"])):
        assert result["sum"].tolist() == expected["sum"].tolist()


def test_an_aligned_tensor_is_not_copied(model: CompiledModel) -> None:
    import torch

    tensor = torch.zeros(8, 8)
    assert tensor.data_ptr() % 64 == 0
    array = model.check_inputs({"x": tensor, "y": torch.zeros(8, 4), "scale": torch.tensor(1.0)})["x"]
    assert array.ctypes.data == tensor.data_ptr()
    assert np.from_dlpack(model._to_tensor(array)).ctypes.data == tensor.data_ptr()


def test_an_array_that_is_aligned_to_its_elements_alone_is_not_copied(
    model: CompiledModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    memory = np.zeros(9 * 8, "float32")
    array = memory[1 if memory.ctypes.data % 64 == 0 else 0 :][:64].reshape(8, 8)
    assert array.ctypes.data % 64

    def address() -> int:
        return int(np.from_dlpack(model._to_tensor(array, 0)).ctypes.data)

    assert address() == array.ctypes.data
    # A bundle of a former version needs a copy, whose memory serves again.
    monkeypatch.setattr(model, "manifest", replace(model.manifest, unaligned_inputs=False))
    first = address()
    assert first != array.ctypes.data
    assert first % 64 == 0
    assert address() == first


def test_an_array_of_another_library_is_taken_by_dlpack(model: CompiledModel, inputs: MakeInputs) -> None:
    import tvm_ffi

    arrays = inputs(3)
    foreign = {name: tvm_ffi.from_dlpack(array) for name, array in arrays.items()}
    assert not hasattr(foreign["x"], "__array__")
    assert model(**foreign)["sum"].tolist() == model(**arrays)["sum"].tolist()


def test_a_tensor_that_needs_gradients_is_refused(model: CompiledModel, inputs: MakeInputs) -> None:
    import torch

    with pytest.raises(InputError, match=r"'x'.*detach\(\)"):
        model(**{**inputs(2), "x": torch.zeros(2, 8, requires_grad=True)})


def test_a_tensor_of_another_dtype_is_refused(model: CompiledModel, inputs: MakeInputs) -> None:
    import torch

    with pytest.raises(InputError, match=r"'x' is float64.*float32"):
        model(**{**inputs(2), "x": torch.zeros(2, 8, dtype=torch.float64)})


def test_memory_of_a_device_is_refused(model: CompiledModel, inputs: MakeInputs) -> None:
    class OnDevice:
        """A tensor that says, as any library's does, that it lies on the first NVIDIA GPU."""

        def __dlpack_device__(self) -> tuple[int, int]:
            return 2, 0

    with pytest.raises(InputError, match=r"'x'.*device.*CPU"):
        model(**{**inputs(2), "x": OnDevice()})


def test_sizes_that_contradict_each_other_are_refused(tmp_path: Path) -> None:
    node = helper.make_node("Concat", ["x", "y"], ["z"], axis=1)
    path = save_model(tmp_path / "beside.onnx", [node], [("x", ["n", 2]), ("y", ["m", 3])], ["z"])
    ranges = {name: {"min": 1, "max": 8, "measure": [2]} for name in ("n", "m")}
    document = {"name": "beside", "model": {"onnx": str(path)}, "dimensions": ranges}
    arrays = {"x": np.zeros((2, 2), np.float32), "y": np.ones((2, 3), np.float32)}
    with runtime.load(compile_by_steps(document, tmp_path, tmp_path / "state")) as model:
        np.testing.assert_array_equal(model(**arrays)["z"], np.hstack([arrays["x"], arrays["y"]]))
        with pytest.raises(InputError, match=r"x \[2, 2\], y \[3, 3\]: m must be n$"):
            model(**{**arrays, "y": np.ones((3, 3), np.float32)})


@pytest.mark.parametrize("dtype", ["int64", "int32"])
def test_an_integer_that_the_table_lacks_is_named(tmp_path: Path, dtype: str) -> None:
    path = save_lookup(tmp_path / "lookup.onnx", dtype)
    bundle = compile_by_steps({"name": "lookup", "model": {"onnx": str(path)}}, tmp_path, tmp_path / "state")
    with runtime.load(bundle) as model:
        ends = model(np.array([[-5, 4]], dtype))["y"]
        np.testing.assert_array_equal(ends, model(np.array([[0, -1]], dtype))["y"])
        for value in (5, -6):
            for shape in ((1, 2), (2, 1), (1, 2)):
                ids = np.array([0, value], dtype).reshape(shape)
                for call in (lambda ids=ids: model(ids), lambda ids=ids: model.check_inputs({"ids": ids})):
                    with pytest.raises(InputError, match=rf"^input 'ids' holds {value}; the model takes -5 to 4$"):
                        call()


def test_a_text_longer_than_the_table_of_positions_is_refused_with_its_limit(tmp_path: Path) -> None:
    nodes = [
        helper.make_node("Shape", ["x"], ["shape"]),
        helper.make_node("Gather", ["shape", "one"], ["count"]),
        helper.make_node("Range", ["zero", "count", "one"], ["places"]),
        helper.make_node("Gather", ["table", "places"], ["positions"]),
        helper.make_node("Add", ["x", "positions"], ["y"]),
    ]
    weights = {"zero": np.array(0), "one": np.array(1), "table": np.ones(40, "float32")}
    path = save_model(tmp_path / "text.onnx", nodes, [("x", ["n", "length"])], ["y"], weights)
    bundle = compile_by_steps({"name": "text", "model": {"onnx": str(path)}}, tmp_path, tmp_path / "state")
    with runtime.load(bundle) as model:
        assert model(np.zeros((2, 40), "float32"))["y"].shape == (2, 40)
        with pytest.raises(InputError, match=r"inputs of the shapes x \[2, 41\]: length must be at most 40$"):
            model(np.zeros((2, 41), "float32"))


@pytest.mark.parametrize("threads", [1, 4])
def test_an_index_that_the_model_computes_is_checked_in_every_part_of_its_tensor(tmp_path: Path, threads: int) -> None:
    path = save_counter(tmp_path / "counter.onnx")
    bundle = compile_by_steps({"name": "counter", "model": {"onnx": str(path)}}, tmp_path, tmp_path / "state")
    with runtime.load(bundle, threads=threads) as model:
        for length in (11, 30_001):
            for first in {0, length // 2, length - 5}:
                x = np.zeros((3, length), "float32")
                x[1, first : first + 4] = 11
                np.testing.assert_array_equal(model(x)["y"], np.cumsum(x > 10, axis=1))
                x[1, first + 4] = 11
                with pytest.raises(InputError, match=r"^the model does not run with these inputs: an index is not "):
                    model(x)


def test_a_tensor_that_pytorch_keeps_with_the_opposite_sign_is_read_as_it_is(
    model: CompiledModel, inputs: MakeInputs
) -> None:
    import torch

    arrays = inputs(2)
    tensor = torch.complex(torch.zeros(2, 8), torch.from_numpy(-arrays["x"])).conj().imag
    assert tensor.is_neg()
    np.testing.assert_array_equal(model(**{**arrays, "x": tensor})["sum"], model(**arrays)["sum"])


def test_strings_are_taken_where_the_model_takes_labels(tmp_path: Path) -> None:
    text = """<ir_version: 9, opset_import: ["" : 18, "ai.onnx.ml": 2]> g (string[n, 2] x) => (string[n, 2] y) {
      y = ai.onnx.ml.LabelEncoder <keys_strings = ["a", "b"], values_strings = ["u", "v"], default_string = "w"> (x)
    }"""
    save_text(tmp_path / "model.onnx", text)
    bundle = compile_by_steps({"name": "labels", "model": {"onnx": "model.onnx"}}, tmp_path, tmp_path / "state")
    with runtime.load(bundle) as model:
        labels = model.manifest.labels
        assert labels == {"x": ("a", "b"), "y": ("u", "v", "w")}
        for strings in ([["b", "a"], ["?", "b"]], np.array([[b"b", b"a"], [b"?", b"b"]])):
            places = model(x=strings)["y"]
            assert [[labels["y"][place] for place in row] for row in places] == [["v", "u"], ["w", "v"]]
        assert model(x=np.array([[1, 0]]))["y"].tolist() == [[1, 0]]
        with pytest.raises(InputError, match=r"'x' is float64, expected int64"):
            model(x=np.array([[1.0, 0.0]]))
