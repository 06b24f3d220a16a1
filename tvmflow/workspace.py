"""The workspace: a folder that holds the artifacts of steps, and a record of the inputs and result of each step."""

import contextlib
import fcntl
import hashlib
import json
import os
import re
import shutil
import tempfile
import time
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, is_dataclass
from functools import cache
from importlib.metadata import version
from pathlib import Path
from typing import Any, Generic, Literal, Protocol, TypeVar

from pydantic import BaseModel, ConfigDict

from tvmflow.bundle import sha256_file
from tvmflow.errors import StepError, TvmflowError
from tvmflow.progress import reporter

_SHA256 = re.compile(r"[0-9a-f]{64}")

Progress = Callable[[float, float, str], None]
"""Called with the bytes moved so far, the bytes to move in all, and whether they are sent or fetched."""


class Record(BaseModel):
    """An immutable, validated value that steps take and return."""

    model_config = ConfigDict(frozen=True, extra="forbid", ser_json_inf_nan="constants", serialize_by_alias=True)


class Artifact(Record):
    """A file of the workspace, identified by its SHA-256; `size` is in bytes, `name` is for people.

    `data` is a file that it names by that file's SHA-256: an ONNX file may have its weights in one. Both are in one
    folder.
    """

    sha256: str
    size: int
    name: str
    data: "Artifact | None" = None

    @property
    def whole_size(self) -> int:
        """The bytes of the file and of its `data`."""
        return self.size + (0 if self.data is None else self.data.whole_size)


class Sources(Record):
    """The user's own modules that a step imported: paths with their SHA-256. When one changes, the step runs again.

    A module in the folder of the release file has a path relative to that folder, so that a copy of the folder gives
    the same paths. `names` has, by path, the names under which the others were imported.
    """

    files: dict[str, str] = {}
    names: dict[str, str] = {}

    @property
    def portable(self) -> dict[str, str]:
        """The digests without paths of this machine, the same on each: by the path in the folder, else by the name.

        A path outside the folder without a name, as older releases have it, is cut to the name of the file.
        """
        digests = {}
        for path, digest in self.files.items():
            is_inside = not Path(path).is_absolute()
            digests[path if is_inside else self.names.get(path, Path(path).name)] = digest
        return dict(sorted(digests.items()))

    def is_unchanged(self, folder: Path = Path()) -> bool:
        """Whether every file still has its digest; relative paths are looked up in `folder`."""
        files = ((folder / path, digest) for path, digest in self.files.items())
        return all(path.is_file() and sha256_file(path) == digest for path, digest in files)


class StepResult(Record):
    """The result of a step: typed values, and artifacts in the place of large data."""

    sources: Sources = Sources()

    def artifacts(self) -> Iterator[Artifact]:
        """Yield every artifact in the result, also from nested records, mappings and sequences."""
        yield from _artifacts(self)


class StepSummary(Record):
    """Whether a step ran or its result was cached, and the seconds that the step or the lookup took."""

    status: Literal["ran", "cached"]
    seconds: float


R = TypeVar("R", bound=StepResult)


@dataclass(frozen=True)
class Outcome(Generic[R]):
    """A step's result, whether the step ran or its result was cached, and the seconds that this took."""

    result: R
    status: Literal["ran", "cached"]
    seconds: float

    @property
    def summary(self) -> StepSummary:
        """The outcome without the result."""
        return StepSummary(status=self.status, seconds=self.seconds)


class Shared(Protocol):
    """The store through which the workspaces of several machines exchange artifacts and records.

    Records of other machines are not trusted: they are validated, and artifacts are checked by their digests. Every
    method raises StoreError when the store fails.
    """

    def has_record(self, step: str, key: str) -> bool:
        """Whether there is a record of the step."""

    def read_record(self, step: str, key: str) -> bytes | None:
        """Return the record of a step as JSON; None if there is none."""

    def write_record(self, step: str, key: str, record: bytes) -> None:
        """Write the record of a step under its cache key `key`; the artifacts of its result must be there already."""

    def fetch(self, sha256: str, place: Path) -> bool:
        """Write an artifact into the new file `place`; return False when the artifact is missing or damaged."""

    def send(self, path: Path, sha256: str, on_progress: Callable[[int], None]) -> None:
        """Send the file `path` unless the store has it; call `on_progress` with the bytes sent since the last call."""


