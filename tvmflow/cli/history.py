"""`tvmflow history`: show what happened to a channel."""

import json
import sys

import click


@click.command("history")
@click.argument("name")
@click.option("--channel", required=True, help="The channel, e.g. production.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON document.")
def history_command(name: str, channel: str, as_json: bool) -> None:
    """Show the moves of a channel of NAME, the changes of its policy and the wishes that were not granted."""
    from rich import box
    from rich.console import Console
    from rich.table import Table

    from tvmflow import settings as machine
    from tvmflow.services import open_store
    from tvmflow.store import channels

    with open_store(machine.load()) as store:
        document = channels.read(store, name, channel)
    if as_json:
        click.echo(json.dumps(document.model_dump(mode="json")))
        return
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for column in ("when (UTC)", "from", "to", "who", "why"):
        table.add_column(column, no_wrap=column != "why")
    for event in document.history:
        match event:
            case channels.Move():
                before, after, kind = event.from_version or "-", event.to_version, "rollback" if event.rollback else ""
            case channels.WishEnd():
                before, after, kind = "-", f"({event.version})", event.outcome
            case channels.PolicyChange():
                before, after, kind = "-", "-", "policy"
        why = ": ".join(part for part in (kind, event.why) if part)
        table.add_row(event.when[:19].replace("T", " "), before, after, event.who, why)
    Console(width=None if sys.stdout.isatty() else 120).print(table)
