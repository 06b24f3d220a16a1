"""The Open Inference Protocol: what a request may say, and that no number is changed on the way."""

import json
from typing import Any

import numpy as np
import pytest

from tvmflow.bundle import Manifest, TensorSpec, Versions
from tvmflow.errors import InputError
from tvmflow.serving import protocol

OUTPUTS = (TensorSpec("a", ("batch",), "float32"), TensorSpec("b", (2, 3), "int64"))
# What a request may say depends on names and labels only; whether arrays fit the inputs is not looked at here.
MANIFEST = Manifest(
    name="m",
    target="native",
    tvm_target={},
    arch="x86_64",
    cpu_features=(),
    threads=1,
    inputs=tuple(TensorSpec(name, (), "int64") for name in ("x", "y", "word")),
    outputs=OUTPUTS,
    dimensions={},
    weights="inside",
    versions=Versions("1", "1", "1", "1"),
    labels={"word": ("a", "\u00e4", "c")},
)


def _parse(document: Any, tail: bytes = b"") -> protocol.InferRequest:
    head = json.dumps(document).encode()
    return protocol.parse(head + tail, str(len(head)) if tail else None, MANIFEST)


def _tensor(datatype: str, shape: list[int], data: Any, name: str = "x") -> dict[str, Any]:
    return {"inputs": [{"name": name, "datatype": datatype, "shape": shape, "data": data}]}


def _words(shape: list[int], size: int, name: str = "word") -> dict[str, Any]:
    """A request with strings as so many bytes."""
    entry = {"name": name, "datatype": "BYTES", "shape": shape, "parameters": {"binary_data_size": size}}
    return {"inputs": [entry]}


@pytest.mark.parametrize("dtype", list(protocol.DATATYPES))
@pytest.mark.parametrize("binary", [False, True], ids=["json", "binary"])
def test_every_dtype_comes_through_as_it_was(dtype: str, binary: bool) -> None:
    bits = np.random.default_rng(0).integers(0, 256, 6 * np.dtype(dtype).itemsize).astype(np.uint8)
    array = (bits % 2).astype(bool) if dtype == "bool" else np.nan_to_num(bits.view(dtype)).reshape(-1)
    array = array[:6].reshape(2, 3)
    request = protocol.InferRequest(None, {}, (protocol.OutputRequest("x", binary),))
    answer = protocol.render(request, "m", "1", {"x": array})
    length = answer.headers.get(protocol.HEADER_LENGTH)
    document = json.loads(answer.body[: int(length)] if length else answer.body)
    tail = answer.body[int(length) :] if length else b""
    parsed = _parse({"inputs": document["outputs"]}, tail)
    assert parsed.inputs["x"].dtype == array.dtype
    np.testing.assert_array_equal(parsed.inputs["x"], array)


def test_data_may_be_nested_or_flat() -> None:
    for data in ([1, 2, 3, 4, 5, 6], [[1, 2, 3], [4, 5, 6]]):
        array = _parse(_tensor("FP32", [2, 3], data)).inputs["x"]
        np.testing.assert_array_equal(array, np.arange(1, 7, dtype=np.float32).reshape(2, 3))


def test_a_float_that_json_writes_as_an_integer_is_a_float() -> None:
    array = _parse(_tensor("FP32", [3], [10**20, 1.5, 2])).inputs["x"]
    np.testing.assert_array_equal(array, np.array([1e20, 1.5, 2], "float32"))
    with pytest.raises(InputError, match="outside the range of FP64"):
        _parse(_tensor("FP64", [1], [10**400]))


def test_an_empty_list_of_outputs_asks_for_all() -> None:
    request = _parse({**_tensor("FP32", [1], [1]), "outputs": []})
    assert [output.name for output in request.outputs] == ["a", "b"]


