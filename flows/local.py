"""The work on one target of a release on this machine: tune, build, choose and measure."""

from dataclasses import dataclass

from flows.context import RunContext
from tasks.benchmark import BenchmarkJob, benchmark, gate_failures
from tasks.candidates import TargetBuilder, tunings_to_build
from tasks.choose import Candidate
from tasks.export import ExportResult
from tasks.original import Original
from tasks.reference import ReferenceResult
from tasks.relax_import import ImportResult
from tasks.track import TargetResult
from tasks.tune import TuneJob, TuneResult, tune
from tasks.validate import why_not_here
from tvmflow.errors import MachineError
from tvmflow.hardware.target import Target
from tvmflow.spec import Spec
from tvmflow.workspace import Outcome


@dataclass(frozen=True)
class ModelSteps:
    """The results of the steps before a target: the original, its ONNX file, its Relax module, its reference outputs.

    `reference` is None without held-out data.
    """

    original: Original
    exported: ExportResult
    imported: ImportResult
    reference: ReferenceResult | None


@dataclass(frozen=True)
class LocalBuilds:
    """The candidates of one target: the build to ship, or the tuned and the untuned one, in this order.

    `builder` made them, and `tuned` is the outcome of the tuning.
    """

    builder: TargetBuilder
    tuned: Outcome[TuneResult]
    candidates: tuple[Candidate, ...]


def build_here(context: RunContext, model: ModelSteps, target: Target) -> LocalBuilds:
    """Tune for one target, then build, package and validate.

    The model is built with and without the tuning; the tuned build is kept only if it differs. Raises TuneError,
    TargetError, BuildError and StepError.
    """
    spec, runner = context.spec, context.runner
    tuned = tune(runner, TuneJob.of(spec, model.imported, target), context.shared_records)
    builder = TargetBuilder(
        runner, spec, model.exported, model.imported, target, model.reference, context.settings.signing_key
    )
    return LocalBuilds(builder, tuned, builder.candidates(tunings_to_build(context.workspace, tuned.result)))


def choose_here(builds: LocalBuilds) -> TargetResult:
    """Choose the candidate to ship, by latency on this machine where there are several.

    The result has neither a benchmark nor failed gates. Raises BundleError for a bundle that does not run here.
    """
    best, choice = builds.builder.best(builds.candidates)
    steps = {"tune": builds.tuned.summary, **best.steps}
    if choice is not None:
        steps["choose"] = choice.summary
    return TargetResult(
        target=builds.builder.target,
        tuned=builds.tuned.result,
        build=best.build,
        packaged=best.packaged,
        verdict=best.verdict,
        choice=None if choice is None else choice.result,
        measurement=None,
        gates=(),
        steps=steps,
    )


def measure_here(context: RunContext, model: ModelSteps, builds: LocalBuilds) -> TargetResult:
    """Choose the candidate to ship, run the release file's benchmark on it, and check the gates.

    A candidate that failed its validation or could not be validated on this machine is not measured: its result has
    `measurement` None and no gates. Raises VerdictError for a gate on a peer that was not measured.
    """
    result = choose_here(builds)
    if not (result.verdict.passed and result.verdict.verified):
        return result
    job = BenchmarkJob.of(
        context.spec, context.workspace, model.original, model.exported, result.packaged, result.target
    )
    measurement = benchmark(context.runner, job)
    gates = tuple(gate_failures(context.spec.gates, measurement.result, result.bundle, result.target))
    steps = {**result.steps, "benchmark": measurement.summary}
    return result.model_copy(update={"measurement": measurement.result, "gates": gates, "steps": steps})


def refuse_unverifiable(spec: Spec, targets: tuple[Target, ...]) -> None:
    """Raise MachineError, before any work begins, for a target whose bundle could not pass on this machine."""
    for target in targets:
        reason = why_not_here(target, spec.build.precision)
        if reason is not None and spec.gates.unverified_targets == "refuse":
            raise MachineError(f"{reason}; release it where it runs, or set gates.unverified_targets to allow")
