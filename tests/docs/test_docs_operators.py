"""What the page of operators says, beside what the importer and the compiler do."""

import importlib.util
import json
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import onnx
import pytest

from support import scale
from tvmflow.compiler.importer import survey_onnx
from tvmflow.compiler.operator_table import Operator, list_operators
from tvmflow.errors import ModelImportError

DOCS = Path(__file__).parents[2] / "docs"


@pytest.fixture(scope="module")
def judge_operators() -> ModuleType:
    spec = importlib.util.spec_from_file_location("judge_operators", DOCS / "judge_operators.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["judge_operators"] = module
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def examples(judge_operators: ModuleType) -> dict[str, list[Any]]:
    # What ONNX expects of these takes most of the time of all, and the compiler's own tests look at their forms.
    slow = ("averagepool", "lppool", "maxpool", "attention")
    return dict(judge_operators.examples_by_operator(scale.choose(normal=slow, long=())))


@pytest.fixture(scope="module")
def operators() -> dict[str, Operator]:
    return {f"{item.domain}.{item.name}" if item.domain else item.name: item for item in list_operators()}


def test_every_operator_of_onnx_is_in_the_list(operators: dict[str, Operator]) -> None:
    schemas = {(schema.domain, schema.name) for schema in onnx.defs.get_all_schemas()}
    assert {(item.domain, item.name) for item in operators.values()} == schemas


def test_every_refused_operator_has_a_reason(operators: dict[str, Operator]) -> None:
    assert [name for name, item in operators.items() if item.kind == "refused" and not item.reason] == []


def test_the_importer_refuses_what_the_list_refuses_and_nothing_else_for_its_operator(
    operators: dict[str, Operator], examples: dict[str, list[Any]], tmp_path: Path
) -> None:
    differences = []
    for name, (example, *_) in examples.items():
        if name not in operators:
            continue
        path = tmp_path / "model.onnx"
        path.write_bytes(example.model.SerializeToString())
        try:
            refusals = survey_onnx(path).refusals
        except ModelImportError:
            continue
        reasons = ("cannot be imported by", "random")
        refusal = {item.operator for item in refusals if any(reason in item.reason for reason in reasons)}
        if (name in refusal) != (operators[name].kind == "refused"):
            differences.append(name)
    assert differences == []
    assert len(examples) > 150


def test_a_form_that_a_converter_refuses_is_listed(operators: dict[str, Operator]) -> None:
    assert "a single class" in operators["ai.onnx.ml.TreeEnsembleClassifier"].refused_forms
    assert operators["Relu"].refused_forms == ()


def test_the_verdicts_of_the_page_are_those_of_the_compiler(
    judge_operators: ModuleType, examples: dict[str, list[Any]]
) -> None:
    verdicts = json.loads(judge_operators.VERDICTS_FILE.read_text())
    names = scale.choose(normal=["Relu", "TopK", "MatMul"], long=sorted(verdicts))
    assert {name: judge_operators.judge(name, examples[name]) for name in names} == {
        name: verdicts[name] for name in names
    }
