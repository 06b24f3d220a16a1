"""The contest for one workload: candidates are compared with the best schedule, and faster ones become records."""

import hashlib
import logging
import math
from bisect import insort
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from tvmflow.hardware.target import Target
from tvmflow.tuning.candidates import Candidate, Library, arguments_of
from tvmflow.tuning.costmodel import warm_up
from tvmflow.tuning.measure import Measurer
from tvmflow.tuning.record_store import RecordStore
from tvmflow.tuning.records import SPACE_VERSION, Record, Trial, now, tvm_version
from tvmflow.tuning.space import Proposal, Search, TunerName, Variants, make_cost_model, make_search
from tvmflow.tuning.traces import normalize
from tvmflow.tuning.worker_process import TrialError
from tvmflow.tuning.workloads import Workload, last_line

if TYPE_CHECKING:
    from tvm.tirx import PrimFunc

# A candidate this many times slower than the best is measured by a single call.
_HOPELESS = 2.0
# A candidate counts as faster below this part of the best's time; smaller differences are noise.
_MARGIN = 0.98
# The store keeps the first trials of a workload and later ones among its fastest, for cost models to learn from.
_POPULATION, _KEPT_FASTEST = 48, 32
# The most schedules of earlier runs that a search starts from, the fastest first.
_PARENTS = 64

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class SearchOptions:
    """Options of the search for schedules, and the store of its results.

    `baseline` schedules a function by the compiler's rules; with None there is no such analytic schedule to beat.
    `variants` returns the other schedules that these rules can make of a function; with None only MetaSchedule's rules
    propose schedules. `threads` is the number of threads of the cost model.
    """

    target: Target
    store: RecordStore
    tuner: TunerName
    seed: int
    threads: int
    baseline: "Callable[[PrimFunc], PrimFunc] | None"
    variants: "Callable[[PrimFunc], Variants] | None"


