"""Tuning the compiler's own decisions: whole blocks or their parts, algorithms, the rows of tiles, layout at the edge.

They decide which functions a model is lowered to, so that no search over one function's schedules can make them. They
are made otherwise, the model is lowered again, and what is new is measured.
"""

import logging
import math
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Protocol

from tvmflow.target import Target, host
from tvmflow.tuning.cache_state import weight_bytes
from tvmflow.tuning.candidates import Candidate, Library, arguments_of
from tvmflow.tuning.measure import MeasurePool
from tvmflow.tuning.record_store import RecordStore
from tvmflow.tuning.records import Decision, Effort, current_context, decisions_key, now
from tvmflow.tuning.traces import normalize, workload_key
from tvmflow.tuning.tuner import why_not_here
from tvmflow.tuning.worker_process import TrialError

if TYPE_CHECKING:
    from tvm.tirx import PrimFunc

# All decisions of one of these kinds are made at once.
_TOGETHER = ("algorithm", "lines", "first", "last", "rows", "panel")
# Last of all, how the model's input is read and its output written, and whether blocks are computed whole; then what
# that leaves to be decided.
KINDS = (*_TOGETHER, "edge", "output", "block", *_TOGETHER)
# What another option must gain before it counts as faster: below lies the noise.
_MARGIN = 0.97
# Functions that together take less of the model's time than this are not worth a decision.
_SMALLEST_SHARE = 0.002

logger = logging.getLogger(__name__)


class Site(Protocol):
    """A decision that the compiler met: its options, the cost model's first, and whose functions it is about."""

    @property
    def key(self) -> str:
        """What identifies it."""

    @property
    def kind(self) -> str:
        """One of KINDS."""

    @property
    def subject(self) -> str:
        """What its functions are about."""

    @property
    def options(self) -> tuple[str, ...]:
        """What can be decided."""

    @property
    def parts(self) -> tuple[str, ...]:
        """Subjects that an option may leave without functions of their own."""


@dataclass(frozen=True)
class Function:
    """A function that the model is lowered to: unscheduled, scheduled by the rules, and its number of call sites."""

    name: str
    func: "PrimFunc"
    scheduled: "PrimFunc"
    subject: str
    calls: int


@dataclass(frozen=True)
class Decided:
    """What measuring made of a decision; seconds are of all calls of its functions, as decided and by the default."""

    key: str
    option: str
    default: str
    seconds: float
    default_seconds: float


@dataclass(frozen=True)
class Spent:
    """How many functions were measured: in this run, and in those before it on the same decisions."""

    trials: int
    before: int


Lower = Callable[[Mapping[str, str]], tuple[Mapping[str, Site], Sequence[Function]]]
"""Lowers and schedules the model as decisions, by their keys, say: the decisions that were met, and the functions."""


def decide(
    lower: "Lower",
    target: Target,
    store: RecordStore,
    *,
    trials: int | None,
    seconds: float | None,
    threads: int,
    on_progress: Callable[[str], None],
    timeout: float = 20.0,
) -> Spent:
    """Measure the decisions that are still open and add what is found to `store`.

    `trials` bounds that number, together with those of earlier runs on the same decisions, and `seconds` the time.
    Where this machine cannot run the target nothing is decided.
    """
    if trials == 0 or why_not_here(target) is not None:
        return Spent(0, 0)
    sites, functions = lower({})
    key = decisions_key(sites)
    efforts = [effort for effort in store.efforts(target) if effort.key == key]
    before = sum(effort.trials for effort in efforts)
    # An effort has the model's time if nothing was left to decide after it.
    if (trials is not None and before >= trials) or any(effort.baseline_seconds is not None for effort in efforts):
        return Spent(0, before)
    deadline = math.inf if seconds is None else time.monotonic() + seconds

    def record(decided: Decided) -> None:
        context = current_context(target)
        store.append(Decision(**asdict(decided), **asdict(context), created_at=now()))

    with MeasurePool(
        target.canonical,
        builders=host().cores,
        threads=threads,
        timeout=timeout,
        deadline=deadline,
        footprint=weight_bytes([(arguments_of(item.func) or (), item.calls) for item in functions]),
    ) as pool:
        decider = Decider(lower, pool, deadline=deadline, trials=None if trials is None else trials - before)
        try:
            decider.decide({name: item.option for name, item in store.decisions(target).items()}, record, on_progress)
        finally:
            if decider.trials:
                context, settled = asdict(current_context(target)), decider.settled_seconds
                store.append(Effort(key, **context, trials=decider.trials, baseline_seconds=settled, created_at=now()))
        return Spent(decider.trials, before)


