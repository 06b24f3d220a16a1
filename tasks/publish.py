"""Publish: send the bundles to the release store, and release.json last."""

import hashlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tasks.export import ExportResult
from tasks.reference import ReferenceResult
from tasks.report import PAGE
from tasks.step import Job, Step, StepRunner, simplify, slug
from tasks.track import TargetResult, TrackResult, make_verdict
from tasks.train import TrainResult
from tvmflow import __version__
from tvmflow.bundle import read_manifest, read_signer
from tvmflow.documents.encoding import narrow
from tvmflow.documents.figures import Measurements
from tvmflow.documents.release import Blob, Making, Provenance, Release, ReleaseTarget, Tuning
from tvmflow.hardware.target import needed_features
from tvmflow.registry import Registry
from tvmflow.report.layers import list_operators
from tvmflow.report.page import read_data
from tvmflow.report.pictures import draw_png, find_charts
from tvmflow.spec import Spec
from tvmflow.store import ReleaseStore
from tvmflow.store.leases import HeldLease
from tvmflow.workspace import Artifact, StepResult, Workspace


class PublishJob(Job):
    """The release, its bundles and its report.

    `document` is the content of release.json. `store` is the URI of the store, and `endpoint` the address of its S3
    server, None for the embedded one.
    """

    tracked: TrackResult
    document: Release
    targets: tuple[TargetResult, ...]
    report: Artifact
    store: str
    endpoint: str | None

    def cache_key(self) -> Mapping[str, Any]:
        """Return the store's address and the document, which names every blob by its digest."""
        return {"store": [self.store, self.endpoint], "document": self.document}

    @classmethod
    def of(
        cls,
        store: ReleaseStore,
        endpoint: str | None,
        document: Release,
        targets: tuple[TargetResult, ...],
        tracked: TrackResult,
        report: Artifact,
    ) -> "PublishJob":
        """Return the job that publishes a release, which has passed and has a version.

        `endpoint` is the address of the S3 server, None for the embedded one. `document` is the release without its
        report, which release.json names as well.
        """
        return cls(
            tracked=tracked,
            document=document.model_copy(update={"report": Blob(sha256=report.sha256, size=report.size)}),
            targets=targets,
            report=report,
            store=store.config.uri,
            endpoint=endpoint,
        )


class PublishResult(StepResult):
    """The URI of the release, and the URI of each target's bundle by the target's name."""

    release_uri: str
    bundle_uris: dict[str, str]


def work(
    job: PublishJob, runner: StepRunner, store: ReleaseStore, registry: Registry, lease: HeldLease
) -> PublishResult:
    """Send the release to the store and mark its version as published in the registry.

    The release exists only when release.json has been written, last; after an interruption, a second run completes it.
    `lease` is the lease on the release's name, which the caller holds. Raises StoreError, also when the lease has been
    lost, and RegistryError.
    """
    artifacts = {item.sha256: item for target in job.targets for item in blobs_of(target).values()}
    page = runner.workspace.path(job.report)
    # The page of a release that is published already may be in the store alone.
    if page.exists():
        artifacts[job.report.sha256] = job.report
    total = sum(item.size for item in artifacts.values())
    sent_bytes = 0

    def report_sent(count: int) -> None:
        nonlocal sent_bytes
        sent_bytes += count
        runner.emit(min(sent_bytes, total), total, "sending")

    blobs = [(runner.workspace.path(item), digest) for digest, item in artifacts.items()]
    uri = store.publish(job.document, blobs, report_sent, lease.require)
    if page.exists():
        _show(page, job.tracked.run_id, runner, registry)
    model = job.tracked.model
    registry.set_version_tag(model, job.document.version, "tvmflow.status", "published")
    registry.set_version_tag(model, job.document.version, "tvmflow.release_uri", uri)
    return PublishResult(
        release_uri=uri,
        bundle_uris={
            item.target.name: f"{store.config.uri}/blobs/sha256/{blobs_of(item)['bundle'].sha256}"
            for item in job.targets
        },
    )


