"""Steps called directly: their work in this process, on the models of a folder of the test's own."""

import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from support.torchlib import share_table
from tasks.export import ExportJob, ExportResult, work
from tasks.original import find_original
from tvmflow import samples
from tvmflow.spec import Spec, parse
from tvmflow.workspace import Workspace

ExportModel = Callable[..., ExportResult]


@pytest.fixture
def workspace(tmp_path: Path) -> Workspace:
    return Workspace(tmp_path / "state")


@pytest.fixture
def seeded() -> Iterator[None]:
    """PyTorch's random numbers are the same in every run, and its own state stays as it was."""
    import torch

    with torch.random.fork_rng():
        torch.manual_seed(0)
        yield


@pytest.fixture
def user_code(tmp_path: Path) -> Iterator[Callable[[str], str]]:
    """Writes a module of the user's and returns its name, which no other test uses."""
    names: list[str] = []

    def write(text: str) -> str:
        name = f"user_{tmp_path.name}_{len(names)}"
        (tmp_path / f"{name}.py").write_text(text)
        names.append(name)
        return name

    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(tmp_path))
        yield write
    for name in names:
        sys.modules.pop(name, None)


@pytest.fixture
def export_spec(workspace: Workspace) -> Callable[[Spec], ExportResult]:
    """Exports the factory's model of a release file."""

    def export(spec: Spec) -> ExportResult:
        if spec.model.onnx is None:
            share_table()
        job = ExportJob.of(spec, find_original(spec, workspace))
        job = job.model_copy(update={"home": workspace.folder, "folder": spec.folder})
        return work(job, lambda done, total, message: None)

    return export


@pytest.fixture
def export_module(
    export_spec: Callable[[Spec], ExportResult], tmp_path: Path, user_code: Callable[[str], str]
) -> ExportModel:
    """Exports the class `Network` of a module's text: `export_module(text, inputs=[...], **sections)`."""

    def export(text: str, **sections: Any) -> ExportResult:
        name = user_code("import torch\nfrom torch import nn\n\n\n" + text)
        return export_spec(parse({"name": "exported", "model": {"factory": f"{name}:Network"}, **sections}, tmp_path))

    return export


@pytest.fixture
def kept_samples(workspace: Workspace) -> Callable[[ExportResult], list[tuple[Any, Any]]]:
    """The samples of an export: inputs and the original's outputs of each."""
    return lambda result: samples.load(workspace.path(result.samples))
