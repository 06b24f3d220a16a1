"""`tvmflow reconcile`: make channels and releases agree with the aliases in MLflow."""

import json
import sys
from typing import TYPE_CHECKING, Any

import click

from tvmflow.cli.options import json_option
from tvmflow.errors import SettingsError

if TYPE_CHECKING:
    from flows.reconcile import ReconcileSummary


@click.command("reconcile")
@json_option
def reconcile_command(as_json: bool) -> None:
    """Make channels and releases agree with MLflow's aliases, for every release file in the setting models.

    It starts the runs that lost webhooks would have started and completes interrupted moves of channels. An alias is
    put back when its version was refused or never released. Exit code 1: a model or channel could not be checked; all
    others were.
    """
    from tvmflow.cli.prefect import prefect_server
    from tvmflow.processes.imports import importing
    from tvmflow.settings import Settings
    from tvmflow.triggers import load

    settings = Settings.load()
    if not settings.models:
        raise SettingsError("set models (TVMFLOW_MODELS='[\"release.yaml\"]') to the release files that are managed")
    load(settings.models)
    with prefect_server(settings) as await_server:
        with importing():
            from flows.reconcile import ReconcileSummary, reconcile

        await_server()
        state: Any = reconcile(return_state=True)
        summary = ReconcileSummary.model_validate(state.result(raise_on_failure=False))
    if as_json:
        click.echo(json.dumps(summary.model_dump(mode="json")))
    else:
        _show(summary)
    for problem in summary.problems:
        click.echo(f"tvmflow: {problem}", err=True)
    if summary.problems:
        sys.exit(1)


def _show(summary: "ReconcileSummary") -> None:
    if not summary.findings:
        click.echo(f"{', '.join(summary.models)}: everything agrees" if not summary.problems else "nothing was done")
    for finding in summary.findings:
        run = f", flow run {finding.flow_run}" if finding.flow_run else ""
        click.echo(f"{finding.alias} {finding.version}: {finding.what}: {finding.done}{run}")
