"""`tvmflow report` and `tvmflow diff`: the page of a release, and what differs between two."""

import json
import webbrowser
from collections.abc import Iterator, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING

import click

from tvmflow.cli.options import OutputFile, json_option, naming_output
from tvmflow.errors import RegistryError, StatementError, StoreError

if TYPE_CHECKING:
    from tvmflow.documents.release import Release
    from tvmflow.registry import Registry
    from tvmflow.report.trust import ChannelEvent, Promotion, Standing
    from tvmflow.settings import Settings
    from tvmflow.store import ReleaseStore
    from tvmflow.store.channel_document import Channel

# The layers that the terminal shows.
_LAYERS = 5


@click.command("report")
@click.argument("name")
@click.argument("version")
@click.option(
    "-o",
    "--output",
    type=OutputFile(replaces=True),
    help="The file to write; NAME-VERSION.html unless given.",
)
@click.option("--open", "opens", is_flag=True, help="Show it in the browser.")
def report_command(name: str, version: str, output: Path | None, opens: bool) -> None:
    """Write the page of the release NAME VERSION: whether it may go out, and what it is like.

    The page is one file that needs no network, by default NAME-VERSION.html in the current folder; --open shows it in
    the browser. It was made with the release; its section on trust is written anew, with who has signed and approved
    the release since, and whether it was built again.
    """
    from tvmflow.report.release import update_page
    from tvmflow.services import open_store_of
    from tvmflow.settings import Settings

    settings, path = Settings.load(), output or Path(f"{name}-{version}.html")
    with open_store_of(settings, name) as store:
        release = store.get_release(name, version)
        if release.report is None:
            raise StoreError(f"the release {name} {version} has no report: it was made before there were any")
        standing = _read_standing(settings, store, release)
        store.get_blob(release.report.sha256, path)
    path.write_text(update_page(path.read_text(), release, standing))
    click.echo(str(path))
    if opens:
        webbrowser.open(path.absolute().as_uri())


def _read_standing(settings: "Settings", store: "ReleaseStore", release: "Release") -> "Standing":
    """Read who has signed a release, what channels did with it, and the last verdict on its promotion to each."""
    from tvmflow.bundle.signature import trusted_keys
    from tvmflow.report.trust import Standing
    from tvmflow.services import open_registry, read_sections
    from tvmflow.store import channels
    from tvmflow.store.channel_statements import check_statement

    name, version = release.name, release.version
    documents, trusted, faults = channels.list_all(store, name), trusted_keys(), []
    events = {document.channel: list(_list_events(document, version)) for document in documents}
    try:
        store.get_release(name, version, trusted=trusted)
    except StatementError as error:
        faults.append(str(error))
    statement = None
    try:
        statement = store.read_statement(name, version)
    except StoreError as error:
        faults += [str(error)] if str(error) not in faults else []
    for document in documents if trusted else ():
        try:
            if events[document.channel]:
                check_statement(store, document, trusted)
        except StatementError as error:
            faults.append(str(error))
    promotions: list[Promotion] = []
    names = sorted({*release.channels, *(document.channel for document in documents)})
    try:
        registry = open_registry(settings, read_sections(settings, name).registry)
        for channel in names:
            try:
                promotions += _read_promotion(registry, release, channel, trusted)
            except StoreError as error:
                faults.append(str(error))
    except RegistryError as error:
        faults.append(str(error))
    except ModuleNotFoundError as error:
        faults.append(f"what MLflow knows of the release is not here: {error.name} is not installed")
    return Standing(
        when=datetime.now(UTC).isoformat(timespec="seconds"),
        signer=None if statement is None else statement.signer,
        is_checked=bool(trusted),
        events=tuple(event for each in events.values() for event in each),
        promotions=tuple(promotions),
        faults=tuple(faults),
    )


