"""The retrain flow: train, evaluate beside what is in production, and release what is at least as good."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from prefect import flow
from prefect.runtime import flow_run

from flows.deployments import one_at_a_time
from flows.release import ReleaseSummary, release_model
from tasks.evaluate import Evaluation, evaluate, keep_verdict
from tasks.export import export
from tasks.register import register
from tasks.step import Context
from tasks.train import train
from tasks.validate import reference
from tvmflow import settings as machine
from tvmflow import spec as release_file
from tvmflow.errors import VerdictError
from tvmflow.services import open_services, open_workspace
from tvmflow.spec import Retrain, Spec
from tvmflow.workspace import Record


class RetrainSummary(Record):
    """What a retraining came to: what `tvmflow retrain --json` prints.

    `source` is the version of the registered PyTorch model, as MODEL/3, `mlflow_run_id` the run that keeps the verdict.
    """

    name: str
    evaluation: Evaluation
    source: str
    mlflow_run_id: str
    release: ReleaseSummary


@flow(name="retrain", flow_run_name="retrain {file}", validate_parameters=True)
def retrain(file: str, arguments: dict[str, Any] | None = None, why: str = "", who: str = "") -> dict[str, Any]:
    """Train the model of a release file anew and release it when it is as good as what production holds.

    `arguments` go over those of the file's section `train`. What the trained model, the challenger, scores on the
    held-out data must be at least what the bundle that the channel `retrain.channel` holds, the champion, scores on the
    same data, plus `retrain.min_gain`. Returns a RetrainSummary as JSON. Raises VerdictError when it is not: nothing is
    registered, released or moved then.
    """
    spec = with_arguments(release_file.load(Path(file)), arguments or {}, file)
    settings = machine.load()
    with one_at_a_time(spec.name), open_services(settings, spec.store, spec.registry) as services:
        workspace = open_workspace(settings, services.store, spec.store)
        return _retrain(Context(spec, settings, workspace, services), why, who).model_dump(mode="json")


def with_arguments(spec: Spec, arguments: Mapping[str, Any], source: str = "release file") -> Spec:
    """The release file with further arguments of its training, and known records in the place of minutes of tuning.

    Errors name it `source`. Raises SpecError for a file that says nothing of training or of held-out data.
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


def _retrain(context: Context, why: str, who: str) -> RetrainSummary:
    spec = context.spec
    rule = spec.retrain or Retrain()
    # New data shows in no argument: each run trains, and one that is resumed finds what it trained.
    trained = train(context, occasion=str(flow_run.get_id()))
    exported = export(context, trained)
    held_out = reference(context, exported, trained)
    evaluation = evaluate(context, held_out, rule).result
    run_id = _keep(context, evaluation, why, who)
    if not evaluation.passed:
        raise VerdictError(
            f"{spec.name} is not released: {evaluation.reason}; the verdict is kept in MLflow run {run_id}"
        )
    model = rule.source or f"{spec.name}-source"
    registered = register(context, exported, trained, evaluation, run_id, model).result
    source = f"{registered.model}/{registered.version}"
    released = release_model(context, trained, source)
    context.registry.set_version_tag(
        registered.model, registered.version, "tvmflow.release", f"{released.name}/{released.version}"
    )
    return RetrainSummary(name=spec.name, evaluation=evaluation, source=source, mlflow_run_id=run_id, release=released)


def _keep(context: Context, evaluation: Evaluation, why: str, who: str) -> str:
    arguments = context.spec.train.arguments if context.spec.train is not None else {}
    metrics = {"challenger": evaluation.challenger}
    if evaluation.champion_metric is not None:
        metrics["champion"] = evaluation.champion_metric
    return keep_verdict(
        context,
        "retrain",
        "passed" if evaluation.passed else "refused",
        {**evaluation.model_dump(mode="json", exclude={"sources"}), "why": why, "who": who, "arguments": arguments},
        metrics,
        {f"train.{name}": value for name, value in arguments.items()} | {"held_out_sha256": evaluation.held_out},
    )