def _show(page: Path, run_id: str, runner: StepRunner, registry: Registry) -> None:
    """Log the page with its charts as PNG and its table of operators, which MLflow's UI shows."""
    content = page.read_text()
    with runner.workspace.scratch() as folder:
        files = {PAGE: page}
        for index, (caption, chart) in enumerate(find_charts(content).items(), 1):
            picture = folder / str(index)
            picture.write_bytes(draw_png(chart))
            files[f"figures/{index:02}-{simplify(caption)}.png"] = picture
        registry.log_artifacts(run_id, files)
    tables = list_operators(read_data(content))
    registry.log_tables(run_id, {f"{slug(target)}/operators.json": rows for target, rows in tables.items()})


def _is_there(
    result: PublishResult, job: PublishJob, store: ReleaseStore, registry: Registry, lease: HeldLease
) -> bool:
    name, version = job.document.name, job.document.version
    needs_statement = store.config.signing_key is not None
    return store.has_release(name, version) and not (needs_statement and store.read_statement(name, version) is None)


publish = Step("publish", PublishResult, work, is_current=_is_there)


def blobs_of(result: TargetResult) -> dict[str, Artifact]:
    """Return, by name, the blobs that the store keeps of a target: `bundle`, and `weights` if they are not in it."""
    apart = result.packaged.apart
    return {"bundle": result.bundle} if apart is None else {"bundle": apart.bundle, "weights": apart.weights}


def release_document(
    spec: Spec,
    workspace: Workspace,
    exported: ExportResult,
    trained: TrainResult | None,
    reference: ReferenceResult | None,
    targets: tuple[TargetResult, ...],
    tracked: TrackResult,
) -> Release:
    """Return the content of release.json for a release that has passed and has a version, without its report.

    `trained` is None where nothing was trained, `reference` without held-out data. Raises BundleError for a bundle that
    is damaged.
    """
    code: dict[str, str] = {}
    for result in (trained, exported, reference):
        code |= {} if result is None else result.sources.portable
    return Release(
        name=spec.name,
        version=tracked.version or "",
        created_at=tracked.created_at,
        tvmflow=__version__,
        mlflow_run_id=tracked.run_id,
        model=f"models:/{tracked.model}/{tracked.version}",
        provenance=Provenance(
            onnx=f"sha256:{exported.onnx.sha256}",
            opset=exported.opset,
            source=exported.registered,
            training=None if trained is None else trained.training,
            held_out=None if reference is None else reference.data,
            code=dict(sorted(code.items())),
            packages=tracked.packages,
        ),
        channels={name: channel.policy for name, channel in spec.channels.items()},
        inputs=exported.inputs,
        outputs=exported.outputs,
        targets=tuple(_make_target(spec, workspace, item) for item in targets),
    )


def keep_published_origin(document: Release, published: Release) -> Release:
    """Return `document` with the provenance of `published` for training, held-out data, code and packages.

    Both have the same version. A change that affects neither the model nor a figure, such as a new comment in the
    user's code, makes no new version, and so must not change the published document.
    """
    origin = {name: getattr(published.provenance, name) for name in ("training", "held_out", "code", "packages")}
    return document.model_copy(update={"provenance": document.provenance.model_copy(update=origin)})


def _make_target(spec: Spec, workspace: Workspace, item: TargetResult) -> ReleaseTarget:
    blobs = {name: Blob(sha256=artifact.sha256, size=artifact.size) for name, artifact in blobs_of(item).items()}
    coverage = item.tuned.coverage
    return ReleaseTarget(
        target=item.target.name,
        tvm_target=item.target.tvm,
        arch=item.target.arch,
        cpu_features=needed_features(item.target, spec.build.precision),
        bundle=blobs["bundle"],
        weights=blobs.get("weights"),
        verdict=make_verdict(item),
        measurements=item.measurement and narrow(Measurements, item.measurement),
        tuning=Tuning(
            **dict(coverage),
            coverage=str(coverage),
            trials=item.tuned.trials,
            shipped=item.shipped,
            ratio_untuned=None if item.choice is None else item.choice.ratio,
        ),
        making=_describe_making(workspace.path(item.bundle)),
    )


def _describe_making(bundle: Path) -> Making:
    manifest = read_manifest(bundle)
    versions, origin = manifest.versions, manifest.provenance
    return Making(
        records=origin["records"],
        options=hashlib.sha256(origin["options"].encode()).hexdigest(),
        code=origin["code"],
        compiler={"apache-tvm": versions.tvm, "apache-tvm-ffi": versions.tvm_ffi, "LLVM": versions.llvm},
        signer=read_signer(bundle),
    )
