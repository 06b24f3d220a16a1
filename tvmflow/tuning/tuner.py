"""The tuner: spends a budget of trials or time on the workloads of a model, where it is expected to save most."""

import math
import time
from collections.abc import Callable, Sequence
from contextlib import closing
from typing import TYPE_CHECKING

from tvmflow.errors import TuneError
from tvmflow.hardware.target import Target, host
from tvmflow.tuning.budget import Budget
from tvmflow.tuning.cache_state import weight_bytes
from tvmflow.tuning.candidates import arguments_of
from tvmflow.tuning.contest import Contest, SearchOptions, make_warm_cost_model, open_contest
from tvmflow.tuning.forecast import ROUND, mean_trial_seconds, saving_of_next_minute
from tvmflow.tuning.measure import Measurer, use_measurer
from tvmflow.tuning.record_store import RecordStore
from tvmflow.tuning.records import SPACE_VERSION, Effort, now, tvm_version
from tvmflow.tuning.report import Progress, TuneReport
from tvmflow.tuning.runner import Device
from tvmflow.tuning.space import TUNERS, Proposal, TunerName, Variants
from tvmflow.tuning.workloads import (
    Task,
    Workload,
    estimate_latency,
    last_line,
    load_workloads,
    why_not_measurable_here,
    why_not_measurable_on_device,
)

if TYPE_CHECKING:
    from tvm.tirx import PrimFunc

# Proposals come in rounds: small enough to learn often, large enough to spread the cost of proposing.
_MIN_ROUND, _MAX_ROUND = 4, ROUND
# The points of a curve at most.
_POINTS = 200


def tune(
    tasks: Sequence[Task],
    target: Target,
    budget: Budget,
    store: RecordStore,
    *,
    tuner: TunerName = "xgb",
    seed: int = 0,
    baseline: "Callable[[PrimFunc], PrimFunc] | None" = None,
    variants: "Callable[[PrimFunc], Variants] | None" = None,
    on_progress: Callable[[Progress], None] | None = None,
    threads: int | None = None,
    timeout: float = 20.0,
    device: Device | None = None,
    measurer: Measurer | None = None,
) -> TuneReport:
    """Search faster schedules for `tasks` and add them to `store`; candidates run on this machine, or on `device`.

    `baseline` returns the compiler's own schedule of a function, which is measured first. A candidate becomes a record
    only if its results equal those of the unscheduled function and it is faster than the best schedule so far, both
    sampled alternately: a function with a record is never slower than one without. Without `baseline`, candidates must
    be faster than the unscheduled function. `variants` returns the other schedules that the compiler's rules can make
    of a function; these are tried first. Trials go to the workload where another second is expected to save most of the
    model's time.

    A budget of trials is for the model, not for the run: trials of earlier runs in `store` count. So a second run, or
    the run after a retraining, returns at once. A run with `until` returns at once if little more can be gained. A
    budget of minutes alone is spent in full.

    `on_progress`, if there is one, receives the progress after each trial. `threads` is the number that a candidate
    runs with (default: the target's, at most this machine's cores); the build or run of one candidate is killed after
    `timeout` seconds. `measurer` builds and measures in place of processes here or on `device`; it is not closed.
    Records are on disk at once, so that an interrupt loses nothing; a KeyboardInterrupt propagates after the worker
    processes have ended. Functions that cannot be tuned (symbolic shapes, a target that this machine cannot run) are
    reported as skipped.

    Raises TuneError for an unknown tuner, when nothing can be measured, and when all devices are lost; RemoteError when
    there are no devices at first.
    """
    start_time = time.monotonic()
    if tuner not in TUNERS:
        raise TuneError(f"{tuner!r} is no tuner; expected one of {', '.join(TUNERS)}")
    threads = threads or (min(target.threads, host().cores) if device is None else target.threads)
    options = SearchOptions(target, store, tuner, seed, threads, baseline, variants)
    reason = why_not_measurable_here(target) if device is None else why_not_measurable_on_device(target)
    run = _Run(load_workloads(tasks, target, store, budget, reason), options, budget, start_time, on_progress)
    workloads = run.open_workloads()
    if workloads and run.total_trials != 0 and not run.is_enough(workloads):
        weights, deadline = run.weight_bytes(), run.deadline
        with use_measurer(
            measurer, target, threads=threads, timeout=timeout, deadline=deadline, weights=weights, device=device
        ) as pool:
            run.spend(pool, workloads)
    return run.report()


