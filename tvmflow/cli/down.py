"""`tvmflow down`: end the local stack."""

import json

import click

from tvmflow.cli.options import json_option


@click.command("down")
@json_option
def down_command(as_json: bool) -> None:
    """End the servers that `tvmflow up` started; releases, runs and deployments are kept for the next start.

    Runs of the worker that have not finished end too, and are marked as crashed.
    """
    from tvmflow.settings import Settings
    from tvmflow.stack import control
    from tvmflow.stack.servers import TITLES

    names = control.down(Settings.load().state)
    if as_json:
        click.echo(json.dumps({"ended": names}))
    else:
        click.echo(f"ended {', '.join(TITLES[name] for name in names)}" if names else "no stack was running")
