"""The state folder: artifacts by their digest, and what each step made of what it read."""

import contextlib
import hashlib
import json
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Generic, Literal, TypeVar

from pydantic import BaseModel, ConfigDict

from tvmflow.bundle import sha256_file
from tvmflow.errors import StepError, TvmflowError
from tvmflow.progress import reporter


class Record(BaseModel):
    """A value that steps give and take: typed, immutable, small."""

    model_config = ConfigDict(frozen=True, extra="forbid", ser_json_inf_nan="constants")


class Artifact(Record):
    """A file of the workspace: its digest says where it is and what it holds; size in bytes."""

    sha256: str
    size: int
    name: str


class Sources(Record):
    """The user's own modules that a step imported, with their digests: when one changes, the step runs again.

    Those in the folder of the release file are relative to it, so that a copy of the folder is judged by its own files.
    """

    files: dict[str, str] = {}

    def unchanged(self, folder: Path = Path()) -> bool:
        """Whether every file still holds what was read; relative paths are looked up in `folder`."""
        files = ((folder / path, digest) for path, digest in self.files.items())
        return all(path.is_file() and sha256_file(path) == digest for path, digest in files)


class StepResult(Record):
    """What a step made."""

    sources: Sources = Sources()

    def artifacts(self) -> Iterator[Artifact]:
        """Every artifact in the result, however deep."""
        yield from _artifacts(self)


R = TypeVar("R", bound=StepResult)


@dataclass(frozen=True)
class Outcome(Generic[R]):
    """A step's result, whether it was made now or found, and the seconds that took."""

    result: R
    status: Literal["ran", "cached"]
    seconds: float


class Workspace:
    """Artifacts and step records below one folder, which several processes and machines may share.

    Artifacts are written whole under their digest and never changed; a record is written last, so that a crash at any
    point leaves either a step that is done or one that is not.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        try:
            for name in ("artifacts", "steps", "tmp", "logs"):
                (folder / name).mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise StepError(
                f"state folder {str(folder)!r} cannot be written ({error.strerror}); set TVMFLOW_HOME to another"
            ) from error

    def path(self, artifact: Artifact) -> Path:
        """Where an artifact's file is."""
        return self.folder / "artifacts" / artifact.sha256[:2] / artifact.sha256

    def keep(self, path: Path, name: str | None = None) -> Artifact:
        """Take a file into the workspace, moving it, and return its artifact."""
        artifact = Artifact(sha256=sha256_file(path), size=path.stat().st_size, name=name or path.name)
        place = self.path(artifact)
        place.parent.mkdir(parents=True, exist_ok=True)
        if not self.holds(artifact):
            path.replace(place)
        return artifact

    def holds(self, artifact: Artifact) -> bool:
        """Whether the artifact's file is there, whole."""
        try:
            return self.path(artifact).stat().st_size == artifact.size
        except OSError:
            return False

    @contextlib.contextmanager
    def scratch(self) -> Iterator[Path]:
        """A temporary folder on the workspace's own file system, gone afterwards."""
        with tempfile.TemporaryDirectory(dir=self.folder / "tmp", ignore_cleanup_errors=True) as folder:
            yield Path(folder)

    def find(self, step: str, key: str, kind: type[R], folder: Path = Path()) -> R | None:
        """What a step made of the same input before, if every artifact and source of it is still there unchanged.

        `folder` is where the user's own modules are.
        """
        try:
            record = json.loads(self._record(step, key).read_text())
            result = kind.model_validate(record["result"])
        except (OSError, ValueError, KeyError, TypeError):
            return None
        intact = all(self.holds(artifact) for artifact in result.artifacts()) and result.sources.unchanged(folder)
        return result if intact else None

    def remember(self, step: str, key: str, result: StepResult, seconds: float) -> None:
        """Record what a step made; only successes are recorded."""
        place = self._record(step, key)
        place.parent.mkdir(parents=True, exist_ok=True)
        document = {"step": step, "seconds": seconds, "result": result.model_dump(mode="json")}
        with self.scratch() as folder:
            (folder / place.name).write_text(json.dumps(document))
            (folder / place.name).replace(place)

    def _record(self, step: str, key: str) -> Path:
        return self.folder / "steps" / step / f"{key}.json"


def step_key(step: str, reads: Mapping[str, Any]) -> str:
    """The SHA-256 of all that a step reads: digests, its part of the release file, versions, its own code."""
    document = {"step": step, "reads": reads, "code": code_digest(), "versions": _versions()}
    return hashlib.sha256(json.dumps(document, sort_keys=True, default=_plain).encode()).hexdigest()


def run_step(
    workspace: Workspace,
    step: str,
    reads: Mapping[str, Any],
    kind: type[R],
    work: Callable[[], R],
    *,
    target: str | None = None,
    valid: Callable[[R], bool] = lambda result: True,
    folder: Path = Path(),
) -> Outcome[R]:
    """Run a step, or find what it made of the same input before; `reads` is all that it depends on.

    The user's own modules that the step imported count as well; those beside the release file are in `folder`.
    `valid` looks whether what a found result stands for outside the workspace (a run, a release) is still there.
    """
    start = time.perf_counter()
    key = step_key(step, reads)
    found = workspace.find(step, key, kind, folder)
    if found is not None and valid(found):
        seconds = time.perf_counter() - start
        reporter().ended(step, target, "cached", seconds)
        return Outcome(found, "cached", seconds)
    reporter().started(step, target)
    try:
        result = work()
        workspace.remember(step, key, result, time.perf_counter() - start)
    except BaseException as error:
        reporter().ended(step, target, "failed", time.perf_counter() - start)
        if isinstance(error, OSError) and not isinstance(error, TvmflowError):
            raise StepError(
                f"step {step} cannot write {str(error.filename or workspace.folder)!r} ({error.strerror}); "
                f"free space or set TVMFLOW_HOME to another folder"
            ) from error
        raise
    seconds = time.perf_counter() - start
    reporter().ended(step, target, "ran", seconds)
    return Outcome(result, "ran", seconds)


@cache
def code_digest() -> str:
    """The SHA-256 over the source of what steps are made of: any change of it makes steps run again."""
    digest = hashlib.sha256()
    package = Path(__file__).parent
    steps = find_spec("tasks")
    for root in (package, *map(Path, (steps and steps.submodule_search_locations) or ())):
        for path in sorted(root.rglob("*.py")):
            if path.parent != package / "cli":
                digest.update(path.relative_to(root).as_posix().encode() + b"\0" + path.read_bytes())
    return digest.hexdigest()


def _plain(value: object) -> object:
    if isinstance(value, BaseModel):
        return value.model_dump(mode="json")
    raise TypeError(f"{value!r} cannot be part of a step's key")


def _versions() -> dict[str, str]:
    return {name: version(name) for name in ("apache-tvm", "apache-tvm-ffi", "numpy", "onnx", "torch")}


def _artifacts(value: object) -> Iterator[Artifact]:
    if isinstance(value, Artifact):
        yield value
    elif isinstance(value, BaseModel):
        for name in type(value).model_fields:
            yield from _artifacts(getattr(value, name))
    elif isinstance(value, Mapping):
        for item in value.values():
            yield from _artifacts(item)
    elif isinstance(value, (tuple, list)):
        for item in value:
            yield from _artifacts(item)
