"""`tvmflow rollback`: move a channel back."""

import json

import click

from tvmflow.cli.options import json_option


@click.command("rollback")
@click.argument("name")
@click.option("--channel", required=True, help="The channel to move back, e.g. production.")
@click.option("--to", metavar="VERSION", help="A version that the channel has held; by default the one before.")
@click.option("--why", default="", help="Kept in the channel's history.")
@json_option
def rollback_command(name: str, channel: str, to: str | None, why: str, as_json: bool) -> None:
    """Move a channel of NAME, alias and pointer, back to the release that it held before.

    The digests of that release are checked; no gates run. A second rollback goes one release further back, unless the
    one before was interrupted: then it completes that.
    """
    from tvmflow.promotion import moves, people
    from tvmflow.services import open_services, read_sections
    from tvmflow.settings import Settings

    settings = Settings.load()
    sections = read_sections(settings, name)
    with open_services(settings, sections.store, sections.registry) as services:
        before, after = moves.roll_back(services, name, channel, who=people.identify_user(), why=why, to=to)
    has_moved = before.version != after.version
    if as_json:
        last = after.moves[-1].model_dump(mode="json")
        document = {"name": name, "channel": channel, "version": after.version, "from_version": before.version}
        click.echo(json.dumps({**document, "moved": has_moved, "move": last}))
    elif before.shown != after.shown and not has_moved:
        click.echo(f"{name}: {channel} holds {after.version} already; its alias names it now")
    elif has_moved:
        click.echo(f"{name}: {channel} moved back from {before.version} to {after.version}")
    else:
        click.echo(f"{name}: {channel} holds {after.version} already")
