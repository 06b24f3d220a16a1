"""A folder of tuning records: appended to by many runs at once, read as one whole, and pruned."""

import contextlib
import errno
import fcntl
import hashlib
import itertools
import json
import logging
import os
import re
import secrets
import weakref
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import MISSING, asdict, astuple, dataclass, fields
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tvmflow.tuning.records import (
    KINDS,
    Context,
    Decision,
    Effort,
    Entry,
    Record,
    Trial,
    context_of,
    current_context,
    merge_efforts,
    tvm_version,
)
from tvmflow.tuning.traces import workload_key

if TYPE_CHECKING:
    from tvm.tirx import PrimFunc

    from tvmflow.target import Target

logger = logging.getLogger(__name__)

# A run begins another file beyond this size: a shared store is sent whole files, again and again as they grow.
_FILE_BYTES = 2**20

_NAME = re.compile(r"([0-9a-f]{16})-[\w.-]+\.jsonl")

FETCHED = "fetched"


@dataclass(frozen=True)
class Pruned:
    """What a store held before and after it was pruned: records, trials and efforts; and the files that went."""

    before: int
    after: int
    files: int


@dataclass(frozen=True)
class _Parsed:
    """A file: its whole lines' bytes, entries with the offset behind each, and what it replaces."""

    size: int
    entries: list[tuple[int, Entry]]
    replaces: dict[str, int]


