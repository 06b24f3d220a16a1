"""The retune flow: it tunes the costliest workloads of a bundle in production, and releases a faster build."""

from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

from prefect import flow

from flows.context import RunContext, open_context
from flows.local import ModelSteps, build_here, choose_here
from flows.release import ReleaseSummary, override, release_model
from tasks.evaluate import keep_verdict
from tasks.export import ExportJob, export
from tasks.relax_import import ImportJob, relax_import
from tasks.retune import CompareJob, ProfileJob, compare, profile, tune_costliest
from tasks.track import WEIGHTS
from tasks.train import TrainJob, TrainResult, train
from tasks.tune import TuneJob
from tasks.validate import why_not_here
from tvmflow import spec as release_file
from tvmflow.bundle.signature import trusted_keys
from tvmflow.documents.encoding import narrow
from tvmflow.documents.release import Release
from tvmflow.documents.verdict import Gain, RetunedTarget, RetuneVerdict, samples_of
from tvmflow.errors import MachineError, StoreError, TuneError
from tvmflow.fetch import cache_folder
from tvmflow.hardware.target import Target
from tvmflow.registry import Registry
from tvmflow.store import channels
from tvmflow.store.resolve import TargetEntry, fetch_target
from tvmflow.workspace import Outcome, Record, Workspace


class RetuneSummary(Record):
    """The outcome of a retuning, which `tvmflow retune --json` prints.

    `version` is the version that the channel held before, `mlflow_run_id` the run that keeps the verdict, and `release`
    the new release, None where there was no gain.
    """

    name: str
    channel: str
    version: str
    verdict: Literal["better", "no gain"]
    reason: str
    targets: tuple[RetunedTarget, ...]
    mlflow_run_id: str
    release: ReleaseSummary | None


@flow(name="retune", flow_run_name="retune {file}", validate_parameters=True)
def retune(file: str, minutes: float = 30.0, channel: str = "production") -> dict[str, Any]:
    """Tune the costliest workloads of a channel's release for some minutes, and release a faster build.

    The model is the one of the channel's release. `minutes` are divided among the targets. A build with all records
    becomes a release only when a measurement with alternating runs finds it faster than the channel's bundle on a
    target and slower on none; otherwise the verdict is "no gain", and the records are kept. Targets that this machine
    cannot run are released as well, but not tuned. Returns a RetuneSummary as JSON. Raises StoreError when the channel
    has no release, or was moved before the faster build could be released, TuneError when `minutes` is not above 0 or
    the release file describes another model by now, and MachineError when this machine can measure none of the
    release's targets.
    """
    if not minutes > 0:
        raise TuneError(f"a budget of {minutes:g} minutes was given; give more than 0")
    spec = override(release_file.load(Path(file)), None, 0, None)
    with open_context(spec) as context:
        version = channels.find_checked(context.store, spec.name, channel).version
        if version is None:
            raise StoreError(
                f"the channel {channel!r} of {spec.name} holds nothing to retune; promote a release to it first"
            )
        production = context.store.get_release(spec.name, version, trusted=trusted_keys())
        source = production.provenance.source
        weights = _weights(context.registry, context.workspace, production) if spec.train is not None else None
        if source is not None and weights is None:
            # The model version that production was built from, even if the alias has moved since.
            context = replace(context, spec=override(spec, None, None, None, source))
        return _retune(context, production, channel, minutes, weights).model_dump(mode="json")


