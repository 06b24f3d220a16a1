"""Records from elsewhere: our own files, and MetaSchedule's JSON databases."""

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
from tvmflow.target import Target, host, missing_features, resolve
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
class Imported:
    """What was read, what was new and is taken, and why the rest was not: reasons with their numbers."""

    read: int
    taken: int
    refused: dict[str, int]


def is_database(path: Path) -> bool:
    """Whether `path` is a folder with MetaSchedule's JSON database, or one of the database's two files."""
    folder = path if path.is_dir() else path.parent
    named = path.is_dir() or path.name in (WORKLOADS, RECORDS)
    return named and (folder / WORKLOADS).is_file() and (folder / RECORDS).is_file()


def import_records(store: RecordStore, path: Path) -> Imported:
    """Add what a file or folder of our own records holds and `store` does not.

    Trials that were spent on a workload are not counted twice: where both know of some, the larger number holds.
    Raises InputError when there is nothing to read.
    """
    given = list(RecordStore(path).entries())
    if not given:
        raise InputError(f"{str(path)!r} holds no tuning record; name a file or folder that tuning has written")
    known = set(store.entries())
    new = [entry for entry in dict.fromkeys(given) if entry not in known and not isinstance(entry, Effort)]
    efforts = list(_spent_beyond(given, known))
    for entry in (*new, *efforts):
        store.append(entry)
    number = sum(not isinstance(entry, Effort) for entry in given)
    refused = {"known already": number - len(new)} if number > len(new) else {}
    return Imported(number, len(new), refused)


def export_records(store: RecordStore, everything: bool) -> list[Entry]:
    """The best record of each workload, for every target and versions, and what was spent on it; or all there is."""
    entries = sorted(store.entries(), key=lambda entry: entry.created_at)
    if everything:
        return entries
    best: dict[tuple[object, str], Record] = {}
    for entry in entries:
        place = (context_of(entry), entry.key)
        if isinstance(entry, Record) and (place not in best or entry.seconds < best[place].seconds):
            best[place] = entry
    decided = {(context_of(entry), entry.key): entry for entry in entries if isinstance(entry, Decision)}
    return [*best.values(), *(merge_efforts(efforts) for efforts in _efforts(entries).values()), *decided.values()]


def import_metaschedule(store: RecordStore, path: Path, target: Target | None) -> Imported:
    """Add the records of a MetaSchedule database, measured by the installed TVM, that replay on their workload.

    A record's time is the median of its `run_secs`. It is taken for `target`, or for the target that it names. Of each
    workload the fastest must also compute what the workload does, where this machine can run it; others are tried until
    one does. Raises InputError when the files are no such database.
    """
    folder = path if path.is_dir() else path.parent
    refused: Counter[str] = Counter()
    workloads = _workloads(folder / WORKLOADS)
    lines = list(_lines(folder / RECORDS))
    known = {(entry.key, entry.trace, entry.target) for entry in store.entries() if isinstance(entry, Record | Trial)}
    # A record is as old as the file: the database says no more.
    written = datetime.fromtimestamp((folder / RECORDS).stat().st_mtime, UTC).isoformat(timespec="seconds")
    found: dict[tuple[str, str], list[Record]] = {}
    places: dict[str, Target] = {}
    functions: dict[str, PrimFunc] = {}
    for line in lines:
        try:
            index, (trace, run_secs, its_target, _) = line
            func = workloads[index]
            seconds = None if run_secs is None else statistics.median(float(value) for value in run_secs)
            place = target or _resolved(its_target)
        except (ValueError, TypeError, KeyError, IndexError, statistics.StatisticsError):
            refused["not a record of MetaSchedule"] += 1
            continue
        reason = _why_not(func, seconds, place, its_target)
        if reason is not None or func is None or seconds is None or place is None:
            refused[reason or "not a record of MetaSchedule"] += 1
            continue
        key = workload_key(func)
        functions[key], places[place.canonical] = func, place
        record = Record(
            key=key,
            workload=_saved(func),
            trace=json.dumps(trace),
            seconds=seconds,
            baseline_seconds=None,
            target=place.canonical,
            tvm_version=tvm_version(),
            space_version=SPACE_VERSION,
            tuner="metaschedule",
            trial=0,
            created_at=written,
        )
        if (key, record.trace, record.target) in known:
            refused["known already"] += 1
        elif not _replays(record, func):
            refused["its trace does not replay on its workload, or changes the function's arguments"] += 1
        else:
            known.add((key, record.trace, record.target))
            found.setdefault((record.target, key), []).append(record)
    taken = 0
    with _Checker() as checker:
        for (canonical, key), records in found.items():
            records.sort(key=lambda record: record.seconds)
            while records and not checker.is_right(records[0], functions[key], places[canonical]):
                refused["its results differ from its workload's, or it does not run"] += 1
                del records[0]
            for record in records[:1]:
                store.append(record)
            for record in records[1:]:
                # Not checked, and so only for the cost model to learn from.
                store.append(Trial(**{field.name: getattr(record, field.name) for field in fields(Trial)}))
            taken += len(records)
    return Imported(len(lines), taken, dict(refused))


