"""Tuning records: what they hold, the folder they are kept in, and how one is applied to a function."""

import hashlib
import json
import logging
import os
import secrets
from collections.abc import Iterator
from dataclasses import asdict, dataclass, fields
from datetime import UTC, datetime
from functools import cache
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tvm.tirx import PrimFunc

    from tvmflow.target import Target

# Raise it when the rules of `space.py` change so that old traces no longer say what is best, or no longer replay.
SPACE_VERSION = "1"

logger = logging.getLogger(__name__)


@cache
def tvm_version() -> str:
    """The installed TVM's version: a trace is only replayed by the version that recorded it."""
    return version("apache-tvm")


def now() -> str:
    """The present in UTC, ISO 8601."""
    return datetime.now(UTC).isoformat(timespec="seconds")


@dataclass(frozen=True)
class Record:
    """A schedule that was measured, checked and found faster than what was known before.

    `key` is `workload_key` of the function; `workload` is the function as `tvm.ir.save_json` writes it; `trace` is the
    schedule's trace in JSON; `seconds` and `baseline_seconds` are median times of one call, measured in turn on one
    machine (`baseline_seconds` is None where no analytic schedule was given); `target` is `Target.canonical`;
    `trial` counts from 1 within the run; `created_at` is UTC in ISO 8601.
    """

    key: str
    workload: str
    trace: str
    seconds: float
    baseline_seconds: float | None
    target: str
    tvm_version: str
    space_version: str
    tuner: str
    trial: int
    created_at: str


@dataclass(frozen=True)
class Effort:
    """How many trials a run spent on a workload, whether or not they led to a record.

    It is what lets a second run know that a workload was tuned and its analytic schedule was not beaten.
    `baseline_seconds` is the time of what needs no tuning, in seconds.
    """

    key: str
    target: str
    tvm_version: str
    space_version: str
    trials: int
    baseline_seconds: float | None
    created_at: str


_KINDS: dict[str, type[Record] | type[Effort]] = {"record": Record, "effort": Effort}


class RecordStore:
    """A folder of JSON-lines files, one per run, which together are what is known; to read only, one file will do.

    Files are only ever appended to and each run writes one of its own, so any number of processes may write at once,
    and copying files together merges two stores. A line that a crash tore is skipped.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = Path(folder)
        self._own = self.folder / f"{datetime.now(UTC):%Y%m%dT%H%M%S}-{os.getpid()}-{secrets.token_hex(4)}.jsonl"
        self._parsed: dict[Path, tuple[tuple[int, int], list[Record | Effort]]] = {}

    def append(self, entry: Record | Effort) -> None:
        """Add `entry` and wait until it is on disk."""
        kind = "record" if isinstance(entry, Record) else "effort"
        line = json.dumps({"kind": kind, **asdict(entry)}, sort_keys=True) + "\n"
        self.folder.mkdir(parents=True, exist_ok=True)
        with self._own.open("ab", buffering=0) as file:
            file.write(line.encode())
            os.fsync(file.fileno())

    def records(self, target: "Target") -> list[Record]:
        """Every record for `target` that this TVM and this search space can use."""
        return [entry for entry in self._entries(target) if isinstance(entry, Record)]

    def efforts(self, target: "Target") -> list[Effort]:
        """What earlier runs spent on the workloads of `target`, with or without success."""
        return [entry for entry in self._entries(target) if isinstance(entry, Effort)]

    def best(self, func: "PrimFunc", target: "Target") -> Record | None:
        """The fastest record of the workload that `func` is, or None; the name of `func` does not matter."""
        key = workload_key(func)
        found = [record for record in self.records(target) if record.key == key]
        return min(found, key=lambda record: record.seconds, default=None)

    def digest(self, target: "Target") -> str:
        """The SHA-256 of every record for `target`; it changes when one is added, not when files are merged."""
        lines = sorted({json.dumps(asdict(record), sort_keys=True) for record in self.records(target)})
        return hashlib.sha256("\n".join(lines).encode()).hexdigest()

    def _entries(self, target: "Target") -> Iterator[Record | Effort]:
        wanted = (target.canonical, tvm_version(), SPACE_VERSION)
        for path in [self.folder] if self.folder.is_file() else sorted(self.folder.glob("*.jsonl")):
            for entry in self._read(path):
                if (entry.target, entry.tvm_version, entry.space_version) == wanted:
                    yield entry

    def _read(self, path: Path) -> list[Record | Effort]:
        status = path.stat()
        stamp = (status.st_size, status.st_mtime_ns)
        known = self._parsed.get(path)
        if known is not None and known[0] == stamp:
            return known[1]
        entries, bad = [], []
        for number, line in enumerate(path.read_bytes().splitlines(), 1):
            try:
                entries.append(_parse(line))
            except (ValueError, KeyError, TypeError):
                bad.append(number)
        if bad:
            more = f" and {len(bad) - 1} more" if len(bad) > 1 else ""
            logger.warning("%s, line %d%s, is torn or not a tuning record; it is skipped", path, bad[0], more)
        self._parsed[path] = (stamp, entries)
        return entries


def _parse(line: bytes) -> Record | Effort:
    obj: dict[str, Any] = json.loads(line)
    entry_type = _KINDS[obj["kind"]]
    return entry_type(**{field.name: obj[field.name] for field in fields(entry_type)})


def workload_key(func: "PrimFunc") -> str:
    """The structural hash of `func` in hex: of its parameters and body, not of its name or other attributes."""
    import tvm_ffi

    return f"{tvm_ffi.structural_hash(normalize(func), map_free_vars=True):016x}"


def normalize(func: "PrimFunc") -> "PrimFunc":
    """`func` under the name `main`, with no attributes but those that say what kind of function it is."""
    import tvm
    from tvm.tirx import PrimFunc

    attrs = tvm.ir.make_node("ir.DictAttrs", **{"s_tir": True, "tirx.noalias": True, "global_symbol": "main"})
    return PrimFunc(func.params, func.body, func.ret_type, attrs)


def replay(trace: str, func: "PrimFunc") -> "PrimFunc":
    """Schedule `func` as `trace` (JSON) says; the result keeps the attributes of `func` and is marked as scheduled.

    Whatever TVM raises when the trace does not fit is passed on.
    """
    from tvm import IRModule
    from tvm.s_tir import Schedule
    from tvm.s_tir.schedule import Trace

    schedule = Schedule(IRModule({"main": normalize(func)}))
    Trace.apply_json_to_schedule(json.loads(trace), schedule)
    scheduled = schedule.mod["main"].without_attr("global_symbol")
    for name, value in (func.attrs or {}).items():
        scheduled = scheduled.with_attr(name, value)
    return scheduled.with_attr("tirx.is_scheduled", True)


def apply(record: Record, func: "PrimFunc") -> "PrimFunc | None":
    """Schedule `func` (unscheduled, any name) with the trace of `record`.

    The result has the parameters and attributes of `func` and the attribute `tirx.is_scheduled`. A record which does
    not replay is no error: a warning is logged and None returned, and the caller goes on with the next best schedule.
    """
    try:
        return replay(record.trace, func)
    except Exception as error:  # TVM raises whatever it likes for a trace that does not fit.
        reason = str(error).strip().splitlines()
        logger.warning("record %s (%s) does not replay: %s", record.key, record.created_at, reason[-1:] or error)
        return None
