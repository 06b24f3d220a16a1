"""`tvmflow verdict`: show the last verdict on a promotion, and decide it again from what was measured."""

import json
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import click

from tvmflow.errors import StoreError, VerdictError

if TYPE_CHECKING:
    from tvmflow.comparison.pairs import Samples
    from tvmflow.registry import Registry
    from tvmflow.verdict import Check


@click.command("verdict")
@click.argument("name")
@click.argument("version")
@click.option("--channel", default="production", show_default=True, help="The channel to which it was promoted.")
@click.option("--replay", is_flag=True, help="Decide again from the kept measurements.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON document.")
def verdict_command(name: str, version: str, channel: str, replay: bool, as_json: bool) -> None:
    """Show the last verdict on a promotion of the release NAME VERSION: every check, its figure and its bound.

    Where TVMFLOW_TRUSTED_KEYS is set, one of these keys must have signed it. With --replay, a ratio that was measured
    is decided again from the times of all runs. Exit code 3: the verdict is not the same.
    """
    from rich import box
    from rich.console import Console
    from rich.table import Table

    from tasks.gate import decide_again
    from tvmflow import settings as machine
    from tvmflow.bundle.signature import trusted_keys
    from tvmflow.promotion import read_verdict
    from tvmflow.services import open_registry

    registry = open_registry(machine.load())
    last = read_verdict(registry, name, channel, version, trusted_keys())
    if last is None:
        raise StoreError(
            f"the registry has no verdict on {name} {version} for {channel}; promote it to that channel first"
        )
    run, verdict, signer = last
    checks = verdict.checks
    if replay:
        with tempfile.TemporaryDirectory(prefix="tvmflow-") as folder:
            checks = tuple(decide_again(check, _read_samples(registry, run, check, Path(folder))) for check in checks)
    if as_json:
        document = verdict.model_copy(update={"checks": checks}).model_dump(mode="json")
        click.echo(json.dumps({**document, "mlflow_run_id": run, "signed_by": signer}))
    else:
        table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
        for column in ("check", "", "figure", "interval", "bound", "pairs"):
            table.add_column(column, no_wrap=True)
        for check in checks:
            table.add_row(
                check.name,
                "passed" if check.passed else "refused",
                "-" if check.value is None else f"{check.value:.4g}",
                "-" if check.interval is None else str(check.interval),
                "-" if check.bound is None else f"{check.bound:g}",
                "-" if check.comparison is None else str(len(check.comparison.pairs)),
            )
        Console(width=None if sys.stdout.isatty() else 120).print(table)
        by = "" if signer is None else f", signed with {signer[:16]}"
        click.echo(f"{name} {version} to {channel}: {verdict.verdict}, MLflow run {run}{by}")
    names = [check.name for check, before in zip(checks, verdict.checks, strict=True) if check.passed != before.passed]
    if names:
        raise VerdictError(f"{', '.join(names)} of {name} {version} is decided otherwise than in MLflow run {run}")


def _read_samples(registry: "Registry", run: str, check: "Check", folder: Path) -> "Sequence[Samples]":
    """Return the times of all runs that a check rests on; none where it has no measurement or they are gone."""
    from tvmflow.comparison.pairs import read_samples

    path = registry.fetch_artifact(run, check.samples_file, folder) if check.samples is not None else None
    try:
        return () if path is None else read_samples(path)
    except (OSError, ValueError) as error:
        raise StoreError(f"{check.samples_file} of MLflow run {run} is damaged ({error}); promote it again") from error
