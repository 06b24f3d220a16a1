"""Tuning a model's functions within a budget: what to measure next, and what becomes a record."""

import hashlib
import logging
import math
import time
from bisect import insort
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Literal

from tvmflow.errors import TuneError
from tvmflow.target import Target, host, missing_features
from tvmflow.tuning.cache_state import weight_bytes
from tvmflow.tuning.candidates import Candidate, Library, arguments_of
from tvmflow.tuning.costmodel import warm_up
from tvmflow.tuning.forecast import ROUND, Forecast, forecast_from_records, mean_trial_seconds, saving_of_next_minute
from tvmflow.tuning.measure import MeasurePool
from tvmflow.tuning.record_store import RecordStore
from tvmflow.tuning.records import SPACE_VERSION, Effort, Record, Trial, now, tvm_version
from tvmflow.tuning.runner import Device
from tvmflow.tuning.space import TUNERS, Proposal, Search, TunerName, Variants, make_cost_model, make_search
from tvmflow.tuning.traces import adapt_record, normalize, workload_key
from tvmflow.tuning.worker_process import TrialError

if TYPE_CHECKING:
    from tvm.tirx import PrimFunc

# Proposals come in rounds: small enough to learn often, large enough to spread the cost of proposing.
_MIN_ROUND, _MAX_ROUND = 4, ROUND
# A candidate this many times slower than the best is measured by a single call.
_HOPELESS = 2.0
# What a candidate must gain over the best before it counts as faster: below lies the noise of measuring in turn.
_MARGIN = 0.98
# A workload is left alone after so many trials in a row that were not faster.
EARLY_STOPPING = 256
# The first trials of a workload are all kept, later ones where they are among its fastest: cost models learn from them.
_KEPT, _KEPT_FASTEST = 48, 32
# The fastest of them that a search starts from, and the points of a curve at most.
_PARENTS = 64
_POINTS = 200

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Budget:
    """How much to spend: `trials`, in total over all workloads, or `minutes` of wall-clock time; or `until`.

    `until` ends the run when another minute is expected to save less than this part of the model's time, alone or
    with one of the others as an upper bound. `early_stopping` leaves a workload alone after so many trials in a row
    that were not faster, and the run ends when none is left.
    """

    trials: int | None = None
    minutes: float | None = None
    until: float | None = None
    early_stopping: int = EARLY_STOPPING

    def __post_init__(self) -> None:
        if self.trials is not None and self.minutes is not None:
            raise TuneError("A tuning budget is either `trials` or `minutes`; give one of them.")
        if self.trials is None and self.minutes is None and self.until is None:
            raise TuneError("A tuning budget is `trials`, `minutes` or `until`; none was given.")
        if self.trials is not None and self.trials < 0:
            raise TuneError(f"A tuning budget of {self.trials} trials was given; expected 0 or more.")
        if self.minutes is not None and not 0 < self.minutes < math.inf:
            raise TuneError(f"A tuning budget of {self.minutes} minutes was given; expected more than 0.")
        if self.until is not None and not 0 < self.until < 1:
            raise TuneError(f"A tuning budget until {self.until} was given; expected a part of 1, as 0.02.")
        if self.early_stopping < 1:
            raise TuneError(
                f"A tuning budget with early stopping at {self.early_stopping} was given; expected 1 or more."
            )

    @property
    def remembers(self) -> bool:
        """Whether what earlier runs spent counts: minutes are spent whatever came before."""
        return self.minutes is None or self.until is not None


@dataclass(frozen=True)
class Task:
    """A function of the model to tune: fused, unscheduled; `weight` is the number of its call sites."""

    name: str
    func: "PrimFunc"
    weight: int


@dataclass(frozen=True)
class Standing:
    """Where one function stands: seconds of a call untuned and now, None where not measured, and trials so far."""

    name: str
    weight: int
    baseline_seconds: float | None
    best_seconds: float | None
    trials: int


@dataclass(frozen=True)
class Latency:
    """The estimated seconds of a run of the model: of all calls of the functions that were timed, untuned and now."""

    untuned: float
    now: float


