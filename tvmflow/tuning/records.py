"""Tuning records: what tuning has measured, each good for one target, TVM version and search space."""

import hashlib
import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from functools import cache
from importlib.metadata import version
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tvmflow.target import Target

# Raise it when the rules of `space.py` change so that old traces no longer say what is best, or no longer replay.
SPACE_VERSION = "3"

_ON_DECISIONS = "decisions-"


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
    schedule's trace in JSON; `seconds` and `baseline_seconds` are the least times of one call, measured in turn on one
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
    `baseline_seconds` is the time of what needs no tuning, in seconds; `seconds` is how long the trials took in all,
    None where that is not known. What was spent on decisions counts for all that a model meets together: their `key` is
    that of `decisions_key`, and `baseline_seconds` the model's time if nothing was left to decide.
    """

    key: str
    target: str
    tvm_version: str
    space_version: str
    trials: int
    baseline_seconds: float | None
    created_at: str
    seconds: float | None = None

    @property
    def on_decisions(self) -> bool:
        """Whether it was spent on decisions."""
        return self.key.startswith(_ON_DECISIONS)


@dataclass(frozen=True)
class Trial:
    """A schedule that was measured and did not become a record: what a cost model learns from beside the records.

    The fields are those of `Record`; `seconds` is the least time of one call, None where the schedule failed.
    """

    key: str
    workload: str
    trace: str
    seconds: float | None
    target: str
    tvm_version: str
    space_version: str
    tuner: str
    created_at: str


@dataclass(frozen=True)
class Decision:
    """What measuring made of a decision that the compiler's cost model takes otherwise.

    `key` says which (`tvmflow.compiler.choices.Site.key`), `option` what was found to be fastest, `default` what the
    cost model takes; `seconds` and `default_seconds` are those of all calls of the functions that it is about.
    """

    key: str
    option: str
    default: str
    seconds: float
    default_seconds: float
    target: str
    tvm_version: str
    space_version: str
    created_at: str


Entry = Record | Effort | Trial | Decision

KINDS: dict[str, type[Entry]] = {"record": Record, "effort": Effort, "trial": Trial, "decision": Decision}


@dataclass(frozen=True)
class Context:
    """What a record is only good for: a target (`Target.canonical`), a TVM version and a search space's version."""

    target: str
    tvm_version: str
    space_version: str

    @property
    def digest(self) -> str:
        """What the names of its files begin with."""
        text = json.dumps([self.target, self.tvm_version, self.space_version])
        return hashlib.sha256(text.encode()).hexdigest()[:16]

    @property
    def is_current(self) -> bool:
        """Whether this TVM and this search space can use it."""
        return (self.tvm_version, self.space_version) == (tvm_version(), SPACE_VERSION)


def context_of(entry: Entry) -> Context:
    """What `entry` is good for."""
    return Context(entry.target, entry.tvm_version, entry.space_version)


def current_context(target: "Target") -> Context:
    """What this TVM and this search space can use for `target`."""
    return Context(target.canonical, tvm_version(), SPACE_VERSION)


def merge_efforts(efforts: Sequence[Effort]) -> Effort:
    """One effort in the place of several on one workload: all their trials, and the newest baseline that is known."""
    ordered = sorted(efforts, key=lambda effort: effort.created_at)
    timed = [effort.baseline_seconds for effort in ordered if effort.baseline_seconds is not None]
    seconds = [effort.seconds for effort in efforts if effort.trials]
    return replace(
        ordered[-1],
        trials=sum(effort.trials for effort in efforts),
        seconds=sum(map(float, filter(None, seconds))) if seconds and None not in seconds else None,
        baseline_seconds=timed[-1] if timed else None,
    )


def decisions_key(met: Iterable[str]) -> str:
    """What identifies the decisions that a model meets, by their keys."""
    return _ON_DECISIONS + hashlib.sha256("\n".join(sorted(met)).encode()).hexdigest()[:32]
