"""`tvmflow verdict`: show the last verdict on a promotion, a build or a retuning, and decide it again."""

import json
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import click

from tvmflow.cli.options import json_option
from tvmflow.errors import StoreError, VerdictError

if TYPE_CHECKING:
    from tvmflow.comparison.pairs import Samples
    from tvmflow.documents.verdict import Check
    from tvmflow.registry import Registry
    from tvmflow.settings import Settings


@click.command("verdict")
@click.argument("name")
@click.argument("version")
@click.option("--channel", default="production", show_default=True, help="The channel to which it was promoted.")
@click.option(
    "--about",
    type=click.Choice(["promotion", "build", "retuning"]),
    default="promotion",
    show_default=True,
    help="The verdict to show: on the promotion, on the choice of each build, or on a retuning of the release.",
)
@click.option("--replay", is_flag=True, help="Decide again from the kept measurements.")
@json_option
def verdict_command(name: str, version: str, channel: str, about: str, replay: bool, as_json: bool) -> None:
    """Show the last verdict on a promotion of the release NAME VERSION: every check, its figure and its bound.

    With --about build, show the measurements by which the release's builds were chosen, tuned or not and on fewer
    threads or not; with --about retuning, those of the last retuning of the release. Where TVMFLOW_TRUSTED_KEYS is set,
    one of these keys must have signed the verdict on a promotion. With --replay, a ratio that was measured is decided
    again from the times of all runs. Exit code 3: the verdict is not the same.
    """
    from rich import box
    from rich.table import Table

    from tasks.gate import decide_again
    from tvmflow.cli.display import output_console
    from tvmflow.services import open_registry, read_sections
    from tvmflow.settings import Settings

    settings = Settings.load()
    registry = open_registry(settings, read_sections(settings, name).registry)
    match about:
        case "promotion":
            verdict = _read_promotion(registry, name, version, channel)
        case "build":
            verdict = _read_choices(registry, settings, name, version)
        case _:
            verdict = _read_retuning(registry, name, version)
    run, checks = verdict.run, verdict.checks
    if replay:
        with tempfile.TemporaryDirectory(prefix="tvmflow-") as folder:
            checks = tuple(decide_again(check, _read_samples(registry, run, check, Path(folder))) for check in checks)
    if as_json:
        rows = [check.model_dump(mode="json") for check in checks]
        click.echo(json.dumps({**verdict.document, "checks": rows, "mlflow_run_id": run}))
    else:
        table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
        for column in ("check", "", "figure", "interval", "bound", "pairs"):
            table.add_column(column, no_wrap=True)
        for check in checks:
            table.add_row(
                check.name,
                verdict.outcomes[0] if check.passed else verdict.outcomes[1],
                "-" if check.value is None else f"{check.value:.4g}",
                "-" if check.interval is None else str(check.interval),
                "-" if check.bound is None else f"{check.bound:g}",
                "-" if check.comparison is None else str(len(check.comparison.pairs)),
            )
        output_console().print(table)
        click.echo(f"{verdict.sentence}, MLflow run {run}{verdict.signed}")
    names = [check.name for check, before in zip(checks, verdict.checks, strict=True) if check.passed != before.passed]
    if names:
        raise VerdictError(f"{', '.join(names)} of {name} {version} is decided otherwise than in MLflow run {run}")


class _StoredVerdict(NamedTuple):
    """A verdict that MLflow keeps: its run, its checks, the other keys of its document, and the whole in a sentence.

    `outcomes` are the words for a check that has passed and for one that has not; `signed` says by whom it is signed.
    """

    run: str
    checks: "tuple[Check, ...]"
    document: dict[str, Any]
    sentence: str
    outcomes: tuple[str, str]
    signed: str = ""


def _read_promotion(registry: "Registry", name: str, version: str, channel: str) -> _StoredVerdict:
    from tvmflow.bundle.signature import trusted_keys
    from tvmflow.promotion.verdicts import read_verdict

    last = read_verdict(registry, name, channel, version, trusted_keys())
    if last is None:
        raise StoreError(
            f"the registry has no verdict on {name} {version} for {channel}; promote it to that channel first"
        )
    run, verdict, signer = last
    document = {**verdict.model_dump(mode="json", exclude={"checks"}), "signed_by": signer}
    sentence = f"{name} {version} to {channel}: {verdict.verdict}"
    signed = "" if signer is None else f", signed with {signer[:16]}"
    return _StoredVerdict(run, verdict.checks, document, sentence, ("passed", "refused"), signed)


def _read_choices(registry: "Registry", settings: "Settings", name: str, version: str) -> _StoredVerdict:
    from tasks.track import CHOICES
    from tvmflow.documents.encoding import decode
    from tvmflow.documents.verdict import Choices
    from tvmflow.services import open_store_of

    with open_store_of(settings, name) as store:
        run = store.get_release(name, version).mlflow_run_id
    content = _fetch(registry, run, CHOICES)
    place, remedy = f"{CHOICES} of MLflow run {run}", "release the model again"
    choices = Choices(targets={}) if content is None else decode(Choices, content, place, remedy)
    checks = tuple(check for each in choices.targets.values() for check in each)
    sentence = f"{name} {version}: {len(checks) or 'no'} measurements of builds"
    return _StoredVerdict(run, checks, {"name": name, "version": version}, sentence, ("faster", "not faster"))


def _read_retuning(registry: "Registry", name: str, version: str) -> _StoredVerdict:
    from tvmflow.documents.encoding import decode
    from tvmflow.documents.verdict import RetuneVerdict
    from tvmflow.promotion.verdicts import VERDICT

    runs = registry.find_runs({"tvmflow.kind": "retune", "tvmflow.name": name, "tvmflow.version": version})
    content = _fetch(registry, runs[0], VERDICT) if runs else None
    if content is None:
        raise StoreError(f"the registry has no verdict on a retuning of {name} {version}; `tvmflow retune` makes one")
    verdict = decode(RetuneVerdict, content, f"{VERDICT} of MLflow run {runs[0]}")
    checks = tuple(item.gain.check for item in verdict.targets if item.gain.check is not None)
    sentence = f"{name} {version}: {verdict.reason}"
    return _StoredVerdict(runs[0], checks, verdict.model_dump(mode="json"), sentence, ("faster", "not faster"))


def _fetch(registry: "Registry", run: str, file: str) -> bytes | None:
    """Return the content of a file of a run; None when the run or the file does not exist."""
    with tempfile.TemporaryDirectory(prefix="tvmflow-") as folder:
        path = registry.fetch_artifact(run, file, Path(folder))
        return None if path is None else path.read_bytes()


def _read_samples(registry: "Registry", run: str, check: "Check", folder: Path) -> "Sequence[Samples]":
    """Return the times of all runs that a check rests on; none where it has no measurement or they are gone."""
    from tvmflow.comparison.pairs import read_samples

    path = registry.fetch_artifact(run, check.samples_file, folder) if check.samples is not None else None
    try:
        return () if path is None else read_samples(path)
    except (OSError, ValueError) as error:
        raise StoreError(f"{check.samples_file} of MLflow run {run} is damaged ({error}); promote it again") from error
