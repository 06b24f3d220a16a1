"""`tvmflow up`: start the local stack, or show its status."""

import json
import sys
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

import click

from tvmflow.cli.options import json_option

if TYPE_CHECKING:
    from tvmflow.stack.control import Status

_PORT = click.IntRange(1, 65535)
_MARKS = {"healthy": "green", "not answering": "red", "down": "red", "off": "dim"}


@click.command("up")
@click.argument("files", nargs=-1, type=click.Path(path_type=Path))
@click.option("--prefect-port", type=_PORT, help="The port of Prefect; 4200 at first.")
@click.option("--mlflow-port", type=_PORT, help="The port of MLflow; 5000 at first.")
@click.option("--s3-port", type=_PORT, help="The port of S3; 9000 at first.")
@click.option("--receiver-port", type=_PORT, help="The port of the webhook receiver; 8085 at first.")
@click.option(
    "--status", "only_status", is_flag=True, help="Start nothing; the exit code is 1 when a server is not healthy."
)
@json_option
def up_command(
    files: tuple[Path, ...],
    prefect_port: int | None,
    mlflow_port: int | None,
    s3_port: int | None,
    receiver_port: int | None,
    only_status: bool,
    as_json: bool,
) -> None:
    """Start Prefect, MLflow, S3, a worker and the webhook receiver on this machine, and keep them running.

    The deployments of the release FILES, by default those of the setting models, are registered. Healthy servers are
    left alone; ports and files are remembered. Commands on the same state folder use the stack while it runs.
    """
    from rich.console import Console

    from tvmflow import spec as release_file
    from tvmflow.settings import Settings
    from tvmflow.stack import control, record

    settings = Settings.load()
    if only_status:
        statuses = control.status(settings.state)
        _show(statuses, as_json)
        if not statuses or any(status.state not in ("healthy", "off") for status in statuses):
            sys.exit(1)
        return
    from tvmflow.cli.display import RichReporter

    models = files or settings.models
    for file in models:
        release_file.load(file)
    ports = {"prefect": prefect_port, "mlflow": mlflow_port, "s3": s3_port, "receiver": receiver_port}
    options = control.StackOptions(
        state=settings.state,
        ports={name: port for name, port in ports.items() if port is not None},
        models=models,
        pool=settings.work_pool,
        database_url=settings.database_url.get_secret_value() if settings.database_url else None,
    )
    with RichReporter(Console(stderr=True)).live():
        statuses = control.up(options)
    _show(statuses, as_json)
    stack_settings, current_settings = record.settings(settings.state), Settings.load()
    for name in ("s3_endpoint", "mlflow_tracking_uri", "prefect_api_url"):
        if getattr(current_settings, name) != stack_settings[name]:
            click.echo(f"the setting {name} names another server: commands use that one, not the stack's", err=True)


def _show(statuses: "list[Status]", as_json: bool) -> None:
    from rich import box
    from rich.table import Table

    from tvmflow.cli.display import output_console
    from tvmflow.stack.servers import TITLES

    if as_json:
        click.echo(json.dumps([asdict(status) for status in statuses]))
        return
    if not statuses:
        click.echo("there is no stack in this state folder; start one with `tvmflow up`")
        return
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for column in ("server", "state", "address", "pid", "log"):
        table.add_column(column, no_wrap=True, justify="right" if column == "pid" else "left")
    for status in statuses:
        address = status.address or "give it release files: tvmflow up FILE..."
        state = f"[{_MARKS[status.state]}]{status.state}[/]"
        table.add_row(TITLES[status.name], state, address, str(status.pid or ""), _short(status.log))
    output_console(160).print(table)


def _short(log: str) -> str:
    path = Path(log)
    return str(path.relative_to(Path.cwd())) if log and path.is_relative_to(Path.cwd()) else log
