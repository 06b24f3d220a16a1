"""Tune: measure schedules of the model's workloads within the budget; records are kept and found again."""

import contextlib
import hashlib
import json
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from tasks.relax_import import ImportResult, load_imported
from tasks.step import Context, Job, as_options, step, variants
from tvmflow.errors import InputError
from tvmflow.process import Emit
from tvmflow.runtime.tracker import Address
from tvmflow.services import open_records
from tvmflow.spec import Build, Tune
from tvmflow.target import Target, host
from tvmflow.workspace import Artifact, Outcome, Record, StepResult, Workspace, run_step, step_key

if TYPE_CHECKING:
    from tvm import IRModule
    from tvm.tirx import PrimFunc

    from tvmflow.compiler import Choices
    from tvmflow.compiler.choices import Site
    from tvmflow.tuning import Decision, Progress, RecordStore, Task, TuneReport
    from tvmflow.tuning import Record as Measured
    from tvmflow.tuning.decisions import Function, Spent
    from tvmflow.tuning.space import Variants

# The part of a budget that goes to the compiler's decisions.
_FOR_DECISIONS = 0.5
_DECISION = "decision"
# The decision on how many threads the whole model runs, which is the bundle's and not the compiler's.
_THREADS = "threads of the model"
# Minutes of a budget that are left for functions at least.
_LEAST = 0.01
_LOOK_UP = {"trials": 0, "minutes": None, "until": None}
# Of so many workloads a person who watches is told how they stand.
_SHOWN = 8


class MeasuredOn(Record):
    """Devices that candidates are measured on: their key at an RPC tracker, HOST:PORT."""

    key: str
    tracker: str


class TuneJob(Job):
    """The imported model, the target, the budget, and how the build will lower the model.

    Of the workloads that are named in `only` those that the model has are tuned; all of them where it has none.
    Candidates are measured here, or on `device`. `curve` is a file that gets a line for each trial on functions: its
    number, and the model's estimated latency in ms.
    """

    imported: ImportResult
    target: Target
    build: Build
    variants: tuple[dict[str, int], ...]
    tune: Tune
    threads: int
    only: tuple[str, ...] = ()
    device: MeasuredOn | None = None
    curve: Path | None = None


class WorkloadTuned(Record):
    """One workload: call sites, what became of it, seconds per call before and after, trials measured."""

    name: str
    calls: int
    status: str
    reason: str | None
    baseline_seconds: float | None
    best_seconds: float | None
    trials: int


class Coverage(Record):
    """How much of a model is tuned: workloads that trials were spent on or that have a record, of all.

    `share_of_time` is the part of the model's time that they take, by call sites and the best time known of each
    workload; the `untimed`, of which none is known, are left out of it. None where no time is known at all.
    """

    tuned: int
    workloads: int
    share_of_time: float | None
    untimed: int

    def __str__(self) -> str:
        """As "17 of 20 workloads tuned, 96 % of time"."""
        text = f"{self.tuned} of {self.workloads} workloads tuned"
        if self.share_of_time is not None and self.workloads:
            text += f", {100 * self.share_of_time:.0f} % of time"
            text += f" ({self.untimed} without a time not counted)" if self.untimed else ""
        return text


Part = Literal["records", "decisions"]
"""Of what tuning found: how functions are scheduled, or what the compiler decides otherwise."""
PARTS: tuple[Part, ...] = ("decisions", "records")

NOTHING_TUNED = Coverage(tuned=0, workloads=0, share_of_time=None, untimed=0)


class TuneResult(StepResult):
    """The best known record of each workload, as lines of JSON, and what was measured for them.

    Behind the records stand the `decisions` of the compiler that measuring has found to be better otherwise.

    `latency_ms` is the estimated latency of the model, that is of all calls of its workloads with a time, and
    `untuned_ms` what it is without tuning; None where no time is known. `curve` has it after some of the trials, from 0
    to the last, at most some hundred. `known` is the SHA-256 of the best that is known of what was `looked_up`:
    workloads and decisions by their keys.
    """

    records: Artifact
    workloads: tuple[WorkloadTuned, ...]
    trials: int
    coverage: Coverage
    decisions: int = 0
    untuned_ms: float | None = None
    latency_ms: float | None = None
    curve: tuple[tuple[int, float], ...] = ()
    looked_up: tuple[str, ...] = ()
    known: str = ""


