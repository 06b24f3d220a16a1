"""Retune: profile a bundle in production, tune its costliest functions, and measure whether a new build is faster."""

import secrets
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tasks.build import BuildResult
from tasks.choose import tuned_sample
from tasks.comparison import compare_in_step
from tasks.export import ExportResult
from tasks.options import variants
from tasks.package import PackageResult
from tasks.step import ChildStep, Step, StepRunner, TargetJob, slug
from tasks.tune import TuneJob, TuneResult, run_job, shared_records
from tvmflow.bundle import read_manifest
from tvmflow.documents import verdict
from tvmflow.documents.verdict import Check
from tvmflow.hardware.target import Target
from tvmflow.processes.children import Emit
from tvmflow.spec import Spec, Tune
from tvmflow.workspace import Outcome, StepResult

if TYPE_CHECKING:
    from tvmflow.tuning.sharing import SharedRecords

# The share of the time in compiled functions that is tuned: the rest is spread over many that cost little.
_SHARE = 0.9
_REPEATS = 20
# A new build is worth a release when the interval of its latency over the old one's ends at this or below.
_GAIN = 0.98


class Profile(StepResult):
    """The compiled functions of a bundle: seconds per run by name, the costliest first."""

    functions: dict[str, float]

    def costliest(self) -> tuple[str, ...]:
        """Return the names of the costliest functions that together take 90 % of the time."""
        total, covered_seconds, names = sum(self.functions.values()), 0.0, []
        for name, seconds in self.functions.items():
            if covered_seconds >= _SHARE * total:
                break
            covered_seconds += seconds
            names.append(name)
        return tuple(names)


class Gain(verdict.Gain, StepResult):
    """A comparison of a new build with the bundle in production, on one target."""


class ProfileJob(TargetJob):
    """The path of a bundle in production, and its target."""

    bundle: Path


def profile_work(job: ProfileJob, emit: Emit) -> Profile:
    """Time each compiled function on the bundle's typical inputs.

    The step calls this in a child process. Raises BundleError where the bundle does not run.
    """
    from tvmflow import runtime
    from tvmflow.runtime.profile import MACHINE, compiled_functions, measure_functions

    with runtime.load(job.bundle) as model:
        inputs = model.typical_inputs
        names = compiled_functions(job.bundle, model.manifest)
        times = measure_functions(model.machine, lambda: model(**inputs), names, _REPEATS, model.device.sync)
    return Profile(functions={item.name: item.seconds for item in times if item.name != MACHINE})


profile = ChildStep("profile", Profile, profile_work, cached=False)

# The step always runs: its budget is there to be spent, and each run searches elsewhere.
_RETUNE = Step("retune", TuneResult, run_job, cached=False)


def tune_costliest(
    runner: StepRunner, job: TuneJob, costliest: tuple[str, ...], minutes: float, shared: "SharedRecords | None"
) -> Outcome[TuneResult]:
    """Tune the workloads named in `costliest`, with a new random seed in each call.

    `minutes` is the budget. On a CPU up to half of it goes to those decisions of the compiler, for the whole model,
    that have not been measured yet. If the model has none of the named workloads, all of its workloads are tuned. The
    measured schedules are kept as tuning records; the result has those of the tuned workloads only, and all decisions.
    `job` is the job of the release's own tuning. `shared` is the store through which machines exchange records, or
    None; a store that fails costs a warning. Raises TuneError when tuning fails as a whole, and BuildError, OptionError
    or TargetError when the model cannot be lowered. Raises StepError when the process that tunes crashes or takes
    longer than the timeout of `runner`, which larger `minutes` do not extend.
    """
    budget = Tune(minutes=minutes, tuner=job.tune.tuner, seed=secrets.randbelow(2**31))
    with shared_records(runner.workspace, job.target, shared):
        return _RETUNE(runner, job.model_copy(update={"tune": budget, "only": costliest}))


class CompareJob(TargetJob):
    """A new build and the path of the bundle in production; `sizes` are the sizes of symbolic dimensions to measure."""

    exported: ExportResult
    production: Path
    build: BuildResult
    packaged: PackageResult
    sizes: tuple[dict[str, int], ...]

    def cache_key(self) -> Mapping[str, Any]:
        """Return the digests of the two bundles."""
        return {"production": self.production.name, "bundle": self.packaged.bundle.sha256}

    @classmethod
    def of(
        cls,
        spec: Spec,
        exported: ExportResult,
        production: Path,
        build: BuildResult,
        packaged: PackageResult,
        target: Target,
    ) -> "CompareJob":
        """Return the job that compares a new build of a release file's model with the bundle `production`."""
        return cls(
            exported=exported,
            production=production,
            build=build,
            packaged=packaged,
            target=target,
            sizes=variants(spec, exported.inputs),
        )


def compare_work(job: CompareJob, runner: StepRunner) -> Gain:
    """Compare the latency of a new build with that of the bundle in production, with alternating runs.

    The new build is better when the confidence interval of the ratio, new / production, ends at 0.98 or below, and
    worse when it lies above 1 / 0.98. A build with the library that is in production is not measured: it is neither
    better nor worse, and has a ratio of 1 and no interval. `runner` has the workspace and the log, and reports the
    progress. Raises BundleError for a bundle that does not run here.
    """
    name, workspace = job.target.name, runner.workspace
    if read_manifest(job.production).files["mod.so"].sha256 == job.build.library.sha256:
        message = f"target {name!r}: the new build is the one in production"
        return Gain(target=name, better=False, worse=False, message=message, ratio=1.0, ratios=())
    comparison, samples = compare_in_step(
        runner,
        workspace.path(job.packaged.bundle),
        job.production,
        bounds=(_GAIN, 1 / _GAIN),
        inputs=tuned_sample(workspace, job.exported, job.sizes),
    )
    message = f"target {name!r}: " + comparison.describe("the new build's", "that in production")
    check = Check.of_ratio(f"{slug(name)}-retuned", message, comparison, _GAIN, samples)
    return Gain(
        target=name,
        better=check.passed,
        worse=comparison.interval.judge(1 / _GAIN) == "fail",
        message=message,
        ratio=comparison.ratio,
        ratios=comparison.ratios,
        interval=comparison.interval,
        check=check,
    )


compare = Step("compare", Gain, compare_work, cached=False)
