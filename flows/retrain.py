"""The retrain flow: it trains, compares the model with the release in production, and releases a better one."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from prefect import flow
from prefect.runtime import flow_run

from flows.context import RunContext, open_context
from flows.release import ReleaseSummary, release_model
from tasks.evaluate import EvaluateJob, Evaluation, evaluate, keep_verdict
from tasks.export import ExportJob, export
from tasks.reference import ReferenceJob, reference
from tasks.register import RegisterJob, register
from tasks.train import TrainJob, train
from tvmflow import spec as release_file
from tvmflow.documents import verdict
from tvmflow.documents.encoding import narrow
from tvmflow.documents.training import finite_json
from tvmflow.documents.verdict import RetrainVerdict
from tvmflow.errors import VerdictError
from tvmflow.fetch import cache_folder
from tvmflow.spec import Retrain, Spec
from tvmflow.workspace import Record


class RetrainSummary(Record):
    """The outcome of a retraining that passed, which `tvmflow retrain --json` prints.

    `source` is the version of the registered PyTorch model, as MODEL/3, `mlflow_run_id` the run that keeps the verdict.
    """

    name: str
    evaluation: Evaluation
    source: str
    mlflow_run_id: str
    release: ReleaseSummary


@flow(name="retrain", flow_run_name="retrain {file}", validate_parameters=True)
def retrain(file: str, arguments: dict[str, Any] | None = None, why: str = "", who: str = "") -> dict[str, Any]:
    """Train the model of a release file again, and release it when it is good enough.

    `arguments` are added to those of the file's section `train`, or replace them. The trained model, the challenger,
    must score at least `retrain.min_gain` more on the held-out data than the champion, which is the bundle that the
    channel `retrain.channel` holds. `who` retrains and `why` are kept with the verdict. Returns a RetrainSummary as
    JSON. Raises VerdictError when the challenger scores less: nothing is registered, released or moved then.
    """
    spec = with_arguments(release_file.load(Path(file)), arguments or {}, file)
    with open_context(spec) as context:
        return _retrain(context, why, who).model_dump(mode="json")


def with_arguments(spec: Spec, arguments: Mapping[str, Any], source: str) -> Spec:
    """Return the release file with these training arguments, and without a budget of minutes for tuning.

    Errors name it `source`. Raises SpecError for a file without training or without held-out data.
    """
    changes: dict[str, object] = {}
    if spec.retrain is None:
        changes["retrain"] = {}
    if spec.train is not None:
        changes["train.arguments"] = {**spec.train.arguments, **arguments}
    if spec.tune.minutes is not None:
        # Minutes are always spent; new weights have the workloads of the old ones, which have records already.
        changes |= {"tune.minutes": None, "tune.trials": 0}
    return release_file.amend(spec, changes, source)


def _retrain(context: RunContext, why: str, who: str) -> RetrainSummary:
    spec, runner = context.spec, context.runner
    rule = spec.retrain or Retrain()
    # New data need not change an argument: each run trains, and a resumed run finds its weights cached.
    trained = train(runner, TrainJob.of(spec, occasion=str(flow_run.get_id())))
    weights = trained.result.weights
    original = context.find_original(weights)
    exported = export(runner, ExportJob.of(spec, original)).result
    held_out = reference(runner, ReferenceJob.of(spec, original, exported)).result
    cache = cache_folder(context.settings)
    job = context.outlast(lambda: EvaluateJob.of(spec, rule, held_out, context.store, cache))
    evaluation = evaluate(runner, job).result
    run_id = context.outlast(lambda: _keep_verdict(context, evaluation, why, who))
    if not evaluation.passed:
        raise VerdictError(
            f"{spec.name} is not released: {evaluation.reason}; the verdict is kept in MLflow run {run_id}"
        )
    model = rule.source or f"{spec.name}-source"
    registering = RegisterJob.of(spec, context.registry, original, exported, weights, evaluation, run_id, model)
    entry = register(runner, registering, context.registry).result
    source = f"{entry.model}/{entry.version}"
    release = release_model(context, trained, source)
    name, version = entry.model, entry.version
    value = f"{release.name}/{release.version}"
    context.outlast(lambda: context.registry.set_version_tag(name, version, "tvmflow.release", value))
    return RetrainSummary(name=spec.name, evaluation=evaluation, source=source, mlflow_run_id=run_id, release=release)


def _keep_verdict(context: RunContext, evaluation: Evaluation, why: str, who: str) -> str:
    """Write the verdict to MLflow; return the id of its run."""
    arguments = context.spec.train.arguments if context.spec.train is not None else {}
    metrics = {"challenger": evaluation.challenger}
    if evaluation.champion_metric is not None:
        metrics["champion"] = evaluation.champion_metric
    figures = dict(narrow(verdict.Evaluation, evaluation))
    return keep_verdict(
        context.registry,
        context.workspace,
        context.spec,
        "retrain",
        RetrainVerdict(**figures, why=why, who=who, arguments=finite_json(arguments)),
        outcome="passed" if evaluation.passed else "refused",
        reason=evaluation.reason,
        metrics=metrics,
        params={f"train.{name}": value for name, value in arguments.items()} | {"held_out_sha256": evaluation.held_out},
    )
