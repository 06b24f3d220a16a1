"""Publish: the bundles to the release store, and release.json last."""

from typing import Any

from tasks.export import ExportResult
from tasks.step import Context, step
from tasks.track import TargetOutcomes, TrackResult, verdict_document
from tvmflow import __version__
from tvmflow.progress import reporter
from tvmflow.store.documents import RELEASE_FORMAT
from tvmflow.target import needed_features
from tvmflow.workspace import Artifact, Outcome, StepResult, run_step


class PublishResult(StepResult):
    """Where the release is, and where each target's bundle is."""

    release_uri: str
    bundle_uris: dict[str, str]


@step
def publish(
    context: Context,
    exported: Outcome[ExportResult],
    outcomes: tuple[TargetOutcomes, ...],
    tracked: Outcome[TrackResult],
) -> Outcome[PublishResult]:
    """Send the release to the store and say so in the registry.

    Interrupted anywhere there is no release, and running again completes it. Raises StoreError.
    """
    spec, store, known = context.spec, context.store, tracked.result
    version = known.version or ""
    document = release_document(context, exported.result, outcomes, known)

    def work() -> PublishResult:
        artifacts = {item.sha256: item for outcome in outcomes for item in blobs_of(outcome).values()}
        total = sum(item.size for item in artifacts.values())
        sent = 0

        def progressed(count: int) -> None:
            nonlocal sent
            sent += count
            reporter().progressed("publish", None, min(sent, total), total, "sending")

        blobs = [(context.file(item), digest) for digest, item in artifacts.items()]
        uri = store.publish(spec.name, version, document, blobs, progressed)
        context.registry.set_version_tag(known.model, version, "tvmflow.status", "published")
        context.registry.set_version_tag(known.model, version, "tvmflow.release_uri", uri)
        return PublishResult(
            release_uri=uri,
            bundle_uris={
                outcome.target.name: f"{store.config.uri}/blobs/sha256/{blobs_of(outcome)['bundle'].sha256}"
                for outcome in outcomes
            },
        )

    return run_step(
        context.workspace,
        "publish",
        {"store": [store.config.uri, context.settings.s3_endpoint], "document": document},
        PublishResult,
        work,
        valid=lambda _: store.has_release(spec.name, version),
    )


def blobs_of(outcome: TargetOutcomes) -> dict[str, Artifact]:
    """What the store keeps of a target: the bundle; or, to share the weights, the bundle without them, and them."""
    apart = outcome.packaged.result.apart
    return {"bundle": outcome.bundle} if apart is None else {"bundle": apart.bundle, "weights": apart.weights}


def release_document(
    context: Context, exported: ExportResult, outcomes: tuple[TargetOutcomes, ...], tracked: TrackResult
) -> dict[str, Any]:
    """What release.json says: where it comes from, what its channels ask for, and per target all about its bundle."""
    return {
        "format": RELEASE_FORMAT,
        "name": context.spec.name,
        "version": tracked.version,
        "created_at": tracked.created_at,
        "tvmflow": __version__,
        "mlflow_run_id": tracked.run_id,
        "model": f"models:/{tracked.model}/{tracked.version}",
        "provenance": {
            "onnx": f"sha256:{exported.onnx.sha256}",
            "opset": exported.opset,
            # A version of a registered model, as MODEL/3; None for a model that comes from elsewhere.
            "source": exported.registered,
        },
        "channels": {
            name: channel.model_dump(mode="json", exclude={"automatic"})
            for name, channel in context.spec.channels.items()
        },
        **exported.model_dump(mode="json", include={"inputs", "outputs"}),
        "targets": [
            {
                "target": outcome.target.name,
                "tvm_target": outcome.target.tvm,
                "arch": outcome.target.arch,
                "cpu_features": list(needed_features(outcome.target, context.spec.build.precision)),
                **{name: {"sha256": item.sha256, "size": item.size} for name, item in blobs_of(outcome).items()},
                "verdict": verdict_document(outcome),
                "measurements": outcome.measured
                and outcome.measured.result.model_dump(mode="json", exclude={"sources"}),
                "tuning": {
                    "trials": outcome.tuned.result.trials,
                    "coverage": str(outcome.tuned.result.coverage),
                    **outcome.tuned.result.coverage.model_dump(mode="json"),
                    "shipped": outcome.shipped,
                    "ratio_untuned": outcome.choice and outcome.choice.result.ratio,
                },
            }
            for outcome in outcomes
        ],
    }
