"""Operators of the user's own in a release: they are compared with their definition, and belong to the cache keys."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from onnx import helper

from support.models import save_model
from support.steps import compile_by_steps
from tasks.export import ExportJob, ExportResult
from tasks.original import find_original
from tasks.relax_import import ImportJob, relax_import
from tasks.step import StepRunner
from tvmflow.bundle import read_manifest, sha256_file
from tvmflow.errors import ExportError
from tvmflow.spec import Spec, parse
from tvmflow.workspace import Workspace

pytestmark = pytest.mark.usefixtures("children_in_forks")

_MODULE = '''
from tvmflow.operators import operator


@operator("""
<domain: "org.example", opset_import: ["": 18]> Twice (x) => (y) { y = Add (x, x) }
""")
def twice(node):
    return node.apply("Add", node.inputs[0], node.inputs[0])
'''


@pytest.fixture
def spec(tmp_path: Path, user_code: Callable[[str], str]) -> Spec:
    name = user_code(_MODULE)
    node = helper.make_node("Twice", ["x"], ["y"], domain="org.example")
    save_model(tmp_path / "model.onnx", [node], [("x", [3, 4])], [("y", [3, 4])])
    return parse({"name": "own", "model": {"onnx": "model.onnx", "operators": [f"{name}:twice"]}}, tmp_path)


def test_onnx_runtime_runs_the_definition(
    export_spec: Callable[[Spec], ExportResult], kept_samples: Any, spec: Spec
) -> None:
    result = export_spec(spec)
    ((inputs, outputs), *_) = kept_samples(result)
    np.testing.assert_allclose(outputs["y"], 2 * inputs["x"])
    assert spec.model.operators[0].partition(":")[0] in [Path(path).stem for path in result.sources.files]


def test_a_changed_converter_imports_the_model_again(
    export_spec: Callable[[Spec], ExportResult], workspace: Workspace, spec: Spec
) -> None:
    runner = StepRunner(workspace, spec.name, spec.folder, timeout=120)
    exported = export_spec(spec)

    def status() -> str:
        return relax_import(runner, ImportJob.of(spec, exported)).status

    assert [status(), status()] == ["ran", "cached"]
    module = spec.folder / f"{spec.model.operators[0].partition(':')[0]}.py"
    module.write_text(_MODULE.replace('"Add", node.inputs[0], node.inputs[0]', '"Sum", *node.inputs, *node.inputs'))
    assert status() == "ran"


def test_an_operator_belongs_to_the_keys(workspace: Workspace, spec: Spec) -> None:
    without = spec.model_copy(update={"model": spec.model.model_copy(update={"operators": ()})})
    one, other = (ExportJob.of(item, find_original(item, workspace)).cache_key() for item in (spec, without))
    assert one != other


def test_an_operator_that_is_not_there_is_one_sentence(export_spec: Callable[[Spec], ExportResult], spec: Spec) -> None:
    absent = spec.model.model_copy(update={"operators": ("no_such_module:twice",)})
    with pytest.raises(ExportError, match=r"operator 'no_such_module:twice': there is no module 'no_such_module'"):
        export_spec(spec.model_copy(update={"model": absent}))


def test_a_bundle_names_the_module_of_an_operator_and_no_path_of_this_machine(
    tmp_path: Path, spec: Spec, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "release"
    folder.mkdir()
    monkeypatch.setenv("TVMFLOW_HOME", str(tmp_path / "state"))
    module = spec.model.operators[0].partition(":")[0]
    model = {"onnx": str(tmp_path / "model.onnx"), "operators": list(spec.model.operators)}
    bundle = compile_by_steps({"name": "own", "model": model, "targets": ["native"]}, folder, tmp_path / "state")
    provenance = read_manifest(bundle).provenance
    # The steps ran in this process, which has imported the tests' own modules too.
    operators = json.loads(provenance["operators"])
    assert operators[module] == sha256_file(tmp_path / f"{module}.py")
    assert [name for name in operators if "/" in name] == []
    assert str(tmp_path) not in str(provenance)