class RecordStore:
    """A folder of JSON-lines files, a few for each run, which together are what is known; one file will do to read.

    Files are only ever appended to and each run writes its own, so any number of processes may write at once, and
    copying files together merges two stores. A line that a crash tore is skipped. A file's name begins with the digest
    of its `Context`; the function of a workload is written once in each file. What other machines wrote is in the
    folder `fetched`. A file may say of others that it replaces them up to a size (`prune`): what was appended to them
    afterwards still counts, and so nothing is lost to a run that is writing meanwhile.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = Path(folder)
        self._run = f"{datetime.now(UTC):%Y%m%dT%H%M%S}-{os.getpid()}-{secrets.token_hex(4)}"
        self._numbers = itertools.count(1)
        self._writers: dict[str, _Writer] = {}
        self._known: dict[Path, tuple[tuple[int, int], _Parsed]] = {}

    def append(self, entry: Entry) -> None:
        """Add `entry` and wait until it is on disk."""
        context = context_of(entry).digest
        writer = self._writers.get(context)
        if writer is None or writer.size >= _FILE_BYTES:
            if writer is not None:
                writer.close()
            self.folder.mkdir(parents=True, exist_ok=True)
            writer = _Writer(self.folder / f"{context}-{self._run}-{next(self._numbers)}.jsonl")
            self._writers[context] = writer
        writer.write(entry)

    def close(self) -> None:
        """End the files that were appended to; what is appended next goes to others."""
        for writer in self._writers.values():
            writer.close()
        self._writers.clear()

    def records(self, target: "Target") -> list[Record]:
        """Every record for `target` that this TVM and this search space can use."""
        return [entry for entry in self.entries(current_context(target)) if isinstance(entry, Record)]

    def efforts(self, target: "Target") -> list[Effort]:
        """What earlier runs spent on the workloads of `target`, with or without success."""
        return [entry for entry in self.entries(current_context(target)) if isinstance(entry, Effort)]

    def decisions(self, target: "Target") -> dict[str, Decision]:
        """The newest word on each decision for `target`, by its key."""
        found = (entry for entry in self.entries(current_context(target)) if isinstance(entry, Decision))
        return {entry.key: entry for entry in sorted(found, key=lambda entry: entry.created_at)}

    def measurements(self, target: "Target") -> list[Record | Trial]:
        """All schedules measured for `target` with this TVM, of any model and space: what a cost model starts from.

        Each has its workload, trace and seconds; those of another space's version may no longer replay.
        """
        found = (entry for entry in self.entries() if isinstance(entry, Record | Trial) and entry.workload)
        return [entry for entry in found if (entry.target, entry.tvm_version) == (target.canonical, tvm_version())]

    def best(self, func: "PrimFunc", target: "Target") -> Record | None:
        """The fastest record of the workload that `func` is, or None; no name in `func` matters."""
        key = workload_key(func)
        found = [record for record in self.records(target) if record.key == key]
        return min(found, key=lambda record: record.seconds, default=None)

    def digest(self, target: "Target") -> str:
        """The SHA-256 of every record for `target`; it changes when one is added, not when files are merge_efforts."""
        lines = sorted({json.dumps(asdict(record), sort_keys=True) for record in self.records(target)})
        return hashlib.sha256("\n".join(lines).encode()).hexdigest()

    def contexts(self) -> list[Context]:
        """The targets and versions of which something is known, sorted."""
        return sorted({context_of(entry) for entry in self.entries()}, key=astuple)

    def entries(self, context: Context | None = None) -> Iterator[Entry]:
        """All that is known, or what is known for a target and versions; what two files both hold, once."""
        files = self._load(None if context is None else context.digest)
        yield from (entry for entry in _union(files) if context is None or context_of(entry) == context)

    def own_files(self) -> list[Path]:
        """The files that were written here, and are named as `append` names them."""
        return [path for path in sorted(self.folder.glob("*.jsonl")) if context_digest(path.name) is not None]

    def replaced_files(self) -> dict[str, int]:
        """The files that others replace, and up to which size in bytes."""
        return _replaced(self._load(None).values())

    def prune(self, keep: int) -> Pruned:
        """Keep the fastest `keep` records of each workload for this TVM and search space, and drop all else.

        What was spent on a workload stays known, in one line. For each target and versions one new file appears that
        replaces the others up to the size that was read; then those go. What a run of this machine is writing is left.
        """
        self.close()
        with hold_lock(self.folder / ".prune"):
            found = {path: self._read(path) for path in self._files(None)}
            # Only after it was read: a run locks its file before it writes the first line.
            paths = {path.name: path for path, parsed in found.items() if parsed.size and not _is_live(path)}
            files = {name: found[path] for name, path in paths.items()}
            replaced = self.replaced_files()
            groups: dict[str, list[Entry]] = {}
            for entry in _union(files, replaced):
                groups.setdefault(context_of(entry).digest, []).append(entry)
            sizes = replaced | {name: max(parsed.size, replaced.get(name, 0)) for name, parsed in files.items()}
            after = 0
            for digest in sorted({*groups, *filter(None, map(context_digest, sizes))}):
                known = groups.get(digest, [])
                survivors = _survivors(known, keep)
                after += len(survivors)
                counting = [
                    name
                    for name, parsed in files.items()
                    if parsed.size > replaced.get(name, 0) and digest in _digests(name, parsed)
                ]
                if [context_digest(name) for name in counting] == [digest] and Counter(survivors) == Counter(known):
                    del sizes[counting[0]]  # It is pruned already.
                    continue
                gone = {name: size for name, size in sizes.items() if context_digest(name) == digest}
                write_entries(self.folder / f"{digest}-{self._run}-{next(self._numbers)}.jsonl", survivors, gone)
            removed = sum(_remove(path, sizes.get(name, -1)) for name, path in paths.items())
            return Pruned(sum(map(len, groups.values())), after, removed)

    def _load(self, digest: str | None) -> dict[str, _Parsed]:
        """The files that may hold something of a context, by name."""
        while True:
            paths = self._files(digest)
            files = {path.name: self._read(path) for path in paths}
            # Otherwise one was pruned meanwhile, and what counted of it is in a file that was not listed yet.
            if all(path.exists() for path in paths):
                return files

    def _files(self, digest: str | None) -> list[Path]:
        """The files that may hold something of a context, by name; here before fetched where both are."""
        if self.folder.is_file():
            return [self.folder]
        found = {path.name: path for place in (self.folder / FETCHED, self.folder) for path in place.glob("*.jsonl")}
        return [found[name] for name in sorted(found) if digest is None or context_digest(name) in (None, digest)]

    def _read(self, path: Path) -> _Parsed:
        try:
            status = path.stat()
            stamp = (status.st_size, status.st_mtime_ns)
            known = self._known.get(path)
            if known is not None and known[0] == stamp:
                return known[1]
            content = path.read_bytes()
        except FileNotFoundError:
            return _Parsed(0, [], {})  # It was pruned since the folder was listed.
        entries: list[tuple[int, Entry]] = []
        workloads: dict[str, str] = {}
        replaces: dict[str, int] = {}
        bad: list[int] = []
        end = 0
        for number, line in enumerate(content.splitlines(keepends=True), 1):
            end += len(line)
            if not line.strip():
                continue
            try:
                obj: dict[str, Any] = json.loads(line)
                # A line that says no kind is a record as `tune` hands it on to `build`.
                kind = obj.get("kind", "record")
                if kind == "workload":
                    workloads[str(obj["key"])] = str(obj["workload"])
                elif kind == "replaces":
                    replaces |= {str(name): int(size) for name, size in obj["files"].items()}
                else:
                    entries.append((end, _entry(KINDS[kind], obj, workloads)))
            except (ValueError, KeyError, TypeError, AttributeError):
                bad.append(number)
        if bad:
            more = f" and {len(bad) - 1} more" if len(bad) > 1 else ""
            logger.warning("%s, line %d%s, is torn or not a tuning record; it is skipped", path, bad[0], more)
        parsed = _Parsed(len(whole_lines(content)), entries, replaces)
        self._known[path] = (stamp, parsed)
        return parsed


class _Writer:
    """A new file that one run appends to; its lock tells `prune` that the run is alive."""

    def __init__(self, path: Path) -> None:
        self._file = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_EXCL, 0o644)
        self.close = weakref.finalize(self, os.close, self._file)
        fcntl.flock(self._file, fcntl.LOCK_SH)
        self._workloads: set[str] = set()
        self.size = 0

    def write(self, entry: Entry) -> None:
        lines = _lines(entry, self._workloads)
        # In one call, so that no reader and no crash finds more than the last line torn.
        if os.write(self._file, lines) != len(lines):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        self.size += len(lines)
        os.fsync(self._file)


def write_entries(path: Path, entries: Iterable[Entry], replaces: Mapping[str, int] | None = None) -> None:
    """Write a whole file of records, which appears or is replaced at once; `replaces` says which others it replaces."""
    partial = path.with_name(f".{path.name}.{secrets.token_hex(4)}.part")
    with partial.open("wb") as file:
        if replaces:
            file.write(_line({"kind": "replaces", "files": dict(replaces)}))
        written: set[str] = set()
        for entry in entries:
            file.write(_lines(entry, written))
        file.flush()
        os.fsync(file.fileno())
    partial.replace(path)


@contextlib.contextmanager
def hold_lock(path: Path) -> Iterator[None]:
    """Be the only process of this machine that holds the lock file `path` while the body runs."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("wb") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def context_digest(name: str) -> str | None:
    """The digest of the context that a file's name says, None where it says none."""
    found = _NAME.fullmatch(name)
    return found[1] if found else None


