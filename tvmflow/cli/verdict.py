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
    from tasks.gate import Check
    from tvmflow.comparison.pairs import Samples
    from tvmflow.registry import Registry


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

    from tasks.gate import Check, decide_again
    from tvmflow import settings as machine
    from tvmflow.bundle.signature import trusted_keys
    from tvmflow.promotion import VERDICT, VERDICT_STATEMENT, check_verdict
    from tvmflow.services import open_registry

    registry = open_registry(machine.load())
    tags = {"kind": "promotion", "name": name, "version": version, "channel": channel}
    runs = registry.find_runs({f"tvmflow.{key}": value for key, value in tags.items()})
    with tempfile.TemporaryDirectory(prefix="tvmflow-") as folder:
        path = registry.fetch_artifact(runs[0], VERDICT, Path(folder)) if runs else None
        if path is None:
            raise StoreError(
                f"the registry has no verdict on {name} {version} for {channel}; promote it to that channel first"
            )
        content = path.read_bytes()
        statement = registry.fetch_artifact(runs[0], VERDICT_STATEMENT, Path(folder))
        signed = None if statement is None else statement.read_bytes()
        signer = check_verdict(content, signed, name, version, channel, trusted_keys())
        document = json.loads(content)
        kept = checks = [Check.model_validate(check) for check in document["checks"]]
        if replay:
            checks = [decide_again(check, _read_samples(registry, runs[0], check, Path(folder))) for check in kept]
    if as_json:
        shown = [check.model_dump(mode="json") for check in checks]
        click.echo(json.dumps({**document, "checks": shown, "mlflow_run_id": runs[0], "signed_by": signer}))
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
        click.echo(f"{name} {version} to {channel}: {document['verdict']}, MLflow run {runs[0]}{by}")
    changed = [check.name for check, before in zip(checks, kept, strict=True) if check.passed != before.passed]
    if changed:
        raise VerdictError(
            f"{', '.join(changed)} of {name} {version} is decided otherwise than in MLflow run {runs[0]}"
        )


def _read_samples(registry: "Registry", run: str, check: "Check", folder: Path) -> "Sequence[Samples]":
    """Return the times of all runs that a check rests on; none where it has no measurement or they are gone."""
    from tvmflow.comparison.pairs import read_samples

    path = registry.fetch_artifact(run, check.samples_file, folder) if check.samples is not None else None
    try:
        return () if path is None else read_samples(path)
    except (OSError, ValueError) as error:
        raise StoreError(f"{check.samples_file} of MLflow run {run} is damaged ({error}); promote it again") from error