@dataclass(frozen=True)
class Progress:
    """Where a run stands after a trial; seconds are of one call, `elapsed` and `total_seconds` of the run.

    `expected` is the part of the model's time that another minute is expected to save; `standings` are of all
    functions, the costliest first.
    """

    trials: int
    total_trials: int | None
    elapsed: float
    total_seconds: float | None
    task: str
    best_seconds: float
    baseline_seconds: float | None
    latency: Latency
    expected: float
    standings: tuple[Standing, ...]


@dataclass(frozen=True)
class TaskReport:
    """What tuning did for one function.

    `tuned`: this run found a faster schedule; `record`: an earlier one did; `baseline`: none is known that is faster
    than what needs no tuning; `skipped`: it could not be tuned, and `reason` says why. Seconds are of one call, None
    where not measured.
    """

    name: str
    weight: int
    status: Literal["tuned", "record", "baseline", "skipped"]
    reason: str | None
    baseline_seconds: float | None
    best_seconds: float | None
    trials: int


@dataclass(frozen=True)
class TuneReport:
    """What a run did: one entry per function, the trials of all, and the seconds the run took.

    `latency` is estimated from all functions with a time, None where there is none. `curve` is the same in seconds
    after each of some trials, from 0 to the last: at most some hundred points; empty where nothing was measured.
    """

    tasks: tuple[TaskReport, ...]
    trials: int
    seconds: float
    latency: Latency | None = None
    curve: tuple[tuple[int, float], ...] = ()

    @property
    def covered(self) -> int:
        """The number of functions that have a record."""
        return sum(task.status in ("tuned", "record") for task in self.tasks)

    @property
    def coverage(self) -> str:
        """How many functions have a record, as "17 of 20"."""
        return f"{self.covered} of {len(self.tasks)}"


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
) -> TuneReport:
    """Search faster schedules for `tasks` on this machine, or on `device`, and add them to `store`.

    `baseline` gives the compiler's own schedule of a function. It is measured first, and a candidate becomes a record
    only if it computes what the unscheduled function does and, measured in turn with the best so far, is faster: a
    function with a record is never slower than one without. Without `baseline` the measure is the unscheduled
    function. `variants` gives what else the compiler's rules can make of a function, tried before anything else. Trials
    go where another second is expected to save most of the model.

    A budget of trials is what the model's functions deserve in all, so trials that `store` knows of count; a second
    run, or the run after a retraining, returns at once, and so it does where the budget says `until`. A budget of
    minutes alone is spent whatever was before.

    `threads` is the number a candidate runs with (default: the target's, at most this machine's cores); a build or
    run of one candidate is given up after `timeout` seconds. What was found is on disk at once, so an interrupt
    (passed on after the worker processes have ended) loses nothing. Functions that cannot be tuned (symbolic shapes,
    a target that this machine cannot run) are reported as skipped. Raises TuneError if nothing can be measured, or when
    all devices are lost; RemoteError if there are none at first.
    """
    if tuner not in TUNERS:
        raise TuneError(f"`{tuner}` is no tuner; expected one of {', '.join(TUNERS)}.")
    run = _Run(target, budget, store, tuner, seed, on_progress, device, variants)
    functions = run.load(tasks)
    trials = run.trials_to_spend(functions)
    open_functions = [function for function in functions if function.reason is None and not run.is_done(function)]
    if open_functions and (trials is None or trials > 0) and not run.is_enough(open_functions):
        cores = host().cores
        threads = threads or (min(target.threads, cores) if device is None else target.threads)
        with MeasurePool(
            target.canonical,
            builders=cores,
            threads=threads,
            timeout=timeout,
            deadline=run.deadline,
            device=device,
            cross_compiler=target.cross_compiler,
            footprint=run.footprint,
        ) as pool:
            run.spend(pool, open_functions, trials, baseline, threads)
    return TuneReport(
        tuple(function.report() for function in functions),
        run.trials,
        time.monotonic() - run.started,
        run.latency(),
        run.curve(),
    )