class _Run:
    """One call of `tune`: which workload is tuned next, when the run ends, and what it reports."""

    def __init__(
        self,
        workloads: list[Workload],
        options: SearchOptions,
        budget: Budget,
        start_time: float,
        on_progress: Callable[[Progress], None] | None,
    ) -> None:
        self.deadline = math.inf if budget.minutes is None else start_time + 60.0 * budget.minutes
        self._start_time = start_time
        self._workloads = workloads
        self._options = options
        self._budget = budget
        self._on_progress = on_progress
        self._trials = 0
        self._latencies: list[float] = []
        self.total_trials = self._trials_to_spend()

    def open_workloads(self) -> list[Workload]:
        """Return the workloads that can be tuned and have not had `early_stopping` trials in vain."""
        return [item for item in self._workloads if item.reason is None and not self._is_exhausted(item)]

    def weight_bytes(self) -> int:
        """Return the bytes of the weights of all functions of static shape."""
        return weight_bytes([(arguments_of(item.task.func) or (), item.task.weight) for item in self._workloads])

    def is_enough(self, workloads: Sequence[Workload]) -> bool:
        """Whether another minute spent on `workloads` is expected to save less than the budget's `until`."""
        if self._budget.until is None or any(workload.seconds is None for workload in workloads):
            return False
        return self._expected_saving(workloads) < self._budget.until

    def spend(self, measurer: Measurer, workloads: Sequence[Workload]) -> None:
        """Measure candidates until the budget is spent or no workload has any left."""
        contests: list[Contest] = []
        for workload in workloads:
            if not self._is_over():
                contest = open_contest(workload, self._options, measurer, self._is_over)
                contests += [contest] if contest is not None else []
        if not contests and not self._is_over():
            raise TuneError(
                f"not one of {len(workloads)} functions could be built and measured ({workloads[0].task.name}: "
                f"{workloads[0].reason}); check that this machine has a C++ compiler and can run "
                f"{self._options.target.name}"
            )
        share = _MAX_ROUND if self.total_trials is None else math.ceil(self.total_trials / max(1, len(contests)))
        batch = min(max(share, _MIN_ROUND), _MAX_ROUND)
        cost_model = make_warm_cost_model(self._options) if contests else None
        active = list(contests)
        self._latencies.append(sum(workload.share for workload in self._workloads))
        while active and not self._is_over() and not self.is_enough([contest.workload for contest in active]):
            usual = mean_trial_seconds([item.workload.forecast for item in active])
            contest, start_time = max(active, key=lambda item: item.priority(usual)), time.monotonic()
            try:
                proposals = contest.propose(batch, cost_model)
            except Exception as error:  # MetaSchedule raises errors of many types without a rule for it.
                contest.workload.reason = f"MetaSchedule cannot schedule it: {last_line(error)}"
                active.remove(contest)
                continue
            if not proposals:
                active.remove(contest)
                continue
            rest = len(proposals) if self.total_trials is None else self.total_trials - self._trials
            self._measure_round(measurer, contest, proposals[:rest], active, start_time)
            if contest.workload.reason is not None or self._is_exhausted(contest.workload):
                active.remove(contest)
        for contest in contests:
            # An effort without trials tells the next run that the workload was considered.
            if contest.workload.trials == 0:
                self._record_effort(contest.workload, 0)

    def report(self) -> TuneReport:
        """Return the result of the run."""
        return TuneReport(
            tuple(workload.report() for workload in self._workloads),
            self._trials,
            time.monotonic() - self._start_time,
            estimate_latency(self._workloads),
            self._curve(),
        )

    def _measure_round(
        self,
        measurer: Measurer,
        contest: Contest,
        proposals: Sequence[Proposal],
        active: Sequence[Contest],
        start_time: float,
    ) -> None:
        """Measure `proposals`, whose search began at `start_time` (monotonic), and forecast what the next ones save."""
        workload = contest.workload
        seconds_before = workload.seconds or contest.best_seconds
        libraries = contest.build(proposals)
        seconds: list[float | None] = []
        contest.refresh_best_seconds()
        trials_before = workload.trials
        try:
            with closing(measurer.times(libraries, lambda: contest.time_limit)) as times:
                for proposal, library in zip(proposals, libraries, strict=True):
                    if self._is_over() or workload.reason is not None:
                        break
                    self._trials += 1
                    workload.trials += 1
                    seconds.append(contest.judge(proposal, library, next(times), self._trials))
                    self._latencies.append(sum(item.share for item in self._workloads))
                    self._report_progress(contest, active)
            contest.learn(proposals[: len(seconds)], seconds)
        finally:
            # An interrupted round counts as well. This run and the next one forecast from the same seconds.
            elapsed = time.monotonic() - start_time
            self._record_effort(workload, workload.trials - trials_before, elapsed)
        saving = 1 - (workload.seconds or seconds_before) / seconds_before
        workload.forecast.update(len(seconds), saving, elapsed)

    def _record_effort(self, workload: Workload, trials: int, seconds: float | None = None) -> None:
        self._options.store.append(
            Effort(
                key=workload.key,
                target=self._options.target.canonical,
                tvm_version=tvm_version(),
                space_version=SPACE_VERSION,
                trials=trials,
                baseline_seconds=workload.baseline_seconds,
                created_at=now(),
                seconds=seconds,
            )
        )

    def _trials_to_spend(self) -> int | None:
        """The budget less the trials of earlier runs on these workloads; None where the budget is time."""
        if self._budget.trials is None:
            return None
        workloads = [workload for workload in self._workloads if workload.reason is None]
        trials = sum(effort.trials for workload in workloads for effort in workload.efforts)
        untried_workloads = sum(not workload.efforts for workload in workloads)
        share = math.ceil(self._budget.trials / max(1, len(workloads)))
        return min(self._budget.trials, max(self._budget.trials - trials, untried_workloads * share))

    def _is_over(self) -> bool:
        is_spent = self.total_trials is not None and self._trials >= self.total_trials
        return is_spent or time.monotonic() >= self.deadline

    def _is_exhausted(self, workload: Workload) -> bool:
        """Whether the last `early_stopping` trials of a workload were not faster."""
        return workload.forecast.stale >= self._budget.early_stopping

    def _expected_saving(self, workloads: Sequence[Workload]) -> float:
        """The part of the model's time that another minute is expected to save."""
        latency = estimate_latency(self._workloads)
        saving = saving_of_next_minute([(workload.share, workload.forecast) for workload in workloads])
        return 0.0 if latency is None else saving / latency.now

    def _curve(self) -> tuple[tuple[int, float], ...]:
        """The latencies after some of the trials, the first and the last among them."""
        trials = range(len(self._latencies))
        stride = max(1, math.ceil(len(trials) / _POINTS))
        return tuple((trial, self._latencies[trial]) for trial in trials if trial % stride == 0 or trial == trials[-1])

    def _report_progress(self, contest: Contest, active: Sequence[Contest]) -> None:
        latency = estimate_latency(self._workloads)
        if self._on_progress is None or latency is None:
            return
        minutes = self._budget.minutes
        self._on_progress(
            Progress(
                trials=self._trials,
                total_trials=self.total_trials,
                elapsed=time.monotonic() - self._start_time,
                total_seconds=None if minutes is None else 60.0 * minutes,
                task=contest.workload.task.name,
                best_seconds=contest.best_seconds,
                baseline_seconds=contest.workload.baseline_seconds,
                latency=latency,
                expected=self._expected_saving([item.workload for item in active]),
                standings=tuple(item.standing() for item in sorted(self._workloads, key=lambda item: -item.share)),
            )
        )
