"""Garbage of a state folder: files that no run has used for a while and any run can make or fetch again."""

import contextlib
import re
import shutil
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from tvmflow.errors import StepError
from tvmflow.files import exclusive
from tvmflow.store.folder import PARTIAL

_DIGEST = re.compile(rb"[0-9a-f]{64}")


@dataclass(frozen=True)
class Piece:
    """A file or folder that can be removed; `kind` says in words what it is, and `size` is in bytes."""

    kind: str
    path: Path
    size: int


@contextlib.contextmanager
def alone_in(state: Path) -> Iterator[None]:
    """Lock a state folder for the body; a run or command that starts there meanwhile waits until the body ends.

    Raises StepError when a run or a command is at work there, because it may use any file.
    """
    state.mkdir(parents=True, exist_ok=True)
    busy = f"a command or a run is at work in the state folder {str(state)!r}; try again when it has ended"
    with exclusive(state, StepError(busy)):
        yield


def find_garbage(state: Path, bundles: Path, days: float) -> list[Piece]:
    """Return the files of a state folder that were not used for `days` days, in the order in which to remove them.

    These are results of steps, artifacts that no kept result names, downloaded models, compiled code and logs, and
    bundles in the folder `bundles`, where devices and servers keep those they fetched. Temporary files of killed runs
    do not wait for `days`. Releases, the registry and tuning records are not looked at. Call it within `alone_in`.
    """
    before = time.time() - days * 86400
    records = list((state / "steps").glob("*/*.json"))
    old_records = {path for path in records if _used_at(path) < before}
    # Any digest counts that a kept result mentions, wherever in it.
    digests = {digest.decode() for path in records if path not in old_records for digest in _digests(path)}
    pieces = [_piece("results of steps", path) for path in sorted(old_records)]
    pieces += [
        _piece("artifacts", path)
        for path in sorted((state / "artifacts").glob("*/*"))
        if path.name not in digests and _used_at(path) < before
    ]
    for kind, pattern in (("downloaded models", "sources/*/*"), ("compiled code", "code/*"), ("logs", "logs/**/*.log")):
        pieces += [_piece(kind, path) for path in sorted(state.glob(pattern)) if _used_at(path) < before]
    pieces += [_piece("files of killed runs", path) for path in _entries(state / "tmp")]
    # Commands that are no runs write to the store in the folder too, but not for a day.
    pieces += [
        _piece("files of killed runs", path)
        for path in sorted((state / "s3").glob(f"{PARTIAL}*"))
        if _used_at(path) < time.time() - 86400
    ]
    pieces += [
        _piece("fetched bundles", path)
        for path in _entries(bundles)
        if not path.is_symlink() and _used_at(path) < before
    ]
    paths = {piece.path for piece in pieces}
    links = [path for path in _entries(state / "bundles") if path.is_symlink()]
    return pieces + [_piece("links to bundles", path) for path in links if path.resolve() in paths or not path.exists()]


def remove(pieces: list[Piece]) -> None:
    """Remove files and folders, in order. Killed at any point, it leaves a folder that every run can use."""
    for piece in pieces:
        if piece.path.is_dir() and not piece.path.is_symlink():
            shutil.rmtree(piece.path, ignore_errors=True)
        else:
            piece.path.unlink(missing_ok=True)


def _entries(folder: Path) -> list[Path]:
    return sorted(folder.iterdir()) if folder.is_dir() else []


def _digests(path: Path) -> list[bytes]:
    try:
        return _DIGEST.findall(path.read_bytes())
    except OSError:
        return []


def _used_at(path: Path) -> float:
    """When a file was used last, or written: `Workspace.find` marks what it returns."""
    return path.lstat().st_mtime


def _piece(kind: str, path: Path) -> Piece:
    files = path.rglob("*") if path.is_dir() and not path.is_symlink() else [path]
    return Piece(kind, path, sum(file.lstat().st_size for file in files if not file.is_dir()))
