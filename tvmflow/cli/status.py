"""`tvmflow status`: show every model with its channels, what waits, and what a person on duty should look at."""

import json
from collections.abc import Iterator, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING

import click

from tvmflow.cli.options import OutputFile, json_option, naming_output
from tvmflow.errors import PrefectError, RegistryError, StatementError, StoreError

if TYPE_CHECKING:
    from tvmflow.documents.release import Release
    from tvmflow.registry import Registry
    from tvmflow.report.fleet import (
        ChannelStatus,
        Fleet,
        FleetDrift,
        FleetStep,
        LastVerdict,
        Signature,
        WaitingApproval,
    )
    from tvmflow.settings import Settings
    from tvmflow.store import ReleaseStore
    from tvmflow.store.channel_document import Channel

# The newest releases of a model in which drifts and steps are looked for.
_HISTORY = 24


@click.command("status")
@click.option("--html", type=OutputFile(), help="Write a page.")
@json_option
def status_command(html: Path | None, as_json: bool) -> None:
    """Show every released model: what its channels hold and since when, what waits, and the last verdicts.

    It is what a person on duty opens first: below the table stands what somebody should look at, with the command for
    it. That is a server that does not answer, a statement that does not hold or was not renewed, a promotion that
    waits, a newer release that was refused, and a figure that drifts. "newer" are the releases after the one that the
    channel holds, "waits" is the release that somebody asks for, "signed" the days until the statement expires. The
    page is one file that needs no network.
    """
    from tvmflow.report.fleet import describe_fleet, write_fleet
    from tvmflow.settings import Settings

    fleet = _read_fleet(Settings.load())
    if html is not None:
        with naming_output(html):
            html.write_text(write_fleet(fleet))
    if as_json:
        click.echo(json.dumps(describe_fleet(fleet)))
    else:
        _show(fleet)


def _show(fleet: "Fleet") -> None:
    from rich import box
    from rich.table import Table

    from tvmflow.cli.display import output_console

    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for column in ("name", "channel", "version", "days", "p50 ms", "newer", "waits", "signed", "last verdict"):
        table.add_column(column, no_wrap=column != "last verdict")
    for item in fleet.channels:
        days = None if item.signature is None else item.signature.days
        table.add_row(
            item.name,
            item.channel or "-",
            item.version or "-",
            "-" if item.days is None else f"{item.days:.0f}",
            "-" if item.p50_ms is None else f"{item.p50_ms:.3f}",
            ", ".join(item.newer) or "-",
            "-" if item.wish is None else item.wish.version,
            "-" if days is None else f"{days:.0f}",
            "-" if item.verdict is None else f"{item.verdict.version} {item.verdict.verdict}",
        )
    output_console(160).print(table)
    for task in fleet.list_tasks():
        click.echo(f"{task.sentence}\n  {task.command}")


def _read_fleet(settings: "Settings") -> "Fleet":
    """Read every model; a registry or a Prefect server that does not answer becomes a fault."""
    from tvmflow.report.fleet import Fleet
    from tvmflow.services import list_sections, open_registry, open_store, read_sections

    faults: list[str] = []
    approvals: Sequence[WaitingApproval] = ()
    if settings.prefect_api_url is not None:
        try:
            approvals = _read_approvals(settings)
        except PrefectError as error:
            faults.append(str(error))
    channels: list[ChannelStatus] = []
    changes: list[tuple[list[FleetDrift], list[FleetStep]]] = []
    for sections in list_sections(settings):
        with open_store(settings, sections.store) as store:
            for name in store.list_names():
                channels += _read_channels(settings, store, name)
                changes.append(_read_changes(store, name))
    try:
        names = {item.name for item in channels}
        registries = {name: open_registry(settings, read_sections(settings, name).registry) for name in names}
        for index, item in enumerate(channels):
            try:
                verdict = _read_verdict(registries[item.name], item)
                channels[index] = item.model_copy(update={"verdict": verdict})
            except StoreError as error:
                faults.append(str(error))
    except RegistryError as error:
        faults.append(str(error))
    return Fleet(
        when=datetime.now(UTC).isoformat(timespec="seconds"),
        channels=tuple(channels),
        approvals=tuple(approvals),
        drifts=tuple(drift for drifts, _ in changes for drift in drifts),
        steps=tuple(step for _, steps in changes for step in steps),
        faults=tuple(faults),
    )