@dataclass
class _Function:
    """A task, and what is reported of it.

    `measured` is what earlier runs measured of it. `untuned_seconds` and `seconds` are the same function's with and
    without tuning as if both were measured now: where they differ from others, other work on this machine does.
    """

    task: Task
    key: str
    known: Record | None
    efforts: list[Effort]
    measured: list[Record | Trial]
    outlook: Forecast
    reason: str | None = None
    baseline_seconds: float | None = None
    best_seconds: float | None = None
    untuned_seconds: float | None = None
    seconds: float | None = None
    trials: int = 0
    tuned: bool = False

    @property
    def share(self) -> float:
        """The seconds that its calls take of a run of the model; 0 where that is not known."""
        return self.task.weight * (self.seconds or 0.0)

    def report(self) -> TaskReport:
        status: Literal["tuned", "record", "baseline", "skipped"]
        if self.tuned:
            status = "tuned"
        elif self.known is not None:
            status = "record"
        else:
            status = "baseline" if self.reason is None else "skipped"
        return TaskReport(
            self.task.name,
            self.task.weight,
            status,
            self.reason if status == "skipped" else None,
            self.baseline_seconds,
            self.best_seconds,
            self.trials,
        )


@dataclass
class _Contest:
    """A function that is being tuned: the best library so far, and what proposes others."""

    function: _Function
    unscheduled: Candidate
    baseline: Library | None
    best: Library
    best_seconds: float
    reference: Library | None = None
    search: Search | None = None
    kept: list[float] = field(default_factory=list)

    def promise(self, mean_trial_seconds: float) -> tuple[bool, float]:
        """Whether the compiler's own rules have proposals left, which come before all others; then the seconds of the
        model that another second is expected to save, where a trial takes `mean_trial_seconds` unless some were timed.
        """
        own = self.search is None or not self.search.beyond
        return own, self.function.share * self.function.outlook.per_second(mean_trial_seconds)


