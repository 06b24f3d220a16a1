"""Imports tuning records from tvmflow's own files and from MetaSchedule's JSON databases, and exports them."""

import base64
import json
import logging
import math
import statistics
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

from tvmflow.errors import InputError, TargetError
from tvmflow.hardware.target import Target, host, missing_features, resolve
from tvmflow.tuning.candidates import Candidate, arguments_of
from tvmflow.tuning.measure import MeasurePool
from tvmflow.tuning.record_store import RecordStore
from tvmflow.tuning.records import (
    SPACE_VERSION,
    Decision,
    Effort,
    Entry,
    Record,
    Trial,
    context_of,
    merge_efforts,
    tvm_version,
)
from tvmflow.tuning.traces import normalize, replay, workload_key
from tvmflow.tuning.worker_process import TrialError

if TYPE_CHECKING:
    from tvm.tirx import PrimFunc

WORKLOADS, RECORDS = "database_workload.json", "database_tuning_record.json"
# MetaSchedule writes this many seconds for a candidate that failed.
_FAILED_SECONDS = 1e10
_CHECK_SECONDS = 60.0

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class ImportCounts:
    """The counts of an import: entries read, entries added to the store, and refused entries by the reason."""

    read: int
    added: int
    refused: dict[str, int]


def is_database(path: Path) -> bool:
    """Whether `path` is a folder with MetaSchedule's JSON database, or one of the database's two files."""
    folder = path if path.is_dir() else path.parent
    may_be = path.is_dir() or path.name in (WORKLOADS, RECORDS)
    return may_be and (folder / WORKLOADS).is_file() and (folder / RECORDS).is_file()


def import_records(store: RecordStore, path: Path) -> ImportCounts:
    """Add the entries of a file or folder of tvmflow's own records that `store` does not have yet.

    Trials are not counted twice: where both sides have efforts on a workload, the larger number of trials holds. Raises
    InputError when there is no entry to read.
    """
    entries = list(RecordStore(path).entries())
    if not entries:
        raise InputError(f"{str(path)!r} holds no tuning record; name a file or folder that tuning has written")
    present = set(store.entries())
    new = [entry for entry in dict.fromkeys(entries) if entry not in present and not isinstance(entry, Effort)]
    efforts = list(_additional_efforts(entries, present))
    for entry in (*new, *efforts):
        store.append(entry)
    number = sum(not isinstance(entry, Effort) for entry in entries)
    refusals = {"already in the store": number - len(new)} if number > len(new) else {}
    return ImportCounts(number, len(new), refusals)


def export_records(store: RecordStore, everything: bool) -> list[Entry]:
    """Return the best record and the effort of each workload in each context, and the newest of each decision.

    With `everything`, return all entries instead, the oldest first.
    """
    entries = sorted(store.entries(), key=lambda entry: entry.created_at)
    if everything:
        return entries
    best: dict[tuple[object, str], Record] = {}
    for entry in entries:
        workload = (context_of(entry), entry.key)
        if isinstance(entry, Record) and (workload not in best or entry.seconds < best[workload].seconds):
            best[workload] = entry
    decisions = {(context_of(entry), entry.key): entry for entry in entries if isinstance(entry, Decision)}
    return [*best.values(), *(merge_efforts(efforts) for efforts in _efforts(entries).values()), *decisions.values()]


def import_metaschedule(store: RecordStore, path: Path, target: Target | None) -> ImportCounts:
    """Add the records of a MetaSchedule database to `store` that replay on their workload with the installed TVM.

    A record's time is the median of its `run_secs`. It is added for `target` or, if that is None, for the target that
    it names. Where this machine can run them, the records of each workload are checked, the fastest first: those with
    wrong results are refused, the first right one becomes a record, and the others become trials, from which only cost
    models learn. Otherwise the fastest becomes a record unchecked. Raises InputError when the files are no such
    database.
    """
    folder = path if path.is_dir() else path.parent
    refusals: Counter[str] = Counter()
    workloads = _workloads(folder / WORKLOADS)
    lines = list(_lines(folder / RECORDS))
    present = {(entry.key, entry.trace, entry.target) for entry in store.entries() if isinstance(entry, Record | Trial)}
    # A record is as old as the file: the database has no times.
    file_time = datetime.fromtimestamp((folder / RECORDS).stat().st_mtime, UTC).isoformat(timespec="seconds")
    groups: dict[tuple[str, str], list[Record]] = {}
    targets: dict[str, Target] = {}
    functions: dict[str, PrimFunc] = {}
    for line in lines:
        try:
            index, (trace, run_secs, its_target, _) = line
            func = workloads[index]
            seconds = None if run_secs is None else statistics.median(float(value) for value in run_secs)
            own_target = target or _resolve(its_target)
        except (ValueError, TypeError, KeyError, IndexError, statistics.StatisticsError):
            refusals["not a record of MetaSchedule"] += 1
            continue
        reason = _why_refused(func, seconds, own_target, its_target)
        if reason is not None or func is None or seconds is None or own_target is None:
            refusals[reason or "not a record of MetaSchedule"] += 1
            continue
        key = workload_key(func)
        functions[key], targets[own_target.canonical] = func, own_target
        record = Record(
            key=key,
            workload=_to_json(func),
            trace=json.dumps(trace),
            seconds=seconds,
            baseline_seconds=None,
            target=own_target.canonical,
            tvm_version=tvm_version(),
            space_version=SPACE_VERSION,
            tuner="metaschedule",
            trial=0,
            created_at=file_time,
        )
        if (key, record.trace, record.target) in present:
            refusals["already in the store"] += 1
        elif not _replays(record, func):
            refusals["its trace does not replay on its workload, or changes the function's arguments"] += 1
        else:
            present.add((key, record.trace, record.target))
            groups.setdefault((record.target, key), []).append(record)
    added_count = 0
    with _Checker() as checker:
        for (canonical, key), records in groups.items():
            records.sort(key=lambda record: record.seconds)
            while records and not checker.is_right(records[0], functions[key], targets[canonical]):
                refusals["its results differ from its workload's, or it does not run"] += 1
                del records[0]
            for record in records[:1]:
                store.append(record)
            for record in records[1:]:
                # These are not checked, so only cost models learn from them.
                store.append(Trial(**{field.name: getattr(record, field.name) for field in fields(Trial)}))
            added_count += len(records)
    return ImportCounts(len(lines), added_count, dict(refusals))


