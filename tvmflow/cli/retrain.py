"""`tvmflow retrain` and `tvmflow notify`: retrain a model now, or report new data to its deployment."""

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from tvmflow.cli.options import file_argument, json_option

if TYPE_CHECKING:
    from collections.abc import Sequence

_EVENT = "tvmflow.data.arrived"
_RESOURCE = "tvmflow.model."


@click.command("retrain")
@file_argument
@click.option("--set", "assignments", multiple=True, metavar="KEY=VALUE", help="A training argument; repeatable.")
@click.option("--why", default="", help="The reason, kept with the verdict.")
@json_option
def retrain_command(file: Path, assignments: tuple[str, ...], why: str, as_json: bool) -> None:
    """Train the model of FILE again, and release it if it is at least as good as the release in production.

    Both are scored by validate.task on the same held-out data; retrain.min_gain is the least gain. Exit code 3: the
    model is not good enough, and production stays as it was.
    """
    from rich.console import Console

    from tvmflow import spec as release_file
    from tvmflow.cli.display import RichReporter, output_console
    from tvmflow.cli.prefect import prefect_server
    from tvmflow.cli.release import show
    from tvmflow.processes.imports import importing
    from tvmflow.promotion import people
    from tvmflow.settings import Settings

    arguments = _parse_arguments(assignments)
    release_file.load(file)
    settings = Settings.load()
    console = Console(stderr=True)
    if not as_json:
        console.print(f"Retraining [bold]{file}[/]", highlight=False)
    with prefect_server(settings) as await_server, RichReporter(console).live():
        with importing():
            import mlflow  # noqa: F401
            from flows.retrain import RetrainSummary, retrain

        await_server()
        summary = RetrainSummary.model_validate(retrain(str(file), arguments, why=why, who=people.identify_user()))
    if as_json:
        click.echo(json.dumps(summary.model_dump(mode="json")))
        return
    output = output_console()
    show(summary.release, settings, output)
    output.print(f"verdict  passed: {summary.evaluation.reason}", highlight=False, soft_wrap=True)
    output.print(f"source   models:/{summary.source}, run {summary.mlflow_run_id}", highlight=False, soft_wrap=True)


@click.command("notify")
@click.argument("name")
@click.option("--set", "assignments", multiple=True, metavar="KEY=VALUE", help="A training argument; repeatable.")
@click.option("--why", default="", help="The reason, kept with the verdict.")
@json_option
def notify_command(name: str, assignments: tuple[str, ...], why: str, as_json: bool) -> None:
    """Report new data for the model NAME, so that its deployment retrain/NAME starts.

    Emits Prefect's event tvmflow.data.arrived, as any program may; `tvmflow deploy` registers the trigger for it.
    """
    from tvmflow.cli.prefect import require_server
    from tvmflow.errors import PrefectError
    from tvmflow.registry.config import without_secrets
    from tvmflow.settings import Settings

    arguments = _parse_arguments(assignments)
    settings = Settings.load()
    require_server(settings)
    address = without_secrets(settings.prefect_api_url or "")
    from flows.runs import is_registered

    if not is_registered(f"retrain/{name}"):
        raise PrefectError(
            f"Prefect's server at {address} has no deployment 'retrain/{name}', so that nothing would start; register "
            "it with `tvmflow deploy` from a release file with a section `retrain`, or correct the name"
        )
    event = _emit(name, {"arguments": arguments, "why": why or "new data"})
    if as_json:
        click.echo(json.dumps({"event": _EVENT, "id": event, "resource": f"{_RESOURCE}{name}"}))
    else:
        click.echo(f"event {_EVENT} of {_RESOURCE}{name} is with Prefect at {address}")


def _emit(name: str, payload: dict[str, Any]) -> str:
    """Emit the event and return its id once the server has it."""
    import asyncio

    from prefect.events import Event
    from prefect.events.clients import get_events_client

    from flows.runs import LOGIN_REFUSED, is_login_refused
    from tvmflow.errors import PrefectError
    from tvmflow.usercode import describe

    event = Event(event=_EVENT, resource={"prefect.resource.id": f"{_RESOURCE}{name}"}, payload=payload)  # type: ignore[arg-type]

    async def send() -> None:
        async with get_events_client() as client:
            await client.emit(event)

    try:
        asyncio.run(send())
    except Exception as error:  # Whatever a websocket or Prefect raises: the event is not there.
        reason = LOGIN_REFUSED if is_login_refused(error) else f"{describe(error)}; look at its server's log"
        raise PrefectError(f"Prefect did not take the event: {reason}") from error
    return str(event.id)


def _parse_arguments(assignments: "Sequence[str]") -> dict[str, Any]:
    """Return the arguments of `--set`; values are read as YAML, as in a release file."""
    import yaml

    from tvmflow.spec.reading import read_yaml

    arguments = {}
    for item in assignments:
        key, separator, value = item.partition("=")
        if not separator or not key.isidentifier():
            raise click.BadParameter(f"{item!r} is not of the form KEY=VALUE", param_hint="--set")
        try:
            arguments[key] = read_yaml(value)
        except yaml.YAMLError as error:
            raise click.BadParameter(f"the value of {key!r} is not valid YAML; quote it", param_hint="--set") from error
    return arguments
