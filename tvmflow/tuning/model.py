"""The tuning of a whole model: first the compiler's decisions, then the schedules of the functions that result."""

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from tvmflow import compiler
from tvmflow.compiler.machine import machine
from tvmflow.compiler.schedules import is_of_stages, schedule, subject, variants
from tvmflow.hardware.target import Target
from tvmflow.tuning.best_records import best_digest, best_lines
from tvmflow.tuning.budget import Budget
from tvmflow.tuning.candidates import arguments_of
from tvmflow.tuning.decisions import Function, Site, TrialCount, decide
from tvmflow.tuning.record_store import RecordStore
from tvmflow.tuning.report import Progress, TuneReport
from tvmflow.tuning.runner import Device
from tvmflow.tuning.space import TunerName, Variants
from tvmflow.tuning.traces import workload_key
from tvmflow.tuning.tuner import tune
from tvmflow.tuning.workloads import Task

if TYPE_CHECKING:
    from tvm import IRModule
    from tvm.tirx import PrimFunc

# The part of a budget that goes to the compiler's decisions.
_DECISIONS_SHARE = 0.5
# Minutes of a budget that are left for functions at least.
_LEAST_MINUTES = 0.01


@dataclass(frozen=True)
class ModelReport:
    """The result of tuning a model.

    `functions` is the result for each function. `lines` are the model's best records and decisions as `best_records`
    writes them. `trials` counts this run's trials on decisions and functions together; `decisions` counts the decisions
    whose option is not the default. `untuned_ms` and `latency_ms` are the model's estimated latency without tuning and
    now, None where no function has a time; `curve` has pairs of a number of trials and the latency in ms after them.
    `lookup_keys` are the keys of all workloads and decisions of the model, and `records_digest` is `best_digest` of
    them. `tuned` counts workloads with a record or with trials; `share_of_time` is the part of the model's time, 0 to
    1, that these take, None where no function has a time. `untimed` counts the functions without a time, which
    `share_of_time` leaves out.
    """

    functions: TuneReport
    lines: list[str]
    trials: int
    decisions: int
    untuned_ms: float | None
    latency_ms: float | None
    curve: tuple[tuple[int, float], ...]
    lookup_keys: tuple[str, ...]
    records_digest: str
    tuned: int
    share_of_time: float | None
    untimed: int


def tune_model(
    imported: "compiler.Imported",
    target: Target,
    options: "compiler.BuildOptions",
    budget: Budget,
    store: RecordStore,
    *,
    tuner: TunerName,
    seed: int,
    threads: int,
    only: Sequence[str] = (),
    device: Device | None = None,
    on_message: Callable[[float, float, str], None],
    on_trial: Callable[[int, float], None],
) -> ModelReport:
    """Tune a model within a budget; with a budget of 0 trials, look up the best records and decisions in `store`.

    Tunes the workloads that `only` names, and all workloads if the model has none of these. `on_message` receives the
    progress as done, total and text; `on_trial` receives the number of each trial on functions and the model's
    estimated latency in ms. Candidates run with `threads` threads on this machine or, if it is not None, on `device`;
    the search uses `tuner` with `seed`.

    Raises TuneError for an unknown tuner, when nothing can be measured, and when all devices are lost; RemoteError when
    there are no devices at first; BuildError, OptionError or TargetError when the model cannot be lowered.
    """
    start_time = time.monotonic()
    model = Lowering(imported, target, options)
    earlier_decisions = store.decisions(target)
    count = _decide(model, target, budget, store, threads, device, on_message)
    lowered, choices = model.lower({key: item.option for key, item in store.decisions(target).items()})
    tasks = [Task(item.name, item.func, item.calls) for item in compiler.workloads(lowered)]
    tasks = [item for item in tasks if item.name in only] or tasks

    def on_progress(progress: Progress) -> None:
        on_message(*describe(progress))
        on_trial(count.trials + progress.trials, 1e3 * progress.latency.now)

    if budget.minutes is not None:
        minutes = budget.minutes - (time.monotonic() - start_time) / 60
        budget = replace(budget, minutes=max(minutes, _LEAST_MINUTES))
    if budget.trials is not None:
        budget = replace(budget, trials=budget.trials - count.trials - count.earlier)
    report = tune(
        tasks,
        target,
        budget,
        store,
        tuner=tuner,
        seed=seed,
        baseline=model.schedule,
        variants=model.variants,
        on_progress=on_progress,
        threads=threads,
        device=device,
    )
    records = [record for item in tasks if (record := store.best(item.func, target)) is not None]
    decisions = [item for key, item in store.decisions(target).items() if choices.overrides_cost_model(key)]
    # Functions that another option has removed have no times, but the decision knows what it saved.
    savings = {item.key: 1e3 * (item.default_seconds - item.seconds) for item in decisions}
    curve = [(count.trials + trial, 1e3 * seconds) for trial, seconds in report.curve]
    if curve and count.trials:
        saved_now = sum(milliseconds for key, milliseconds in savings.items() if key not in earlier_decisions)
        curve.insert(0, (0, curve[0][1] + saved_now))
    keys = {item.name: workload_key(item.func) for item in tasks}
    lookup_keys = tuple(sorted({*keys.values(), *choices.sites}))
    tuned, share_of_time, untimed = _coverage(report, keys, store, target)
    return ModelReport(
        functions=report,
        lines=best_lines(records, decisions),
        trials=report.trials + count.trials,
        decisions=len(decisions),
        untuned_ms=None if report.latency is None else 1e3 * report.latency.untuned + sum(savings.values()),
        latency_ms=None if report.latency is None else 1e3 * report.latency.now,
        curve=tuple(curve),
        lookup_keys=lookup_keys,
        records_digest=best_digest(store, target, lookup_keys),
        tuned=tuned,
        share_of_time=share_of_time,
        untimed=untimed,
    )