def _additional_efforts(entries: Sequence[Entry], present: set[Entry]) -> Iterator[Effort]:
    """Yield for each workload an effort with as many trials as `entries` have more than `present`."""
    stored_efforts = _efforts(present)
    for workload, efforts in _efforts(entries).items():
        effort = merge_efforts(efforts)
        trials = merge_efforts(stored_efforts[workload]).trials if workload in stored_efforts else -1
        if effort.trials > trials:
            yield replace(effort, trials=effort.trials - max(trials, 0))


def _efforts(entries: Sequence[Entry] | set[Entry]) -> dict[tuple[object, str], list[Effort]]:
    """The efforts by context and workload."""
    groups: dict[tuple[object, str], list[Effort]] = {}
    for entry in entries:
        if isinstance(entry, Effort):
            groups.setdefault((context_of(entry), entry.key), []).append(entry)
    return groups


def _workloads(path: Path) -> "list[PrimFunc | None]":
    """The functions of a database in its order; None for a module that is not one function."""
    import tvm
    from tvm.tirx import PrimFunc

    functions: list[PrimFunc | None] = []
    for line in _lines(path):
        try:
            module: Any = _load_module(line[1], tvm)
            (func,) = [item for item in module.functions.values() if isinstance(item, PrimFunc)]
        except Exception as error:  # TVM raises errors of many types for what it cannot read.
            logger.debug("a workload of %s is not one function: %s", path, error)
            func = None
        functions.append(func)
    return functions


def _load_module(text: Any, tvm: Any) -> Any:
    """A module from the database's form: base64 of eight bytes with the length of its JSON, and the JSON."""
    content = base64.b64decode(text)
    return tvm.ir.load_json(content[8 : 8 + int.from_bytes(content[:8], "little")].decode())


def _lines(path: Path) -> Iterator[Any]:
    for number, line in enumerate(path.read_text(errors="replace").splitlines(), 1):
        if line.strip():
            try:
                yield json.loads(line)
            except ValueError as error:
                raise InputError(
                    f"{str(path)!r}, line {number}, is not JSON; it is no MetaSchedule database"
                ) from error


def _resolve(its_target: dict[str, Any]) -> Target | None:
    """The target that a record names, less what TVM adds to every target; None for one that is not built here.

    TVM's form has no profile of the processor: what names the code of this machine is taken for this machine's.
    """
    try:
        target = resolve({name: value for name, value in its_target.items() if name not in ("keys", "tag", "model")})
    except TargetError:
        return None
    own = resolve("native")
    return own if target.tvm == own.tvm else target


def _why_refused(
    func: "PrimFunc | None", seconds: float | None, target: Target | None, its_target: dict[str, Any]
) -> str | None:
    if func is None:
        return "its workload is not one function that this TVM can read"
    if seconds is None or not 0 < seconds < _FAILED_SECONDS:
        return "it failed when it was measured"
    if target is None:
        return "its target is not built here"
    if target.tvm.get("kind") != its_target.get("kind"):
        return f"it was measured for {its_target.get('kind')}"
    if arguments_of(func) is None:
        return "its shapes are symbolic"
    return None


def _to_json(func: "PrimFunc") -> str:
    from tvm import ir

    return str(ir.save_json(normalize(func)))


def _replays(record: Record, func: "PrimFunc") -> bool:
    try:
        return arguments_of(replay(record.trace, func)) == arguments_of(func)
    except Exception as error:  # TVM raises errors of many types for a trace that does not fit.
        logger.debug("a trace does not replay: %s", error)
        return False


class _Checker:
    """Compares schedules with their workloads in worker processes, which start at the first comparison."""

    def __init__(self) -> None:
        self._pools: dict[str, MeasurePool] = {}

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        for pool in self._pools.values():
            pool.close()

    def is_right(self, record: Record, func: "PrimFunc", target: Target) -> bool:
        """Return whether the schedule computes what the function does; True where this machine cannot run it."""
        if target.tvm.get("kind") != "llvm" or target.arch != host().arch or missing_features(target.features):
            return True
        if record.target not in self._pools:
            threads = min(target.threads, host().cores)
            self._pools[record.target] = MeasurePool(
                record.target, builders=1, threads=threads, timeout=_CHECK_SECONDS, deadline=math.inf
            )
        pool = self._pools[record.target]
        unscheduled = Candidate(record.workload, arguments_of(func) or ())
        reference, library = pool.build([unscheduled, replace(unscheduled, trace=record.trace)])
        try:
            if isinstance(reference, TrialError) or isinstance(library, TrialError):
                raise TrialError("it cannot be built")
            pool.check(library, reference)
        except TrialError as error:
            logger.debug("an imported record is refused: %s", error)
            return False
        return True
