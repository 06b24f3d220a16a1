"""`tvmflow serve`: answer inference requests over HTTP."""

import json
import logging
import os
import re
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING

import click

from tvmflow.cli.options import NumberRange
from tvmflow.errors import SettingsError

if TYPE_CHECKING:
    from tvmflow.serving import Source
    from tvmflow.serving.source import ServedModel

_RELEASE = re.compile(r"([^/@]+)(?:@([^/@]+)|/([^/@]+))")


@click.command("serve")
@click.argument("models", metavar="NAME@CHANNEL|NAME/VERSION|BUNDLE", nargs=-1, required=True)
@click.option("--host", default="127.0.0.1", show_default=True, help="The address to listen on; 0.0.0.0 for all.")
@click.option("--port", type=click.IntRange(0, 65535), default=8080, show_default=True, help="0 takes a free one.")
@click.option("--grpc-port", type=click.IntRange(0, 65535), help="Also answer gRPC, at this port; 0 takes a free one.")
@click.option(
    "--threads",
    type=click.IntRange(min=1),
    help="Threads of a batch; by default TVM_NUM_THREADS, else the machine's cores, at most the bundle's max_threads.",
)
@click.option(
    "--max-batch", type=click.IntRange(min=1), default=64, show_default=True, help="The most rows that run together."
)
@click.option(
    "--max-delay-ms",
    type=NumberRange(min=0),
    default=0,
    show_default=True,
    help="The longest time that a request waits for others to join its batch.",
)
@click.option(
    "--max-body-mb",
    type=NumberRange(min=0, min_open=True),
    default=64,
    show_default=True,
    help="The largest request.",
)
@click.option(
    "--max-waiting-mb",
    type=NumberRange(min=0, min_open=True),
    default=256,
    show_default=True,
    help="The most that all requests hold together that are not answered yet; others get 429.",
)
@click.option(
    "--timeout-s",
    type=NumberRange(min=0, min_open=True),
    default=60,
    show_default=True,
    help="The longest time for an answer; then it is 504.",
)
@click.option(
    "--hang-s",
    type=NumberRange(min=0, min_open=True),
    default=120,
    show_default=True,
    help="How long one batch may run before the server says that it is not live.",
)
@click.option(
    "--poll",
    type=NumberRange(min=0, min_open=True),
    default=5,
    show_default=True,
    help="Seconds between two polls of the channel.",
)
@click.option("--json", "as_json", is_flag=True, help="Print the address as a JSON document.")
def serve_command(
    models: tuple[str, ...],
    host: str,
    port: int,
    grpc_port: int | None,
    threads: int | None,
    max_batch: int,
    max_delay_ms: float,
    max_body_mb: float,
    max_waiting_mb: float,
    timeout_s: float,
    hang_s: float,
    poll: float,
    as_json: bool,
) -> None:
    """Serve channels' releases, given releases or bundles over the Open Inference Protocol (version 2, REST and gRPC).

    Every bundle is verified before it is loaded. When the channel moves, the server swaps to the new version without
    dropping a request; it refuses a version that fails verification, and still serves the one before. On SIGTERM it
    answers the requests that it has accepted, then ends.
    """
    os.environ.setdefault("TVM_USE_RUNTIME_LIB", "1")
    try:
        from tvmflow.serving import Limits, Options, serve
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] in ("tvmflow", "tvm"):
            raise
        raise SettingsError(f"serving needs {error.name!r}; install it with `pip install tvmflow[serve]`") from error

    def announce(address: str, rpc_address: str | None, models: "Sequence[ServedModel]") -> None:
        if as_json:
            versions = {model.name: model.version for model in models}
            click.echo(json.dumps({"address": address, "grpc": rpc_address, "models": versions}))
        else:
            names = ", ".join(f"{model.name} {model.version}" for model in models)
            click.echo(f"serving {names} at {address}" + (f", gRPC at {rpc_address}" if rpc_address else ""))

    logging.basicConfig(level=logging.WARNING, format="tvmflow: %(message)s")
    logging.getLogger("tvmflow.serving").setLevel(logging.INFO)
    limits = Limits(int(max_body_mb * 2**20), int(max_waiting_mb * 2**20), timeout_s, hang_s)
    options = Options(host, port, threads, max_batch, max_delay_ms / 1e3, limits, grpc_port, poll)
    with ExitStack() as stack:
        serve([_source(model, stack) for model in models], options, announce)


def _source(model: str, stack: ExitStack) -> "Source":
    """Return the source that the argument names; a store that it needs stays open as long as the stack."""
    from tvmflow.serving import bundle_source, channel_source, release_source

    path = Path(model)
    if model.endswith(".tar.gz") or path.is_file():
        return bundle_source(path)
    # Imported here because serving a bundle needs neither a store nor its settings.
    from tvmflow import fetch
    from tvmflow.services import open_store_of
    from tvmflow.settings import Settings

    match = _RELEASE.fullmatch(model)
    if match is None:
        raise SettingsError(f"{model!r} cannot be served; give NAME@CHANNEL, NAME/VERSION or a bundle's path")
    name, channel, version = match.groups()
    configuration = Settings.load()
    store, cache = stack.enter_context(open_store_of(configuration, name)), fetch.cache_folder(configuration)
    return channel_source(store, name, channel, cache) if channel else release_source(store, name, version, cache)
