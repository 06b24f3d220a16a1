"""Reproduce: whether the bundles of a release are the same when they are built again on this machine."""

from pathlib import Path

from tasks.gate import GateJob, GateResult, has_passed
from tasks.rebuild import rebuild
from tasks.step import Step, StepRunner, slug
from tvmflow.documents.verdict import REBUILD, Check
from tvmflow.errors import TvmflowError
from tvmflow.onnx_model.external_data import data_digests
from tvmflow.registry import Registry
from tvmflow.store import ReleaseStore
from tvmflow.store.resolve import TargetEntry, fetch_target


def work(job: GateJob, runner: StepRunner, store: ReleaseStore, cache: Path, registry: Registry) -> GateResult:
    """Build every bundle again from the ONNX file and the tuning records of the release's run in MLflow.

    Returns a check for each bundle, which passes if the new one is the same. Bundles are fetched into the folder
    `cache`. Raises StoreError when the store fails, RegistryError when MLflow does.
    """
    run = job.release.mlflow_run_id
    checks = []
    with runner.workspace.scratch() as folder:
        onnx = registry.fetch_artifact(run, "model.onnx", folder)
        for location in {} if onnx is None else data_digests(onnx):
            registry.fetch_artifact(run, location, folder)
        for entry in TargetEntry.read_all(job.release):
            runner.emit(0, 0, f"building {entry.target}")
            records = registry.fetch_artifact(run, f"{slug(entry.target)}/records.jsonl", folder)
            if records is not None:
                # The build looks for them there.
                runner.workspace.keep(records)
            checks.append(_check(entry, fetch_target(store, entry, cache), onnx, run))
    return GateResult(checks=tuple(checks), compared=job.current_version)


# A release that was the same once is not built again; one that was not is.
reproduce = Step("reproduce", GateResult, work, is_current=has_passed)


def _check(entry: TargetEntry, bundle: Path, onnx: Path | None, run: str) -> Check:
    passed, target = False, f"target {entry.target!r}"
    if onnx is None:
        message = f"{target} cannot be built again: MLflow run {run} has no model.onnx; release it again"
    else:
        try:
            message = f"{target} is the same when built again: {', '.join(rebuild(bundle, onnx))}"
            passed = True
        except TvmflowError as error:
            message = f"{target}: {error}"
    return Check(name=REBUILD, message=message, passed=passed)
