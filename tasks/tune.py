"""The step `tune`: measures schedules of the model's workloads within a budget, or looks up the best ones.

The measurements are kept as tuning records, which later runs use.
"""

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tasks.options import as_options, variants
from tasks.relax_import import ImportResult, load_imported
from tasks.step import Step, StepRunner, TargetJob
from tvmflow.errors import InputError
from tvmflow.hardware.target import Target, host
from tvmflow.processes.children import Emit
from tvmflow.runtime.tracker import Address
from tvmflow.spec import Build, Spec, Tune
from tvmflow.workspace import Artifact, Outcome, Record, StepResult, Workspace

if TYPE_CHECKING:
    from tvmflow.tuning.best_records import Part
    from tvmflow.tuning.sharing import SharedRecords

_LOOK_UP = {"trials": 0, "minutes": None, "until": None}


class DeviceKey(Record):
    """The devices that measure candidates: their key at an RPC tracker, and the tracker's address HOST:PORT."""

    key: str
    tracker: str


class TuneJob(TargetJob):
    """The imported model, the target, the budget, and how the build will lower the model.

    Only the model's workloads named in `only` are tuned, or all of its workloads if it has none of these. Candidates
    are measured on this machine, or on `device`. `curve` is a file that gets a line for each trial: its number, and the
    model's estimated latency in ms. Candidates run on `threads` threads. `is_extra` distinguishes a tuning that the
    user asked for from the release's own.
    """

    imported: ImportResult
    build: Build
    variants: tuple[dict[str, int], ...]
    tune: Tune
    threads: int
    only: tuple[str, ...] = ()
    device: DeviceKey | None = None
    curve: Path | None = None
    is_extra: bool = False

    @property
    def needs_compiler(self) -> bool:
        """True: the step compiles candidates."""
        return True

    def cache_key(self) -> dict[str, Any]:
        """Return all values that the result depends on; the device that measures is not among them."""
        from tvmflow import tuning
        from tvmflow.tuning.best_records import store_digest

        key = self.model_dump(mode="json", exclude={"home", "folder", "imported", "device", "curve"})
        key["imported"] = [self.imported.ir.sha256, self.imported.params.sha256, self.imported.transposes]
        if not self.tune.has_budget:
            # Without a budget the step only looks up, and so it depends on the whole store.
            key["records"] = store_digest(tuning.RecordStore(self.workspace.records), self.target)
        return key

    @classmethod
    def of(cls, spec: Spec, imported: ImportResult, target: Target) -> "TuneJob":
        """Return the job that tunes a release file's model for a target, with the release file's budget."""
        return cls(
            imported=imported,
            target=target,
            build=spec.build,
            variants=variants(spec, imported.inputs),
            tune=spec.tune,
            threads=min(target.threads, host().cores),
        )


class TunedWorkload(Record):
    """One workload: its number of call sites, its status, the seconds of a call, and its number of trials.

    `baseline_seconds` is without tuning, `best_seconds` with the best schedule; None where the workload has no time.
    `reason` explains the status, or is None.
    """

    name: str
    calls: int
    status: str
    reason: str | None
    baseline_seconds: float | None
    best_seconds: float | None
    trials: int


class Coverage(Record):
    """The tuned part of a model: `tuned` of its `workloads` have a record or trials.

    `share_of_time` is the part of the model's time that these take, by call sites and the best time of each workload;
    the `untimed` workloads have no time and do not count. It is None where no workload has a time.
    """

    tuned: int
    workloads: int
    share_of_time: float | None
    untimed: int

    def __str__(self) -> str:
        """Return text such as "17 of 20 workloads tuned, 96 % of time", or "nothing tuned" without workloads."""
        if not self.workloads:
            return "nothing tuned"
        text = f"{self.tuned} of {self.workloads} workloads tuned"
        if self.share_of_time is not None:
            text += f", {100 * self.share_of_time:.0f} % of time"
            text += f" ({self.untimed} without a time not counted)" if self.untimed else ""
        return text


NOTHING_TUNED = Coverage(tuned=0, workloads=0, share_of_time=None, untimed=0)


class TuneResult(StepResult):
    """The best records and decisions of a model, and the figures of the tuning.

    `records` is a file as `tvmflow.tuning.best_records` reads it; `decisions` is the number of decisions in it.
    `latency_ms` is the model's estimated latency, the sum over all calls of its workloads with a time, and `untuned_ms`
    the same without tuning; both are None where no workload has a time. `curve` has pairs of trial and latency in ms,
    from trial 0 to the last, at most a few hundred. `lookup_keys` are the keys of the model's workloads and decisions
    in the record store, and `records_digest` is the SHA-256 over the best record or decision of each key.
    """

    records: Artifact
    workloads: tuple[TunedWorkload, ...]
    trials: int
    coverage: Coverage
    decisions: int = 0
    untuned_ms: float | None = None
    latency_ms: float | None = None
    curve: tuple[tuple[int, float], ...] = ()
    lookup_keys: tuple[str, ...] = ()
    records_digest: str = ""


