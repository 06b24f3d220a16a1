"""`tvmflow deploy`: register the deployments of release files, and MLflow's webhook."""

import json
from pathlib import Path
from typing import TYPE_CHECKING

import click

from tvmflow.cli.options import json_option
from tvmflow.errors import SettingsError

if TYPE_CHECKING:
    from flows.deployments import Deployed
    from flows.pools import PoolType
    from tvmflow.settings import Settings

_WEBHOOK = "tvmflow"


@click.command("deploy")
@click.argument("files", metavar="[FILE]...", nargs=-1, type=click.Path(path_type=Path))
@click.option("--pool", help="The work pool; by default that of the setting work_pool.")
@click.option(
    "--pool-type",
    "kind",
    type=click.Choice(["process", "docker", "kubernetes"]),
    help="The type of a work pool that does not exist yet; by default process.",
)
@click.option("--image", help="The image that the containers of a new docker or kubernetes pool run.")
@click.option("--receiver", metavar="URL", help="Make MLflow report new aliases to the receiver at this address.")
@json_option
def deploy_command(
    files: tuple[Path, ...],
    pool: str | None,
    kind: "PoolType | None",
    image: str | None,
    receiver: str | None,
    as_json: bool,
) -> None:
    """Register the deployments of each release FILE, by default of those in the setting models.

    They are release/NAME, promote/NAME, retune/NAME and, where the file has a section retrain, retrain/NAME; then
    reconcile/all, gc/all, and make/POOL for the setting target_pools. They can be registered again at any time; paused
    schedules stay paused. Two automations of Prefect watch their runs: one ends those whose worker died, the other
    reports those that failed through the setting notification_block.
    """
    from tvmflow.cli.prefect import require_server
    from tvmflow.settings import Settings
    from tvmflow.triggers import load

    settings = Settings.load()
    paths = files or settings.models
    if not paths:
        raise SettingsError("name release files, or set models (TVMFLOW_MODELS='[\"release.yaml\"]') to them")
    # Those in the setting models are read as well: no two release files may have the same name.
    catalogue = load(path.absolute() for path in (*settings.models, *paths))
    entries = [entry for entry in catalogue.entries if entry.file in {path.absolute() for path in paths}]
    require_server(settings)
    from flows.automations import register_automations
    from flows.deployments import register
    from flows.pools import ensure_pool
    from tvmflow.services import record_sections

    name = pool or settings.work_pool
    created = ensure_pool(name, kind, image)
    targets = tuple(dict.fromkeys(settings.target_pools.values()))
    for target in targets:
        ensure_pool(target)
    for entry in entries:
        record_sections(settings, entry.spec)
    deployments = register(entries, name, targets)
    automations = register_automations(settings.notification_block)
    connected = _connect(settings, receiver) if receiver is not None else None
    unmanaged = [entry.name for entry in entries if entry.file not in {path.absolute() for path in settings.models}]
    if as_json:
        document = {
            "pool": {"name": name, "created": created},
            "deployments": [vars(item) for item in deployments],
            "automations": list(automations),
            "webhook": connected,
            "unmanaged": unmanaged,
        }
        click.echo(json.dumps(document))
    else:
        _show(deployments, name, created, connected, unmanaged)
        if settings.notification_block is None:
            click.echo("failed runs are not reported: the setting notification_block is not set")


def _connect(settings: "Settings", receiver: str) -> dict[str, str]:
    """Create or change MLflow's webhook."""
    from tvmflow.services import open_registry
    from tvmflow.triggers.webhook import PATH

    if settings.webhook_secret is None or not settings.webhook_secret.get_secret_value():
        raise SettingsError("set webhook_secret (TVMFLOW_WEBHOOK_SECRET): MLflow signs its webhooks with it")
    url = receiver.rstrip("/").removesuffix(PATH) + PATH
    new = open_registry(settings).connect_webhook(_WEBHOOK, url, settings.webhook_secret.get_secret_value())
    return {"url": url, "status": "created" if new else "updated"}


def _show(
    deployments: "list[Deployed]", pool: str, created: bool, connected: dict[str, str] | None, unmanaged: list[str]
) -> None:
    from rich import box
    from rich.table import Table

    from tvmflow.cli.display import output_console

    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for column in ("deployment", "schedule", "event"):
        table.add_column(column, no_wrap=True)
    for item in deployments:
        table.add_row(item.name, ", ".join(item.schedules) or "-", ", ".join(item.events) or "-")
    console = output_console()
    console.print(table)
    lines = [
        f"work pool {pool}{' was created' if created else ''}: `prefect worker start --pool {pool}` runs what is due"
    ]
    if connected is not None:
        lines.append(f"MLflow reports new aliases to {connected['url']}, starting within a minute")
    if unmanaged:
        lines.append(
            f"{', '.join(unmanaged)}: not in the setting models, so that neither aliases nor reconcile start anything"
        )
    for line in lines:
        console.print(line, highlight=False, soft_wrap=True)
