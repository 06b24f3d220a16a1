import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from onnx import TensorProto, helper

from support.models import save_dense, save_model

from .conftest import Command


def test_a_model_that_compiles_is_no_error(tvmflow: Command, tmp_path: Path) -> None:
    result = tvmflow("doctor", save_dense(tmp_path / "dense.onnx"))
    assert result.code == 0, result.stderr
    assert "nothing is refused" in result.stdout
    for words in ("MatMul", "Softmax", "free dimension batch: axis 0 of 'x'", "dense.onnx"):
        assert words in result.stdout


def test_a_refused_model_has_its_own_exit_code_and_names_file_node_and_operator(
    tvmflow: Command, tmp_path: Path
) -> None:
    node = helper.make_node("Foo", ["x"], ["y"], name="a_foo", domain="org.example")
    path = save_model(tmp_path / "model.onnx", [node], [("x", [1])], [("y", [1])])
    result = tvmflow("doctor", path)
    assert result.code == 4
    for words in ("model.onnx", "org.example.Foo", "a_foo", "refused"):
        assert words in result.stdout


def test_the_document_holds_every_operator_and_refusal(tvmflow: Command, tmp_path: Path) -> None:
    node = helper.make_node("Foo", ["x"], ["y"], name="a_foo", domain="org.example")
    path = save_model(tmp_path / "model.onnx", [node], [("x", [1])], [("y", [1])])
    result = tvmflow("doctor", path, "--json")
    assert result.code == 4
    document = json.loads(result.stdout)
    assert document["refused"] is True
    assert document["refusals"][0]["node"] == "a_foo"
    assert [item["verdict"] for item in document["operators"]] == ["refused"]


def test_the_smallest_size_of_a_free_dimension_is_found_by_running_the_model(tvmflow: Command, tmp_path: Path) -> None:
    node = helper.make_node("Gather", ["x", "last"], ["y"], axis=2)
    weights = {"last": np.array([4], "int64")}
    path = save_model(tmp_path / "model.onnx", [node], [("x", [1, 3, "height", 16])], ["y"], weights)
    result = tvmflow("doctor", path)
    assert "free dimension height: axis 2 of 'x'; runs from 5" in result.stdout


def test_a_free_dimension_that_takes_one_size_is_said_to(tvmflow: Command, tmp_path: Path) -> None:
    node = helper.make_node("MatMul", ["x", "w"], ["y"])
    path = save_model(tmp_path / "m.onnx", [node], [("x", ["n", "k"])], ["y"], {"w": np.ones((10, 3), "float32")})
    assert "free dimension k: axis 1 of 'x'; runs at 10 alone" in tvmflow("doctor", path).stdout
    document = json.loads(tvmflow("doctor", path, "--json").stdout)
    assert (document["smallest"], document["largest"]) == ({"n": 1, "k": 10}, {"n": None, "k": 10})


def test_given_shapes_leave_no_free_dimension(tvmflow: Command, tmp_path: Path) -> None:
    result = tvmflow("doctor", save_dense(tmp_path / "dense.onnx"), "--input-shapes", "x:[8,4]", "--json")
    assert result.code == 0, result.stderr
    assert json.loads(result.stdout)["free"] == {}


def test_an_unknown_target_is_one_sentence(tvmflow: Command, tmp_path: Path) -> None:
    result = tvmflow("doctor", save_dense(tmp_path / "dense.onnx"), "--target", "no-such-machine")
    assert result.code == 2
    assert "no-such-machine" in result.sentence


@pytest.mark.parametrize("command", ["doctor", "bisect"])
@pytest.mark.parametrize(
    ("shapes", "words"),
    [("x:[8,4,1]", ["'x'", "[batch, 4]", "[8, 4, 1]"]), ("x:[8,5]", ["'x'", "[8, 5]"]), ("z:[8,4]", ["'z'", "x"])],
)
def test_shapes_that_do_not_fit_the_model_are_one_sentence(
    tvmflow: Command, tmp_path: Path, command: str, shapes: str, words: list[str]
) -> None:
    result = tvmflow(command, save_dense(tmp_path / "dense.onnx"), "--input-shapes", shapes)
    assert result.code != 0
    assert [word for word in words if word not in result.sentence] == []


def test_strings_are_not_a_matter_of_sizes(tvmflow: Command, tmp_path: Path) -> None:
    node = helper.make_node("Cast", ["x"], ["y"], to=TensorProto.STRING)
    path = save_model(tmp_path / "model.onnx", [node], [("x", ["n", 3])], [("y", ["n", 3], TensorProto.STRING)])
    document = json.loads(tvmflow("doctor", path, "--json").stdout)
    (advice,) = [item["advice"] for item in document["refusals"] if item["operator"] == "Cast"]
    assert "float32" in advice
    assert "sizes" not in advice


_OPERATOR = '''
from tvmflow.operators import operator

print("loading my operators")


@operator("""
<domain: "org.example", opset_import: ["": 18]> Twice (x) => (y) { y = Add (x, x) }
""")
def twice(node):
    return node.apply("Add", node.inputs[0], node.inputs[0])
'''


def test_what_a_module_of_operators_prints_is_not_in_the_document(
    tvmflow: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("printing_operators.py").write_text(_OPERATOR)
    node = helper.make_node("Twice", ["x"], ["y"], domain="org.example")
    path = save_model(tmp_path / "model.onnx", [node], [("x", [3, 4])], [("y", [3, 4])])
    result = tvmflow("doctor", path, "--operator", "printing_operators:twice", "--json")
    assert json.loads(result.stdout)["refusals"] == []
    result = tvmflow("doctor", path, "--operator", "printing_operators")
    assert result.code == 2
    assert "is not of the form MODULE:OPERATOR" in result.sentence


_MAIN = """
import sys
from tvmflow.cli import cli
cli(["doctor", *sys.argv[1:]], standalone_mode=False)
print("torch" in sys.modules)
"""


@pytest.mark.long
def test_torch_which_takes_as_long_as_the_rest_is_not_imported(tmp_path: Path) -> None:
    path = save_dense(tmp_path / "dense.onnx")
    result = subprocess.run(
        [sys.executable, "-c", _MAIN, str(path)], capture_output=True, text=True, check=True, timeout=120
    )
    assert result.stdout.splitlines()[-1] == "False"