def whole_lines(content: bytes) -> bytes:
    """`content` without a line at its end that is not whole: torn, or still being written."""
    return content[: content.rfind(b"\n") + 1]


def _line(obj: Mapping[str, Any]) -> bytes:
    return json.dumps(obj, sort_keys=True).encode() + b"\n"


def _lines(entry: Entry, written: set[str]) -> bytes:
    """`entry` as a line, before it that of its workload unless the file has it already."""
    kind = next(kind for kind, entry_type in KINDS.items() if isinstance(entry, entry_type))
    obj = {"kind": kind, **asdict(entry)}
    before = b""
    if (workload := obj.pop("workload", None)) and entry.key not in written:
        before = _line({"kind": "workload", "key": entry.key, "workload": workload})
        written.add(entry.key)
    return before + _line(obj)


def _entry(kind: type[Entry], obj: Mapping[str, Any], workloads: Mapping[str, str]) -> Entry:
    wanted = [field for field in fields(kind) if field.name != "workload"]
    # What has a default came later: lines that were written before do without it.
    values = {field.name: obj[field.name] for field in wanted if field.name in obj or field.default is MISSING}
    if kind in (Record, Trial):
        values["workload"] = obj.get("workload") or workloads.get(obj["key"], "")
    return kind(**values)


def _digests(name: str, parsed: _Parsed) -> set[str]:
    """The contexts of a file: that of its name, or of what it holds where somebody else has named it."""
    digest = context_digest(name)
    return {context_of(entry).digest for _, entry in parsed.entries} if digest is None else {digest}


def _replaced(files: Iterable[_Parsed]) -> dict[str, int]:
    replaced: dict[str, int] = {}
    for parsed in files:
        for name, size in parsed.replaces.items():
            replaced[name] = max(size, replaced.get(name, 0))
    return replaced


def _union(files: Mapping[str, _Parsed], replaced: Mapping[str, int] | None = None) -> Iterator[Entry]:
    """The entries of all files by name, less what is replaced; what two files both hold, once."""
    replaced = _replaced(files.values()) if replaced is None else replaced
    before: set[Entry] = set()
    for name, parsed in files.items():
        entries = [entry for end, entry in parsed.entries if end > replaced.get(name, 0)]
        # Within one file two equal lines are two events, as efforts that were spent in the same second.
        yield from (entry for entry in entries if entry not in before)
        before.update(entries)


def _survivors(entries: Iterable[Entry], keep: int) -> list[Entry]:
    """The best `keep` records of each workload, what was spent on each in one line, and the newest decisions.

    Nothing of other versions.
    """
    records: dict[str, list[Record]] = {}
    efforts: dict[str, list[Effort]] = {}
    decisions: dict[tuple[Context, str], Decision] = {}
    for entry in sorted(entries, key=lambda entry: entry.created_at):
        if not context_of(entry).is_current:
            continue
        if isinstance(entry, Record):
            records.setdefault(entry.key, []).append(entry)
        elif isinstance(entry, Effort):
            efforts.setdefault(entry.key, []).append(entry)
        elif isinstance(entry, Decision):
            decisions[context_of(entry), entry.key] = entry
    best = [r for key in sorted(records) for r in sorted(records[key], key=lambda record: record.seconds)[:keep]]
    return [*best, *(merge_efforts(efforts[key]) for key in sorted(efforts)), *decisions.values()]


def _is_live(path: Path) -> bool:
    """Whether a run of this machine is writing the file."""
    with contextlib.suppress(FileNotFoundError), path.open("rb") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
    return False


def _remove(path: Path, size: int) -> bool:
    """Remove a file if its whole lines have `size` bytes; whether it went."""
    with contextlib.suppress(FileNotFoundError):
        if len(whole_lines(path.read_bytes())) == size:
            path.unlink()
            return True
    return False
