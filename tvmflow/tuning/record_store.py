"""The store of tuning records: a folder of files to which many runs append at once, read as one collection."""

import contextlib
import errno
import fcntl
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
from typing import IO, TYPE_CHECKING, Any, get_type_hints

from tvmflow.files import replaceable, replacing
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

    from tvmflow.hardware.target import Target

logger = logging.getLogger(__name__)

# A run begins another file beyond this size, because sharing sends a whole file each time it grows.
_FILE_BYTES = 2**20
_NAME = re.compile(r"([0-9a-f]{16})-[\w.-]+\.jsonl")
# The types of the fields of each kind of entry, by name.
_TYPES: dict[type[Entry], dict[str, Any]] = {kind: get_type_hints(kind) for kind in KINDS.values()}
# The folder, within a store's own, of the files that other machines wrote.
FETCHED = "fetched"


@dataclass(frozen=True)
class Pruned:
    """The result of pruning: the number of entries before and after, and the number of removed files."""

    before: int
    after: int
    files: int


@dataclass(frozen=True)
class _Parsed:
    """The content of a file: the bytes of its whole lines, its entries, each with the offset of its end, and the files
    that it replaces, by name, each up to a size in bytes.
    """

    size: int
    entries: list[tuple[int, Entry]]
    replaces: dict[str, int]