# The workloads of which a progress message shows times.
_SHOWN_WORKLOADS = 8


def describe(progress: Progress) -> tuple[float, float, str]:
    """Return the amount done, the total amount (0 if there is no bound), and a text for a person to read.

    Amounts are trials, or seconds where the budget is time. The text has the times of the model and its costliest
    functions.
    """
    done, total = float(progress.trials), float(progress.total_trials or 0)
    rest = f"{total - done:.0f} trials left"
    if progress.total_trials is None:
        done, total = progress.elapsed, progress.total_seconds or 0.0
        rest = f"{max(0.0, total - done) / 60:.1f} min left" if total else f"a minute more: -{progress.expected:.1%}"
    latency = progress.latency
    lines = [f"{1e3 * latency.untuned:.3f} -> {1e3 * latency.now:.3f} ms estimated, {rest}"]
    for item in progress.standings[:_SHOWN_WORKLOADS]:
        times = [seconds and 1e6 * item.weight * seconds for seconds in (item.baseline_seconds, item.best_seconds)]
        before, now = ("-" if value is None else f"{value:.1f}" for value in times)
        mark = ">" if item.name == progress.task else " "
        lines.append(f"{mark} {item.name[:48]:<48} {before:>9} -> {now:>9} us {item.trials:>5} trials")
    return done, total, "\n".join(lines)


class Lowering:
    """A model that the compiler can lower and schedule repeatedly, each time with other options for its decisions."""

    def __init__(self, imported: "compiler.Imported", target: Target, options: "compiler.BuildOptions") -> None:
        self._machine = machine(target)
        self._imported = imported
        self._target = target
        self._options = options
        self._scheduled: dict[str, PrimFunc] = {}
        self._lowered: dict[frozenset[tuple[str, str]], tuple[IRModule, compiler.Choices]] = {}

    def lower(self, options: Mapping[str, str]) -> "tuple[IRModule, compiler.Choices]":
        """Return the lowered module, and all decisions that occurred in its lowering; the result is cached.

        `options` maps a decision's key to the option to take; other decisions take the cost model's default. An
        option that a decision does not have is ignored. Raises BuildError when a pass fails, OptionError for wrong
        build options, and TargetError for a precision that the target's processor has no instructions for.
        """
        key = frozenset(options.items())
        if key not in self._lowered:
            choices = compiler.Choices(options)
            module = compiler.lower(self._imported, self._target, self._options, choices)
            self._lowered[key] = module, choices
        return self._lowered[key]

    def schedule(self, func: "PrimFunc") -> "PrimFunc":
        """Return a function as the compiler's rules schedule it; cached."""
        key = workload_key(func)
        if key not in self._scheduled:
            self._scheduled[key] = schedule(func, self._machine)[0]
        return self._scheduled[key]

    def variants(self, func: "PrimFunc") -> Variants:
        """Return the other schedules that the compiler's rules can make of a function."""
        if self._target.arch == "cuda":
            return Variants(())
        return Variants(variants(func, self._machine)[1:], only=is_of_stages(func))

    def functions(self, options: Mapping[str, str]) -> tuple[Mapping[str, Site], Sequence[Function]]:
        """Lower the model with `options` (see `lower`); return its decisions by key, and its functions of static shape.

        This is the `Lower` of `decisions.decide`.
        """
        module, choices = self.lower(options)
        functions = [
            Function(item.name, item.func, self.schedule(item.func), subject(item.func), item.calls)
            for item in compiler.workloads(module)
            if arguments_of(item.func) is not None
        ]
        return choices.sites, functions


def _decide(
    model: Lowering,
    target: Target,
    budget: Budget,
    store: RecordStore,
    threads: int,
    device: Device | None,
    on_message: Callable[[float, float, str], None],
) -> TrialCount:
    """Spend the first part of the budget on the compiler's own decisions, which are measured on this machine alone."""
    if device is not None or target.arch == "cuda":
        return TrialCount(0, 0)
    trials = budget.trials
    if trials:
        # Trials of earlier runs on functions count as well.
        lowered, _ = model.lower({key: item.option for key, item in store.decisions(target).items()})
        keys = {workload_key(item.func) for item in compiler.workloads(lowered)}
        earlier_trials = sum(effort.trials for effort in store.efforts(target) if effort.key in keys)
        trials = min(round(_DECISIONS_SHARE * trials), max(1, trials - earlier_trials))
    seconds = None if budget.minutes is None else 60 * _DECISIONS_SHARE * budget.minutes
    start_time = time.monotonic()
    return decide(
        model.functions,
        target,
        store,
        trials=trials,
        seconds=seconds,
        threads=threads,
        on_progress=lambda message: on_message(time.monotonic() - start_time, seconds or 0.0, message),
    )


def _coverage(
    report: TuneReport, keys: Mapping[str, str], store: RecordStore, target: Target
) -> tuple[int, float | None, int]:
    """The number of tuned workloads, their share of the model's time, and the number of workloads without a time."""
    searched_keys = {effort.key for effort in store.efforts(target) if effort.trials}
    tuned_tasks = [
        item for item in report.tasks if item.status in ("tuned", "record") or keys[item.name] in searched_keys
    ]
    seconds = {
        item.name: item.weight * best
        for item in report.tasks
        if (best := item.best_seconds or item.baseline_seconds) is not None
    }
    total = sum(seconds.values())
    share = sum(seconds.get(item.name, 0.0) for item in tuned_tasks) / total if total else None
    return len(tuned_tasks), share, len(report.tasks) - len(seconds)
