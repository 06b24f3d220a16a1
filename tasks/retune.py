"""Retune: where the time of a bundle in production goes, tuning just that, and whether a new build is faster."""

import secrets
from pathlib import Path

from tasks.build import BuildResult
from tasks.choose import tuned_sample
from tasks.export import ExportResult
from tasks.package import PackageResult
from tasks.relax_import import ImportResult
from tasks.sidebyside import DECIDING_PAIRS, side_by_side
from tasks.step import Context, Job, slug, step
from tasks.tune import TuneResult, run_job, shared_records, tune_job
from tvmflow.bundle import read_manifest
from tvmflow.process import Emit
from tvmflow.progress import reporter
from tvmflow.spec import Tune
from tvmflow.target import Target
from tvmflow.workspace import Outcome, StepResult, run_step

# The share of the time in compiled functions that is tuned: the rest is spread over many that cost little.
_SHARE = 0.9
_REPEATS = 20
# What a new build must gain to be worth a release.
_GAIN = 0.98


class Profile(StepResult):
    """The compiled functions of a bundle by seconds per run, the costliest first."""

    functions: dict[str, float]

    def costliest(self) -> tuple[str, ...]:
        """Those that make up most of the time."""
        total, covered, chosen = sum(self.functions.values()), 0.0, []
        for name, seconds in self.functions.items():
            if covered >= _SHARE * total:
                break
            covered += seconds
            chosen.append(name)
        return tuple(chosen)


class Gain(StepResult):
    """A new build beside the one in production, on one target.

    `ratios` are its latency over the other's in each pair of rounds, empty where both have the same library.
    """

    target: str
    better: bool
    worse: bool
    told: str
    ratio: float
    ratios: tuple[float, ...]


class ProfileJob(Job):
    """The bundle to look into."""

    bundle: Path


def work(job: ProfileJob, emit: Emit) -> Profile:
    """Time each compiled function on the golden sample, in a process of its own."""
    from tvmflow import runtime
    from tvmflow.runtime.profile import MACHINE, measure_functions, schedule_rules

    with runtime.load(job.bundle) as model:
        inputs = model.sample[0]
        names = schedule_rules(job.bundle, model.manifest)
        times = measure_functions(model.machine, lambda: model(**inputs), names, _REPEATS, model.device.sync)
    return Profile(functions={item.name: item.seconds for item in times if item.name != MACHINE})


@step
def profile(context: Context, bundle: Path, target: Target) -> Outcome[Profile]:
    """Where the time of a bundle in production goes, on this machine. Raises BundleError where it does not run."""
    job = ProfileJob(home=context.workspace.folder, bundle=bundle)
    return run_step(
        context.workspace,
        "profile",
        {"bundle": bundle.name},
        Profile,
        lambda: context.call("tasks.retune:work", job, Profile, target=target.name),
        target=target.name,
        valid=lambda _: False,
    )


@step
def tune_costliest(
    context: Context, imported: Outcome[ImportResult], known: Profile, minutes: float, target: Target
) -> Outcome[TuneResult]:
    """Spend minutes on the workloads that cost most; what is found becomes a record.

    Never found done: the time is there to be spent, and each run looks elsewhere. Raises TuneError.
    """
    budget = Tune(minutes=minutes, tuner=context.spec.tune.tuner, seed=secrets.randbelow(2**31))
    job = tune_job(context, imported, target).model_copy(update={"tune": budget, "only": known.costliest()})
    with shared_records(context, target):
        return run_step(
            context.workspace,
            "retune",
            {"tune": budget, "only": job.only, "imported": imported.result.ir.sha256},
            TuneResult,
            lambda: run_job(context, job),
            target=target.name,
            valid=lambda _: False,
        )


@step
def compare(
    context: Context,
    exported: Outcome[ExportResult],
    held: Path,
    built: Outcome[BuildResult],
    packaged: Outcome[PackageResult],
    target: Target,
) -> Outcome[Gain]:
    """Measure a new build beside the bundle in production, in turn; the same library needs no measuring.

    It is better when its latency is below 0.98 of the other's in the median of 25 pairs of rounds and lower in at least
    20 of them, worse when the same can be said of the other. Raises BundleError for a bundle that does not run here.
    """

    def measured() -> Gain:
        if read_manifest(held).files["mod.so"].sha256 == built.result.library.sha256:
            told = f"target {target.name!r}: the new build is the one in production"
            return Gain(target=target.name, better=False, worse=False, told=told, ratio=1.0, ratios=())
        beside = side_by_side(
            context.workspace,
            f"{context.spec.name}-compare-{slug(target.name)}",
            context.file(packaged.result.bundle),
            held,
            timeout=context.timeout,
            progress=lambda done, total: reporter().progressed("compare", target.name, done, total, "in turn"),
            pairs=DECIDING_PAIRS,
            inputs=tuned_sample(context, exported),
        )
        told = f"target {target.name!r}: " + beside.told("the new build's", "that in production")
        return Gain(
            target=target.name,
            better=beside.is_faster(_GAIN),
            worse=beside.reversed.is_faster(_GAIN),
            told=told,
            ratio=beside.ratio,
            ratios=beside.ratios,
        )

    return run_step(
        context.workspace,
        "compare",
        {"held": held.name, "bundle": packaged.result.bundle.sha256},
        Gain,
        measured,
        target=target.name,
        valid=lambda _: False,
    )