def _spent_beyond(given: Sequence[Entry], known: set[Entry]) -> Iterator[Effort]:
    """The efforts in `given` beyond those that are `known`, one for each workload."""
    before = _efforts(known)
    for place, efforts in _efforts(given).items():
        effort = merge_efforts(efforts)
        spent = merge_efforts(before[place]).trials if place in before else -1
        if effort.trials > spent:
            yield replace(effort, trials=effort.trials - max(spent, 0))


def _efforts(entries: Sequence[Entry] | set[Entry]) -> dict[tuple[object, str], list[Effort]]:
    found: dict[tuple[object, str], list[Effort]] = {}
    for entry in entries:
        if isinstance(entry, Effort):
            found.setdefault((context_of(entry), entry.key), []).append(entry)
    return found


def _workloads(path: Path) -> "list[PrimFunc | None]":
    """The functions of a database in its order; None for a module that is not one function."""
    import tvm
    import tvm_ffi
    from tvm.tirx import PrimFunc

    functions: list[PrimFunc | None] = []
    for line in _lines(path):
        try:
            module: Any = _loaded(line[1], tvm, tvm_ffi)
            (func,) = [item for item in module.functions.values() if isinstance(item, PrimFunc)]
        except Exception as error:  # TVM raises whatever it likes for what it cannot read.
            logger.debug("a workload of %s is not one function: %s", path, error)
            func = None
        functions.append(func)
    return functions


def _loaded(text: Any, tvm: Any, tvm_ffi: Any) -> Any:
    """A module as the database writes it: base64 of its JSON behind its length in eight bytes."""
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


def _resolved(its_target: dict[str, Any]) -> Target | None:
    """The target that a record names; what TVM adds to every target says nothing."""
    try:
        return resolve({name: value for name, value in its_target.items() if name not in ("keys", "tag")})
    except TargetError:
        return None


def _why_not(
    func: "PrimFunc | None", seconds: float | None, place: Target | None, its_target: dict[str, Any]
) -> str | None:
    if func is None:
        return "its workload is not one function that this TVM can read"
    if seconds is None or not 0 < seconds < _FAILED_SECONDS:
        return "it failed when it was measured"
    if place is None:
        return "its target is not built here"
    if place.tvm.get("kind") != its_target.get("kind"):
        return f"it was measured for {its_target.get('kind')}"
    if arguments_of(func) is None:
        return "its shapes are symbolic"
    return None


def _saved(func: "PrimFunc") -> str:
    from tvm import ir

    return str(ir.save_json(normalize(func)))


def _replays(record: Record, func: "PrimFunc") -> bool:
    try:
        return arguments_of(replay(record.trace, func)) == arguments_of(func)
    except Exception as error:  # TVM raises whatever it likes for a trace that does not fit.
        logger.debug("a trace does not replay: %s", error)
        return False


class _Checker:
    """Compares schedules with their workloads, in processes of their own, which are started when they are needed."""

    def __init__(self) -> None:
        self._pools: dict[str, MeasurePool] = {}

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        for pool in self._pools.values():
            pool.close()

    def is_right(self, record: Record, func: "PrimFunc", target: Target) -> bool:
        """Whether the schedule computes what the function does; True where this machine cannot run it."""
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