def skip_tuning(workspace: Workspace) -> TuneResult:
    """Return the result of a tuning without records."""
    return TuneResult(records=_keep_lines(workspace, []), workloads=(), trials=0, coverage=NOTHING_TUNED)


def work(job: TuneJob, emit: Emit) -> TuneResult:
    """Tune the model, or look up its best records where the job has no budget and there are any for the target.

    The step calls this in a child process. Raises TuneError when tuning fails as a whole.
    """
    from tvmflow import tuning
    from tvmflow.tuning.best_records import best_digest
    from tvmflow.tuning.model import tune_model

    def write_point(trial: int, milliseconds: float) -> None:
        if job.curve is not None:
            with job.curve.open("a") as file:
                file.write(f"{trial} {milliseconds}\n")

    workspace = job.workspace
    store = tuning.RecordStore(workspace.records)
    if not job.tune.has_budget and not job.is_extra and store.is_empty(job.target):
        # To look up the model's workloads would lower it, and the build does that again.
        return skip_tuning(workspace).model_copy(update={"records_digest": best_digest(store, job.target, ())})
    report = tune_model(
        load_imported(workspace, job.imported),
        job.target,
        as_options(job.build, job.variants),
        tuning.Budget(
            trials=job.tune.trials if job.tune.has_budget else 0,
            minutes=job.tune.minutes,
            until=job.tune.until,
            early_stopping=job.tune.early_stopping,
        ),
        store,
        tuner=job.tune.tuner,
        seed=job.tune.seed,
        threads=job.threads,
        only=job.only,
        device=None if job.device is None else tuning.Device(job.device.key, Address.parse(job.device.tracker)),
        on_message=emit,
        on_trial=write_point,
    )
    return TuneResult(
        records=_keep_lines(workspace, report.lines),
        workloads=tuple(
            TunedWorkload(
                name=item.name,
                calls=item.weight,
                status=item.status,
                reason=item.reason,
                baseline_seconds=item.baseline_seconds,
                best_seconds=item.best_seconds,
                trials=item.trials,
            )
            for item in report.functions.tasks
        ),
        trials=report.trials,
        coverage=Coverage(
            tuned=report.tuned,
            workloads=len(report.functions.tasks),
            share_of_time=report.share_of_time,
            untimed=report.untimed,
        ),
        decisions=report.decisions,
        untuned_ms=report.untuned_ms,
        latency_ms=report.latency_ms,
        curve=report.curve,
        lookup_keys=report.lookup_keys,
        records_digest=report.records_digest,
    )


def _tune_or_look_up(job: TuneJob, runner: StepRunner) -> TuneResult:
    """Tune a model that has no result in the cache; where it has one, look up the best records of today.

    There are three cases. A cached result whose records are still the best ones is returned by the step, which does not
    call this function (`_has_best_records`). With a cached result and better records, which another run has found,
    the budget is not spent again: a run with 0 trials builds on these records, and the number of trials and the curve
    stay those of the cached result. Without a cached result the model is tuned.
    """
    earlier = runner.workspace.find("tune", _TUNE.key(runner, job), TuneResult)
    if earlier is None:
        return run_job(job, runner)
    result = run_job(job.model_copy(update={"tune": job.tune.model_copy(update=_LOOK_UP)}), runner)
    return result.model_copy(update={"trials": earlier.trials, "curve": earlier.curve})


def _has_best_records(result: TuneResult, job: TuneJob) -> bool:
    from tvmflow import tuning
    from tvmflow.tuning.best_records import best_digest

    store = tuning.RecordStore(job.workspace.records)
    return best_digest(store, job.target, result.lookup_keys) == result.records_digest


def run_job(job: TuneJob, runner: StepRunner) -> TuneResult:
    """Tune in a child process and return its result; the temporary files of its workers are removed when it ends.

    Raises the child's TvmflowError, and StepError when the child dies.
    """
    with runner.workspace.scratch() as folder:
        return runner.call(work, job, TuneResult, environment={"TMPDIR": str(folder)})


_TUNE = Step("tune", TuneResult, _tune_or_look_up, is_current=_has_best_records)
_TUNE_MORE = Step("tune", TuneResult, run_job, cached=False)


