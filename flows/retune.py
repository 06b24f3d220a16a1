"""The retune flow: a time budget spent on what costs most in production, and a release where that made it faster."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

from prefect import flow

from flows.deployments import one_at_a_time
from flows.make import chosen_here, make_here
from flows.release import ReleaseSummary, override, release_model
from tasks.evaluate import keep_verdict
from tasks.export import ExportResult, export
from tasks.relax_import import ImportResult, relax_import
from tasks.retune import Gain, compare, profile, tune_costliest
from tasks.step import Context
from tasks.track import WEIGHTS
from tasks.train import TrainResult, train
from tasks.validate import unable
from tvmflow import settings as machine
from tvmflow import spec as release_file
from tvmflow.errors import StoreError, TargetError, TuneError
from tvmflow.fetch import cache_folder
from tvmflow.registry import Registry
from tvmflow.services import open_services, open_workspace
from tvmflow.store import channels
from tvmflow.store.resolve import TargetEntry, fetch_bundle
from tvmflow.target import Target
from tvmflow.workspace import Outcome, Record, Workspace


class Retuned(Record):
    """One target: the functions that were tuned, the costliest first, trials made, and what came of it."""

    target: str
    functions: tuple[str, ...]
    trials: int
    gain: Gain


class RetuneSummary(Record):
    """What a retuning came to: what `tvmflow retune --json` prints.

    `version` is what the channel holds; `mlflow_run_id` the run that keeps the verdict; `release` is None where there
    was no gain.
    """

    name: str
    channel: str
    version: str
    verdict: Literal["better", "no gain"]
    reason: str
    targets: tuple[Retuned, ...]
    mlflow_run_id: str
    release: ReleaseSummary | None


@flow(name="retune", flow_run_name="retune {file}", validate_parameters=True)
def retune(file: str, minutes: float = 30.0, channel: str = "production") -> dict[str, Any]:
    """Spend minutes of tuning on the workloads that cost most in what a channel holds; release a faster build.

    The model stays what the channel holds. A build with all known records becomes a release only when it is measured
    faster than the bundle in production, beside it; otherwise the records stay, and the verdict says "no gain". Targets
    that this machine cannot run are released with it, and not tuned. Returns a RetuneSummary as JSON. Raises StoreError
    when the channel holds nothing, TuneError when the release file describes another model by now.
    """
    if not minutes > 0:
        raise TuneError(f"a budget of {minutes:g} minutes was given; give more than 0")
    spec = override(release_file.load(Path(file)), None, 0, None)
    settings = machine.load()
    with one_at_a_time(spec.name), open_services(settings, spec.store, spec.registry) as services:
        pointer = channels.find(services.store, spec.name, channel)
        if pointer is None:
            raise StoreError(
                f"the channel {channel!r} of {spec.name} holds nothing to retune; promote a release to it first"
            )
        held = services.store.get_release(spec.name, pointer.version)
        source = held.get("provenance", {}).get("source")
        workspace = open_workspace(settings, services.store, spec.store)
        weights = _weights(services.registry, workspace, held) if spec.train is not None else None
        if source is not None and weights is None:
            # The version that production was made of, wherever the alias has moved since.
            spec = override(spec, None, None, None, source)
        context = Context(spec, settings, workspace, services)
        return _retune(context, held, channel, minutes, weights).model_dump(mode="json")


def _retune(
    context: Context, held: Mapping[str, Any], channel: str, minutes: float, weights: Outcome[TrainResult] | None
) -> RetuneSummary:
    spec, version = context.spec, str(held["version"])
    bundles = _bundles(context, held)
    trained = weights or (train(context) if spec.train is not None else None)
    exported = export(context, trained)
    if held.get("provenance", {}).get("onnx") != f"sha256:{exported.result.onnx.sha256}":
        raise TuneError(
            f"the release file describes another model than {spec.name} {version}, which {channel} holds; "
            "release and promote it first"
        )
    imported = relax_import(context, exported)
    done = tuple(
        _target(context, exported, imported, target, bundle, minutes / len(bundles)) for target, bundle in bundles
    )
    better = any(item.gain.better for item in done) and not any(item.gain.worse for item in done)
    verdict: Literal["better", "no gain"] = "better" if better else "no gain"
    reason = f"{verdict}: " + "; ".join(item.gain.told for item in done)
    run_id = _keep(context, channel, version, verdict, reason, minutes, done)
    released = None
    if better:
        released = release_model(context, trained, held["provenance"].get("source"))
    return RetuneSummary(
        name=spec.name,
        channel=channel,
        version=version,
        verdict=verdict,
        reason=reason,
        targets=done,
        mlflow_run_id=run_id,
        release=released,
    )


def _bundles(context: Context, held: Mapping[str, Any]) -> tuple[tuple[Target, Path], ...]:
    """The bundles in production of the targets that this machine can measure."""
    entries = {entry.target: entry for entry in TargetEntry.read_all(held)}
    found: list[tuple[Target, Path]] = []
    for target in context.spec.resolve_targets():
        if (
            target.name in entries
            and target.tvm.get("kind") == "llvm"
            and unable(target, context.spec.build.precision) is None
        ):
            bundle = fetch_bundle(context.store, entries[target.name].sha256, cache_folder(context.settings))
            found.append((target, bundle))
    if not found:
        raise TargetError(
            f"{context.spec.name} {held['version']} has none of the release file's targets that this machine can "
            "measure; retune it where one of them runs"
        )
    return tuple(found)


def _weights(registry: Registry, workspace: Workspace, held: Mapping[str, Any]) -> Outcome[TrainResult] | None:
    """The weights of the release in production, from its MLflow run, if it was made of trained ones."""
    with workspace.scratch() as folder:
        path = registry.fetch_artifact(str(held["mlflow_run_id"]), WEIGHTS, folder)
        return None if path is None else Outcome(TrainResult(weights=workspace.keep(path)), "cached", 0.0)


def _target(
    context: Context,
    exported: Outcome[ExportResult],
    imported: Outcome[ImportResult],
    target: Target,
    bundle: Path,
    minutes: float,
) -> Retuned:
    """Tune what costs most in a bundle, and measure a build with all that is known beside it."""
    known = profile(context, bundle, target).result
    spent = tune_costliest(context, imported, known, minutes, target).result
    # What a release would ship: it finds the same builds and the same choice done.
    made = chosen_here(make_here(context, exported, imported, None, target))
    gain = compare(context, exported, bundle, made.built, made.packaged, target).result
    return Retuned(target=target.name, functions=known.costliest(), trials=spent.trials, gain=gain)


def _keep(
    context: Context,
    channel: str,
    version: str,
    verdict: str,
    reason: str,
    minutes: float,
    done: tuple[Retuned, ...],
) -> str:
    document = {
        "verdict": verdict,
        "reason": reason,
        "channel": channel,
        "version": version,
        "minutes": minutes,
        "targets": [item.model_dump(mode="json") for item in done],
    }
    metrics: dict[str, float] = {"trials": sum(item.trials for item in done)}
    metrics |= {f"{item.target}.ratio": item.gain.ratio for item in done}
    return keep_verdict(context, "retune", verdict, document, metrics, {"minutes": minutes, "compared": version})
