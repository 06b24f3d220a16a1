"""`tvmflow list`: what is released."""

import json
import sys

import click


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
    from tvmflow.services import open_store
    from tvmflow.store import channels

    with open_store(machine.load()) as store:
        releases = list(store.iterate_releases(name))
        held = {each: channels.list_all(store, each) for each in {release["name"] for release in releases}}
        if name is not None and not releases:
            known = ", ".join(store.list_names()) or "none"
            raise StoreError(f"there is no release of {name!r} in {store.config.uri}; released are: {known}")
    holding = [
        [pointer.channel for pointer in held[release["name"]] if pointer.version == str(release["version"])]
        for release in releases
    ]
    if as_json:
        # A release's own `channels` are what it takes to reach them.
        documents = [{**release, "held_by": by} for release, by in zip(releases, holding, strict=True)]
        click.echo(json.dumps(documents))
        return
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for column in ("name", "version", "channels", "created (UTC)", "target", "p50 ms", "/ ONNX RT", "error", "bundle"):
        table.add_column(column, no_wrap=column != "channels")
    for release, by in zip(releases, holding, strict=True):
        for target in release["targets"]:
            measured, compared = target["measurements"], target["verdict"]["comparisons"]
            typical = measured["points"][0] if measured else None
            ratio = typical["ratio"].get("onnxruntime") if typical else None
            table.add_row(
                release["name"],
                str(release["version"]),
                ", ".join(by),
                release["created_at"][:19].replace("T", " "),
                target["target"],
                f"{typical['runners']['tvm']['latency_ms']['p50']:.3f}" if typical else "-",
                f"{ratio:.2f}" if ratio is not None else "-",
                f"{compared[0]['max_abs_error']:.1e}" if compared else "-",
                target["bundle"]["sha256"][:12],
            )
    Console(width=None if sys.stdout.isatty() else 120).print(table)
