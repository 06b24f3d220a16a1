"""`tvmflow history`: show the moves of a channel."""

import dataclasses
import json
import sys

import click


@click.command("history")
@click.argument("name")
@click.option("--channel", required=True, help="The channel, e.g. production.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON document.")
def history_command(name: str, channel: str, as_json: bool) -> None:
    """Show the moves of a channel of NAME: when, from and to which release, by whom and why."""
    from rich import box
    from rich.console import Console
    from rich.table import Table

    from tvmflow import settings as machine
    from tvmflow.services import open_store
    from tvmflow.store import channels

    with open_store(machine.load()) as store:
        pointer = channels.read(store, name, channel)
    if as_json:
        click.echo(json.dumps(dataclasses.asdict(pointer)))
        return
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for column in ("when (UTC)", "from", "to", "who", "why"):
        table.add_column(column, no_wrap=column != "why")
    for move in pointer.history:
        why = f"rollback{': ' if move.why else ''}{move.why}" if move.rollback else move.why
        table.add_row(move.when[:19].replace("T", " "), move.from_version or "-", move.to_version, move.who, why)
    Console(width=None if sys.stdout.isatty() else 120).print(table)