class RecordStore:
    """A folder of JSON-lines files, a few for each run; their union is the store. `folder` may also be a single file.

    Files are only ever appended to and each run writes its own, so any number of processes may write at once, and
    copying the files of two stores into one folder merges them. A line that a crash cut short is skipped. A file's name
    begins with the digest of its `Context`; each file has the function of a workload once. The folder `fetched` holds
    the files of other machines. A pruned file names the files that it replaces and up to which size; lines that were
    appended to them later still count, so that no entry of a run that writes meanwhile is lost.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = Path(folder)
        self._run = f"{datetime.now(UTC):%Y%m%dT%H%M%S}-{os.getpid()}-{secrets.token_hex(4)}"
        self._numbers = itertools.count(1)
        self._writers: dict[str, _Writer] = {}
        self._cache: dict[Path, tuple[tuple[int, int], _Parsed]] = {}

    def append(self, entry: Entry) -> None:
        """Append an entry to this run's file and wait until it is on disk. Raises OSError when it cannot be written."""
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
        """Close the files of this run; the next `append` begins a new one."""
        for writer in self._writers.values():
            writer.close()
        self._writers.clear()

    def records(self, target: "Target") -> list[Record]:
        """Return every record for a target that this TVM and this version of the search space can use."""
        return [entry for entry in self.entries(current_context(target)) if isinstance(entry, Record)]

    def efforts(self, target: "Target") -> list[Effort]:
        """Return the efforts of all runs on the workloads of a target, with or without success."""
        return [entry for entry in self.entries(current_context(target)) if isinstance(entry, Effort)]

    def decisions(self, target: "Target") -> dict[str, Decision]:
        """Return the newest measurement of each decision for a target, by the decision's key."""
        decisions = (entry for entry in self.entries(current_context(target)) if isinstance(entry, Decision))
        return {decision.key: decision for decision in sorted(decisions, key=lambda decision: decision.created_at)}

    def is_empty(self, target: "Target") -> bool:
        """Whether nothing was ever measured for a target that this TVM and this version of the search space can use."""
        return next(iter(self.entries(current_context(target))), None) is None

    def measurements(self, target: "Target") -> list[Record | Trial]:
        """Return all schedules measured for a target with this TVM, of every model and every search space.

        Cost models learn from them. Those of another search space may no longer replay.
        """
        schedules = (entry for entry in self.entries() if isinstance(entry, Record | Trial) and entry.workload)
        return [entry for entry in schedules if (entry.target, entry.tvm_version) == (target.canonical, tvm_version())]

    def best(self, func: "PrimFunc", target: "Target") -> Record | None:
        """Return the fastest record of `func`'s workload, None without one; names in `func` do not matter."""
        key = workload_key(func)
        records = [record for record in self.records(target) if record.key == key]
        return min(records, key=lambda record: record.seconds, default=None)

    def contexts(self) -> list[Context]:
        """Return the contexts of all entries, sorted."""
        return sorted({context_of(entry) for entry in self.entries()}, key=astuple)

    def entries(self, context: Context | None = None) -> Iterator[Entry]:
        """Yield the entries of `context`, or of all contexts (None); an entry in two files comes once."""
        files = self._load(None if context is None else context.digest)
        yield from (entry for entry in _union(files) if context is None or context_of(entry) == context)

    def own_files(self) -> list[Path]:
        """Return the record files in the folder, sorted: those that this machine's runs have written.

        Files with names of another form are left out. A store that is a single file, or does not exist yet, has none.
        """
        return [path for path in sorted(self.folder.glob("*.jsonl")) if context_digest(path.name) is not None]

    def replaced_files(self) -> dict[str, int]:
        """Return the names of the files that others replace, each with the size in bytes up to which it is replaced."""
        return _find_replaced_sizes(self._load(None).values())

    def prune(self, keep: int) -> Pruned:
        """Keep the fastest `keep` records of each workload that this TVM and search space can use, and drop the others.

        One effort for each workload and the newest decisions stay as well. For each context one new file appears that
        replaces the others up to the size that was read; then the others are removed, except those that a run of this
        machine is writing. Returns the counts.
        """
        self.close()
        with hold_lock(self.folder / ".prune"):
            contents = {path: self._read(path) for path in self._files(None)}
            # Look at locks after reading the files: a run locks its file before it writes the first line.
            paths = {path.name: path for path, parsed in contents.items() if parsed.size and not _is_live(path)}
            files = {name: contents[path] for name, path in paths.items()}
            replaced_sizes = self.replaced_files()
            groups: dict[str, list[Entry]] = {}
            for entry in _union(files, replaced_sizes):
                groups.setdefault(context_of(entry).digest, []).append(entry)
            sizes = replaced_sizes | {
                name: max(parsed.size, replaced_sizes.get(name, 0)) for name, parsed in files.items()
            }
            after = 0
            for digest in sorted({*groups, *filter(None, map(context_digest, sizes))}):
                entries = groups.get(digest, [])
                survivors = _survivors(entries, keep)
                after += len(survivors)
                effective = [
                    name
                    for name, parsed in files.items()
                    if parsed.size > replaced_sizes.get(name, 0) and digest in _digests(name, parsed)
                ]
                if [context_digest(name) for name in effective] == [digest] and Counter(survivors) == Counter(entries):
                    del sizes[effective[0]]  # It is pruned already.
                    continue
                replaces = {name: size for name, size in sizes.items() if context_digest(name) == digest}
                write_entries(self.folder / f"{digest}-{self._run}-{next(self._numbers)}.jsonl", survivors, replaces)
            removals = sum(_remove(path, sizes.get(name, -1)) for name, path in paths.items())
            return Pruned(sum(map(len, groups.values())), after, removals)

    def _load(self, digest: str | None) -> dict[str, _Parsed]:
        """The content of the files that may hold entries of a context, by name."""
        while True:
            paths = self._files(digest)
            files = {path.name: self._read(path) for path in paths}
            # A file that is gone was pruned meanwhile, and its survivors are in a file that was not listed yet.
            if all(path.exists() for path in paths):
                return files

    def _files(self, digest: str | None) -> list[Path]:
        """The files that may hold entries of a context, sorted by name; a file of this machine hides a fetched one."""
        if self.folder.is_file():
            return [self.folder]
        paths = {path.name: path for folder in (self.folder / FETCHED, self.folder) for path in folder.glob("*.jsonl")}
        return [paths[name] for name in sorted(paths) if digest is None or context_digest(name) in (None, digest)]

    def _read(self, path: Path) -> _Parsed:
        try:
            status = path.stat()
            stamp = (status.st_size, status.st_mtime_ns)
            cache_entry = self._cache.get(path)
            if cache_entry is not None and cache_entry[0] == stamp:
                return cache_entry[1]
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
                # Lines without a kind are records in the file that the step `tune` hands to `build`.
                kind = obj.get("kind", "record")
                if kind == "workload":
                    workloads[str(obj["key"])] = str(obj["workload"])
                elif kind == "replaces":
                    replaces |= {str(name): int(size) for name, size in obj["files"].items()}
                else:
                    entries.append((end, _entry(KINDS[kind], obj, workloads)))
            except (ValueError, KeyError, TypeError, AttributeError, OverflowError, RecursionError):
                bad.append(number)
        if bad:
            more = f" and {len(bad) - 1} more" if len(bad) > 1 else ""
            logger.warning("%s, line %d%s, is torn or not a tuning record; it is skipped", path, bad[0], more)
        parsed = _Parsed(len(whole_lines(content)), entries, replaces)
        self._cache[path] = (stamp, parsed)
        return parsed


class _Writer:
    """A new file that one run appends to; the lock that it holds tells `prune` that the run is alive."""

    def __init__(self, path: Path) -> None:
        self._file = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_EXCL, 0o644)
        self.close = weakref.finalize(self, os.close, self._file)
        fcntl.flock(self._file, fcntl.LOCK_SH)
        self._workloads: set[str] = set()
        self.size = 0

    def write(self, entry: Entry) -> None:
        lines = _lines(entry, self._workloads)
        # In one call, so that at most the last line is torn, for a reader or after a crash.
        if os.write(self._file, lines) != len(lines):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        self.size += len(lines)
        os.fsync(self._file)


