"""`tvmflow down`: the end of the local stack."""

import json

import click


@click.command("down")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON document.")
def down_command(as_json: bool) -> None:
    """End the servers that `tvmflow up` started; releases, runs and deployments are kept for the next start.

    Runs that the worker has under way end with it, and are marked as crashed.
    """
    from tvmflow import settings as machine
    from tvmflow.stack import control
    from tvmflow.stack.servers import TITLES

    ended = control.down(machine.load().state)
    if as_json:
        click.echo(json.dumps({"ended": ended}))
    else:
        click.echo(f"ended {', '.join(TITLES[name] for name in ended)}" if ended else "no stack was running")