def work(job: TuneJob, emit: Emit) -> TuneResult:
    """Tune, in a process of its own."""
    from tvmflow import compiler, tuning

    workspace, target, started = job.workspace, job.target, time.monotonic()
    model = _Model(job)
    store = tuning.RecordStore(workspace.records)
    trials = job.tune.trials if job.tune.has_budget else 0
    already = store.decisions(target)
    decided = _decide(job, model, store, trials, emit)
    known = {key: item.option for key, item in store.decisions(target).items()}
    lowered, choices = model.lowered(known)
    tasks = [tuning.Task(item.name, item.func, item.calls) for item in compiler.workloads(lowered)]
    tasks = [item for item in tasks if item.name in job.only] or tasks

    def told(progress: "Progress") -> None:
        emit(*_fraction(progress))
        if job.curve is not None:
            with job.curve.open("a") as file:
                file.write(f"{decided.trials + progress.trials} {1e3 * progress.latency.now}\n")

    left = None if job.tune.minutes is None else max(job.tune.minutes - (time.monotonic() - started) / 60, _LEAST)
    report = tuning.tune(
        tasks,
        target,
        tuning.Budget(
            trials=None if trials is None else trials - decided.trials - decided.before,
            minutes=left,
            until=job.tune.until,
            early_stopping=job.tune.early_stopping,
        ),
        store,
        tuner=job.tune.tuner,
        seed=job.tune.seed,
        baseline=model.scheduled,
        variants=model.variants,
        on_progress=told,
        threads=job.threads,
        device=None if job.device is None else tuning.Device(job.device.key, Address.parse(job.device.tracker)),
    )
    best = [record for item in tasks if (record := store.best(item.func, target)) is not None]
    otherwise = [item for key, item in store.decisions(target).items() if choices.otherwise(key)]
    # The functions as they were before any was decided otherwise have no times of their own.
    saved = sum(1e3 * (item.default_seconds - item.seconds) for item in otherwise)
    saved_now = sum(1e3 * (item.default_seconds - item.seconds) for item in otherwise if item.key not in already)
    curve = [(decided.trials + trial, 1e3 * seconds) for trial, seconds in report.curve]
    if curve and decided.trials:
        curve.insert(0, (0, curve[0][1] + saved_now))
    looked_up = tuple(sorted({*(tuning.workload_key(item.func) for item in tasks), *choices.met}))
    with workspace.scratch() as folder:
        path = folder / "records.jsonl"
        lines = [*sorted(map(_line, best)), *sorted(map(_line, otherwise))]
        path.write_text("".join(line + "\n" for line in lines))
        return TuneResult(
            records=workspace.keep(path),
            workloads=tuple(
                WorkloadTuned(
                    name=item.name,
                    calls=item.weight,
                    status=item.status,
                    reason=item.reason,
                    baseline_seconds=item.baseline_seconds,
                    best_seconds=item.best_seconds,
                    trials=item.trials,
                )
                for item in report.tasks
            ),
            trials=report.trials + decided.trials,
            decisions=len(otherwise),
            untuned_ms=None if report.latency is None else 1e3 * report.latency.untuned + saved,
            latency_ms=None if report.latency is None else 1e3 * report.latency.now,
            curve=tuple(curve),
            looked_up=looked_up,
            known=_best_known(store, target, looked_up),
            coverage=_coverage(report, tasks, store, target),
        )