class Workspace:
    """Artifacts and step records below one folder, which several processes may use at once.

    An artifact is written completely before it gets its name, which is its digest, and never changes. The record of a
    step is written after its artifacts: after a crash, a step has a complete record or none. With `shared`, machines
    use each other's results. Logs of steps are in `log_folder`, in a folder for each release; None means the subfolder
    `logs`. A temporary workspace names another folder, so that its logs outlive it. Where no other workspace uses the
    folder, the temporary files that killed runs left there are removed. Raises StepError when the folder cannot be
    written.
    """

    def __init__(self, folder: Path, shared: Shared | None = None, log_folder: Path | None = None) -> None:
        self.folder = folder
        self.shared = shared
        self.log_folder = log_folder or folder / "logs"
        try:
            for path in (folder / "artifacts", folder / "steps", folder / "tmp", self.log_folder):
                path.mkdir(parents=True, exist_ok=True)
            # Who removes garbage locks the folder for itself alone. The kernel frees the lock of a process that dies.
            lock = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
            weakref.finalize(self, os.close, lock)
            with contextlib.suppress(BlockingIOError):
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                # Nobody else works in the folder: killed runs have left these.
                for path in (folder / "tmp").iterdir():
                    shutil.rmtree(path, ignore_errors=True)
            fcntl.flock(lock, fcntl.LOCK_SH)
        except OSError as error:
            raise StepError(
                f"state folder {str(folder)!r} cannot be written ({error.strerror}); set TVMFLOW_HOME to another"
            ) from error

    def path(self, artifact: Artifact) -> Path:
        """Return the path of an artifact's file, which need not exist.

        Files lie in folders by the first digits of their digests. A file that refers to one of `data` by its digest,
        such as an ONNX file to its weights, lies in the folder of that one, because it can name a file beside it only.
        """
        return self.folder / "artifacts" / (artifact.data or artifact).sha256[:2] / artifact.sha256

    def keep(self, path: Path, name: str | None = None, data: Path | None = None) -> Artifact:
        """Move a file into the workspace and return its artifact; `name` replaces the file's own name.

        `data` is a file to which it refers by its SHA-256, which is moved too; None without such a file.
        """
        data_artifact = None if data is None else self.keep(data)
        artifact = Artifact(
            sha256=sha256_file(path), size=path.stat().st_size, name=name or path.name, data=data_artifact
        )
        place = self.path(artifact)
        place.parent.mkdir(parents=True, exist_ok=True)
        if not self.holds(artifact):
            path.replace(place)
        return artifact

    def holds(self, artifact: Artifact) -> bool:
        """Whether the artifact's file exists with the artifact's size; its digest is not checked."""
        try:
            return self.path(artifact).stat().st_size == artifact.size
        except OSError:
            return False

    def logs(self, name: str, since: float) -> list[Path]:
        """Return the logs of the release `name` that are not empty and were written since a time of `time.time`."""
        paths = sorted((self.log_folder / name).glob("*.log"))
        return [path for path in paths if path.stat().st_mtime >= since and path.stat().st_size]

    @contextlib.contextmanager
    def scratch(self) -> Iterator[Path]:
        """Create a temporary folder on the workspace's own file system; it is removed when the body ends."""
        with tempfile.TemporaryDirectory(dir=self.folder / "tmp", ignore_cleanup_errors=True) as folder:
            yield Path(folder)

    def find(
        self, step: str, key: str, result_type: type[R], folder: Path = Path(), progress: Progress | None = None
    ) -> R | None:
        """Return the result that a step recorded under a key; None unless all its artifacts and sources are unchanged.

        `folder` is the folder of the release file, to which paths of sources are relative. A result that only the
        shared workspace has is fetched; a result that only this workspace has is sent to the shared one. `progress`, if
        there is one, gets the bytes that are moved. Raises StoreError when the shared workspace fails.
        """
        place = self._record(step, key)
        with contextlib.suppress(OSError):
            content = place.read_bytes()
            result = _parse_result(content, result_type)
            if result is not None and self._intact(result, folder):
                self._mark_used(place, result)
                if self.shared is not None and not self.shared.has_record(step, key):
                    self._share_record(step, key, content, result, progress)
                return result
        record = None if self.shared is None else self.shared.read_record(step, key)
        result = None if record is None else _parse_result(record, result_type)
        if record is None or result is None or not result.sources.is_unchanged(folder):
            return None
        if not self.fetch(result.artifacts(), progress):
            return None
        self._write(place, record)
        return result

    def remember(
        self, step: str, key: str, result: StepResult, seconds: float, progress: Progress | None = None
    ) -> None:
        """Record the result of a step, which took `seconds`, under its cache key, and send it to the shared workspace.

        `progress` is called with the bytes sent so far, all bytes, and the word `sharing`; None where nobody wants to
        know. Raises StoreError when the shared workspace fails; the local record has been written by then.
        """
        document = {"step": step, "seconds": seconds, "result": result.model_dump(mode="json")}
        record = json.dumps(document).encode()
        self._write(self._record(step, key), record)
        if self.shared is not None:
            self._share_record(step, key, record, result, progress)

    def share(self, artifacts: Iterable[Artifact], progress: Progress | None = None) -> None:
        """Send artifacts to the shared workspace, if there is one; `progress`, unless None, gets the bytes sent.

        Raises StoreError when the shared workspace fails.
        """
        by_digest = {artifact.sha256: artifact for artifact in artifacts}
        total, sent_bytes = sum(artifact.size for artifact in by_digest.values()), 0

        def count_sent(count: int) -> None:
            nonlocal sent_bytes
            sent_bytes += count
            if progress is not None:
                progress(min(sent_bytes, total), total, "sharing")

        if self.shared is not None:
            for artifact in by_digest.values():
                self.shared.send(self.path(artifact), artifact.sha256, count_sent)

    def fetch(self, artifacts: Iterable[Artifact], progress: Progress | None = None) -> bool:
        """Fetch the artifacts that this workspace lacks from the shared one; return whether it holds all of them now.

        False means that an artifact is missing or damaged in the shared workspace, or has an unsafe name. `progress`,
        if there is one, gets the bytes that are fetched. Raises StoreError when the shared workspace fails.
        """
        by_digest = {artifact.sha256: artifact for artifact in artifacts}
        if not all(_is_safe(artifact) for artifact in by_digest.values()):
            return False
        missing = [artifact for artifact in by_digest.values() if not self.holds(artifact)]
        total, done = sum(artifact.size for artifact in missing), 0
        for artifact in missing:
            if progress is not None:
                progress(done, total, "fetching")
            with self.scratch() as scratch:
                temporary = scratch / "artifact"
                if self.shared is None or not self.shared.fetch(artifact.sha256, temporary):
                    return False
                if temporary.stat().st_size != artifact.size:
                    return False
                self.path(artifact).parent.mkdir(parents=True, exist_ok=True)
                temporary.replace(self.path(artifact))
            done += artifact.size
        return True

    @property
    def records(self) -> Path:
        """The folder of the tuning records."""
        return self.folder / "records"

    def _mark_used(self, record: Path, result: StepResult) -> None:
        for path in (record, *map(self.path, result.artifacts())):
            os.utime(path)

    def _intact(self, result: StepResult, folder: Path) -> bool:
        return all(self.holds(artifact) for artifact in result.artifacts()) and result.sources.is_unchanged(folder)

    def _share_record(self, step: str, key: str, record: bytes, result: StepResult, progress: Progress | None) -> None:
        self.share(result.artifacts(), progress)
        if self.shared is not None:
            self.shared.write_record(step, key, record)

    def _write(self, place: Path, content: bytes) -> None:
        place.parent.mkdir(parents=True, exist_ok=True)
        with self.scratch() as folder:
            (folder / place.name).write_bytes(content)
            (folder / place.name).replace(place)

    def _record(self, step: str, key: str) -> Path:
        return self.folder / "steps" / step / f"{key}.json"


