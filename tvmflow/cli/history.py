"""`tvmflow history`: show what happened to a channel, and how the figures of releases have changed."""

import json

import click

from tvmflow.cli.options import json_option

# The newest releases that the table of figures has columns for.
_SHOWN = 8


@click.command("history")
@click.argument("name")
@click.option("--channel", help="The channel, e.g. production.")
@click.option("--figures", is_flag=True, help="Show the figures of all releases, which drift, and where they stepped.")
@json_option
def history_command(name: str, channel: str | None, figures: bool, as_json: bool) -> None:
    """Show the moves of a channel of NAME, the changes of its policy and the wishes that were not granted.

    With --figures, show the figures of its releases instead. A figure drifts when it rises or falls over six releases
    or more, also by small steps; it stepped when it changed at one release and stayed so.
    """
    if figures == (channel is not None):
        raise click.UsageError("give either --channel or --figures")
    if channel is None:
        _show_figures(name, as_json)
    else:
        _show_channel(name, channel, as_json)


def _show_channel(name: str, channel: str, as_json: bool) -> None:
    from rich import box
    from rich.table import Table

    from tvmflow.cli.display import output_console
    from tvmflow.services import open_store_of
    from tvmflow.settings import Settings
    from tvmflow.store import channels
    from tvmflow.store.channel_document import Move, PolicyChange, WishEnd

    with open_store_of(Settings.load(), name) as store:
        document = channels.read(store, name, channel)
    if as_json:
        click.echo(json.dumps(document.model_dump(mode="json")))
        return
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for column in ("when (UTC)", "from", "to", "who", "why"):
        table.add_column(column, no_wrap=column != "why")
    for event in document.history:
        match event:
            case Move():
                before, after, kind = event.from_version or "-", event.to_version, "rollback" if event.rollback else ""
            case WishEnd():
                before, after, kind = "-", f"({event.version})", event.outcome
            case PolicyChange():
                before, after, kind = "-", "-", "policy"
        why = ": ".join(part for part in (kind, event.why) if part)
        table.add_row(event.when[:19].replace("T", " "), before, after, event.who, why)
    output_console().print(table)


def _show_figures(name: str, as_json: bool) -> None:
    from rich import box
    from rich.table import Table

    from tvmflow.cli.display import output_console
    from tvmflow.errors import StoreError
    from tvmflow.report.drift import find_drifts, find_steps, list_figures
    from tvmflow.report.numbers import format_number
    from tvmflow.services import open_store_of
    from tvmflow.settings import Settings

    with open_store_of(Settings.load(), name) as store:
        releases = list(store.iterate_releases(name))
        if not releases:
            raise StoreError(
                f"there is no release of {name!r} in {store.config.uri}; `tvmflow list` shows those that are"
            )
    series, drifts, steps = list_figures(releases), list(find_drifts(releases)), list(find_steps(releases))
    if as_json:
        rows = [
            {"target": target, "figure": figure, "values": dict(points)} for (target, figure), points in series.items()
        ]
        document = {
            "figures": rows,
            "drifts": [drift.model_dump(mode="json") for drift in drifts],
            "steps": [step.model_dump(mode="json") for step in steps],
        }
        click.echo(json.dumps(document))
        return
    versions = [release.version for release in releases][-_SHOWN:]
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for column in ("target", "figure", *versions):
        table.add_column(column, no_wrap=True)
    for (target, figure), points in series.items():
        values = dict(points)
        table.add_row(target, figure, *(format_number(values[each]) if each in values else "-" for each in versions))
    output_console(140).print(table)
    for change in (*drifts, *steps):
        click.echo(str(change))