class _Run:
    """One call of `tune`."""

    def __init__(
        self,
        target: Target,
        budget: Budget,
        store: RecordStore,
        tuner: TunerName,
        seed: int,
        on_progress: Callable[[Progress], None] | None,
        device: Device | None,
        variants: "Callable[[PrimFunc], Variants] | None",
    ) -> None:
        self.started = time.monotonic()
        self.deadline = math.inf if budget.minutes is None else self.started + 60.0 * budget.minutes
        self.trials = 0
        self._target = target
        self._budget = budget
        self._store = store
        self._tuner = tuner
        self._seed = seed
        self._on_progress = on_progress
        self._device = device
        self._variants = variants
        self._total_trials: int | None = None
        self._functions: list[_Function] = []
        self._latencies: list[float] = []

    def load(self, tasks: Sequence[Task]) -> list[_Function]:
        """The workloads of `tasks`, equal ones together, with what the store knows of them."""
        elsewhere = why_not_here(self._target) if self._device is None else _why_not_there(self._target)
        best: dict[str, Record] = {}
        records: dict[str, list[Record]] = {}
        for record in sorted(self._store.records(self._target), key=lambda record: -record.seconds):
            best[record.key] = record
            records.setdefault(record.key, []).append(record)
        measured: dict[str, list[Record | Trial]] = {}
        for entry in self._store.measurements(self._target):
            if entry.space_version == SPACE_VERSION:
                measured.setdefault(entry.key, []).append(entry)
        efforts: dict[str, list[Effort]] = {}
        for effort in self._store.efforts(self._target):
            efforts.setdefault(effort.key, []).append(effort)
        functions: dict[str, _Function] = {}
        for task in tasks:
            key = workload_key(task.func)
            same = functions.get(key)
            if same is not None:
                same.task = replace(same.task, weight=same.task.weight + task.weight)
                continue
            spent = efforts.get(key, [])
            function = functions[key] = _Function(
                task,
                key,
                _known(best, key, task),
                spent,
                measured.get(key, []),
                forecast_from_records(spent, records.get(key, [])) if self._budget.remembers else Forecast(),
                elsewhere,
            )
            if arguments_of(task.func) is None:
                function.reason = "its shapes are symbolic, and MetaSchedule needs static ones"
            elif task.func.attrs and task.func.attrs.get("tirx.is_scheduled", False):
                function.reason = "it is scheduled already"
            if function.known is not None:
                function.best_seconds = function.known.seconds
                function.baseline_seconds = function.known.baseline_seconds
            elif function.efforts:
                function.baseline_seconds = max(function.efforts, key=lambda effort: effort.created_at).baseline_seconds
            function.seconds = function.best_seconds or function.baseline_seconds
            function.untuned_seconds = function.baseline_seconds or function.best_seconds
        self._functions = list(functions.values())
        return self._functions

    @property
    def footprint(self) -> int:
        """The bytes of the weights of all functions of static shape."""
        tasks = [function.task for function in self._functions]
        return weight_bytes([(arguments_of(task.func) or (), task.weight) for task in tasks])

    def is_done(self, function: _Function) -> bool:
        """Whether a function's trials have been in vain for long enough."""
        return function.outlook.stale >= self._budget.early_stopping

    def is_enough(self, functions: Sequence[_Function]) -> bool:
        """Whether another minute spent on `functions` is expected to save less than the budget asks for."""
        if self._budget.until is None or any(function.seconds is None for function in functions):
            return False
        return self._expected(functions) < self._budget.until

    def _expected(self, functions: Sequence[_Function]) -> float:
        """The part of the model's time that another minute is expected to save."""
        latency = self.latency()
        saved = saving_of_next_minute([(function.share, function.outlook) for function in functions])
        return 0.0 if latency is None else saved / latency.now

    def latency(self) -> Latency | None:
        """The estimated seconds of a run of the model, None where no function has a time."""
        timed = [function for function in self._functions if function.seconds]
        if not timed:
            return None
        untuned = sum(function.task.weight * (function.untuned_seconds or 0.0) for function in timed)
        return Latency(untuned, sum(function.share for function in timed))

    def curve(self) -> tuple[tuple[int, float], ...]:
        """The estimated seconds of a run of the model after some of the trials, the first and the last among them."""
        trials = range(len(self._latencies))
        stride = max(1, math.ceil(len(trials) / _POINTS))
        shown = [trial for trial in trials if trial % stride == 0 or trial == trials[-1]]
        return tuple((trial, self._latencies[trial]) for trial in shown)

    def trials_to_spend(self, functions: Sequence[_Function]) -> int | None:
        """The budget less what earlier runs spent on these workloads; None where the budget is time."""
        if self._budget.trials is None:
            return None
        functions = [function for function in functions if function.reason is None]
        spent = sum(effort.trials for function in functions for effort in function.efforts)
        new = sum(not function.efforts for function in functions)
        share = math.ceil(self._budget.trials / max(1, len(functions)))
        return min(self._budget.trials, max(self._budget.trials - spent, new * share))

    def spend(
        self,
        pool: MeasurePool,
        functions: Sequence[_Function],
        trials: int | None,
        baseline: "Callable[[PrimFunc], PrimFunc] | None",
        threads: int,
    ) -> None:
        """Measure until the budget is spent or no function has anything left to propose."""
        self._total_trials = trials
        contests: list[_Contest] = []
        for function in functions:
            if not self._over():
                contests += self._prepare(pool, function, baseline)
        if not contests and functions and not self._over():
            raise TuneError(
                f"Not one of {len(functions)} functions could be built and measured ({functions[0].task.name}: "
                f"{functions[0].reason}); check that this machine has a C++ compiler and can run {self._target.name}."
            )
        share = _MAX_ROUND if trials is None else math.ceil(trials / max(1, len(contests)))
        size = min(max(share, _MIN_ROUND), _MAX_ROUND)
        cost_model = self._cost_model(threads) if contests else None
        active = list(contests)
        self._latencies.append(sum(function.share for function in self._functions))
        while active and not self._over() and not self.is_enough([contest.function for contest in active]):
            usual = mean_trial_seconds([item.function.outlook for item in active])
            contest, started = max(active, key=lambda item: item.promise(usual)), time.monotonic()
            try:
                search = contest.search = contest.search or self._search(contest.function, size, cost_model)
                proposals = search.propose()
            except Exception as error:  # MetaSchedule raises whatever it likes for a function that it has no rule for.
                contest.function.reason = f"MetaSchedule cannot schedule it: {_last_line(error)}"
                active.remove(contest)
                continue
            if not proposals:
                active.remove(contest)
                continue
            left = len(proposals) if trials is None else trials - self.trials
            self._round(pool, contest, search, proposals[:left], active, started)
            if contest.function.reason is not None or self.is_done(contest.function):
                active.remove(contest)
        for contest in contests:
            # So that the next run knows that these had their chance and were passed over.
            if contest.function.trials == 0:
                self._store.append(self._effort(contest.function, 0))

    def _prepare(
        self, pool: MeasurePool, function: _Function, baseline: "Callable[[PrimFunc], PrimFunc] | None"
    ) -> Iterator[_Contest]:
        """Build and measure what candidates must beat: the analytic schedule, the best record, else the function."""
        from tvm import ir

        func = normalize(function.task.func)
        unscheduled = Candidate(ir.save_json(func), arguments_of(func) or ())
        scheduled = _schedule(baseline, function.task) if baseline is not None else None
        rivals = [unscheduled]
        if scheduled is not None:
            rivals = [Candidate(ir.save_json(normalize(scheduled)), arguments_of(scheduled) or ())]
        if function.known is not None:
            rivals.append(replace(unscheduled, trace=function.known.trace))
        function.baseline_seconds = function.best_seconds = None
        starts = [self._start(pool, function, built) for built in pool.build(rivals)]
        analytic = starts[0] if scheduled is not None else None
        if function.known is not None and starts[-1] is None and not self._over():
            function.known = None
        if scheduled is not None and not any(starts):
            starts = [self._start(pool, function, *pool.build([unscheduled]))]
        measured = [start for start in starts if start is not None]
        if not measured:
            return
        best, best_seconds = min(measured, key=lambda start: start[1])
        baseline_library = None
        if analytic is not None:
            baseline_library, function.baseline_seconds = analytic
        function.reason, function.best_seconds = None, best_seconds
        function.seconds, function.untuned_seconds = best_seconds, function.baseline_seconds or measured[0][1]
        contest = _Contest(function, unscheduled, baseline_library, best, best_seconds)
        contest.kept = sorted(_slowness(entry.seconds) for entry in function.measured)
        yield contest

    def _start(
        self, pool: MeasurePool, function: _Function, built: Library | TrialError
    ) -> tuple[Library, float] | None:
        """A library that candidates must beat and its seconds, or None with the reason noted."""
        try:
            library = _library(built)
            return library, pool.time(library)
        except TrialError as error:
            logger.warning("%s: what it starts from cannot be measured: %s", function.task.name, error)
            function.reason = f"what it starts from cannot be measured: {error}"
            return None

    def _search(self, function: _Function, size: int, cost_model: object) -> Search:
        # What was proposed in an earlier run is not proposed again.
        spent = sum(effort.trials for effort in function.efforts)
        digest = hashlib.sha256(f"{self._seed}:{function.key}:{spent}".encode()).digest()
        func = normalize(function.task.func)
        search = make_search(
            func,
            self._target.canonical,
            self._tuner,
            batch=size,
            seed=int.from_bytes(digest[:4], "big") % (2**31 - 2) + 1,
            cost_model=cost_model,
            variants=self._variants(func) if self._variants is not None else None,
        )
        if function.known is not None:
            search.start_from(function.known.trace, function.known.seconds)
        self._go_on(search, function)
        return search

    def _go_on(self, search: Search, function: _Function) -> None:
        """Let the fastest of what earlier runs measured be parents of what is proposed."""
        from tvm import ir

        names = ir.save_json(normalize(function.task.func))
        measured = {entry.trace: entry.seconds for entry in function.measured if entry.workload == names}
        known = function.known.trace if function.known is not None else None
        for trace, seconds in sorted(measured.items(), key=lambda item: (_slowness(item[1]), item[0]))[:_PARENTS]:
            if seconds is not None and trace != known:
                try:
                    search.start_from(trace, seconds)
                except Exception as error:  # TVM raises whatever it likes for a trace that does not fit.
                    logger.debug("%s: a known schedule does not replay: %s", function.task.name, _last_line(error))

    def _cost_model(self, threads: int) -> object:
        """What predicts costs, with what is known of this target from all runs."""
        cost_model = make_cost_model(self._tuner, seed=self._seed, threads=threads)
        if self._tuner != "xgb":
            return cost_model
        try:
            learnt = warm_up(cost_model, self._store.measurements(self._target), self._target.canonical)
            logger.info("the cost model starts from %d schedules", learnt)
        except Exception as error:  # TVM raises whatever it likes for what another version recorded.
            logger.warning("the cost model starts from nothing: %s", _last_line(error))
            return make_cost_model(self._tuner, seed=self._seed, threads=threads)
        return cost_model

    def _round(
        self,
        pool: MeasurePool,
        contest: _Contest,
        search: Search,
        proposals: Sequence[Proposal],
        active: Sequence[_Contest],
        started: float,
    ) -> None:
        """Measure `proposals`; each that beats the best so far becomes the best, and a record, at once.

        `started` is when they were asked for (`time.monotonic`).
        """
        function = contest.function
        before = function.seconds or contest.best_seconds
        built = pool.build([replace(contest.unscheduled, trace=proposal.trace) for proposal in proposals])
        seconds: list[float | None] = []
        with suppress(TrialError):
            contest.best_seconds = pool.time(contest.best)  # Other work on this machine comes and goes between rounds.
        times = pool.times(built, lambda: contest.best_seconds * _HOPELESS)
        with self._counted(function, started), closing(times):
            for proposal, library in zip(proposals, built, strict=True):
                if self._over() or function.reason is not None:
                    break
                seconds.append(self._trial(pool, contest, proposal, library, next(times)))
                self._latencies.append(sum(function.share for function in self._functions))
                self._progress(contest, active)
        search.tell(proposals[: len(seconds)], seconds)
        saved = 1 - (function.seconds or before) / before
        function.outlook.note(len(seconds), saved, time.monotonic() - started)

    def _trial(
        self,
        pool: MeasurePool,
        contest: _Contest,
        proposal: Proposal,
        built: Library | TrialError,
        measured: float | TrialError,
    ) -> float | None:
        """The seconds of a candidate, None if it fails or is wrong."""
        self.trials += 1
        contest.function.trials += 1
        seconds: float | None = None
        try:
            library, seconds = _library(built), _seconds(measured)
            if seconds < contest.best_seconds:
                self._challenge(pool, contest, proposal, library)
            if contest.best is not library:
                library.path.unlink(missing_ok=True)
        except TrialError as error:
            logger.debug("%s: trial %d failed: %s", contest.function.task.name, self.trials, error)
            seconds, library = None, None
        if library is None or contest.best is not library:
            self._keep(contest, proposal, seconds)
        return seconds

    def _keep(self, contest: _Contest, proposal: Proposal, seconds: float | None) -> None:
        """Note in the store what was measured and is no record, where a cost model may learn from it."""
        kept, slowness = contest.kept, _slowness(seconds)
        if len(kept) >= _KEPT and slowness >= kept[_KEPT_FASTEST - 1]:
            return
        insort(kept, slowness)
        trial = Trial(
            key=contest.function.key,
            workload=contest.unscheduled.func,
            trace=proposal.trace,
            seconds=seconds,
            target=self._target.canonical,
            tvm_version=tvm_version(),
            space_version=SPACE_VERSION,
            tuner=self._tuner,
            created_at=now(),
        )
        self._store.append(trial)

    def _challenge(self, pool: MeasurePool, contest: _Contest, proposal: Proposal, library: Library) -> None:
        """Make `library` the best if it is right and, measured in turn with the best, faster. Raises TrialError."""
        function = contest.function
        if contest.reference is None:
            try:
                reference = _library(*pool.build([contest.unscheduled]))
                pool.expect(reference)
            except TrialError as error:
                function.reason = f"the unscheduled function, which results are compared with, does not run: {error}"
                raise
            contest.reference = reference
        pool.check(library, contest.reference)
        rivals = [contest.best]
        if contest.baseline is not None and contest.baseline is not contest.best:
            rivals.append(contest.baseline)
        seconds, *others = pool.compare(library, *rivals)
        if seconds >= min(others) * _MARGIN:
            return
        if contest.baseline is not None:
            function.baseline_seconds = others[-1]
        function.seconds = (function.seconds or seconds) * seconds / min(others)
        self._store.append(
            Record(
                key=function.key,
                workload=contest.unscheduled.func,
                trace=proposal.trace,
                seconds=seconds,
                baseline_seconds=function.baseline_seconds,
                target=self._target.canonical,
                tvm_version=tvm_version(),
                space_version=SPACE_VERSION,
                tuner=self._tuner,
                trial=self.trials,
                created_at=now(),
            )
        )
        contest.best = library
        contest.best_seconds = function.best_seconds = seconds
        function.tuned = True

    @contextmanager
    def _counted(self, function: _Function, started: float) -> Iterator[None]:
        """Note in the store the trials made meanwhile, also when they are interrupted."""
        before = function.trials
        try:
            yield
        finally:
            self._store.append(self._effort(function, function.trials - before, time.monotonic() - started))

    def _effort(self, function: _Function, trials: int, seconds: float | None = None) -> Effort:
        return Effort(
            key=function.key,
            target=self._target.canonical,
            tvm_version=tvm_version(),
            space_version=SPACE_VERSION,
            trials=trials,
            baseline_seconds=function.baseline_seconds,
            created_at=now(),
            seconds=seconds,
        )

    def _over(self) -> bool:
        spent = self._total_trials is not None and self.trials >= self._total_trials
        return spent or time.monotonic() >= self.deadline

    def _progress(self, contest: _Contest, active: Sequence[_Contest]) -> None:
        latency = self.latency()
        if self._on_progress is None or latency is None:
            return
        minutes = self._budget.minutes
        self._on_progress(
            Progress(
                trials=self.trials,
                total_trials=self._total_trials,
                elapsed=time.monotonic() - self.started,
                total_seconds=None if minutes is None else 60.0 * minutes,
                task=contest.function.task.name,
                best_seconds=contest.best_seconds,
                baseline_seconds=contest.function.baseline_seconds,
                latency=latency,
                expected=self._expected([contest.function for contest in active]),
                standings=tuple(
                    Standing(item.task.name, item.task.weight, item.untuned_seconds, item.seconds, item.trials)
                    for item in sorted(self._functions, key=lambda item: -item.share)
                ),
            )
        )


