"""The tuning of the compiler's own decisions, such as an operator's algorithm, or whether a block is one function.

These decisions determine which functions a model is lowered to, so that a search over the schedules of one function
cannot make them. To measure an option, the model is lowered with it, and the functions that change are measured.
"""

import logging
import math
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Protocol

from tvmflow.hardware.target import Target
from tvmflow.tuning.cache_state import weight_bytes
from tvmflow.tuning.candidates import Candidate, Library, arguments_of
from tvmflow.tuning.measure import Measurer, use_measurer
from tvmflow.tuning.record_store import RecordStore
from tvmflow.tuning.records import Decision, Effort, MeasuredDecision, current_context, decisions_key, now
from tvmflow.tuning.traces import normalize, workload_key
from tvmflow.tuning.worker_process import TrialError
from tvmflow.tuning.workloads import why_not_measurable_here

if TYPE_CHECKING:
    from tvm.tirx import PrimFunc

# All decisions of such a kind are measured together: each lowering of the model takes the next option of every one.
_TOGETHER = ("algorithm", "lines", "first", "last", "rows", "panel")
# In this order: after the kinds above come how the model's input is read and its output written, and whether blocks are
# computed whole; then the kinds above once more, for the functions that are new.
KINDS = (*_TOGETHER, "edge", "output", "block", *_TOGETHER)
# An option counts as faster below this part of the default's time; smaller differences are noise.
_MARGIN = 0.97
# Functions that together take less of the model's time than this are not worth a decision.
_SMALLEST_SHARE = 0.002

logger = logging.getLogger(__name__)


class Site(Protocol):
    """A decision of the compiler that a model contains (`tvmflow.compiler.choices.Site`)."""

    @property
    def key(self) -> str:
        """The name of the decision, the same in every model and run."""

    @property
    def kind(self) -> str:
        """The kind of the decision, one of KINDS."""

    @property
    def subject(self) -> str:
        """The text that names the operator that the decision is about, such as a convolution's shapes."""

    @property
    def options(self) -> tuple[str, ...]:
        """The options, the cost model's default first."""

    @property
    def parts(self) -> tuple[str, ...]:
        """The subjects of the operators that one option joins in one function and another leaves in separate ones."""

    @property
    def cycles(self) -> tuple[float, ...]:
        """The cost model's estimates of the options; empty where it has none."""


@dataclass(frozen=True)
class Function:
    """A function that the model is lowered to: unscheduled (`func`), and scheduled by the compiler's rules.

    `subject` is the `Site.subject` of the decisions about it, empty where there are none; `calls` is the number of its
    call sites.
    """

    name: str
    func: "PrimFunc"
    scheduled: "PrimFunc"
    subject: str
    calls: int


@dataclass(frozen=True)
class TrialCount:
    """The number of measured functions: in this run, and in earlier runs on the same decisions."""

    trials: int
    earlier: int


Lower = Callable[[Mapping[str, str]], tuple[Mapping[str, Site], Sequence[Function]]]
"""Lowers and schedules the model with options by their decisions' keys; returns its sites by key, and its functions."""


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
    measurer: Measurer | None = None,
) -> TrialCount:
    """Find the fastest option of each decision that `store` has no measurement of, and add the results to `store`.

    An option is measured by lowering the model with it (`lower`) and timing the functions that result. `trials` bounds
    the number of functions that this run and earlier runs on the same decisions measure in all; `seconds` bounds this
    run's time; None means no bound. A function runs with `threads` threads; its build or run is killed after `timeout`
    seconds. `on_progress` gets a text when a kind of decisions begins. `measurer` builds and times the functions; with
    None, worker processes on this machine do so.

    Returns two numbers of measured functions: of this run, and of all earlier runs. For a target that this machine
    cannot run, and for 0 `trials`, nothing is measured, and both numbers are 0.
    """
    if trials == 0 or why_not_measurable_here(target) is not None:
        return TrialCount(0, 0)
    sites, functions = lower({})
    key = decisions_key(sites)
    efforts = [effort for effort in store.efforts(target) if effort.key == key]
    earlier = sum(effort.trials for effort in efforts)
    # An effort has the model's time if nothing was left to decide after it.
    if (trials is not None and earlier >= trials) or any(effort.baseline_seconds is not None for effort in efforts):
        return TrialCount(0, earlier)
    deadline = math.inf if seconds is None else time.monotonic() + seconds

    def record(decision: MeasuredDecision) -> None:
        store.append(Decision(**asdict(decision), **asdict(current_context(target)), created_at=now()))

    weights = weight_bytes([(arguments_of(item.func) or (), item.calls) for item in functions])
    with use_measurer(measurer, target, threads=threads, timeout=timeout, deadline=deadline, weights=weights) as pool:
        decider = Decider(lower, pool, deadline=deadline, trials=None if trials is None else trials - earlier)
        try:
            decider.decide({name: item.option for name, item in store.decisions(target).items()}, record, on_progress)
        finally:
            if decider.trials:
                context, seconds_at_end = asdict(current_context(target)), decider.settled_seconds
                effort = Effort(
                    key, **context, trials=decider.trials, baseline_seconds=seconds_at_end, created_at=now()
                )
                store.append(effort)
        return TrialCount(decider.trials, earlier)


