"""`tvmflow compile`: an ONNX file to a bundle, or one sentence and no file."""

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import onnx
import pytest
from onnx import TensorProto, helper

from tvmflow.bundle import read_manifest, sha256_file
from tvmflow.cli.compile import parse_shapes
from tvmflow.errors import InputError
from tvmflow.target import host

Command = Callable[..., Any]


def write_model(nodes: list[onnx.NodeProto], path: Path) -> Path:
    """A model of one input x and one output y, both float32[1, 4]."""
    graph = helper.make_graph(
        nodes,
        "model",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, [1, 4])],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, [1, 4])],
    )
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=9), path)
    return path


def test_the_same_model_gives_the_same_bundle_from_what_is_done(tvmflow: Command, bundle: Path, models: Path) -> None:
    ended = tvmflow("compile", models / "small.onnx", "-o", "again.tar.gz", "--json")
    assert ended.code == 0
    assert Path("again.tar.gz").read_bytes() == bundle.read_bytes()
    document = json.loads(ended.out)
    assert document["bundle"] == "again.tar.gz"
    assert document["sha256"] == sha256_file(bundle)
    assert document["verified"] is True
    assert document["max_abs_error"] < 1e-5
    assert [line.split()[-1] for line in ended.err.splitlines()] == ["cached"] * 6


def test_symbolic_dimensions_can_be_fixed(tvmflow: Command, models: Path) -> None:
    shapes = "x:[4,8] y:[4,4]"
    assert tvmflow("compile", models / "small.onnx", "-o", "four.tar.gz", "--input-shapes", shapes).code == 0
    manifest = read_manifest(Path("four.tar.gz"))
    assert [item.shape for item in (*manifest.inputs, *manifest.outputs)] == [(4, 8), (4, 4), (4, 4), (4, 4), (4, 4)]
    assert manifest.dimensions == {}
    assert tvmflow("run", "four.tar.gz").out.startswith("sum: float32[4, 4]\n")


BAD_SHAPES = [
    ("z:[1,8]", "has no input 'z'; its inputs are x, y"),
    ("x=[1,8]", "cannot be read; write them as"),
    ("x:[1,8", "cannot be read; write them as"),
    ("1,8", "cannot be read; write them as"),
    ("x:[0,8]", "dimension 0 is neither a positive number nor a name"),
    ("x:[-1,8]", "dimension -1 is neither a positive number nor a name"),
    ("x:[1,2.5]", "dimension '2.5' is neither a positive number nor a name"),
    ("x:[4,9]", "input 'x' of the ONNX model has shape [batch, 8], the release file says [4, 9]"),
    ("x:[8]", "input 'x' of the ONNX model has shape [batch, 8], the release file says [8]"),
]


@pytest.mark.parametrize(("shapes", "said"), BAD_SHAPES)
def test_shapes_that_do_not_fit_are_one_sentence(tvmflow: Command, models: Path, shapes: str, said: str) -> None:
    ended = tvmflow("compile", models / "small.onnx", "-o", "b.tar.gz", "--input-shapes", shapes)
    assert said in ended.sentence
    assert not Path("b.tar.gz").exists()


@pytest.mark.parametrize(
    ("text", "shapes"),
    [
        ("", {}),
        ("x:[1,3,224,224]", {"x": (1, 3, 224, 224)}),
        ("x:[1, 3] mask:[batch, 128]", {"x": (1, 3), "mask": ("batch", 128)}),
        (" x : [ 1 ] , y:[2]", {"x": (1,), "y": (2,)}),
        ("scalar:[]", {"scalar": ()}),
        ("serving_default_x:0:[1,2]", {"serving_default_x:0": (1, 2)}),
        ('"quoted":[1]', {"quoted": (1,)}),
    ],
)
def test_shapes_are_read_as_tvmc_took_them(text: str, shapes: dict[str, tuple[int | str, ...]]) -> None:
    assert parse_shapes(text) == shapes


@pytest.mark.parametrize("text", ["x", "x:", "x:[1", "[1]", "x:[1] y", "x:[[1]]"])
def test_shapes_that_cannot_be_read_are_refused(text: str) -> None:
    with pytest.raises(InputError, match=re.escape(repr(text))):
        parse_shapes(text)


def _refused(tvmflow: Command, model: object, *options: str) -> str:
    ended = tvmflow("compile", model, "-o", "b.tar.gz", *options)
    assert not Path("b.tar.gz").exists()
    said: str = ended.sentence
    return said


def test_a_missing_model_is_one_sentence(tvmflow: Command) -> None:
    assert "there is no file" in _refused(tvmflow, "absent.onnx")


def test_a_missing_model_with_shapes_is_one_sentence(tvmflow: Command) -> None:
    assert "there is no ONNX file 'absent.onnx'" in _refused(tvmflow, "absent.onnx", "--input-shapes", "x:[1]")


def test_a_folder_is_no_model(tvmflow: Command, tmp_path: Path) -> None:
    assert "there is no file" in _refused(tvmflow, tmp_path)