def tune(runner: StepRunner, job: TuneJob, shared: "SharedRecords | None" = None) -> Outcome[TuneResult]:
    """Tune a model for a target within the job's budget; with 0 trials, look up the best records.

    A cached result is looked up again when the store has gained a better record. `shared` is the store through which
    machines exchange records, or None. Failed trials are normal. Raises TuneError when tuning fails as a whole, and
    BuildError or TargetError when the model cannot be lowered. Raises StepError when the process that tunes crashes or
    takes longer than the timeout of `runner`.
    """
    with shared_records(runner.workspace, job.target, shared):
        return _TUNE(runner, job)


def tune_more(
    runner: StepRunner,
    job: TuneJob,
    budget: Tune,
    *,
    device: DeviceKey | None = None,
    curve: Path | None = None,
    shared: "SharedRecords | None" = None,
) -> Outcome[TuneResult]:
    """Tune a model within a `budget` of its own, on this machine or, unless it is None, on `device`.

    `curve` is a file that gets a line for each trial: its number, and the model's estimated latency in ms; None means
    no file. The result is never cached, because the user asks for the work. It replaces the cached result of the
    release's own tuning, if there is one. `shared` is the store through which machines exchange records, or None.
    Raises TuneError when tuning fails as a whole, RemoteError where there are no such devices, and BuildError or
    TargetError when the model cannot be lowered. Raises StepError when the process that tunes crashes or takes longer
    than the timeout of `runner`, even if the `budget` has more minutes.
    """
    with shared_records(runner.workspace, job.target, shared):
        own_key = _TUNE.key(runner, job)
        threads = job.threads if device is None else job.target.threads
        extra = {"tune": budget, "device": device, "threads": threads, "curve": curve, "is_extra": True}
        tuned = _TUNE_MORE(runner, job.model_copy(update=extra))
    if runner.workspace.find("tune", own_key, TuneResult) is not None:
        runner.workspace.remember("tune", own_key, tuned.result, tuned.seconds)
    return tuned


@contextlib.contextmanager
def shared_records(workspace: Workspace, target: Target, shared: "SharedRecords | None") -> Iterator[None]:
    """Fetch other machines' records for a target, and send new ones while the body runs.

    `shared` is the store through which machines exchange records; with None nothing is fetched or sent.
    """
    from tvmflow import tuning
    from tvmflow.tuning.sharing import sharing

    with sharing(tuning.RecordStore(workspace.records), shared, tuning.current_context(target).digest):
        yield


def send_records(workspace: Workspace, target: Target, shared: "SharedRecords") -> dict[str, int]:
    """Send this machine's records, and return the size in bytes of each file that `shared` has for a target, by name.

    Raises StoreError.
    """
    from tvmflow import tuning
    from tvmflow.tuning.sharing import Sharing

    Sharing(tuning.RecordStore(workspace.records), shared).send()
    return shared.sizes(tuning.current_context(target).digest)


def with_records(workspace: Workspace, tuned: TuneResult, path: Path, target: Target) -> TuneResult:
    """Return `tuned` with the best records of the file or folder `path` in place of its own for the same workloads.

    Raises InputError when `path` has no record that this TVM can use for the target.
    """
    from tvmflow import tuning
    from tvmflow.tuning.best_records import replace_lines

    lines = replace_lines(_lines(workspace, tuned), tuning.RecordStore(path), target)
    if not lines:
        raise InputError(
            f"{str(path)!r} holds no tuning record of this TVM for target {target.name!r}; "
            f"name a file or folder that tuning for this target has written"
        )
    return _with_lines(workspace, tuned, lines)


def part_of(workspace: Workspace, tuned: TuneResult, part: "Part") -> TuneResult:
    """Return `tuned` with only its records or only its decisions."""
    from tvmflow.tuning.best_records import select_part

    return _with_lines(workspace, tuned, select_part(_lines(workspace, tuned), part))


def with_threads(workspace: Workspace, tuned: TuneResult, threads: int) -> TuneResult:
    """Return `tuned` with the decision that the model runs on `threads` threads."""
    from tvmflow.tuning.best_records import set_threads

    return _with_lines(workspace, tuned, set_threads(_lines(workspace, tuned), threads))


def _lines(workspace: Workspace, tuned: TuneResult) -> list[str]:
    return workspace.path(tuned.records).read_text().splitlines()


def _with_lines(workspace: Workspace, tuned: TuneResult, lines: list[str]) -> TuneResult:
    return tuned.model_copy(update={"records": _keep_lines(workspace, lines)})


def _keep_lines(workspace: Workspace, lines: list[str]) -> Artifact:
    with workspace.scratch() as folder:
        path = folder / "records.jsonl"
        path.write_text("".join(line + "\n" for line in lines))
        return workspace.keep(path)