class Decider:
    """Measures the options of a model's decisions; `trials` is the number of functions measured so far."""

    def __init__(self, lower: Lower, measurer: Measurer, *, deadline: float, trials: int | None) -> None:
        """Prepare to measure the model that `lower` lowers.

        `trials` bounds the number of functions that are measured, `deadline` (of `time.monotonic`) the time.
        """
        self._lower = lower
        self._measurer = measurer
        self._deadline = deadline
        self._trials_left = math.inf if trials is None else trials
        self._measurements: dict[str, tuple[Library, float] | None] = {}
        self.trials = 0
        self.settled_seconds: float | None = None
        """The time of the model's functions once everything is decided, in seconds; None before."""

    def decide(
        self,
        options: Mapping[str, str],
        on_decision: Callable[[MeasuredDecision], None],
        on_progress: Callable[[str], None],
    ) -> dict[str, str]:
        """Return `options` with the option found for each further decision, by the decision's key.

        The decisions in `options` are not measured again. Each new decision is passed to `on_decision` at once, and
        `on_progress` gets a text when a kind of decisions begins. Decisions that take too little of the model's time,
        or that time or trials do not suffice for, are not in the result: the compiler takes the cost model's default.
        """
        options = dict(options)
        for kind in KINDS:
            if self._is_over():
                break
            on_progress(f"decisions: {kind}")
            decide = self._decide_together if kind in _TOGETHER else self._decide_in_turn
            options |= decide(kind, options, on_decision)
        if not self._is_over():
            total = sum(self._seconds_by_subject(self._lower(options)[1]).values())
            self.settled_seconds = total if math.isfinite(total) else None
        return options

    def _decide_together(
        self, kind: str, options: Mapping[str, str], on_decision: Callable[[MeasuredDecision], None]
    ) -> dict[str, str]:
        """Decide all sites of a kind, lowering the model once for each place in their lists of options.

        A function belongs to the site with its subject.
        """
        sites, functions = self._lower(options)
        seconds = self._seconds_by_subject(functions)
        open_sites = [
            site for site in self._open_sites(kind, sites, options) if self._matters(seconds[site.subject], seconds)
        ]
        best = {site.key: (site.options[0], seconds[site.subject], functions) for site in open_sites}
        for place in range(1, max((len(site.options) for site in open_sites), default=0)):
            others = {site.key: site.options[place] for site in open_sites if place < len(site.options)}
            _, other_functions = self._lower({**options, **others})
            other_seconds = self._seconds_by_subject(other_functions)
            if self._is_over():
                return {}
            for site in open_sites:
                if site.key in others and 0 < other_seconds[site.subject] < best[site.key][1]:
                    best[site.key] = (others[site.key], other_seconds[site.subject], other_functions)
        new_options = {}
        for site in open_sites:
            option, _, best_functions = best[site.key]
            default, challengers = (
                [function for function in group if function.subject == site.subject]
                for group in (functions, best_functions)
            )
            new_options[site.key] = self._settle(site, option, default, challengers, on_decision)
        return new_options

    def _decide_in_turn(
        self, kind: str, options: Mapping[str, str], on_decision: Callable[[MeasuredDecision], None]
    ) -> dict[str, str]:
        """Decide the sites of a kind one by one, the costliest first, because one decision may remove other sites."""
        new_options: dict[str, str] = {}
        sites, functions = self._lower(options)
        while not self._is_over():
            seconds = self._seconds_by_subject(functions)
            open_sites = self._open_sites(kind, sites, {**options, **new_options})
            affected_seconds = {
                site.key: sum(seconds[part] for part in (site.subject, *site.parts)) for site in open_sites
            }
            open_sites = [site for site in open_sites if self._matters(affected_seconds[site.key], seconds)]
            if not open_sites:
                break
            site = max(open_sites, key=lambda site: affected_seconds[site.key])
            other_sites, other_functions = self._lower({**options, **new_options, site.key: site.options[1]})
            is_faster = sum(self._seconds_by_subject(other_functions).values()) < sum(seconds.values())
            if self._is_over():
                break
            new_options[site.key] = self._settle(
                site,
                site.options[int(is_faster)],
                without(functions, other_functions),
                without(other_functions, functions),
                on_decision,
            )
            if new_options[site.key] == site.options[1]:
                sites, functions = other_sites, other_functions
        return new_options

    def _open_sites(self, kind: str, sites: Mapping[str, Site], options: Mapping[str, str]) -> list[Site]:
        return [site for key, site in sites.items() if site.kind == kind and key not in options and site.options[1:]]

    def _matters(self, seconds: float, all_seconds: Mapping[str, float]) -> bool:
        return seconds >= _SMALLEST_SHARE * sum(all_seconds.values())

    def _settle(
        self,
        site: Site,
        option: str,
        default: Sequence[Function],
        challengers: Sequence[Function],
        on_decision: Callable[[MeasuredDecision], None],
    ) -> str:
        """Return the option if a comparison confirms that its functions are faster, else the default."""
        comparison = self._compare(default, challengers) if option != site.options[0] else None
        if comparison is None:
            option = site.options[0]
            comparison = (sum(self._seconds(function) for function in default),) * 2
        on_decision(MeasuredDecision(site.key, option, site.options[0], *comparison))
        return option

    def _seconds_by_subject(self, functions: Iterable[Function]) -> Counter[str]:
        """The seconds of all calls by subject; infinite where one of its functions cannot be measured."""
        self._measure(
            [function for function in functions if workload_key(function.scheduled) not in self._measurements]
        )
        seconds: Counter[str] = Counter()
        for function in functions:
            seconds[function.subject] += self._seconds(function)  # type: ignore[assignment]
        return seconds

    def _seconds(self, function: Function) -> float:
        measurement = self._measurements.get(workload_key(function.scheduled))
        return math.inf if measurement is None else measurement[1] * function.calls

    def _measure(self, functions: Sequence[Function]) -> None:
        unique = {workload_key(function.scheduled): function for function in functions}
        keys = list(unique)[: None if math.isinf(self._trials_left) else int(self._trials_left)]
        libraries = self._measurer.build([candidate(unique[key].scheduled) for key in keys])
        for key, library in zip(keys, libraries, strict=True):
            if self._is_over():
                return
            self.trials += 1
            self._trials_left -= 1
            self._measurements[key] = None
            try:
                if isinstance(library, TrialError):
                    raise library
                self._measurements[key] = library, self._measurer.time(library)
            except TrialError as error:
                logger.debug("%s cannot be measured: %s", unique[key].name, error)

    def _compare(self, default: Sequence[Function], challengers: Sequence[Function]) -> tuple[float, float] | None:
        """Measure both in turn; return the seconds of both if the challengers are right and faster, else None."""
        try:
            for function in challengers:
                library = self._library(function)
                (reference,) = self._measurer.build([candidate(function.func)])
                if isinstance(reference, TrialError):
                    raise reference
                self._measurer.check(library, reference)
            functions = [*challengers, *default]
            times = self._measurer.compare(*(self._library(function) for function in functions))
        except TrialError as error:
            logger.debug("an option is passed over: %s", error)
            return None
        of_calls = [function.calls * time for function, time in zip(functions, times, strict=True)]
        seconds, default_seconds = sum(of_calls[: len(challengers)]), sum(of_calls[len(challengers) :])
        return (seconds, default_seconds) if seconds < _MARGIN * default_seconds else None

    def _library(self, function: Function) -> Library:
        measurement = self._measurements.get(workload_key(function.scheduled))
        if measurement is None:
            raise TrialError(f"{function.name} was not measured")
        return measurement[0]

    def _is_over(self) -> bool:
        return self._trials_left <= 0 or time.monotonic() >= self._deadline


def without(functions: Iterable[Function], others: Iterable[Function]) -> list[Function]:
    """Return the functions for which `others` has none with the same scheduled code and the same number of calls."""
    keys = {(workload_key(function.scheduled), function.calls) for function in others}
    return [function for function in functions if (workload_key(function.scheduled), function.calls) not in keys]


def candidate(func: "PrimFunc") -> Candidate:
    """Return a function as a candidate for measuring."""
    from tvm import ir

    return Candidate(ir.save_json(normalize(func)), arguments_of(func) or ())