def _retune(
    context: RunContext,
    production: Release,
    channel: str,
    minutes: float,
    weights: Outcome[TrainResult] | None,
) -> RetuneSummary:
    spec, version = context.spec, production.version
    bundles = _bundles(context, production)
    runner = context.runner
    trained = weights or (train(runner, TrainJob.of(spec)) if spec.train is not None else None)
    original = context.find_original(None if trained is None else trained.result.weights)
    exported = export(runner, ExportJob.of(spec, original)).result
    if production.provenance.onnx != f"sha256:{exported.onnx.sha256}":
        raise TuneError(
            f"the release file describes another model than {spec.name} {version}, which {channel} holds; "
            "release and promote it first"
        )
    imported = relax_import(runner, ImportJob.of(spec, exported)).result
    model = ModelSteps(original, exported, imported, None)
    targets = tuple(
        _retune_target(context, model, target, bundle, minutes / len(bundles)) for target, bundle in bundles
    )
    is_better = any(item.gain.better for item in targets) and not any(item.gain.worse for item in targets)
    verdict: Literal["better", "no gain"] = "better" if is_better else "no gain"
    reason = f"{verdict}: " + "; ".join(item.gain.message for item in targets)
    run_id = _log_verdict(context, channel, version, verdict, reason, minutes, targets)
    release = None
    if is_better:
        # Somebody may have rolled the channel back from this very model while its build was tuned.
        context.outlast(lambda: channels.require_version(context.store, spec.name, channel, version))
        release = release_model(context, trained, production.provenance.source)
    return RetuneSummary(
        name=spec.name,
        channel=channel,
        version=version,
        verdict=verdict,
        reason=reason,
        targets=targets,
        mlflow_run_id=run_id,
        release=release,
    )


def _bundles(context: RunContext, production: Release) -> tuple[tuple[Target, Path], ...]:
    """Return the bundles in production for the targets that this machine can measure.

    Raises MachineError without any.
    """
    entries = {entry.target: entry for entry in TargetEntry.read_all(production)}
    bundles: list[tuple[Target, Path]] = []
    for target in context.spec.resolve_targets():
        if (
            target.name in entries
            and target.tvm.get("kind") == "llvm"
            and why_not_here(target, context.spec.build.precision) is None
        ):
            bundle = fetch_target(context.store, entries[target.name], cache_folder(context.settings))
            bundles.append((target, bundle))
    if not bundles:
        raise MachineError(
            f"{context.spec.name} {production.version} has none of the release file's targets that this machine can "
            "measure; retune it where one of them runs"
        )
    return tuple(bundles)


def _weights(registry: Registry, workspace: Workspace, production: Release) -> Outcome[TrainResult] | None:
    """Return the weights of the release in production from its MLflow run, None where the run has none."""
    with workspace.scratch() as folder:
        path = registry.fetch_artifact(production.mlflow_run_id, WEIGHTS, folder)
        if path is None:
            return None
        return Outcome(TrainResult.of_release(workspace.keep(path), production), "cached", 0.0)


def _retune_target(
    context: RunContext, model: ModelSteps, target: Target, bundle: Path, minutes: float
) -> RetunedTarget:
    """Tune the costliest functions of a bundle, and measure it in turn with a build that has all records."""
    spec, runner = context.spec, context.runner
    costliest = profile(runner, ProfileJob(bundle=bundle, target=target)).result.costliest()
    job = TuneJob.of(spec, model.imported, target)
    tuned = tune_costliest(runner, job, costliest, minutes, context.shared_records).result
    # The build that a release would ship; a release of it then finds these steps in the cache.
    result = choose_here(build_here(context, model, target))
    comparing = CompareJob.of(spec, model.exported, bundle, result.build, result.packaged, target)
    gain = narrow(Gain, compare(runner, comparing).result)
    return RetunedTarget(target=target.name, functions=costliest, trials=tuned.trials, gain=gain)


def _log_verdict(
    context: RunContext,
    channel: str,
    version: str,
    verdict: Literal["better", "no gain"],
    reason: str,
    minutes: float,
    targets: tuple[RetunedTarget, ...],
) -> str:
    document = RetuneVerdict(
        verdict=verdict, reason=reason, channel=channel, version=version, minutes=minutes, targets=targets
    )
    metrics: dict[str, float] = {"trials": sum(item.trials for item in targets)}
    metrics |= {f"{item.target}.ratio": item.gain.ratio for item in targets}
    params = {"minutes": minutes, "compared": version}
    checks = [item.gain.check for item in targets if item.gain.check is not None]
    return keep_verdict(
        context.registry,
        context.workspace,
        context.spec,
        "retune",
        document,
        outcome=verdict,
        reason=reason,
        metrics=metrics,
        params=params,
        version=version,
        files=samples_of(context.workspace, checks),
    )