class _Model:
    """The model as the compiler lowers and schedules it, decision by decision."""

    def __init__(self, job: TuneJob) -> None:
        from tvmflow.compiler.machine import machine

        self._machine = machine(job.target)
        self._imported = load_imported(job.workspace, job.imported)
        self._target = job.target
        self._options = as_options(job.build, job.variants)
        self._scheduled: dict[str, PrimFunc] = {}
        self._lowered: dict[frozenset[tuple[str, str]], tuple[IRModule, Choices]] = {}

    def lowered(self, made: "Mapping[str, str]") -> "tuple[IRModule, Choices]":
        """The lowered module, and the decisions that were met."""
        from tvmflow import compiler

        key = frozenset(made.items())
        if key not in self._lowered:
            choices = compiler.Choices(made)
            module = compiler.lower(self._imported, self._target, self._options, choices)
            self._lowered[key] = module, choices
        return self._lowered[key]

    def scheduled(self, func: "PrimFunc") -> "PrimFunc":
        """A function as the rules schedule it; once, whatever the decisions about others."""
        from tvmflow.compiler.schedules import schedule
        from tvmflow.tuning import workload_key

        key = workload_key(func)
        if key not in self._scheduled:
            self._scheduled[key] = schedule(func, self._machine)[0]
        return self._scheduled[key]

    def variants(self, func: "PrimFunc") -> "Variants":
        """What else the rules can make of a function."""
        from tvmflow.compiler.schedules import is_of_stages, variants
        from tvmflow.tuning.space import Variants

        if self._target.arch == "cuda":
            return Variants(())
        return Variants(variants(func, self._machine)[1:], only=is_of_stages(func))

    def functions(self, made: "Mapping[str, str]") -> "tuple[Mapping[str, Site], Sequence[Function]]":
        """What `Decider` measures: the static functions, and the decisions that were met."""
        from tvmflow import compiler
        from tvmflow.compiler.schedules import subject
        from tvmflow.tuning.candidates import arguments_of
        from tvmflow.tuning.decisions import Function

        module, choices = self.lowered(made)
        found = [
            Function(item.name, item.func, self.scheduled(item.func), subject(item.func), item.calls)
            for item in compiler.workloads(module)
            if arguments_of(item.func) is not None
        ]
        return choices.met, found


def _decide(job: TuneJob, model: _Model, store: "RecordStore", trials: int | None, emit: Emit) -> "Spent":
    """Spend the first part of the budget on the compiler's own decisions."""
    from tvmflow.compiler import workloads
    from tvmflow.tuning import workload_key
    from tvmflow.tuning.decisions import Spent, decide

    if job.device is not None or job.target.arch == "cuda":
        return Spent(0, 0)
    if trials:
        # What earlier runs spent on functions counts as well.
        lowered, _ = model.lowered({key: item.option for key, item in store.decisions(job.target).items()})
        keys = {workload_key(item.func) for item in workloads(lowered)}
        spent = sum(effort.trials for effort in store.efforts(job.target) if effort.key in keys)
        trials = min(round(_FOR_DECISIONS * trials), max(1, trials - spent))
    seconds = None if job.tune.minutes is None else 60 * _FOR_DECISIONS * job.tune.minutes
    started = time.monotonic()
    return decide(
        model.functions,
        job.target,
        store,
        trials=trials,
        seconds=seconds,
        threads=job.threads,
        on_progress=lambda told: emit(time.monotonic() - started, seconds or 0.0, told),
    )


def _coverage(report: "TuneReport", tasks: "Sequence[Task]", store: "RecordStore", target: Target) -> Coverage:
    from tvmflow import tuning

    spent = {effort.key for effort in store.efforts(target) if effort.trials}
    keys = {item.name: tuning.workload_key(item.func) for item in tasks}
    tuned = [item for item in report.tasks if item.status in ("tuned", "record") or keys[item.name] in spent]
    seconds = {
        item.name: item.weight * best
        for item in report.tasks
        if (best := item.best_seconds or item.baseline_seconds) is not None
    }
    total = sum(seconds.values())
    return Coverage(
        tuned=len(tuned),
        workloads=len(report.tasks),
        share_of_time=sum(seconds.get(item.name, 0.0) for item in tuned) / total if total else None,
        untimed=len(report.tasks) - len(seconds),
    )


@step
def tune(context: Context, imported: Outcome[ImportResult], target: Target) -> Outcome[TuneResult]:
    """Tune the model for a target within the release file's budget; with 0 trials, look up what is known.

    Where it was tuned before and something better has become known since, that is looked up. Raises TuneError when
    tuning fails as a whole; failed trials are normal.
    """
    from tvmflow import tuning

    job = tune_job(context, imported, target)

    def work_or_look_up() -> TuneResult:
        found = context.workspace.find("tune", step_key("tune", reads), TuneResult)
        if found is None:
            return run_job(context, job)
        known = run_job(context, job.model_copy(update={"tune": job.tune.model_copy(update=_LOOK_UP)}))
        return known.model_copy(update={"trials": found.trials, "curve": found.curve})

    def still_best(found: TuneResult) -> bool:
        return _best_known(tuning.RecordStore(context.workspace.records), target, found.looked_up) == found.known

    with shared_records(context, target):
        reads = _reads(context, job)
        return run_step(
            context.workspace, "tune", reads, TuneResult, work_or_look_up, target=target.name, valid=still_best
        )