class Contest:
    """The tuning of one workload: the best library so far, and the search that proposes others."""

    def __init__(
        self,
        workload: Workload,
        options: SearchOptions,
        measurer: Measurer,
        *,
        unscheduled: Candidate,
        baseline: Library | None,
        best: Library,
        best_seconds: float,
    ) -> None:
        """Begin with the schedules that `open_contest` has measured; `baseline` is the analytic one."""
        self.workload = workload
        self.best_seconds = best_seconds
        self._options = options
        self._measurer = measurer
        self._unscheduled = unscheduled
        self._baseline = baseline
        self._best = best
        self._reference: Library | None = None
        self._search: Search | None = None
        self._kept_seconds = sorted(_or_infinite(entry.seconds) for entry in workload.measurements)

    def priority(self, usual_trial_seconds: float) -> tuple[bool, float]:
        """Return the rank of this contest; the one with the largest rank continues first.

        Workloads for which the compiler's own rules have proposals left come first; then those for which another second
        is expected to save most seconds of the model's run. `usual_trial_seconds` is the duration of a trial, for a
        workload of which none was timed.
        """
        has_own_proposals = self._search is None or not self._search.is_beyond_rules
        return has_own_proposals, self.workload.share * self.workload.forecast.gain_per_second(usual_trial_seconds)

    def propose(self, batch: int, cost_model: object) -> list[Proposal]:
        """Return the next schedules to measure, about `batch` of them; an empty list when there are no more.

        `cost_model` ranks schedules: a result of `make_warm_cost_model`. Only the first call reads `batch` and
        `cost_model`. For a function that MetaSchedule has no rule for, TVM raises errors of many types.
        """
        if self._search is None:
            self._search = self._make_search(batch, cost_model)
        return self._search.propose()

    def build(self, proposals: Sequence[Proposal]) -> list[Library | TrialError]:
        """Build proposals, and return for each of them its library, or the error if it cannot be built."""
        return self._measurer.build([replace(self._unscheduled, trace=proposal.trace) for proposal in proposals])

    def refresh_best_seconds(self) -> None:
        """Measure the best library again, because the load of this machine changes; keep the old time on failure."""
        try:
            self.best_seconds = self._measurer.time(self._best)
        except TrialError as error:
            logger.debug("%s: the best schedule was not measured again: %s", self.workload.task.name, error)

    @property
    def time_limit(self) -> float:
        """Twice the best library's seconds: a candidate that takes longer is timed by one rough sample only."""
        return self.best_seconds * _HOPELESS

    def learn(self, proposals: Sequence[Proposal], seconds: Sequence[float | None]) -> None:
        """Pass the measured seconds of proposals to the search, None for those that failed."""
        if self._search is not None:
            self._search.tell(proposals, seconds)

    def judge(
        self, proposal: Proposal, library: Library | TrialError, result: float | TrialError, trial: int
    ) -> float | None:
        """Judge a measured candidate, and return the seconds of its call; None if it failed or its results are wrong.

        `library` is the built candidate and `result` the seconds of its call; either is the error instead where that
        step failed. A candidate that is faster than the best becomes the best and a record; others may be stored for
        cost models to learn from. `trial` is the number of the trial within the run.
        """
        name = self.workload.task.name
        seconds: float | None = None
        is_best = False
        if isinstance(library, TrialError) or isinstance(result, TrialError):
            logger.debug("%s: trial %d failed: %s", name, trial, library if isinstance(library, TrialError) else result)
        else:
            seconds = result
            try:
                is_best = result < self.best_seconds and self._challenge(proposal, library, trial)
                if not is_best:
                    library.path.unlink(missing_ok=True)
            except TrialError as error:
                logger.debug("%s: trial %d failed: %s", name, trial, error)
                seconds = None
        if not is_best:
            self._keep(proposal, seconds)
        return seconds

    def _challenge(self, proposal: Proposal, library: Library, trial: int) -> bool:
        """Make `library` the best if its results are right and it is faster, and return whether it is.

        It is measured in turn with the best. Raises TrialError when it is wrong or fails.
        """
        workload = self.workload
        self._measurer.check(library, self._build_reference())
        rivals = [self._best]
        if self._baseline is not None and self._baseline is not self._best:
            rivals.append(self._baseline)
        seconds, *others = self._measurer.compare(library, *rivals)
        if seconds >= min(others) * _MARGIN:
            return False
        if self._baseline is not None:
            workload.baseline_seconds = others[-1]
        workload.seconds = (workload.seconds or seconds) * seconds / min(others)
        self._options.store.append(
            Record(
                key=workload.key,
                workload=self._unscheduled.func,
                trace=proposal.trace,
                seconds=seconds,
                baseline_seconds=workload.baseline_seconds,
                target=self._options.target.canonical,
                tvm_version=tvm_version(),
                space_version=SPACE_VERSION,
                tuner=self._options.tuner,
                trial=trial,
                created_at=now(),
            )
        )
        self._best = library
        self.best_seconds = workload.best_seconds = seconds
        workload.is_tuned = True
        return True

    def _build_reference(self) -> Library:
        """The unscheduled function, whose results candidates must have. Raises TrialError when it does not run."""
        if self._reference is None:
            try:
                (reference,) = self._measurer.build([self._unscheduled])
                if isinstance(reference, TrialError):
                    raise reference
                self._measurer.expect(reference)
            except TrialError as error:
                self.workload.reason = (
                    f"the unscheduled function, which results are compared with, does not run: {error}"
                )
                raise
            self._reference = reference
        return self._reference

    def _keep(self, proposal: Proposal, seconds: float | None) -> None:
        """Store a measurement that is no record, unless the store has enough of the workload that are faster."""
        order = _or_infinite(seconds)
        if len(self._kept_seconds) >= _POPULATION and order >= self._kept_seconds[_KEPT_FASTEST - 1]:
            return
        insort(self._kept_seconds, order)
        self._options.store.append(
            Trial(
                key=self.workload.key,
                workload=self._unscheduled.func,
                trace=proposal.trace,
                seconds=seconds,
                target=self._options.target.canonical,
                tvm_version=tvm_version(),
                space_version=SPACE_VERSION,
                tuner=self._options.tuner,
                created_at=now(),
            )
        )

    def _make_search(self, batch: int, cost_model: object) -> Search:
        options, workload = self._options, self.workload
        # With the number of earlier trials in the seed, a run does not repeat the proposals of the run before it.
        trials = sum(effort.trials for effort in workload.efforts)
        digest = hashlib.sha256(f"{options.seed}:{workload.key}:{trials}".encode()).digest()
        func = normalize(workload.task.func)
        search = make_search(
            func,
            options.target.canonical,
            options.tuner,
            batch=batch,
            seed=int.from_bytes(digest[:4], "big") % (2**31 - 2) + 1,
            cost_model=cost_model,
            variants=options.variants(func) if options.variants is not None else None,
        )
        best_trace = None
        if workload.record is not None:
            best_trace = workload.record.trace
            search.start_from(best_trace, workload.record.seconds)
        self._add_parents(search, best_trace)
        return search

    def _add_parents(self, search: Search, best_trace: str | None) -> None:
        """Let the search start from the fastest schedules that earlier runs have measured."""
        parents = {
            entry.trace: entry.seconds
            for entry in self.workload.measurements
            if entry.workload == self._unscheduled.func
        }
        for trace, seconds in sorted(parents.items(), key=lambda item: (_or_infinite(item[1]), item[0]))[:_PARENTS]:
            if seconds is not None and trace != best_trace:
                try:
                    search.start_from(trace, seconds)
                except Exception as error:  # TVM raises errors of many types for a trace that does not fit.
                    name = self.workload.task.name
                    logger.debug("%s: a schedule of an earlier run does not replay: %s", name, last_line(error))