class Decider:
    """Measures the options of the decisions that a model meets."""

    def __init__(
        self, lower: Lower, pool: MeasurePool, *, deadline: float = math.inf, trials: int | None = None
    ) -> None:
        """Prepare to measure what `lower` makes of the model.

        `trials` bounds the functions that are measured, `deadline` (of `time.monotonic`) the time.
        """
        self._lower = lower
        self._pool = pool
        self._deadline = deadline
        self._left = math.inf if trials is None else trials
        self._measured: dict[str, tuple[Library, float] | None] = {}
        self.trials = 0
        self.settled_seconds: float | None = None
        """The time of the model's functions once everything is decided, in seconds; None before."""

    def decide(
        self, known: Mapping[str, str], on_decided: Callable[[Decided], None], on_progress: Callable[[str], None]
    ) -> dict[str, str]:
        """Every decision that is made now, by its key; those `known` are not measured again.

        What is decided is passed on at once. Where time or trials run out the rest stays with the cost model.
        """
        made = dict(known)
        for kind in KINDS:
            if self._over():
                break
            on_progress(f"decisions: {kind}")
            decide = self._decide if kind in _TOGETHER else self._decide_in_turn
            made |= decide(kind, made, on_decided)
        if not self._over():
            total = sum(self._costs(self._lower(made)[1]).values())
            self.settled_seconds = total if math.isfinite(total) else None
        return made

    def _decide(self, kind: str, made: Mapping[str, str], on_decided: Callable[[Decided], None]) -> dict[str, str]:
        """All decisions of a kind, each option of all at once: a function's subject says whose it is."""
        sites, functions = self._lower(made)
        costs = self._costs(functions)
        open_sites = [site for site in self._open(kind, sites, made) if self._matters(costs[site.subject], costs)]
        best = {site.key: (site.options[0], costs[site.subject], functions) for site in open_sites}
        for place in range(1, max((len(site.options) for site in open_sites), default=0)):
            tried = {site.key: site.options[place] for site in open_sites if place < len(site.options)}
            _, others = self._lower({**made, **tried})
            other_costs = self._costs(others)
            if self._over():
                return {}
            for site in open_sites:
                seconds = other_costs[site.subject]
                if site.key in tried and 0 < seconds < best[site.key][1]:
                    best[site.key] = (tried[site.key], seconds, others)
        decided = {}
        for site in open_sites:
            option, seconds, others = best[site.key]
            usual, other = ([item for item in found if item.subject == site.subject] for found in (functions, others))
            decided[site.key] = self._settle(site, option, usual, other, on_decided)
        return decided

    def _decide_in_turn(
        self, kind: str, made: Mapping[str, str], on_decided: Callable[[Decided], None]
    ) -> dict[str, str]:
        """Decisions of a kind one by one: what one of them leaves, another may take."""
        decided: dict[str, str] = {}
        sites, functions = self._lower(made)
        while not self._over():
            costs = self._costs(functions)
            open_sites = self._open(kind, sites, {**made, **decided})
            involved = {site.key: sum(costs[part] for part in (site.subject, *site.parts)) for site in open_sites}
            open_sites = [site for site in open_sites if self._matters(involved[site.key], costs)]
            if not open_sites:
                break
            site = max(open_sites, key=lambda site: involved[site.key])
            other_sites, others = self._lower({**made, **decided, site.key: site.options[1]})
            faster = sum(self._costs(others).values()) < sum(costs.values())
            if self._over():
                break
            decided[site.key] = self._settle(
                site, site.options[int(faster)], _without(functions, others), _without(others, functions), on_decided
            )
            if decided[site.key] == site.options[1]:
                sites, functions = other_sites, others
        return decided

    def _open(self, kind: str, sites: Mapping[str, Site], made: Mapping[str, str]) -> list[Site]:
        return [site for key, site in sites.items() if site.kind == kind and key not in made and len(site.options) > 1]

    def _matters(self, seconds: float, costs: Mapping[str, float]) -> bool:
        return seconds >= _SMALLEST_SHARE * sum(costs.values())

    def _settle(
        self,
        site: Site,
        option: str,
        usual: Sequence[Function],
        others: Sequence[Function],
        on_decided: Callable[[Decided], None],
    ) -> str:
        """The option if it is confirmed to be faster, else the default."""
        confirmed = self._confirm(usual, others) if option != site.options[0] else None
        if confirmed is None:
            option = site.options[0]
            confirmed = (sum(self._seconds(function) for function in usual),) * 2
        on_decided(Decided(site.key, option, site.options[0], *confirmed))
        return option

    def _costs(self, functions: Iterable[Function]) -> Counter[str]:
        """The seconds of all calls by subject; infinite where one of its functions cannot be measured."""
        self._measure([function for function in functions if workload_key(function.scheduled) not in self._measured])
        costs: Counter[str] = Counter()
        for function in functions:
            costs[function.subject] += self._seconds(function)  # type: ignore[assignment]
        return costs

    def _seconds(self, function: Function) -> float:
        found = self._measured.get(workload_key(function.scheduled))
        return math.inf if found is None else found[1] * function.calls

    def _measure(self, functions: Sequence[Function]) -> None:
        unique = {workload_key(function.scheduled): function for function in functions}
        keys = list(unique)[: None if math.isinf(self._left) else int(self._left)]
        built = self._pool.build([_candidate(unique[key].scheduled) for key in keys])
        for key, library in zip(keys, built, strict=True):
            if self._over():
                return
            self.trials += 1
            self._left -= 1
            self._measured[key] = None
            try:
                if isinstance(library, TrialError):
                    raise library
                self._measured[key] = library, self._pool.time(library)
            except TrialError as error:
                logger.debug("%s cannot be measured: %s", unique[key].name, error)

    def _confirm(self, usual: Sequence[Function], others: Sequence[Function]) -> tuple[float, float] | None:
        """The seconds of both, measured in turn, if the others are right and still faster; None if not."""
        try:
            for function in others:
                library, _ = self._found(function)
                (reference,) = self._pool.build([_candidate(function.func)])
                if isinstance(reference, TrialError):
                    raise reference
                self._pool.check(library, reference)
            both = [*others, *usual]
            times = self._pool.compare(*(self._found(function)[0] for function in both))
        except TrialError as error:
            logger.debug("an option is passed over: %s", error)
            return None
        of_calls = [function.calls * time for function, time in zip(both, times, strict=True)]
        seconds, default_seconds = sum(of_calls[: len(others)]), sum(of_calls[len(others) :])
        return (seconds, default_seconds) if seconds < _MARGIN * default_seconds else None

    def _found(self, function: Function) -> tuple[Library, float]:
        found = self._measured.get(workload_key(function.scheduled))
        if found is None:
            raise TrialError(f"{function.name} was not measured")
        return found

    def _over(self) -> bool:
        return self._left <= 0 or time.monotonic() >= self._deadline


def _without(functions: Iterable[Function], others: Iterable[Function]) -> list[Function]:
    """The functions that are not among the others, or not called as often."""
    known = {(workload_key(function.scheduled), function.calls) for function in others}
    return [function for function in functions if (workload_key(function.scheduled), function.calls) not in known]


def _candidate(func: "PrimFunc") -> Candidate:
    from tvm import ir

    return Candidate(ir.save_json(normalize(func)), arguments_of(func) or ())