@step
def tune_more(
    context: Context,
    imported: Outcome[ImportResult],
    target: Target,
    budget: Tune,
    device: MeasuredOn | None,
    curve: Path | None = None,
) -> Outcome[TuneResult]:
    """Tune the model for a target within a budget of its own, here or on devices; `curve` is as in TuneJob.

    Never found done, for it is asked for; a release whose own tuning was done finds what this one found in its place.
    Raises TuneError when tuning fails as a whole, RemoteError where there are no such devices.
    """
    job = tune_job(context, imported, target)
    with shared_records(context, target):
        own = step_key("tune", _reads(context, job))
        threads = job.threads if device is None else target.threads
        job = job.model_copy(update={"tune": budget, "device": device, "threads": threads, "curve": curve})
        tuned = run_step(
            context.workspace,
            "tune",
            {**_reads(context, job), "more": True},
            TuneResult,
            lambda: run_job(context, job),
            target=target.name,
            valid=lambda _: False,
        )
    if context.workspace.find("tune", own, TuneResult) is not None:
        context.workspace.remember("tune", own, tuned.result, tuned.seconds)
    return tuned


def run_job(context: Context, job: TuneJob) -> TuneResult:
    """Tune in a process of its own; whatever ends it, what its workers built is removed."""
    with context.workspace.scratch() as folder:
        environment = {"TMPDIR": str(folder)}
        return context.call("tasks.tune:work", job, TuneResult, target=job.target.name, environment=environment)


@contextlib.contextmanager
def shared_records(context: Context, target: Target) -> Iterator[None]:
    """Look up what other machines recorded for a target, and send what is recorded here while the body runs."""
    from tvmflow import tuning
    from tvmflow.tuning.sharing import sharing

    shared = None
    if context.services is not None:
        shared = open_records(context.settings, context.store, context.spec.store)
    store = tuning.RecordStore(context.workspace.records)
    with sharing(store, shared, tuning.current_context(target).digest):
        yield


def _reads(context: Context, job: TuneJob) -> dict[str, Any]:
    """What the step depends on; it does not matter where candidates are measured."""
    reads = job.model_dump(mode="json", exclude={"home", "imported", "device", "curve"})
    reads["imported"] = [job.imported.ir.sha256, job.imported.params.sha256]
    if not job.tune.has_budget:
        # Without a budget the step is a look-up: it depends on what is known, and on nothing when it measures itself.
        reads["records"] = _known(context.workspace.records, job.target)
    return reads


def tune_job(context: Context, imported: Outcome[ImportResult], target: Target) -> TuneJob:
    """What the process that tunes is told."""
    spec = context.spec
    return TuneJob(
        home=context.workspace.folder,
        imported=imported.result,
        target=target,
        build=spec.build,
        variants=variants(spec, imported.result.inputs),
        tune=spec.tune,
        threads=min(target.threads, host().cores),
    )


def with_records(context: Context, tuned: Outcome[TuneResult], path: Path, target: Target) -> Outcome[TuneResult]:
    """The same with the best records of a file or a folder in the place of what is known for their workloads.

    Raises InputError when there is no record that this TVM can use for the target.
    """
    from tvmflow import tuning

    workspace = context.workspace
    known = workspace.path(tuned.result.records).read_text().splitlines()
    lines = {str(json.loads(line)["key"]): line for line in known}
    given = sorted(tuning.RecordStore(path).records(target), key=lambda record: -record.seconds)
    if not given:
        raise InputError(
            f"{str(path)!r} holds no tuning record of this TVM for target {target.name!r}; "
            f"name a file or folder that tuning for this target has written"
        )
    lines.update({record.key: _line(record) for record in given})
    lines.update({key: _line(item) for key, item in tuning.RecordStore(path).decisions(target).items()})
    return _with_lines(workspace, tuned, sorted(lines.values()))


def part_of(workspace: Workspace, tuned: Outcome[TuneResult], part: Part) -> Outcome[TuneResult]:
    """The same with one part of what was found."""
    lines = workspace.path(tuned.result.records).read_text().splitlines()
    kept = [line for line in lines if (json.loads(line).get("kind") == _DECISION) == (part == "decisions")]
    return _with_lines(workspace, tuned, kept)


