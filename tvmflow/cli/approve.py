"""`tvmflow approve`: answer a promotion that waits for a person."""

import json
from typing import TYPE_CHECKING

import click

from tvmflow.cli.options import json_option

if TYPE_CHECKING:
    from flows.approvals import WaitingPromotion
    from tvmflow.settings import Settings


@click.command("approve")
@click.argument("run", required=False)
@click.option("--reject", is_flag=True, help="Reject the promotion instead.")
@click.option("--why", default="", help="Kept with the verdict and in the channel's history.")
@json_option
def approve_command(run: str | None, reject: bool, why: str, as_json: bool) -> None:
    """Approve the promotion that waits in the flow run RUN, an id or its beginning; without RUN, list all that wait."""
    from tvmflow.cli.prefect import prefect_server
    from tvmflow.errors import SettingsError
    from tvmflow.promotion import people
    from tvmflow.settings import Settings

    settings = Settings.load()
    if settings.prefect_api_url is None:
        raise SettingsError(
            "nothing waits where there is no Prefect server: set TVMFLOW_PREFECT_API_URL, or start one by `tvmflow up`"
        )
    with prefect_server(settings):
        from flows.approvals import answer, list_waiting

        if run is None:
            promotions = list_waiting()
            if as_json:
                click.echo(json.dumps([item.model_dump(mode="json") for item in promotions]))
            else:
                _show(promotions, settings)
            return
        who = people.identify_user()
        waiting = answer(
            run,
            approve=not reject,
            who=who,
            why=why,
            check=lambda item: None if reject else _check(settings, item, who),
        )
    document = {**waiting.model_dump(mode="json"), "approved": not reject}
    if as_json:
        click.echo(json.dumps(document))
    else:
        outcome = "rejected" if reject else "approved"
        click.echo(f"{outcome}: {waiting.name} {waiting.version} to {waiting.channel}, run {waiting.run}")


def _check(settings: "Settings", item: "WaitingPromotion", who: str) -> None:
    """Raise VerdictError where the channel wants another person's approval than that of the one who asked."""
    from tvmflow.errors import VerdictError
    from tvmflow.promotion import people
    from tvmflow.services import open_store_of
    from tvmflow.store import channels

    with open_store_of(settings, item.name) as store:
        document = channels.find(store, item.name, item.channel)
    is_own = document.wish is not None and people.is_same_person(document.wish.who, who)
    if is_own and document.policy is not None and document.policy.approval == "another":
        raise VerdictError(
            f"{who} asked for {item.version} on {item.name}@{item.channel}, which another person must approve"
        )


def _show(promotions: list["WaitingPromotion"], settings: "Settings") -> None:
    from rich import box
    from rich.markdown import Markdown
    from rich.table import Table

    from tvmflow.cli.display import output_console

    console = output_console()
    if not promotions:
        console.print(f"nothing waits for approval at {settings.prefect_api_url}", highlight=False, soft_wrap=True)
        return
    for item in promotions:
        if item.report:
            console.print(Markdown(item.report))
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for column in ("run", "name", "version", "channel", "asked by", "since (UTC)"):
        table.add_column(column, no_wrap=True)
    for item in promotions:
        since = item.since[:19].replace("T", " ")
        table.add_row(item.run[:8], item.name, item.version, item.channel, item.who, since)
    console.print(table)
