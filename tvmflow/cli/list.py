"""`tvmflow list`: list the releases in the store."""

import itertools
import json
import sys
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import click

if TYPE_CHECKING:
    from tvmflow.store import ReleaseStore


@click.command("list")
@click.argument("name", required=False)
@click.option("--json", "as_json", is_flag=True, help="Print one JSON document.")
def list_command(name: str | None, as_json: bool) -> None:
    """List the releases in the store, of one NAME or of all, with the channels that hold each."""
    from rich import box
    from rich.console import Console
    from rich.table import Table

    from tvmflow import settings as machine
    from tvmflow.errors import StoreError
    from tvmflow.services import open_store, open_store_of

    settings = machine.load()
    with open_store(settings) if name is None else open_store_of(settings, name) as store:
        releases = list(store.iterate_releases(name))
        if name is not None and not releases:
            names = ", ".join(store.list_names()) or "none"
            raise StoreError(f"there is no release of {name!r} in {store.config.uri}; released are: {names}")
        channels = _read_channels(store, releases)
    if as_json:
        # A release's own `channels` are the conditions under which it reaches them.
        documents = [{**release, "held_by": holders} for release, holders in zip(releases, channels, strict=True)]
        click.echo(json.dumps(documents))
        return
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for column in ("name", "version", "channels", "created (UTC)", "target", "p50 ms", "/ ONNX RT", "error", "bundle"):
        table.add_column(column, no_wrap=column != "channels")
    for release, holders in zip(releases, channels, strict=True):
        for row in read_rows(release, holders):
            table.add_row(*row)
    Console(width=None if sys.stdout.isatty() else 120).print(table)


def _read_channels(store: "ReleaseStore", releases: list[dict[str, Any]]) -> list[list[str]]:
    """Return the channels that hold each of the releases."""
    from tvmflow.store import channels

    names = {str(release.get("name")) for release in releases}
    pointers = {name: channels.list_all(store, name) for name in names}
    return [
        [
            pointer.channel
            for pointer in pointers[str(release.get("name"))]
            if pointer.version == str(release.get("version"))
        ]
        for release in releases
    ]


def read_rows(release: dict[str, Any], channels: list[str]) -> list[tuple[str, ...]]:
    """Return the table's rows for a release, one for each target; `channels` are those that hold it.

    Raises StoreError for a damaged document.
    """
    from tvmflow.errors import StoreError

    try:
        rows = list(_make_rows(release, channels))
        for cell in itertools.chain(*rows):
            cell.encode()  # a lone surrogate, which JSON may hold, cannot be printed
    except (LookupError, TypeError, AttributeError, ValueError, ArithmeticError) as error:
        raise StoreError(
            f"the release {release.get('name')!r} {release.get('version')!r} is damaged, its document cannot be shown "
            f"({error!r}); publish it again, or print it with --json"
        ) from error
    return rows


def _make_rows(release: dict[str, Any], channels: list[str]) -> Iterator[tuple[str, ...]]:
    for target in release["targets"]:
        measurements, comparisons = target["measurements"], target["verdict"]["comparisons"]
        typical = measurements["points"][0] if measurements else None
        ratio = typical["ratio"].get("onnxruntime") if typical else None
        yield (
            str(release["name"]),
            str(release["version"]),
            ", ".join(channels),
            str(release["created_at"])[:19].replace("T", " "),
            str(target["target"]),
            f"{typical['runners']['tvm']['latency_ms']['p50']:.3f}" if typical else "-",
            f"{ratio:.2f}" if ratio is not None else "-",
            f"{comparisons[0]['max_abs_error']:.1e}" if comparisons else "-",
            str(target["bundle"]["sha256"])[:12],
        )
