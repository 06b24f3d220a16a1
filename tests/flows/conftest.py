"""Releases as a user makes them: the command in a process of its own, a state folder each, real servers.

A machine without `commands` starts that process as a shell does, and so does every `start`; the others fork it from
one that has imported what commands import.
"""

import json
import os
import shutil
import subprocess
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import psutil
import pytest
import yaml

from support import scale
from support.command_server import CommandServer
from support.databases import Databases
from support.processes import TVMFLOW, CommandResult, clean_environment, is_foreign
from support.rclone import rclone_s3
from tvmflow.services import open_registry, open_store
from tvmflow.settings import Settings
from tvmflow.store import ReleaseStore, channels

EXAMPLES = Path(__file__).parents[2] / "examples"
LIMIT_SECONDS = 400.0

Document = dict[str, Any]


@dataclass(frozen=True)
class Machine:
    """A machine with a state folder and settings of its own."""

    home: Path
    settings: Mapping[str, str] = field(default_factory=dict)
    commands: CommandServer | None = None

    @property
    def environment(self) -> dict[str, str]:
        """The environment of its commands."""
        return clean_environment(TVMFLOW_HOME=str(self.home), **self.settings)

    def start(self, *arguments: str | Path) -> "subprocess.Popen[str]":
        """Start `tvmflow` with these arguments, as the leader of a session of its own."""
        return subprocess.Popen(
            [TVMFLOW, *arguments],
            env=self.environment,
            # Away from the repository: no tvmflow.toml and no other folder's modules.
            cwd=self.home.parent,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )

    def finish(self, process: "subprocess.Popen[str]") -> CommandResult:
        """Wait for a command's end; it and its children are killed when it takes too long."""
        try:
            stdout, stderr = process.communicate(timeout=LIMIT_SECONDS)
        except BaseException:
            for child in (*psutil.Process(process.pid).children(recursive=True), process):
                child.kill()
            raise
        return CommandResult(process.returncode, stdout, stderr)

    def run(self, *arguments: str | Path) -> CommandResult:
        """Run `tvmflow` with these arguments to its end."""
        if self.commands is not None:
            words = list(map(str, arguments))
            reply = self.commands.run(words, self.environment, self.home.parent, LIMIT_SECONDS)
            return CommandResult(reply.returncode, reply.stdout, reply.stderr)
        with self.start(*arguments) as process:
            return self.finish(process)

    def release(self, file: Path, *arguments: str) -> CommandResult:
        """Run `tvmflow release FILE --json` to its end."""
        return self.run("release", file, "--json", *arguments)

    def releases(self, name: str | None = None) -> list[Document]:
        """What is in its release store."""
        with open_store(self._loaded) as store:
            return [release.model_dump(mode="json") for release in store.iterate_releases(name)]

    def versions(self, name: str) -> list[Any]:
        """The versions of a registered model, newest first."""
        return open_registry(self._loaded).list_versions(name)

    def channel(self, name: str, channel: str) -> Any:
        """Where a channel points, None if it was never moved."""
        with open_store(self._loaded) as store:
            return channels.find(store, name, channel)

    def nothing_is_published(self) -> bool:
        """Whether the embedded store holds no release and no blob."""
        folder = self.home / "s3" / "tvmflow"
        return not any(path.is_file() for name in ("releases", "blobs") for path in (folder / name).rglob("*"))

    @property
    def mlflow(self) -> Any:
        """MLflow's own client of its registry."""
        from mlflow import MlflowClient

        uri = open_registry(self._loaded).config.tracking_uri
        return MlflowClient(uri, registry_uri=uri)

    @property
    def _loaded(self) -> Settings:
        with pytest.MonkeyPatch.context() as patch:
            for name in filter(is_foreign, list(os.environ)):
                patch.delenv(name)
            for name, value in self.settings.items():
                patch.setenv(name, value)
            return Settings(home=self.home)


@pytest.fixture(scope="module")
def machine(
    tmp_path_factory: pytest.TempPathFactory, prefect_server: str, databases: Databases, commands: CommandServer
) -> Machine:
    """A machine whose settings name the Prefect server, so that its commands start in a second; the rest embedded."""
    home = tmp_path_factory.mktemp("machine") / "state"
    databases.mlflow(home / "mlflow" / "mlflow.db")
    return Machine(home, {"TVMFLOW_PREFECT_API_URL": prefect_server}, commands)


@pytest.fixture
def fresh_machine(tmp_path: Path, prefect_server: str, commands: CommandServer) -> Machine:
    """The same with nothing in it yet."""
    return Machine(tmp_path / "state", {"TVMFLOW_PREFECT_API_URL": prefect_server}, commands)


