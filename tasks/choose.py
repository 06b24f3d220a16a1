"""Choose: the build with what tuning found is measured beside the one without it, and the better one is shipped.

So are choices that only the whole model can tell: how much of what was found to use, and on how many threads to run.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Literal, ParamSpec, TypeVar, cast

from tasks.build import BuildResult, Inspect, build
from tasks.export import ExportResult
from tasks.package import PackageResult, package
from tasks.relax_import import ImportResult
from tasks.sidebyside import DECIDING_PAIRS, Beside, side_by_side
from tasks.step import Context, slug, step, variants
from tasks.tune import NOTHING_TUNED, TuneResult, part_of, with_threads
from tasks.validate import ReferenceResult, Verdict, unable, validate
from tvmflow import process, samples
from tvmflow.progress import reporter
from tvmflow.samples import Named
from tvmflow.target import Target, host
from tvmflow.tuning.best_records import PARTS, Part
from tvmflow.workspace import Outcome, StepResult, Workspace, run_step

if TYPE_CHECKING:
    from prefect import Task

P = ParamSpec("P")
R = TypeVar("R")

# What tuning must gain of the whole model's time: below lies what two measurements of one build differ by.
GAIN = 0.99


@dataclass(frozen=True)
class Candidate:
    """One build of a target as it would be shipped, the records it was made with, and what validation says of it."""

    known: Outcome[TuneResult]
    built: Outcome[BuildResult]
    packaged: Outcome[PackageResult]
    verdict: Outcome[Verdict]


class Choice(StepResult):
    """Whether the tuned or the untuned build is shipped, and why, in a sentence.

    `ratio` is the tuned build's latency over the untuned one's, in the median of pairs of neighbouring rounds, `spread`
    how far the pairs are apart relative to it; None where the two were not compared. `part` is what the tuned build was
    made with, `threads` the number that the bundle runs with where fewer than the target's were faster.
    """

    shipped: Literal["tuned", "untuned"]
    told: str
    ratio: float | None = None
    spread: float | None = None
    part: Part | Literal["all"] = "all"
    threads: int | None = None


class Fewer(StepResult):
    """Whether a bundle is faster on fewer threads, told in one sentence."""

    faster: bool
    told: str


def untuned(workspace: Workspace) -> Outcome[TuneResult]:
    """What tuning comes to where nothing is known: no records."""
    with workspace.scratch() as folder:
        path = folder / "records.jsonl"
        path.touch()
        records = workspace.keep(path)
    return Outcome(TuneResult(records=records, workloads=(), trials=0, coverage=NOTHING_TUNED), "cached", 0.0)


def to_build(workspace: Workspace, tuned: Outcome[TuneResult]) -> tuple[Outcome[TuneResult], ...]:
    """What to build with: what tuning found, then nothing; only the latter where nothing was found."""
    nothing = untuned(workspace)
    return (nothing,) if tuned.result.records.sha256 == nothing.result.records.sha256 else (tuned, nothing)


Built = tuple[Outcome[TuneResult], Outcome[BuildResult]]


def distinct(builds: Iterable[Built]) -> tuple[Built, ...]:
    """The builds of `to_build`, or the untuned one alone where tuning has changed nothing: it needs no records."""
    *tuned, plain = builds
    code = plain[1].result.library, plain[1].result.params
    return (*(item for item in tuned if (item[1].result.library, item[1].result.params) != code), plain)


@dataclass(frozen=True)
class Making:
    """One target of a release that is made here: built with what is known, and of the builds the best is shipped."""

    context: Context
    exported: Outcome[ExportResult]
    imported: Outcome[ImportResult]
    target: Target
    held_out: Outcome[ReferenceResult] | None = None
    inspect: Inspect | None = None

    def candidates(self, known: Sequence[Outcome[TuneResult]]) -> tuple[Candidate, ...]:
        """The builds with each of what `to_build` says, as far as they differ."""
        return tuple(self._candidate(*built) for built in distinct([self._built(item) for item in known]))

    def best(self, candidates: Sequence[Candidate]) -> tuple[Candidate, Outcome[Choice] | None]:
        """What is shipped of them, measured on this machine; a single one where nothing is tuned needs no choice.

        Where the tuned build is not the better one, parts of what was found may still be. Fewer threads are tried last
        and halved as long as that is faster, where the release has a budget for tuning.
        """
        shipped, choice = candidates[-1], None
        if len(candidates) > 1:
            tuned, plain = candidates
            choice = self._chosen(tuned, plain, "all")
            shipped = tuned if choice.result.shipped == "tuned" else plain
            if shipped is plain and choice.result.ratio is not None:
                shipped, choice = self._part(tuned, plain) or (shipped, choice)
        if self.context.spec.tune.has_budget:
            shipped, choice = self._fewer_threads(shipped, choice)
        return shipped, choice

    def _part(self, tuned: Candidate, plain: Candidate) -> tuple[Candidate, Outcome[Choice]] | None:
        """The build with a part of what was found, if it is better than the one without."""
        for part in PARTS:
            known = part_of(self.context.workspace, tuned.known, part)
            if known.result.records in (plain.known.result.records, tuned.known.result.records):
                continue
            built, *others = distinct([self._built(known), (plain.known, plain.built)])
            if others:
                candidate = self._candidate(*built)
                choice = self._chosen(candidate, plain, part)
                if choice.result.shipped == "tuned":
                    return candidate, choice
        return None

    def _fewer_threads(
        self, shipped: Candidate, choice: Outcome[Choice] | None
    ) -> tuple[Candidate, Outcome[Choice] | None]:
        able = unable(self.target, self.context.spec.build.precision) is None and shipped.verdict.result.passed
        threads = min(self.target.threads, host().cores) if able else 1
        while threads > 1:
            threads //= 2
            known = with_threads(self.context.workspace, shipped.known, threads)
            packaged = self._packaged(known, shipped.built)
            fewer = _called(fewer_threads)(self.context, self.exported, known, packaged, shipped, threads, self.target)
            if not fewer.result.faster:
                break
            candidate = self._candidate(known, shipped.built)
            if not candidate.verdict.result.passed:
                break
            before = choice or Outcome(Choice(shipped="untuned", told=""), fewer.status, 0.0)
            told = "; ".join(filter(None, (before.result.told, fewer.result.told)))
            result = before.result.model_copy(update={"threads": threads, "told": told})
            shipped, choice = candidate, replace(before, result=result, seconds=before.seconds + fewer.seconds)
        return shipped, choice

    def _built(self, known: Outcome[TuneResult]) -> Built:
        return known, _called(build)(self.context, self.imported, known, self.target, self.inspect)

    def _packaged(self, known: Outcome[TuneResult], built: Outcome[BuildResult]) -> Outcome[PackageResult]:
        return _called(package)(self.context, self.exported, self.imported, known, built, self.target)

    def _candidate(self, known: Outcome[TuneResult], built: Outcome[BuildResult]) -> Candidate:
        packaged = self._packaged(known, built)
        verdict = _called(validate)(self.context, self.exported, packaged, self.target, self.held_out)
        return Candidate(known, built, packaged, verdict)

    def _chosen(self, tuned: Candidate, plain: Candidate, part: Part | Literal["all"]) -> Outcome[Choice]:
        return _called(choose)(self.context, self.exported, tuned, plain, self.target, part)


def _called(task: "Task[P, R]") -> "Task[P, R]":
    """A step to call: within a flow one of its task runs, else its function alone."""
    if process.in_child():
        return task
    from prefect.context import FlowRunContext

    return task if FlowRunContext.get() is not None else cast("Task[P, R]", task.fn)


@step
def choose(
    context: Context,
    exported: Outcome[ExportResult],
    tuned: Candidate,
    untuned: Candidate,
    target: Target,
    part: Part | Literal["all"] = "all",
) -> Outcome[Choice]:
    """Measure the tuned build beside the untuned one, in turn; found done for the same code, whatever its weights.

    They run on a sample of the sizes that the release file says to tune at, or else on the golden one.

    The tuned one is shipped when its latency is below 0.99 of the other's in the median of 25 pairs of rounds, and
    lower in 20 of them at least. Where this machine cannot run them it is shipped as well: each of its records was
    measured to be faster. One that validation refuses is not shipped if the other passes. `part` is what the tuned one
    was made with. Raises BundleError for a bundle that does not run here.
    """
    reason = unable(target, context.spec.build.precision)
    refused = [item.verdict.result.reasons for item in (tuned, untuned)]

    def work() -> Choice:
        if refused[0] and not refused[1]:
            told = f"the untuned build is shipped: the tuned one is refused ({refused[0][0]})"
            return Choice(shipped="untuned", told=told, part=part)
        if refused[1] and not refused[0]:
            told = f"the tuned build is shipped: the untuned one is refused ({refused[1][0]})"
            return Choice(shipped="tuned", told=told, part=part)
        if reason is not None:
            told = f"the tuned build is shipped, not compared with the untuned: {reason}"
            return Choice(shipped="tuned", told=told, part=part)
        beside = _beside(context, exported, "choose", tuned.packaged, untuned.packaged, target)
        better = beside.is_faster(GAIN)
        whose = "the tuned one's" if part == "all" else f"with the tuned {part} alone the"
        return Choice(
            shipped="tuned" if better else "untuned",
            told=f"the {'tuned' if better else 'untuned'} build is shipped: " + beside.told(whose, "the untuned one's"),
            ratio=beside.ratio,
            spread=beside.spread,
            part=part,
        )

    code = _reads(context, (tuned.known, tuned.built), (untuned.known, untuned.built), target)
    reads = {**code, "part": part, "refused": refused, "unable": reason}
    return run_step(context.workspace, "choose", reads, Choice, work, target=target.name)


@step
def fewer_threads(
    context: Context,
    exported: Outcome[ExportResult],
    known: Outcome[TuneResult],
    packaged: Outcome[PackageResult],
    usual: Candidate,
    threads: int,
    target: Target,
) -> Outcome[Fewer]:
    """Measure a build, packaged to run on fewer threads, beside the same on more, in turn, by the rule of `choose`.

    Raises BundleError for a bundle that does not run here.
    """

    def work() -> Fewer:
        beside = _beside(context, exported, "threads", packaged, usual.packaged, target)
        return Fewer(
            faster=beside.is_faster(GAIN),
            told=f"it runs on {threads} thread{'s' if threads > 1 else ''}: {beside.told('there its', 'that on more')}",
        )

    reads = _reads(context, (known, usual.built), (usual.known, usual.built), target)
    return run_step(context.workspace, "threads", reads, Fewer, work, target=target.name)


def tuned_sample(context: Context, exported: Outcome[ExportResult]) -> Named | None:
    """The first sample's inputs of the sizes that the release file says to tune at; None where there is none."""
    for sizes in variants(context.spec, exported.result.inputs):
        for inputs, _ in samples.load(context.file(exported.result.samples)):
            shapes = [(item.shape, inputs[item.name].shape) for item in exported.result.inputs]
            if all(
                sizes.get(str(dim), size) == size
                for known, found in shapes
                for dim, size in zip(known, found, strict=True)
            ):
                return inputs
    return None


def _beside(
    context: Context,
    exported: Outcome[ExportResult],
    what: str,
    candidate: Outcome[PackageResult],
    held: Outcome[PackageResult],
    target: Target,
) -> Beside:
    return side_by_side(
        context.workspace,
        f"{context.spec.name}-{what}-{slug(target.name)}",
        context.file(candidate.result.bundle),
        context.file(held.result.bundle),
        timeout=context.timeout,
        progress=lambda done, total: reporter().progressed(what, target.name, done, total, "in turn"),
        pairs=DECIDING_PAIRS,
        gain=GAIN,
        inputs=tuned_sample(context, exported),
    )


def _reads(context: Context, candidate: Built, held: Built, target: Target) -> dict[str, Any]:
    """What a measurement depends on. The lowered IR holds no weights: a retrained model is as fast as it was."""
    code = [[known.result.records.sha256, built.result.ir.sha256] for known, built in (candidate, held)]
    return {
        "code": code,
        "build": context.spec.build,
        "sizes": [context.spec.inputs, context.spec.dimensions],
        "target": [target.canonical, target.threads],
    }
