"""Tune: measure schedules of the model's workloads within the budget; records are kept and found again."""

import json
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tasks.relax_import import ImportResult, load_imported
from tasks.step import Context, Job, as_options, step, variants
from tvmflow.errors import InputError
from tvmflow.process import Emit
from tvmflow.spec import Build, Tune
from tvmflow.target import Target, host
from tvmflow.workspace import Artifact, Outcome, Record, StepResult, run_step

if TYPE_CHECKING:
    from tvm.tirx import PrimFunc

    from tvmflow.tuning import Progress


class TuneJob(Job):
    """The imported model, the target, the budget, and how the build will lower the model."""

    imported: ImportResult
    target: Target
    build: Build
    variants: tuple[dict[str, int], ...]
    tune: Tune
    threads: int


class WorkloadTuned(Record):
    """One workload: call sites, what became of it, seconds per call before and after, trials measured."""

    name: str
    calls: int
    status: str
    reason: str | None
    baseline_seconds: float | None
    best_seconds: float | None
    trials: int


class TuneResult(StepResult):
    """The best known record of each workload, as lines of JSON, and what was measured for them."""

    records: Artifact
    workloads: tuple[WorkloadTuned, ...]
    trials: int
    coverage: str


def work(job: TuneJob, emit: Emit) -> TuneResult:
    """Tune, in a process of its own."""
    from tvmflow import compiler, tuning
    from tvmflow.compiler.machine import machine
    from tvmflow.compiler.schedules import schedule

    workspace, target = job.workspace, job.target
    options = as_options(job.build, job.variants)
    lowered = compiler.lower(load_imported(workspace, job.imported), target, options)
    tasks = [tuning.Task(item.name, item.func, item.calls) for item in compiler.workloads(lowered)]
    store = tuning.RecordStore(workspace.folder / "records")
    cpu = machine(target)
    trials = None if job.tune.minutes is not None else job.tune.trials or 0
    report = tuning.tune(
        tasks,
        target,
        tuning.Budget(trials=trials, minutes=job.tune.minutes),
        store,
        tuner=job.tune.tuner,
        seed=job.tune.seed,
        baseline=lambda func: schedule(func, cpu)[0],
        on_progress=lambda progress: emit(*_fraction(progress)),
        threads=job.threads,
    )
    best = [record for item in tasks if (record := store.best(item.func, target)) is not None]
    with workspace.scratch() as folder:
        path = folder / "records.jsonl"
        lines = sorted(json.dumps(asdict(record), sort_keys=True) for record in best)
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
            trials=report.trials,
            coverage=report.coverage,
        )


@step
def tune(context: Context, imported: Outcome[ImportResult], target: Target) -> Outcome[TuneResult]:
    """Tune the model for a target within the release file's budget; with 0 trials, look up what is known.

    Raises TuneError when tuning fails as a whole; failed trials are normal.
    """
    spec = context.spec
    job = TuneJob(
        home=context.workspace.folder,
        imported=imported.result,
        target=target,
        build=spec.build,
        variants=variants(spec, imported.result.inputs),
        tune=spec.tune,
        threads=min(target.threads, host().cores),
    )
    reads = job.model_dump(mode="json", exclude={"home", "imported"})
    reads["imported"] = [imported.result.ir.sha256, imported.result.params.sha256]
    if not spec.tune.minutes and not spec.tune.trials:
        # Without a budget the step is a look-up: it depends on what is known, and on nothing when it measures itself.
        reads["records"] = _known(context.workspace.folder / "records")
    return run_step(
        context.workspace,
        "tune",
        reads,
        TuneResult,
        lambda: context.call("tasks.tune:work", job, TuneResult, target=target.name),
        target=target.name,
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
    lines.update({record.key: json.dumps(asdict(record), sort_keys=True) for record in given})
    with workspace.scratch() as folder:
        merged = folder / "records.jsonl"
        merged.write_text("".join(line + "\n" for line in sorted(lines.values())))
        result = tuned.result.model_copy(update={"records": workspace.keep(merged)})
    return Outcome(result, tuned.status, tuned.seconds)


def best_records(path: Path) -> "Callable[[PrimFunc], PrimFunc | None]":
    """What schedules a function by its best record, or returns None where there is none that still replays."""
    from tvmflow import tuning

    known: dict[str, Any] = {}
    for line in path.read_text().splitlines():
        record = tuning.Record(**json.loads(line))
        known[record.key] = record

    def scheduled(func: "PrimFunc") -> "PrimFunc | None":
        record = known.get(tuning.workload_key(func)) if known else None
        return None if record is None else tuning.apply(record, func)

    return scheduled


def _fraction(progress: "Progress") -> tuple[float, float, str]:
    """Trials or seconds done, of how many, and the workload with its best time."""
    message = f"{progress.task}: {progress.best_seconds * 1e6:.0f} us"
    if progress.total_trials is not None:
        return progress.trials, progress.total_trials, message
    return progress.elapsed, progress.total_seconds or progress.elapsed, message


def _known(folder: Path) -> list[tuple[str, int]]:
    """The record files and their sizes: they only grow."""
    if not folder.is_dir():
        return []
    return sorted((path.name, path.stat().st_size) for path in folder.rglob("*") if path.is_file())