def write_entries(path: Path, entries: Iterable[Entry], replaces: Mapping[str, int] | None = None) -> None:
    """Write a whole file of entries, which appears, or replaces an older one, in one step; a device is written itself.

    `replaces` gives the files that it replaces in the store, by name, each with the size in bytes up to which it does;
    None means no files. Raises OSError when it cannot be written.
    """
    if not replaceable(path):
        with path.open("wb") as file:
            _write_all(file, entries, replaces)
        return
    with replacing(path, 0o644) as file:
        _write_all(file, entries, replaces)
        file.flush()
        os.fsync(file.fileno())


def _write_all(file: IO[bytes], entries: Iterable[Entry], replaces: Mapping[str, int] | None) -> None:
    if replaces:
        file.write(_line({"kind": "replaces", "files": dict(replaces)}))
    workload_keys: set[str] = set()
    for entry in entries:
        file.write(_lines(entry, workload_keys))


@contextlib.contextmanager
def hold_lock(path: Path) -> Iterator[None]:
    """Hold the lock file `path` while the body runs; other processes of this machine wait for it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("wb") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def context_digest(name: str) -> str | None:
    """Return the digest of a context from the name of its file, None for a name of another form."""
    match = _NAME.fullmatch(name)
    return match[1] if match else None


def whole_lines(content: bytes) -> bytes:
    """Return the whole lines of `content`, without an incomplete line at its end."""
    return content[: content.rfind(b"\n") + 1]


def _line(obj: Mapping[str, Any]) -> bytes:
    return json.dumps(obj, sort_keys=True).encode() + b"\n"


def _lines(entry: Entry, workload_keys: set[str]) -> bytes:
    """The line of an entry, after a line with its workload unless the file has that already."""
    kind = next(kind for kind, entry_type in KINDS.items() if isinstance(entry, entry_type))
    obj = {"kind": kind, **asdict(entry)}
    workload_line = b""
    if (workload := obj.pop("workload", None)) and entry.key not in workload_keys:
        workload_line = _line({"kind": "workload", "key": entry.key, "workload": workload})
        workload_keys.add(entry.key)
    return workload_line + _line(obj)


def _entry(kind: type[Entry], obj: Mapping[str, Any], workloads: Mapping[str, str]) -> Entry:
    own_fields = [field for field in fields(kind) if field.name != "workload"]
    # Fields with a default were added later, and older lines do not have them.
    values = {field.name: obj[field.name] for field in own_fields if field.name in obj or field.default is MISSING}
    if kind in (Record, Trial):
        values["workload"] = obj.get("workload") or workloads.get(obj["key"], "")
    # Whoever may write to a shared place can put any line there: a time of 0 would be the best for ever. A decision has
    # an infinite time where a function cannot be measured.
    for name, value in values.items():
        if not isinstance(value, _TYPES[kind][name]) or (isinstance(value, float) and not value > 0):
            raise ValueError(f"{name} is {value!r}")
    return kind(**values)


def _digests(name: str, parsed: _Parsed) -> set[str]:
    """Return the digests of a file's contexts: from its name or, if the name has none, from its entries."""
    digest = context_digest(name)
    return {context_of(entry).digest for _, entry in parsed.entries} if digest is None else {digest}


def _find_replaced_sizes(files: Iterable[_Parsed]) -> dict[str, int]:
    sizes: dict[str, int] = {}
    for parsed in files:
        for name, size in parsed.replaces.items():
            sizes[name] = max(size, sizes.get(name, 0))
    return sizes


def _union(files: Mapping[str, _Parsed], replaced: Mapping[str, int] | None = None) -> Iterator[Entry]:
    """The entries of all files less the replaced ones; an entry that two files hold comes once."""
    replaced = _find_replaced_sizes(files.values()) if replaced is None else replaced
    earlier: set[Entry] = set()
    for name, parsed in files.items():
        entries = [entry for end, entry in parsed.entries if end > replaced.get(name, 0)]
        # Two equal lines of one file are two events, such as equal efforts in the same second.
        yield from (entry for entry in entries if entry not in earlier)
        earlier.update(entries)


def _survivors(entries: Iterable[Entry], keep: int) -> list[Entry]:
    """The entries that pruning keeps, all of them of current contexts.

    The fastest `keep` records and one effort for each workload, and the newest measurement of each decision.
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
    """Whether a run of this machine is writing to the file."""
    with contextlib.suppress(FileNotFoundError), path.open("rb") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
    return False


def _remove(path: Path, size: int) -> bool:
    """Remove a file if its whole lines have `size` bytes, and return whether that was so."""
    with contextlib.suppress(FileNotFoundError):
        if len(whole_lines(path.read_bytes())) == size:
            path.unlink()
            return True
    return False
