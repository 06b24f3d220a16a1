"""`tvmflow promote`: move a channel to a release."""

import json
from typing import TYPE_CHECKING, Any

import click

from tvmflow.cli.options import json_option

if TYPE_CHECKING:
    from tvmflow.settings import Settings


@click.command("promote")
@click.argument("name")
@click.argument("version")
@click.option("--channel", required=True, help="The channel to move, e.g. production.")
@click.option("--why", default="", help="Kept in the channel's history.")
@click.option("--approve", is_flag=True, help="Approve of it yourself, where the channel requires a person to.")
@json_option
def promote_command(name: str, version: str, channel: str, why: str, approve: bool, as_json: bool) -> None:
    """Promote release VERSION of NAME: check that it is complete, run the channel's gates, move channel and alias.

    Where the channel requires approval, the deployment promote/NAME asks a person and the command returns without
    waiting; --approve gives your own approval instead. Exit code 3: the promotion was refused, and the channel still
    holds the release that it held before.
    """
    from rich.console import Console

    from tvmflow.cli.display import RichReporter
    from tvmflow.cli.prefect import prefect_server
    from tvmflow.processes.imports import importing
    from tvmflow.promotion import people
    from tvmflow.settings import Settings

    settings = Settings.load()
    needs_person = not approve and _needs_approval(settings, name, version, channel)
    console = Console(stderr=True)
    if not as_json and not needs_person:
        console.print(f"Promoting [bold]{name} {version}[/] to [bold]{channel}[/]", highlight=False)
    reporter = RichReporter(console)
    with prefect_server(settings) as await_server, reporter.live():
        with importing():
            from flows.promote import promote
            from flows.runs import is_registered

        await_server()
        if needs_person and settings.prefect_api_url is not None and is_registered(f"promote/{name}"):
            summary = _ask(name, version, channel, why)
        else:
            summary = promote(name, version, channel, who=people.identify_user(), why=why, approved=approve)
    if as_json:
        click.echo(json.dumps(summary))
    else:
        show(summary)


def _needs_approval(settings: "Settings", name: str, version: str, channel: str) -> bool:
    """Whether a person must approve the move first. Raises StoreError or SpecError."""
    from tvmflow.promotion import policies
    from tvmflow.services import open_store_of
    from tvmflow.store import channels

    with open_store_of(settings, name) as store:
        document = channels.find(store, name, channel)
        policy = policies.read_policy(store, document, version)
    return policy.approval != "none" and document.version != version


def _ask(name: str, version: str, channel: str, why: str) -> dict[str, Any]:
    """Start the deployment that asks for approval."""
    from flows.promote import PromotionSummary, ask_for_approval
    from tvmflow.promotion import people

    run = ask_for_approval(name, version, channel, who=people.identify_user(), why=why)
    summary = PromotionSummary(
        name=name,
        version=version,
        channel=channel,
        from_version=None,
        status="waiting",
        message=f"{channel} needs a person's approval: when its checks are done, `tvmflow approve {run}`",
        who=people.identify_user(),
        why=why,
        flow_run_id=run,
    )
    return summary.model_dump(mode="json")


def show(summary: dict[str, Any]) -> None:
    """Print the checks and the outcome of a promotion; `summary` is a PromotionSummary as JSON."""
    from rich import box
    from rich.table import Table

    from tvmflow.cli.display import output_console

    console = output_console()
    if summary["checks"]:
        table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
        table.add_column("check", no_wrap=True)
        table.add_column("what was found")
        for check in summary["checks"]:
            table.add_row(check["name"], check["told"])
        console.print(table)
    console.print(f"{summary['name']}: {summary['told']}", highlight=False, soft_wrap=True)
    if summary["mlflow_run_id"]:
        console.print(f"MLflow   run {summary['mlflow_run_id']}", highlight=False, soft_wrap=True)
