"""Tuning records: the results of measurements, each valid for one target, TVM version and search space."""

import hashlib
import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from functools import cache
from importlib.metadata import version
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tvmflow.hardware.target import Target

# Raise it when a change of the rules of `space.py` makes old traces fail to replay or no longer the best.
SPACE_VERSION = "3"

_ON_DECISIONS = "decisions-"


@cache
def tvm_version() -> str:
    """Return the installed TVM's version; only the version that recorded a trace replays it."""
    return version("apache-tvm")


def now() -> str:
    """Return the present time in UTC, in ISO 8601 to the second."""
    return datetime.now(UTC).isoformat(timespec="seconds")


@dataclass(frozen=True)
class Record:
    """A schedule that was measured, gave the right results, and was faster than the best one before it.

    `key` is `workload_key` of the function; `workload` is the function as `tvm.ir.save_json` writes it; `trace` is the
    schedule's trace in JSON; `seconds` and `baseline_seconds` are the least times of one call with this schedule and
    with the analytic one, sampled alternately on one machine (`baseline_seconds` is None where there was no analytic
    schedule); `target` is `Target.canonical`; `tuner` names the search that proposed it; `trial` counts from 1 within
    the run; `created_at` is UTC in ISO 8601.
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
    """The number of trials that a run spent on a workload, whether or not they led to a record.

    It tells a second run that a workload was tuned even where no schedule was faster than the analytic one.
    `baseline_seconds` is the time of a call with the analytic schedule; `seconds` is the duration of all these trials,
    None where they were not timed.

    There is one effort for all decisions of a model together. Its `key` is `decisions_key`, and its `baseline_seconds`
    is the time of the model's functions once nothing was left to decide, None before.
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
    def is_on_decisions(self) -> bool:
        """Whether the trials were spent on the compiler's decisions."""
        return self.key.startswith(_ON_DECISIONS)


@dataclass(frozen=True)
class Trial:
    """A schedule that was measured and did not become a record; cost models learn from it as from records.

    The fields are as in `Record`; `seconds` is the least time of one call, None where the schedule failed.
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
class MeasuredDecision:
    """The fastest option of one of the compiler's decisions, as it was measured.

    `key` identifies the decision (`tvmflow.compiler.choices.Site.key`); `option` is the fastest option and `default`
    the cost model's; `seconds` and `default_seconds` are the times of all calls of the functions that it affects.
    """

    key: str
    option: str
    default: str
    seconds: float
    default_seconds: float


@dataclass(frozen=True)
class Decision(MeasuredDecision):
    """A measured decision with the conditions under which it is valid, and the time at which it was recorded."""

    target: str
    tvm_version: str
    space_version: str
    created_at: str


Entry = Record | Effort | Trial | Decision

KINDS: dict[str, type[Entry]] = {"record": Record, "effort": Effort, "trial": Trial, "decision": Decision}


@dataclass(frozen=True)
class Context:
    """The conditions under which an entry is valid: `Target.canonical`, TVM's version and that of the search space."""

    target: str
    tvm_version: str
    space_version: str

    @property
    def digest(self) -> str:
        """The first 16 hexadecimal digits of the context's SHA-256; the names of its files begin with them."""
        text = json.dumps([self.target, self.tvm_version, self.space_version])
        return hashlib.sha256(text.encode()).hexdigest()[:16]

    @property
    def is_current(self) -> bool:
        """Whether this TVM and this version of the search space can use the entries of the context."""
        return (self.tvm_version, self.space_version) == (tvm_version(), SPACE_VERSION)


def context_of(entry: Entry) -> Context:
    """Return the context in which an entry is valid."""
    return Context(entry.target, entry.tvm_version, entry.space_version)


def current_context(target: "Target") -> Context:
    """Return the context whose records this TVM and this version of the search space can use for `target`."""
    return Context(target.canonical, tvm_version(), SPACE_VERSION)


def merge_efforts(efforts: Sequence[Effort]) -> Effort:
    """Return one effort in place of several on one workload: the newest one, with the sum of all trials.

    Its `baseline_seconds` are the newest that are not None. Its `seconds` are the sum, or None if an effort with trials
    has none. Raises IndexError if `efforts` is empty.
    """
    by_time = sorted(efforts, key=lambda effort: effort.created_at)
    baselines = [effort.baseline_seconds for effort in by_time if effort.baseline_seconds is not None]
    seconds = [effort.seconds for effort in efforts if effort.trials]
    return replace(
        by_time[-1],
        trials=sum(effort.trials for effort in efforts),
        seconds=sum(map(float, filter(None, seconds))) if seconds and None not in seconds else None,
        baseline_seconds=baselines[-1] if baselines else None,
    )


def decisions_key(keys: Iterable[str]) -> str:
    """Return the key of all decisions of a model together, from the keys of the decisions in any order."""
    return _ON_DECISIONS + hashlib.sha256("\n".join(sorted(keys)).encode()).hexdigest()[:32]