def test_strings_as_bytes_follow_their_lengths() -> None:
    tail = b"\x01\0\0\0a\x02\0\0\0\xc3\xa4"
    assert _parse(_words([2], 11), tail).inputs["word"].tolist() == [0, 1]
    with pytest.raises(InputError, match="end before its 2 strings do"):
        _parse(_words([2], 11), b"\x01\0\0\0a\x03\0\0\0\xc3\xa4")
    with pytest.raises(InputError, match="6 bytes follow its strings"):
        _parse(_words([1], 11), tail)
    with pytest.raises(InputError, match="end before its 1000000000000 strings do"):
        _parse(_words([10**12], 8), bytes(8))
    with pytest.raises(InputError, match="'x' takes no strings"):
        _parse(_words([2], 11, "x"), tail)


def test_strings_are_nested_or_flat() -> None:
    for data in (["a", "b", "c", "\u00e4"], [["a", "b"], ["c", "\u00e4"]]):
        array = _parse(_tensor("BYTES", [2, 2], data, "word")).inputs["word"]
        assert array.tolist() == [[0, -1], [2, 1]]


def test_a_scalar_and_an_empty_tensor_have_their_shapes() -> None:
    assert _parse(_tensor("INT8", [], [7])).inputs["x"].shape == ()
    assert _parse(_tensor("FP64", [0, 4], [])).inputs["x"].shape == (0, 4)


def test_several_binary_inputs_follow_each_other() -> None:
    first, second = np.arange(3, dtype=np.int16), np.array([[1.5]], np.float64)
    entries = [
        {
            "name": name,
            "datatype": datatype,
            "shape": list(array.shape),
            "parameters": {"binary_data_size": array.nbytes},
        }
        for name, datatype, array in (("x", "INT16", first), ("y", "FP64", second))
    ]
    arrays = _parse({"inputs": entries}, first.tobytes() + second.tobytes()).inputs
    np.testing.assert_array_equal(arrays["x"], first)
    np.testing.assert_array_equal(arrays["y"], second)


def test_all_outputs_are_given_unless_some_are_asked_for() -> None:
    assert _parse({"inputs": []}).outputs == (protocol.OutputRequest("a", False), protocol.OutputRequest("b", False))
    request = {"inputs": [], "outputs": [{"name": "b", "parameters": {"binary_data": True}}]}
    assert _parse(request).outputs == (protocol.OutputRequest("b", True),)
    request = {"inputs": [], "parameters": {"binary_data_output": True}}
    assert _parse(request).outputs == (protocol.OutputRequest("a", True), protocol.OutputRequest("b", True))


def test_metadata_names_symbolic_sizes_minus_one() -> None:
    assert protocol.describe(OUTPUTS) == [
        {"name": "a", "datatype": "FP32", "shape": [-1]},
        {"name": "b", "datatype": "INT64", "shape": [2, 3]},
    ]


