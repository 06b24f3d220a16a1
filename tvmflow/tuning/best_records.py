"""The best records and decisions of one model as a file of JSON lines, which tuning hands to the build.

A line without a `kind` is a record. A line of the kind `decision` has the option that the compiler takes for the
decision `key`, or the number of threads that the model runs on.
"""

import hashlib
import json
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from tvmflow.hardware.target import Target
from tvmflow.tuning.record_store import RecordStore
from tvmflow.tuning.records import Decision, Record
from tvmflow.tuning.traces import apply, workload_key

if TYPE_CHECKING:
    from tvm.tirx import PrimFunc

Part = Literal["records", "decisions"]
"""A part of such a file: how functions are scheduled, or which options the compiler takes."""
PARTS: tuple[Part, ...] = ("decisions", "records")

_DECISION = "decision"
# The decision on the number of threads of the whole model: the bundle's, not one of the compiler's.
_THREADS = "threads of the model"


def best_lines(records: Iterable[Record], decisions: Iterable[Decision]) -> list[str]:
    """Return a line of JSON, without a line break, for each record, sorted, and then for each decision, sorted too."""
    return [*sorted(map(_line, records)), *sorted(map(_line, decisions))]


def replace_lines(lines: Iterable[str], store: RecordStore, target: Target) -> list[str]:
    """Return `lines` with the best records and the decisions that a store has for `target` added, all sorted.

    A line of `lines` is kept unless the store has a record or a decision with its key. Returns an empty list when the
    store has no record for the target.
    """
    records = sorted(store.records(target), key=lambda record: -record.seconds)
    if not records:
        return []
    by_key = {str(json.loads(line)["key"]): line for line in lines}
    by_key |= {record.key: _line(record) for record in records}
    by_key |= {key: _line(decision) for key, decision in store.decisions(target).items()}
    return sorted(by_key.values())


def select_part(lines: Iterable[str], part: Part) -> list[str]:
    """Return the decisions among `lines` if `part` is "decisions", the records if it is "records"."""
    return [line for line in lines if (json.loads(line).get("kind") == _DECISION) == (part == "decisions")]


def set_threads(lines: Iterable[str], threads: int) -> list[str]:
    """Return `lines` with the decision that the model runs on `threads` threads, in place of an earlier one."""
    others = [line for line in lines if json.loads(line)["key"] != _THREADS]
    return [*others, json.dumps({"kind": _DECISION, "key": _THREADS, "option": str(threads)}, sort_keys=True)]


def read_decisions(path: Path) -> dict[str, str]:
    """Return the option that a file records for each of the compiler's decisions, by the decision's key.

    The number of threads is left out.
    """
    options = _read_options(path)
    options.pop(_THREADS, None)
    return options


def read_threads(path: Path, default: int) -> int:
    """Return the number of threads that a file records for the model, or `default` if it records none."""
    return int(_read_options(path).get(_THREADS, default))


def read_schedules(path: Path) -> "Callable[[PrimFunc], PrimFunc | None]":
    """Return a function that schedules a PrimFunc by its record in a file.

    It returns None for a PrimFunc without a record, or whose record does not replay.
    """
    lines = map(json.loads, path.read_text().splitlines())
    records = {line["key"]: Record(**line) for line in lines if "kind" not in line}

    def schedule(func: "PrimFunc") -> "PrimFunc | None":
        record = records.get(workload_key(func)) if records else None
        return None if record is None else apply(record, func)

    return schedule


def best_digest(store: RecordStore, target: Target, keys: Sequence[str]) -> str:
    """Return the SHA-256 (hex) of the best schedules and the options that a store has for `keys` and a target.

    `keys` are workloads' and decisions' keys. The digest covers the trace of each workload's fastest record and the
    option of each decision, but no times. A key that the store does not have adds nothing. The order of the keys does
    not matter, nor does a key that occurs twice.
    """
    key_set, traces = set(keys), {}
    for record in sorted(store.records(target), key=lambda record: (-record.seconds, record.trace)):
        if record.key in key_set:
            traces[record.key] = record.trace
    options = {key: decision.option for key, decision in store.decisions(target).items() if key in key_set}
    return hashlib.sha256(json.dumps([traces, options], sort_keys=True).encode()).hexdigest()


def store_digest(store: RecordStore, target: Target) -> str:
    """Return the SHA-256 (hex) of all records, efforts and decisions that a store has for a target.

    Trials that did not become records are left out, and so are decisions that a newer one replaces. How the entries are
    spread over the store's files, and their order there, does not change the digest.
    """
    entries: list[dict[str, Any]] = [
        *map(asdict, store.records(target)),
        *map(asdict, store.efforts(target)),
        *map(asdict, store.decisions(target).values()),
    ]
    lines = sorted({json.dumps(entry, sort_keys=True) for entry in entries})
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()


def _line(entry: Record | Decision) -> str:
    kind = {"kind": _DECISION} if isinstance(entry, Decision) else {}
    return json.dumps({**kind, **asdict(entry)}, sort_keys=True)


def _read_options(path: Path) -> dict[str, str]:
    lines = map(json.loads, path.read_text().splitlines())
    return {str(line["key"]): str(line["option"]) for line in lines if line.get("kind") == _DECISION}