def _known(best: dict[str, Record], key: str, task: Task) -> Record | None:
    """The best record of a task's workload in the names that its function has."""
    try:
        return adapt_record(best[key], task.func) if key in best else None
    except Exception as error:  # TVM raises whatever it likes for a trace that does not fit.
        logger.warning("%s: the best record does not replay: %s", task.name, _last_line(error))
        return None


def why_not_here(target: Target) -> str | None:
    """Why candidates for `target` cannot be measured on this machine, or None if they can."""
    if target.tvm.get("kind") != "llvm":
        return f"candidates are measured on this machine's CPU, which cannot run {target.name}"
    if target.arch != host().arch:
        return f"it needs a machine of {target.arch}, and this one is {host().arch}"
    missing = missing_features(target.features)
    return f"this machine's CPU lacks {', '.join(missing)}" if missing else None


def _why_not_there(target: Target) -> str | None:
    """Why candidates for `target` cannot be measured on a device, or None if they can."""
    if target.tvm.get("kind") != "llvm":
        return f"candidates are measured on a device's CPU, which cannot run {target.name}"
    return None


def _schedule(baseline: "Callable[[PrimFunc], PrimFunc]", task: Task) -> "PrimFunc | None":
    try:
        return baseline(task.func)
    except Exception as error:  # Whatever is wrong with the analytic schedule, a tuned one may still be found.
        logger.warning("%s has no analytic schedule to start from: %s", task.name, _last_line(error))
        return None


def _library(built: Library | TrialError) -> Library:
    if isinstance(built, TrialError):
        raise built
    return built


def _seconds(measured: float | TrialError) -> float:
    if isinstance(measured, TrialError):
        raise measured
    return measured


def _slowness(seconds: float | None) -> float:
    return math.inf if seconds is None else seconds


def _last_line(error: Exception) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[-1].strip()