@pytest.mark.parametrize("text", [b"", b"not a model", b"\x08\xff\xff\xff", b"\0" * 1000])
def test_a_file_that_is_no_model_is_one_sentence(tvmflow: Command, text: bytes) -> None:
    Path("bad.onnx").write_bytes(text)
    assert "bad.onnx' is not a readable ONNX file" in _refused(tvmflow, "bad.onnx")


def test_a_truncated_model_is_one_sentence(tvmflow: Command, models: Path) -> None:
    data = (models / "small.onnx").read_bytes()
    Path("cut.onnx").write_bytes(data[: len(data) * 2 // 3])
    assert "cut.onnx' is not a readable ONNX file" in _refused(tvmflow, "cut.onnx")


def test_a_model_that_is_not_valid_is_one_sentence(tvmflow: Command) -> None:
    write_model([helper.make_node("Relu", ["nowhere"], ["y"])], Path("bad.onnx"))
    assert "the ONNX model is not valid" in _refused(tvmflow, "bad.onnx")


def test_an_operator_that_tvm_does_not_know_is_named(tvmflow: Command) -> None:
    write_model([helper.make_node("LpNormalization", ["x"], ["y"], name="normalise")], Path("norm.onnx"))
    ended = tvmflow("compile", "norm.onnx", "-o", "b.tar.gz", "--json")
    assert ended.code == 1
    assert "operator LpNormalization (node 'normalise') cannot be imported by TVM" in ended.sentence
    assert json.loads(ended.out)["error"]["type"] == "UnsupportedOperatorError"
    assert not Path("b.tar.gz").exists()


@pytest.mark.parametrize(
    ("target", "said"),
    [
        ("x86-64-v9", "target 'x86-64-v9' is unknown; did you mean 'x86-64-v"),
        ("llvm -mcpu=nonesuch -mtriple=x86_64-linux-gnu", "LLVM knows no CPU 'nonesuch'"),
        ("vulkan", "target 'vulkan' is unknown"),
    ],
)
def test_an_impossible_target_is_one_sentence(tvmflow: Command, models: Path, target: str, said: str) -> None:
    assert said in _refused(tvmflow, models / "small.onnx", "--target", target)


def test_a_target_that_only_tvm_can_refuse_is_one_sentence(tvmflow: Command, bundle: Path, models: Path) -> None:
    target = '{"kind": "llvm", "mtriple": "x86_64-linux-gnu", "mcpu": "x86-64-v3", "nonsense": 1}'
    assert "nonsense" in _refused(tvmflow, models / "small.onnx", "--target", target)


@pytest.mark.parametrize("output", ["absent/b.tar.gz", "file/b.tar.gz"])
def test_an_output_that_cannot_be_written_is_one_sentence(
    tvmflow: Command, bundle: Path, models: Path, output: str
) -> None:
    Path("file").touch()
    assert f"'{output}' cannot be written" in tvmflow("compile", models / "small.onnx", "-o", output).sentence


def test_a_state_folder_that_cannot_be_written_is_one_sentence(
    tvmflow: Command, models: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    Path("file").touch()
    monkeypatch.setenv("TVMFLOW_HOME", "file/state")
    assert "set TVMFLOW_HOME to another" in _refused(tvmflow, models / "small.onnx")


@pytest.mark.skipif("avx512_bf16" not in host().features, reason="this CPU has no avx512_bf16")
def test_a_bundle_in_bfloat16_is_within_its_bound_and_needs_the_instructions(tvmflow: Command, models: Path) -> None:
    ended = tvmflow("compile", models / "small.onnx", "-o", "narrow.tar.gz", "--precision", "bf16", "--json")
    assert ended.code == 0
    document = json.loads(ended.out)
    assert (document["precision"], document["verified"]) == ("bf16", True)
    assert 1e-4 < document["max_abs_error"] < 0.2  # beyond what float32 is allowed
    assert "avx512_bf16" in read_manifest(Path("narrow.tar.gz")).cpu_features


def test_a_precision_that_the_target_has_no_instructions_for_is_refused(tvmflow: Command, models: Path) -> None:
    ended = tvmflow("compile", models / "small.onnx", "-o", "n.tar.gz", "--precision", "bf16", "--target", "x86-64-v3")
    assert ended.code != 0
    assert "target 'x86-64-v3' has no instructions for precision bf16 (avx512_bf16)" in ended.err
    assert not Path("n.tar.gz").exists()


@pytest.mark.skipif("avx512_vnni" not in host().features, reason="this CPU has no avx512_vnni")
def test_int8_without_a_quantised_model_says_how_to_make_one(tvmflow: Command, models: Path) -> None:
    ended = tvmflow("compile", models / "small.onnx", "-o", "n.tar.gz", "--precision", "int8")
    assert ended.code != 0
    assert "needs a quantised model" in ended.err
    assert "onnxruntime.quantization.quantize_static" in ended.err