REFUSED = {
    "no object": ([], "the request is not a JSON object"),
    "no inputs": ({}, "'inputs' is not a list"),
    "id": ({"id": 7, "inputs": []}, "'id' is not a string"),
    "input": ({"inputs": [3]}, "an input is not a JSON object"),
    "name": ({"inputs": [{"datatype": "FP32"}]}, "has no 'name'"),
    "datatype": (_tensor("FLOAT", [1], [1]), "datatype 'FLOAT', expected one of BOOL, INT8"),
    "other input": ({"inputs": [{"name": "z" * 1000}]}, "z...z"),
    "strings": (_tensor("BYTES", [2], ["a", 1], "word"), "'data' does not hold strings only"),
    "ragged strings": (_tensor("BYTES", [3], [["a"], ["b", "c"]], "word"), "'data' does not hold strings only"),
    "strings as bytes": (_words([1], 1), "'binary_data_size' is 1, 0 bytes are there"),
    # NumPy's array of these has the room of the longest string for each.
    "strings among numbers": (_tensor("FP32", [1], ["x" * 2**20, *[0] * 2**20]), "does not hold FP32 values only"),
    "shape": (_tensor("FP32", [-1], [1]), "'shape' is not a list of sizes"),
    "shape of booleans": (_tensor("FP32", [True], [1]), "'shape' is not a list of sizes"),
    "count": (_tensor("FP32", [3], [1, 2]), "has 2 values, its shape [3] asks for 3"),
    "huge shape": (_tensor("FP32", [2**62, 2**62], [1, 2]), "has 2 values"),
    "huge sizes": (_tensor("FP32", [10**4000] * 2, [1, 2]), "'shape' is not a list of sizes"),
    "many sizes": (_tensor("FP32", [9999] * 120_000, [1]), "'shape' is not a list of sizes, at most 64"),
    "no data": ({"inputs": [{"name": "x", "datatype": "FP32", "shape": [1]}]}, "'data' of input 'x' is not a list"),
    "ragged": (_tensor("FP32", [3], [[1, 2], [3]]), "not equally long"),
    "text": (_tensor("FP32", [1], ["1.5"]), "does not hold FP32 values only"),
    "null": (_tensor("FP32", [1], [None]), "does not hold FP32 values only"),
    "fraction": (_tensor("INT64", [1], [1.5]), "does not hold INT64 values only"),
    "number for boolean": (_tensor("BOOL", [1], [1]), "does not hold BOOL values only"),
    "negative": (_tensor("UINT8", [1], [-1]), "outside the range of UINT8"),
    "too large": (_tensor("INT8", [1], [128]), "outside the range of INT8"),
    "larger than any": (_tensor("UINT64", [1], [2**64]), "outside the range of UINT64"),
    "overflow": (_tensor("FP16", [1], [1e6]), "outside the range of FP16"),
    "twice": ({"inputs": _tensor("INT8", [1], [1])["inputs"] * 2}, "'x' is given twice"),
    "output": ({"inputs": [], "outputs": [{"name": "c"}]}, "no output 'c'; it returns a, b"),
    "output twice": ({"inputs": [], "outputs": [{"name": "b"}, {"name": "b"}]}, "'b' is asked for twice"),
    "parameters": ({"inputs": [], "parameters": 3}, "'parameters' is not a JSON object"),
    "binary size": (
        {"inputs": [{"name": "x", "datatype": "FP32", "shape": [2], "parameters": {"binary_data_size": 7}}]},
        "'binary_data_size' is 7, expected 8",
    ),
    "binary is not there": (
        {"inputs": [{"name": "x", "datatype": "FP32", "shape": [2], "parameters": {"binary_data_size": 8}}]},
        "ends before the bytes of input 'x'",
    ),
}


@pytest.mark.parametrize(("document", "complaint"), REFUSED.values(), ids=REFUSED.keys())
def test_what_the_protocol_does_not_allow_is_refused(document: Any, complaint: str) -> None:
    with pytest.raises(InputError) as refusal:
        _parse(document)
    assert complaint in str(refusal.value)


@pytest.mark.parametrize("body", [b"", b"{", b"\xff", b"[" * 100_000], ids=["empty", "cut", "no text", "deep"])
def test_what_is_not_json_is_refused(body: bytes) -> None:
    with pytest.raises(InputError, match="the request is not JSON"):
        protocol.parse(body, None, MANIFEST)


@pytest.mark.parametrize("length", ["", "-1", "x", "99", "²"])
def test_a_wrong_length_of_the_json_is_refused(length: str) -> None:
    with pytest.raises(InputError, match="expected the length in bytes of the JSON"):
        protocol.parse(b'{"inputs": []}', length, MANIFEST)


def test_bytes_that_belong_to_no_input_are_refused() -> None:
    with pytest.raises(InputError, match="3 bytes follow that no input"):
        _parse({"inputs": []}, b"abc")


def test_infinity_is_given_as_bytes_and_not_as_json() -> None:
    results = {"a": np.array([np.inf], np.float32)}
    with pytest.raises(InputError, match="ask for binary_data"):
        protocol.render(protocol.InferRequest(None, {}, (protocol.OutputRequest("a", False),)), "m", "1", results)
    answer = protocol.render(protocol.InferRequest("7", {}, (protocol.OutputRequest("a", True),)), "m", "1", results)
    length = int(answer.headers[protocol.HEADER_LENGTH])
    assert json.loads(answer.body[:length])["id"] == "7"
    assert np.frombuffer(answer.body[length:], "<f4")[0] == np.inf
