"""`tvmflow status`: show every model with its channels, what waits, and the last verdicts."""

import json
import sys
from collections.abc import Iterator
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

import click

if TYPE_CHECKING:
    from tvmflow.registry import Registry
    from tvmflow.release import Release
    from tvmflow.store import ReleaseStore


@click.command("status")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON document.")
def status_command(as_json: bool) -> None:
    """Show every released model: what each channel holds and since when, what waits, and the last verdict.

    It is what a person on duty opens first. "newer" are the releases after the one that the channel holds, "waits" is
    the release that somebody asks for.
    """
    from rich import box
    from rich.console import Console
    from rich.table import Table

    from tvmflow import settings as machine
    from tvmflow.services import open_registry, open_store

    settings = machine.load()
    registry = open_registry(settings)
    with open_store(settings) as store:
        rows = [row for name in store.list_names() for row in _read_rows(store, registry, name)]
    if as_json:
        click.echo(json.dumps(rows))
        return
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for column in ("name", "channel", "version", "days", "p50 ms", "newer", "waits", "last verdict"):
        table.add_column(column, no_wrap=column != "last verdict")
    for row in rows:
        verdict = row["verdict"]
        table.add_row(
            row["name"],
            row["channel"] or "-",
            row["version"] or "-",
            "-" if row["days"] is None else f"{row['days']:.0f}",
            "-" if row["p50_ms"] is None else f"{row['p50_ms']:.3f}",
            ", ".join(row["newer"]) or "-",
            row["wish"] or "-",
            "-" if verdict is None else ": ".join([f"{verdict['version']} {verdict['verdict']}", *verdict["reasons"]]),
        )
    Console(width=None if sys.stdout.isatty() else 160).print(table)


def _read_rows(store: "ReleaseStore", registry: "Registry", name: str) -> Iterator[dict[str, Any]]:
    """Yield a row for each channel of a model, one without a channel where it has none."""
    from tvmflow.store import channels

    versions = store.list_versions(name)
    all_channels = channels.list_all(store, name)
    if not all_channels:
        empty = {"channel": None, "version": None, "days": None, "p50_ms": None, "wish": None, "verdict": None}
        yield {"name": name, **empty, "newer": versions}
    for channel in all_channels:
        version = channel.version
        is_there = version in versions
        yield {
            "name": name,
            "channel": channel.channel,
            "version": version,
            "days": _days_since(channel.moves[-1].when) if channel.moves else None,
            "p50_ms": _p50(store.get_release(name, version)) if version is not None and is_there else None,
            "newer": versions[versions.index(version) + 1 :] if version is not None and is_there else versions,
            "wish": channel.wish and channel.wish.version,
            "verdict": _last_verdict(registry, name, channel.channel),
        }


def _days_since(when: str) -> float:
    """Return the days that have passed since a time in ISO 8601."""
    return (datetime.now(UTC) - datetime.fromisoformat(when)).total_seconds() / 86400


def _p50(release: "Release") -> float | None:
    """Return the smallest median latency of a release's targets in ms, None where none was measured."""
    return min((item.p50 for item in release.targets if item.p50 is not None), default=None)


def _last_verdict(registry: "Registry", name: str, channel: str) -> dict[str, Any] | None:
    """Return version, verdict and reasons of the last promotion to a channel, None where the registry has none."""
    from tvmflow.promotion import read_verdict

    last = read_verdict(registry, name, channel)
    return None if last is None else last.verdict.model_dump(mode="json", include={"version", "verdict", "reasons"})