def _list_events(document: "Channel", version: str) -> Iterator["ChannelEvent"]:
    """Yield what happened to a version in a channel, the oldest first."""
    from tvmflow.report.trust import ChannelEvent
    from tvmflow.store.channel_document import Move, WishEnd

    for event in document.history:
        if isinstance(event, Move) and version in (event.from_version, event.to_version):
            verb = "rolled back" if event.rollback else "moved"
            what = f"{verb} from {event.from_version or 'nothing'} to {event.to_version}"
        elif isinstance(event, WishEnd) and event.version == version:
            what = event.outcome
        else:
            continue
        yield ChannelEvent(channel=document.channel, when=event.when, what=what, who=event.who, why=event.why)


def _read_promotion(
    registry: "Registry", release: "Release", channel: str, trusted: Sequence[Path]
) -> Iterator["Promotion"]:
    """Yield the last verdict on a promotion to a channel, if there is one."""
    from tvmflow.promotion.verdicts import read_verdict
    from tvmflow.report.trust import Promotion

    last = read_verdict(registry, release.name, channel, release.version, trusted)
    if last is not None:
        run, verdict, signer = last
        fields = verdict.model_dump(include={"channel", "verdict", "who", "why"})
        yield Promotion(**fields, approval=verdict.approval, checks=verdict.checks, run=run, signer=signer)


@click.command("diff")
@click.argument("name")
@click.argument("before")
@click.argument("now")
@click.option("--html", type=OutputFile(), help="Write a page.")
@json_option
def diff_command(name: str, before: str, now: str, html: Path | None, as_json: bool) -> None:
    """Show what differs between two versions of NAME, BEFORE and NOW: figures, model, tuning, bundles and layers.

    The figures of each were measured when it was made, so the machine or its load may differ.
    """
    from tvmflow.cli.display import output_console
    from tvmflow.report.changes import compare_releases, find_slowdowns
    from tvmflow.report.layers import compare_layers, fetch_times
    from tvmflow.report.release import write_difference
    from tvmflow.services import open_store_of
    from tvmflow.settings import Settings

    with open_store_of(Settings.load(), name) as store:
        old, new = (store.get_release(name, version) for version in (before, now))
        old_times, new_times = (fetch_times(release.report, store.get_blob) for release in (old, new))
    slower = {target: compare_layers(times, old_times.get(target, {})) for target, times in new_times.items()}
    changes, slowdowns = list(compare_releases(new, old)), list(find_slowdowns(new, old))
    if html is not None:
        with naming_output(html):
            html.write_text(write_difference(new, old, slower))
    if as_json:
        rows = [change.model_dump(mode="json") for change in changes]
        by_target = {target: [row.model_dump(mode="json") for row in layers] for target, layers in slower.items()}
        document = {
            "name": name,
            "before": before,
            "now": now,
            "changes": rows,
            "slowdowns": [slowdown.model_dump(mode="json") for slowdown in slowdowns],
            "slower": by_target,
        }
        click.echo(json.dumps(document))
        return
    from rich import box
    from rich.table import Table

    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for column in ("target", "", before, now, "ratio"):
        table.add_column(column, no_wrap=True)
    for change in changes:
        if change.is_shown:
            ratio = "" if change.ratio is None else f"{change.ratio:.3f}"
            table.add_row(change.target or "all", change.name, _cell(change.before), _cell(change.now), ratio)
    for target, layers in slower.items():
        for row in layers[:_LAYERS]:
            if row.difference > 0:
                table.add_row(target, f"layer {row.name}, ms", f"{row.before:.4g}", f"{row.ms:.4g}", "")
    if table.row_count:
        output_console(140).print(table)
    else:
        click.echo(f"{name} {before} and {now} do not differ")
    for slowdown in slowdowns:
        click.echo(str(slowdown))


def _cell(value: float | str | None) -> str:
    from tvmflow.report.release import shorten

    if value is None:
        return "-"
    return shorten(value) if isinstance(value, str) else f"{value:.6g}"