def step_key(step: str, inputs: Mapping[str, Any], code: str = "") -> str:
    """Return the cache key of a step, in hexadecimal.

    It is the SHA-256 of the step's name and inputs, the versions of the libraries that steps use, and `code`, the
    digest of the step's code.
    """
    document = {"step": step, "inputs": inputs, "code": code, "versions": _versions()}
    return hashlib.sha256(json.dumps(document, sort_keys=True, default=_plain).encode()).hexdigest()


def run_step(
    workspace: Workspace,
    step: str,
    inputs: Mapping[str, Any],
    result_type: type[R],
    work: Callable[[], R],
    *,
    code: str = "",
    target: str | None = None,
    is_valid: Callable[[R], bool] = lambda result: True,
    folder: Path = Path(),
) -> Outcome[R]:
    """Return a step's cached result for the same inputs; else run `work`, record its result and return it.

    The cache key is made of `inputs`, which must name all values that the result depends on, and of `code`, the digest
    of the code that makes the result. A cached result also needs unchanged `sources`; `folder` is the folder of the
    release file, to which their paths are relative. `is_valid` says whether a cached result may be used, for instance
    whether the MLflow run that it names still exists. Progress is reported under the name `target`, None for a step of
    no target. Raises what `work` raises, StepError for a full disk or a file that cannot be written, StoreError when
    the shared workspace fails.
    """
    start = time.perf_counter()
    key = step_key(step, inputs, code)
    has_started = False

    def report(done: float, total: float, message: str) -> None:
        nonlocal has_started
        if not has_started:
            has_started = True
            reporter().begin(step, target)
        reporter().advance(step, target, done, total, message)

    try:
        cached_result = workspace.find(step, key, result_type, folder, report)
        if cached_result is not None and is_valid(cached_result):
            seconds = time.perf_counter() - start
            reporter().end(step, target, "cached", seconds)
            return Outcome(cached_result, "cached", seconds)
        if not has_started:
            has_started = True
            reporter().begin(step, target)
        result = work()
        workspace.remember(step, key, result, time.perf_counter() - start, report)
    except BaseException as error:
        reporter().end(step, target, "failed", time.perf_counter() - start)
        if isinstance(error, OSError) and not isinstance(error, TvmflowError):
            raise StepError(
                f"step {step} cannot write {str(error.filename or workspace.folder)!r} ({error.strerror}); "
                f"free space or set TVMFLOW_HOME to another folder"
            ) from error
        raise
    seconds = time.perf_counter() - start
    reporter().end(step, target, "ran", seconds)
    return Outcome(result, "ran", seconds)