@dataclass(frozen=True)
class Digits:
    """The digits example, made quick and released once; with `--long`, with nothing but embedded servers."""

    machine: Machine
    folder: Path
    first: CommandResult

    @property
    def file(self) -> Path:
        """The release file."""
        return self.folder / "release.yaml"

    def made(self, step: str) -> Document:
        """What a step of the first release made; asked for before another result is recorded."""
        records = [json.loads(path.read_text()) for path in (self.machine.home / "steps" / step).glob("*.json")]
        return dict(records[0]["result"]) if len(records) == 1 else pytest.fail(f"{step} has {len(records)} records")

    def artifact(self, described: Document) -> Path:
        """Where an artifact of a step is."""
        return self.machine.home.joinpath("artifacts", described["sha256"][:2], described["sha256"])

    def derived(self, name: str, **changed: Any) -> Path:
        """A release file beside the first with some of its sections changed."""
        path = self.folder / f"{name}.yaml"
        path.write_text(yaml.safe_dump(yaml.safe_load(self.file.read_text()) | changed))
        return path


@pytest.fixture(scope="session")
def digits(
    tmp_path_factory: pytest.TempPathFactory, prefect_server: str, databases: Databases, commands: CommandServer
) -> Digits:
    folder = tmp_path_factory.mktemp("digits")
    example = Path(
        shutil.copytree(EXAMPLES / "digits", folder / "example", ignore=shutil.ignore_patterns("__pycache__"))
    )
    document = yaml.safe_load((example / "release.yaml").read_text())
    document["train"]["arguments"] = {"epochs": 2, "seed": 0}
    document["benchmark"] |= {"repeats": 5, "rounds": 2, "callers": [3], "threads": 1}
    document["validate"]["show"] = "shown:show"
    (example / "shown.py").write_text("def show(inputs):\n    return f'brightest {inputs[\"image\"].max():.2f}'\n")
    (example / "release.yaml").write_text(yaml.safe_dump(document))
    served = Machine(folder / "state", {"TVMFLOW_PREFECT_API_URL": prefect_server}, commands)
    if scale.is_long():
        releasing = Machine(served.home)
    else:
        # An interrupted release starts embedded servers in a normal run.
        releasing = served
        databases.mlflow(served.home / "mlflow" / "mlflow.db")
    first = releasing.release(example / "release.yaml", "--trace", str(folder / "steps.json"))
    assert first.code == 0, first.stderr
    return Digits(served, example, first)


def make_onnx(
    folder: Path,
    nodes: list[Any] | None = None,
    weights: Mapping[str, Any] | None = None,
    shape: tuple[int | str, ...] = ("batch", 4),
    name: str = "model.onnx",
) -> Path:
    """An ONNX model from `x` to `y`; by default a dense layer of 4 x 3 weights with a softmax."""
    from support import models

    if nodes is None:
        return models.save_dense(folder / name, batch=shape[0])
    return models.save_model(folder / name, nodes, [("x", list(shape))], ["y"], weights)


def make_file(folder: Path, **sections: Any) -> Path:
    """A release file of one round of two runs without peers, with the given sections."""
    document = {
        "name": "tiny",
        "model": {"onnx": "model.onnx"},
        "benchmark": {"repeats": 2, "rounds": 1, "warmup": 0, "peers": []},
        **sections,
    }
    path = folder / f"{document['name']}.yaml"
    path.write_text(yaml.safe_dump(document))
    return path


# A metric that is scored first where the release is made, and then on a worker, where it waits until somebody says go.
_WAITING = """
import time
from pathlib import Path

import numpy as np

HERE = Path({here!r})


def data():
    return {{"x": np.eye(4, dtype=np.float32)}}, np.zeros(4, np.int64)


def score(outputs, labels):
    if (HERE / "scored").exists():
        (HERE / "reached").touch()
        while not (HERE / "go").exists():
            time.sleep(0.01)
    (HERE / "scored").touch()
    return 1.0
"""


def make_waiting(folder: Path, name: str) -> Path:
    """A release whose bundle is scored for as long as the test wants, of a model that no other test has built."""
    from onnx import helper

    weights = {"w": np.full((4, 3), len(name), np.float32)}
    make_onnx(folder, [helper.make_node("MatMul", ["x", "w"], ["y"])], weights)
    (folder / "waiting.py").write_text(_WAITING.format(here=str(folder)))
    return make_file(folder, name=name, validate={"task": {"dataset": "waiting:data", "metric": "waiting:score"}})


@pytest.fixture(scope="session")
def make() -> SimpleNamespace:
    """What tests make their releases of: `onnx`, `file`, and both at once, `waiting`."""
    return SimpleNamespace(onnx=make_onnx, file=make_file, waiting=make_waiting)


@pytest.fixture(scope="session")
def s3(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ReleaseStore]:
    """An S3 server that no command starts or ends: rclone's."""
    with rclone_s3(tmp_path_factory.mktemp("s3"), bucket="tvmflow") as config:
        yield ReleaseStore(config)
