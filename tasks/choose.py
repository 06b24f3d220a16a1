"""Choose: decide whether a target's tuned or untuned build is shipped, and on how many threads it runs.

Both are decided by measuring whole bundles with alternating runs: only the whole model shows how much tuning gains.
"""

from collections.abc import Mapping
from typing import Any, Literal

from tasks.build import BuildResult
from tasks.comparison import compare_in_step
from tasks.export import ExportResult
from tasks.options import variants
from tasks.package import PackageResult
from tasks.step import Step, StepRunner, TargetJob, slug
from tasks.tune import TuneResult
from tasks.validate import Verdict, why_not_here
from tvmflow import samples
from tvmflow.arrays import NamedArrays
from tvmflow.comparison import Comparison
from tvmflow.documents import release
from tvmflow.documents.verdict import Check
from tvmflow.hardware.target import Target
from tvmflow.spec import Spec
from tvmflow.tuning.best_records import Part
from tvmflow.workspace import Artifact, Record, StepResult, StepSummary, Workspace

# The interval of the tuned latency over the untuned one must end at this or below.
GAIN = 0.99


class Candidate(Record):
    """One build of a target as it would be shipped, the tuning that it was built with, and its verdict.

    `steps` says for each step, by name, whether it ran or was cached.
    """

    tuned: TuneResult
    build: BuildResult
    packaged: PackageResult
    verdict: Verdict
    steps: dict[str, StepSummary]


class Choice(release.Choice, StepResult):
    """The build that is shipped, tuned or untuned; `checks` are the measurements that decided, empty without any."""

    checks: tuple[Check, ...] = ()


class FewerThreads(StepResult):
    """The measurement of a bundle on fewer threads; `check` has passed if the bundle is faster on these."""

    check: Check


class ComparisonJob(TargetJob):
    """Two builds of a target whose latencies are to be compared.

    `sizes` are the sizes of symbolic dimensions that the release file says to tune at. `sections` are the sections of
    the release file on which the code of the builds depends. `refusal` is the sentence that says why this machine
    cannot run the builds; None when it can.
    """

    candidate: Candidate
    baseline: Candidate
    exported: ExportResult
    sizes: tuple[dict[str, int], ...]
    sections: dict[str, Any]
    refusal: str | None

    def cache_key(self) -> Mapping[str, Any]:
        """Return the values that a measurement depends on.

        They do not change with the weights, because the lowered IR holds none.
        """
        sides = (self.candidate, self.baseline)
        return {
            "code": [[side.tuned.records.sha256, side.build.ir.sha256] for side in sides],
            "sections": self.sections,
            "target": [self.target.canonical, self.target.threads],
            "refused": [side.verdict.reasons for side in sides],
            "refusal": self.refusal,
        }

    def compare(self, runner: StepRunner) -> tuple[Comparison, Artifact]:
        """Compare the latencies of the two bundles, with alternating runs.

        The inputs are a sample with the tuned sizes or, without one, the first sample. Returns the comparison and the
        file with the times of all runs. Raises BundleError for a bundle that does not run here.
        """
        workspace = runner.workspace
        return compare_in_step(
            runner,
            workspace.path(self.candidate.packaged.bundle),
            workspace.path(self.baseline.packaged.bundle),
            bounds=(GAIN,),
            inputs=tuned_sample(workspace, self.exported, self.sizes),
        )


class ChooseJob(ComparisonJob):
    """The tuned build as candidate and the untuned one as baseline.

    `part` is the part of the tuning that the candidate was built with.
    """

    part: Part | Literal["all"] = "all"

    def cache_key(self) -> Mapping[str, Any]:
        """Return the key of every ComparisonJob with the field `part` added."""
        return {**super().cache_key(), "part": self.part}


class ThreadsJob(ComparisonJob):
    """A build on `threads` threads as candidate, and the same build on more threads as baseline."""

    threads: int


def comparison_fields(
    spec: Spec, exported: ExportResult, candidate: Candidate, baseline: Candidate, target: Target
) -> dict[str, Any]:
    """Return the fields of a ComparisonJob, by name, for two candidates of a release file's model."""
    return {
        "candidate": candidate,
        "baseline": baseline,
        "exported": exported,
        "target": target,
        "sizes": variants(spec, exported.inputs),
        "sections": spec.model_dump(mode="json", include={"build", "inputs", "dimensions"}),
        "refusal": why_not_here(target, spec.build.precision),
    }


def choose_work(job: ChooseJob, runner: StepRunner) -> Choice:
    """Choose the build to ship; the choice is cached for the same code, whatever its weights.

    The tuned build is shipped when the confidence interval of the ratio tuned latency / untuned latency ends at 0.99 or
    below. It is also shipped if this machine cannot run the two, because each of its records was measured to be faster.
    A build that failed validation is not shipped if the other passed. Raises BundleError for a bundle that does not run
    here.
    """
    tuned, plain = job.candidate.verdict.reasons, job.baseline.verdict.reasons
    if tuned and not plain:
        message = f"the untuned build is shipped: the tuned one is refused ({tuned[0]})"
        return Choice(shipped="untuned", message=message, part=job.part)
    if plain and not tuned:
        message = f"the tuned build is shipped: the untuned one is refused ({plain[0]})"
        return Choice(shipped="tuned", message=message, part=job.part)
    if job.refusal is not None:
        message = f"the tuned build is shipped, not compared with the untuned: {job.refusal}"
        return Choice(shipped="tuned", message=message, part=job.part)
    comparison, samples = job.compare(runner)
    whose = "the tuned one's" if job.part == "all" else f"with the tuned {job.part} alone the"
    sentence = comparison.describe(whose, "the untuned one's")
    name = f"{slug(job.target.name)}-tuned" + ("" if job.part == "all" else f"-{job.part}")
    check = Check.of_ratio(name, sentence, comparison, GAIN, samples)
    winner: Literal["tuned", "untuned"] = "tuned" if check.passed else "untuned"
    return Choice(
        shipped=winner,
        message=f"the {winner} build is shipped: {sentence}",
        ratio=comparison.ratio,
        interval=comparison.interval,
        part=job.part,
        checks=(check,),
    )


def threads_work(job: ThreadsJob, runner: StepRunner) -> FewerThreads:
    """Compare the latency of a build on fewer threads with its latency on more threads.

    The build is faster on fewer threads when the confidence interval of the ratio, latency on fewer / latency on more,
    ends at 0.99 or below. Raises BundleError for a bundle that does not run here.
    """
    comparison, samples = job.compare(runner)
    noun = "thread" if job.threads == 1 else "threads"
    sentence = f"it runs on {job.threads} {noun}: {comparison.describe('there its', 'that on more')}"
    name = f"{slug(job.target.name)}-threads-{job.threads}"
    return FewerThreads(check=Check.of_ratio(name, sentence, comparison, GAIN, samples))


choose = Step("choose", Choice, choose_work)
fewer_threads = Step("threads", FewerThreads, threads_work)


def tuned_sample(workspace: Workspace, exported: ExportResult, sizes: tuple[dict[str, int], ...]) -> NamedArrays:
    """Return the inputs, by name, of a sample with one of these sizes of symbolic dimensions, or else of the first one.

    Earlier `sizes` take precedence, then earlier samples.
    """
    pairs = samples.load(workspace.path(exported.samples))
    for size in sizes:
        for inputs, _ in pairs:
            shapes = [(item.shape, inputs[item.name].shape) for item in exported.inputs]
            if all(
                size.get(str(dim), length) == length
                for declared, actual in shapes
                for dim, length in zip(declared, actual, strict=True)
            ):
                return inputs
    return pairs[0][0]