def _parse_result(record: bytes, result_type: type[R]) -> R | None:
    try:
        return result_type.model_validate(json.loads(record)["result"])
    except (ValueError, KeyError, TypeError):
        return None


def _is_safe(artifact: Artifact) -> bool:
    """Whether digests and names stay inside the workspace; records of other machines may hold anything."""
    if artifact.data is not None and not _is_safe(artifact.data):
        return False
    return _SHA256.fullmatch(artifact.sha256) is not None and Path(artifact.name).name == artifact.name


def _plain(value: object) -> object:
    if isinstance(value, BaseModel):
        return value.model_dump(mode="json")
    if is_dataclass(value) and not isinstance(value, type):
        return asdict(value)
    raise TypeError(f"{value!r} cannot be part of a step's key")


@cache
def _versions() -> dict[str, str]:
    return {name: version(name) for name in ("apache-tvm", "apache-tvm-ffi", "numpy", "onnx", "torch")}


def _artifacts(value: object) -> Iterator[Artifact]:
    if isinstance(value, Artifact):
        yield value
        yield from _artifacts(value.data)
    elif isinstance(value, BaseModel):
        for name in type(value).model_fields:
            yield from _artifacts(getattr(value, name))
    elif isinstance(value, Mapping):
        for item in value.values():
            yield from _artifacts(item)
    elif isinstance(value, (tuple, list)):
        for item in value:
            yield from _artifacts(item)
