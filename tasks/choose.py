"""Choose: the build with what tuning found is measured beside the one without it, and the better one is shipped."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Literal

from tasks.build import BuildResult
from tasks.package import PackageResult
from tasks.sidebyside import side_by_side
from tasks.step import Context, slug, step
from tasks.tune import NOTHING_TUNED, TuneResult
from tasks.validate import Verdict, unable
from tvmflow.progress import reporter
from tvmflow.target import Target
from tvmflow.workspace import Outcome, StepResult, Workspace, run_step

# What tuning must gain of the whole model's time: below lies what two measurements of one build differ by.
GAIN = 0.99
_PAIRS = 15


@dataclass(frozen=True)
class Candidate:
    """One build of a target as it would be shipped, the records it was made with, and what validation says of it."""

    known: Outcome[TuneResult]
    built: Outcome[BuildResult]
    packaged: Outcome[PackageResult]
    verdict: Outcome[Verdict]


class Choice(StepResult):
    """Whether the tuned or the untuned build is shipped, and why, in one sentence.

    `ratio` is the tuned build's latency over the untuned one's, in the median of pairs of neighbouring rounds, `spread`
    how far the pairs are apart relative to it; None where the two were not compared.
    """

    shipped: Literal["tuned", "untuned"]
    told: str
    ratio: float | None = None
    spread: float | None = None


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


def better(
    candidates: Sequence[Candidate], compared: Callable[[Candidate, Candidate], Outcome[Choice]]
) -> tuple[Candidate, Outcome[Choice] | None]:
    """What is shipped of the builds that `distinct` left; where there are two, what `compared` says of them."""
    if len(candidates) == 1:
        return candidates[0], None
    tuned, untuned = candidates
    choice = compared(tuned, untuned)
    return (tuned if choice.result.shipped == "tuned" else untuned), choice


@step
def choose(context: Context, tuned: Candidate, untuned: Candidate, target: Target) -> Outcome[Choice]:
    """Measure the tuned build beside the untuned one, in turn; found done for the same code, whatever its weights.

    The tuned one is shipped when its latency is below 0.99 of the other's in the median of 15 pairs of rounds, and
    lower in 12 of them at least. Where this machine cannot run them it is shipped as well: each of its records was
    measured to be faster. One that validation refuses is not shipped if the other passes. Raises BundleError for a
    bundle that does not run here.
    """
    reason, refused = unable(target), [item.verdict.result.reasons for item in (tuned, untuned)]

    def work() -> Choice:
        if refused[0] and not refused[1]:
            told = f"the untuned build is shipped: the tuned one is refused ({refused[0][0]})"
            return Choice(shipped="untuned", told=told)
        if refused[1] and not refused[0]:
            told = f"the tuned build is shipped: the untuned one is refused ({refused[1][0]})"
            return Choice(shipped="tuned", told=told)
        if reason is not None:
            return Choice(shipped="tuned", told=f"the tuned build is shipped, not compared with the untuned: {reason}")
        beside = side_by_side(
            context.workspace,
            f"{context.spec.name}-choose-{slug(target.name)}",
            context.file(tuned.packaged.result.bundle),
            context.file(untuned.packaged.result.bundle),
            timeout=context.timeout,
            progress=lambda done, total: reporter().progressed("choose", target.name, done, total, "in turn"),
            pairs=_PAIRS,
        )
        better = beside.is_faster(GAIN)
        return Choice(
            shipped="tuned" if better else "untuned",
            told=f"the {'tuned' if better else 'untuned'} build is shipped: the tuned one's latency is "
            f"{beside.ratio:.3f} of the untuned one's ({beside.candidate_ms:.3f} ms beside {beside.held_ms:.3f} ms), "
            f"lower in {beside.lower} of {len(beside.ratios)} pairs",
            ratio=beside.ratio,
            spread=beside.spread,
        )

    # The lowered IR holds no weights: a retrained model is as fast as it was.
    code = [[item.known.result.records.sha256, item.built.result.ir.sha256] for item in (tuned, untuned)]
    reads = {
        "code": code,
        "build": context.spec.build,
        "sizes": [context.spec.inputs, context.spec.dimensions],
        "target": [target.canonical, target.threads],
        "refused": refused,
        "unable": reason,
    }
    return run_step(context.workspace, "choose", reads, Choice, work, target=target.name)