def with_threads(workspace: Workspace, tuned: Outcome[TuneResult], threads: int) -> Outcome[TuneResult]:
    """The same with the decision that the model runs on so many threads."""
    lines = workspace.path(tuned.result.records).read_text().splitlines()
    kept = [line for line in lines if json.loads(line)["key"] != _THREADS]
    decided = json.dumps({"kind": _DECISION, "key": _THREADS, "option": str(threads)}, sort_keys=True)
    return _with_lines(workspace, tuned, [*kept, decided])


def _line(known: "Measured | Decision") -> str:
    """A record or a decision as it stands in the file of what is known."""
    from tvmflow import tuning

    kind = {"kind": _DECISION} if isinstance(known, tuning.Decision) else {}
    return json.dumps({**kind, **asdict(known)}, sort_keys=True)


def _with_lines(workspace: Workspace, tuned: Outcome[TuneResult], lines: Sequence[str]) -> Outcome[TuneResult]:
    with workspace.scratch() as folder:
        path = folder / "records.jsonl"
        path.write_text("".join(line + "\n" for line in lines))
        result = tuned.result.model_copy(update={"records": workspace.keep(path)})
    return Outcome(result, tuned.status, tuned.seconds)


def decisions(path: Path) -> dict[str, str]:
    """The decisions of the compiler that measuring has found to be better otherwise, by their keys."""
    decided = _decided(path)
    decided.pop(_THREADS, None)
    return decided


def threads(path: Path, usual: int) -> int:
    """The number of threads that the model runs on, as decided, else `usual`."""
    return int(_decided(path).get(_THREADS, usual))


def _decided(path: Path) -> dict[str, str]:
    lines = map(json.loads, path.read_text().splitlines())
    return {str(line["key"]): str(line["option"]) for line in lines if line.get("kind") == _DECISION}


def best_records(path: Path) -> "Callable[[PrimFunc], PrimFunc | None]":
    """What schedules a function by its best record, or returns None where there is none that still replays."""
    from tvmflow import tuning

    known: dict[str, Any] = {}
    for line in map(json.loads, path.read_text().splitlines()):
        if "kind" not in line:
            known[line["key"]] = tuning.Record(**line)

    def scheduled(func: "PrimFunc") -> "PrimFunc | None":
        record = known.get(tuning.workload_key(func)) if known else None
        return None if record is None else tuning.apply(record, func)

    return scheduled


def _fraction(progress: "Progress") -> tuple[float, float, str]:
    """Trials or seconds done, of how many (0 if nobody knows), and how the model and its costliest workloads stand."""
    done, total = float(progress.trials), float(progress.total_trials or 0)
    left = f"{total - done:.0f} trials left"
    if progress.total_trials is None:
        done, total = progress.elapsed, progress.total_seconds or 0.0
        left = f"{max(0.0, total - done) / 60:.1f} min left" if total else f"a minute more: -{progress.expected:.1%}"
    latency = progress.latency
    lines = [f"{1e3 * latency.untuned:.3f} -> {1e3 * latency.now:.3f} ms estimated, {left}"]
    for item in progress.standings[:_SHOWN]:
        times = [seconds and 1e6 * item.weight * seconds for seconds in (item.baseline_seconds, item.best_seconds)]
        before, now = ("-" if value is None else f"{value:.1f}" for value in times)
        mark = ">" if item.name == progress.task else " "
        lines.append(f"{mark} {item.name[:48]:<48} {before:>9} -> {now:>9} us {item.trials:>5} trials")
    return done, total, "\n".join(lines)


def _best_known(store: "RecordStore", target: Target, keys: Sequence[str]) -> str:
    """The SHA-256 of the best record of each workload and of each decision among `keys`."""
    wanted, best = set(keys), {}
    for record in sorted(store.records(target), key=lambda record: (-record.seconds, record.trace)):
        if record.key in wanted:
            best[record.key] = record.trace
    decided = {key: item.option for key, item in store.decisions(target).items() if key in wanted}
    return hashlib.sha256(json.dumps([best, decided], sort_keys=True).encode()).hexdigest()


def _known(folder: Path, target: Target) -> str:
    """The SHA-256 of what is known of the target, wherever it was recorded and in whichever files it lies."""
    from tvmflow import tuning

    store = tuning.RecordStore(folder)
    entries = [
        *map(asdict, store.records(target)),
        *map(asdict, store.efforts(target)),
        *map(asdict, store.decisions(target).values()),
    ]
    lines = sorted({json.dumps(entry, sort_keys=True) for entry in entries})
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()