def _read_approvals(settings: "Settings") -> "list[WaitingApproval]":
    from tvmflow.cli.prefect import prefect_server
    from tvmflow.report.fleet import WaitingApproval

    with prefect_server(settings):
        from flows.approvals import list_waiting

        return [
            WaitingApproval(
                run=item.run,
                name=item.name,
                version=item.version,
                channel=item.channel,
                who=item.who,
                days=_days_since(item.since),
            )
            for item in list_waiting()
        ]


def _read_channels(settings: "Settings", store: "ReleaseStore", name: str) -> "Iterator[ChannelStatus]":
    """Yield every channel of a model, one entry without a channel where it has none."""
    from tvmflow.report.fleet import ChannelStatus, Wish
    from tvmflow.store import channels

    versions = tuple(store.list_versions(name))
    all_channels = channels.list_all(store, name)
    if not all_channels:
        yield ChannelStatus(name=name, channel=None, newer=versions)
    for document in all_channels:
        version, wish = document.version, document.wish
        is_there = version in versions
        yield ChannelStatus(
            name=name,
            channel=document.channel,
            version=version,
            days=_days_since(document.moves[-1].when) if document.moves else None,
            p50_ms=_p50(store.get_release(name, version)) if version is not None and is_there else None,
            newer=versions[versions.index(version) + 1 :] if version is not None and is_there else versions,
            is_gone=version is not None and not is_there,
            lags=version != document.shown,
            wish=None
            if wish is None
            else Wish(version=wish.version, who=wish.who, why=wish.why, days=_days_since(wish.when)),
            signature=_read_signature(settings, store, document),
        )


def _read_signature(settings: "Settings", store: "ReleaseStore", document: "Channel") -> "Signature | None":
    """Return what the statement on a channel says; None without one, unless this machine demands it."""
    from tvmflow.bundle.signature import trusted_keys
    from tvmflow.report.fleet import Signature
    from tvmflow.store.channel_statements import check_statement, read_claim

    trusted, envelope, fault = trusted_keys(), document.statement, None
    if envelope is None and not trusted:
        return None
    if trusted:
        try:
            check_statement(store, document, trusted)
        except StatementError as error:
            fault = str(error)
    claim = read_claim(document)
    days = None if claim is None else -_days_since(claim.expires)
    return Signature(
        key=None if envelope is None else envelope.signer,
        days=days,
        fault=fault,
        is_late=days is not None and days < settings.statement_days / 2,
    )


def _read_changes(store: "ReleaseStore", name: str) -> "tuple[list[FleetDrift], list[FleetStep]]":
    """Return the drifts and the steps in the figures of a model's newest releases."""
    from tvmflow.report.drift import find_drifts, find_steps
    from tvmflow.report.fleet import FleetDrift, FleetStep

    releases = [store.get_release(name, version) for version in store.list_versions(name)[-_HISTORY:]]
    return (
        [FleetDrift(name=name, **drift.model_dump()) for drift in find_drifts(releases)],
        [FleetStep(name=name, **step.model_dump()) for step in find_steps(releases)],
    )


def _days_since(when: str) -> float:
    """Return the days that have passed since a time in ISO 8601."""
    return (datetime.now(UTC) - datetime.fromisoformat(when)).total_seconds() / 86400


def _p50(release: "Release") -> float | None:
    """Return the smallest median latency of a release's targets in ms, None where none was measured."""
    return min((item.p50 for item in release.targets if item.p50 is not None), default=None)


def _read_verdict(registry: "Registry", item: "ChannelStatus") -> "LastVerdict | None":
    """Return the last verdict on a promotion to a channel, None where the registry has none."""
    from tvmflow.promotion.verdicts import read_verdict
    from tvmflow.report.fleet import LastVerdict

    last = None if item.channel is None else read_verdict(registry, item.name, item.channel)
    if last is None:
        return None
    return LastVerdict(version=last.verdict.version, verdict=last.verdict.verdict, reasons=last.verdict.reasons)