def open_contest(
    workload: Workload, options: SearchOptions, measurer: Measurer, is_over: Callable[[], bool]
) -> Contest | None:
    """Build and measure the schedules that candidates must beat, and return the workload's contest.

    These are the best record and the analytic schedule. The unscheduled function takes the place of an analytic
    schedule that is missing, and of both where neither can be measured. Returns None, with the workload's `reason` set,
    when none of them can be built and measured. A record that fails is removed from the workload, unless `is_over`
    returns True: the run's budget is spent then, and the record may have failed for lack of time.
    """
    from tvm import ir

    func = normalize(workload.task.func)
    unscheduled = Candidate(ir.save_json(func), arguments_of(func) or ())
    analytic = _schedule(options.baseline, workload) if options.baseline is not None else None
    candidates = [unscheduled]
    if analytic is not None:
        candidates = [Candidate(ir.save_json(normalize(analytic)), arguments_of(analytic) or ())]
    if workload.record is not None:
        candidates.append(replace(unscheduled, trace=workload.record.trace))
    workload.baseline_seconds = workload.best_seconds = None
    starts = [_measure(workload, measurer, library) for library in measurer.build(candidates)]
    baseline = starts[0] if analytic is not None else None
    if workload.record is not None and starts[-1] is None and not is_over():
        workload.record = None
    if analytic is not None and not any(starts):
        starts = [_measure(workload, measurer, *measurer.build([unscheduled]))]
    measurements = [start for start in starts if start is not None]
    if not measurements:
        return None
    best, best_seconds = min(measurements, key=lambda start: start[1])
    baseline_library = None
    if baseline is not None:
        baseline_library, workload.baseline_seconds = baseline
    workload.reason, workload.best_seconds = None, best_seconds
    workload.seconds, workload.untuned_seconds = best_seconds, workload.baseline_seconds or measurements[0][1]
    return Contest(
        workload,
        options,
        measurer,
        unscheduled=unscheduled,
        baseline=baseline_library,
        best=best,
        best_seconds=best_seconds,
    )


def make_warm_cost_model(options: SearchOptions) -> object:
    """Return the cost model of a run; None for a tuner that uses none.

    The model of `xgb` has learnt from the measurements that the store has for the target.
    """
    cost_model = make_cost_model(options.tuner, seed=options.seed, threads=options.threads)
    if options.tuner != "xgb":
        return cost_model
    try:
        number = warm_up(cost_model, options.store.measurements(options.target), options.target.canonical)
        logger.info("the cost model starts from %d schedules", number)
    except Exception as error:  # TVM raises errors of many types for what another version recorded.
        logger.warning("the cost model starts from nothing: %s", last_line(error))
        return make_cost_model(options.tuner, seed=options.seed, threads=options.threads)
    return cost_model


def _measure(workload: Workload, measurer: Measurer, library: Library | TrialError) -> tuple[Library, float] | None:
    """A library that candidates must beat with its seconds; None, with the workload's reason set, where it fails."""
    try:
        if isinstance(library, TrialError):
            raise library
        return library, measurer.time(library)
    except TrialError as error:
        logger.warning("%s: the schedule to start from cannot be measured: %s", workload.task.name, error)
        workload.reason = f"the schedule to start from cannot be measured: {error}"
        return None


def _schedule(baseline: "Callable[[PrimFunc], PrimFunc]", workload: Workload) -> "PrimFunc | None":
    try:
        return baseline(workload.task.func)
    except Exception as error:  # Whatever is wrong with the analytic schedule, the search may find a better one.
        logger.warning("%s has no analytic schedule to start from: %s", workload.task.name, last_line(error))
        return None


def _or_infinite(seconds: float | None) -> float:
    return math.inf if seconds is None else seconds
