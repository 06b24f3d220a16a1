"""`tvmflow receive`: receive MLflow's webhooks."""

import json
import logging
import os
import socket
from contextlib import suppress
from typing import TYPE_CHECKING

import click

from tvmflow.errors import SettingsError

if TYPE_CHECKING:
    from tvmflow.triggers import RunRequest


@click.command("receive")
@click.option("--host", default="127.0.0.1", show_default=True, help="The address to listen on; 0.0.0.0 for all.")
@click.option("--port", type=click.IntRange(0, 65535), default=8085, show_default=True, help="0 takes a free one.")
@click.option("--json", "as_json", is_flag=True, help="Print the address as a JSON document.")
def receive_command(host: str, port: int, as_json: bool) -> None:
    """Receive MLflow's webhooks: an alias that is set starts the release or the promotion that it asks for.

    The receiver accepts deliveries that are signed with the setting webhook_secret, at most five minutes old, and about
    models of the release files in the setting models. `tvmflow reconcile` acts on events that came while the receiver
    was down.
    """
    from tvmflow.cli.prefect import point_at_server
    from tvmflow.settings import Settings
    from tvmflow.triggers import load

    settings = Settings.load()
    secret = settings.webhook_secret.get_secret_value() if settings.webhook_secret else ""
    if not secret:
        raise SettingsError("set webhook_secret (TVMFLOW_WEBHOOK_SECRET) to the secret of MLflow's webhook")
    if not settings.models:
        raise SettingsError("set models (TVMFLOW_MODELS='[\"release.yaml\"]') to the release files that are managed")
    point_at_server(settings)
    # MLflow waits for half a minute and then retries by itself.
    os.environ.setdefault("PREFECT_CLIENT_MAX_RETRIES", "1")
    load(settings.models)

    import uvicorn

    from flows.runs import start
    from tvmflow.http_server import PatientServer
    from tvmflow.triggers.receiver import PATIENCE, application
    from tvmflow.triggers.webhook import PATH

    def submit(run_request: "RunRequest", key: str) -> str:
        return start(run_request.deployment, run_request.parameters, key=key, tags=(run_request.tag,))

    try:
        listener = socket.create_server((host, port), family=socket.AF_INET6 if ":" in host else socket.AF_INET)
    except OSError as error:
        reason = error.strerror or error
        raise SettingsError(
            f"port {port} of {host} cannot be opened ({reason}); choose another with --host and --port"
        ) from error
    logging.basicConfig(level=logging.WARNING, format="tvmflow: %(message)s")
    logging.getLogger("tvmflow.triggers").setLevel(logging.INFO)
    app = application(secret, lambda: load(settings.models), submit)
    config = uvicorn.Config(app, log_config=None, access_log=False, server_header=False)
    server = PatientServer(config, PATIENCE)
    url_host = f"[{host}]" if ":" in host else host
    address = f"http://{url_host}:{listener.getsockname()[1]}{PATH}"
    click.echo(json.dumps({"address": address}) if as_json else f"receiving MLflow's webhooks at {address}")
    # uvicorn finishes its answers and then raises the signal that ended it again.
    with suppress(KeyboardInterrupt):
        server.run(sockets=[listener])
