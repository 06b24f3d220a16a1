"""`tvmflow list`: list the releases in the store."""

import json
from collections.abc import Iterator
from typing import TYPE_CHECKING

import click

from tvmflow.cli.options import json_option

if TYPE_CHECKING:
    from tvmflow.documents.release import Release
    from tvmflow.store import ReleaseStore


@click.command("list")
@click.argument("name", required=False)
@json_option
def list_command(name: str | None, as_json: bool) -> None:
    """List the releases of one NAME, or of all in every store that this machine knows, with the channels of each."""
    from rich import box
    from rich.table import Table

    from tvmflow.cli.display import output_console
    from tvmflow.services import list_sections, open_store, read_sections
    from tvmflow.settings import Settings

    settings = Settings.load()
    releases: list[Release] = []
    channels: list[list[str]] = []
    for sections in list_sections(settings) if name is None else [read_sections(settings, name)]:
        with open_store(settings, sections.store) as store:
            own_releases = list(store.iterate_releases(name))
            if name is not None and not own_releases:
                raise store.explain_missing("release", name)
            releases += own_releases
            channels += _read_channels(store, own_releases)
    if as_json:
        # A release's own `channels` are the conditions under which it reaches them.
        pairs = zip(releases, channels, strict=True)
        documents = [{**release.model_dump(mode="json"), "held_by": holders} for release, holders in pairs]
        click.echo(json.dumps(documents))
        return
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for column in ("name", "version", "channels", "created (UTC)", "target", "p50 ms", "/ ONNX RT", "error", "bundle"):
        table.add_column(column, no_wrap=column != "channels")
    for release, holders in zip(releases, channels, strict=True):
        for row in make_rows(release, holders):
            table.add_row(*row)
    output_console().print(table)


def _read_channels(store: "ReleaseStore", releases: list["Release"]) -> list[list[str]]:
    """Return the channels that hold each of the releases."""
    from tvmflow.store import channels

    pointers = {name: channels.list_all(store, name) for name in {release.name for release in releases}}
    return [
        [pointer.channel for pointer in pointers[release.name] if pointer.version == release.version]
        for release in releases
    ]


def make_rows(release: "Release", channels: list[str]) -> Iterator[tuple[str, ...]]:
    """Yield the table's rows for a release, one for each target; `channels` are those that hold it."""
    for target in release.targets:
        ratio = None if target.measurements is None else target.measurements.typical.ratio.get("onnxruntime")
        deviation = target.verdict.original
        yield (
            release.name,
            release.version,
            ", ".join(channels),
            release.created_at[:19].replace("T", " "),
            target.target,
            "-" if target.p50 is None else f"{target.p50:.3f}",
            "-" if ratio is None else f"{ratio:.2f}",
            "-" if deviation is None else f"{deviation.max_abs_error:.1e}",
            target.bundle.sha256[:12],
        )
