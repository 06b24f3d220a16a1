"""`tvmflow records`: list, show, export, import and prune tuning records."""

import json
import statistics
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from tvmflow.cli.options import OutputFile, json_option

if TYPE_CHECKING:
    from rich.table import Table

    from tvmflow.tuning.record_store import RecordStore
    from tvmflow.tuning.records import Context, Entry, Record
    from tvmflow.tuning.sharing import Sharing

_TARGET = click.option("--target", help="Only this target, e.g. native.")


@click.group("records")
def records_command() -> None:
    """List, show, export, import and prune tuning records, here and in the release store."""


@records_command.command("list")
@_TARGET
@click.option("--workloads", is_flag=True, help="One line for each workload, with its key.")
@json_option
def list_records(target: str | None, workloads: bool, as_json: bool) -> None:
    """List the records of each target, TVM version and search space."""
    with _open_records() as (store, sharing):
        _fetch(sharing)
        rows = [
            row
            for context in store.contexts()
            if _is_wanted(context, target)
            for row in (_by_workload(store, context) if workloads else [_summary(store, context)])
        ]
    if as_json:
        click.echo(json.dumps(rows))
        return
    if not rows:
        click.echo(f"There are no tuning records in {str(store.folder)!r}; tune a model with `tvmflow tune`.")
        return
    if workloads:
        table = _table(
            "workload", "target", "TVM", "space", "records", "trials", "best us", "/ untuned", "newest (UTC)"
        )
        for row in rows:
            table.add_row(
                row["key"],
                _short(row["target"]),
                row["tvm_version"],
                row["space_version"],
                str(row["records"]),
                str(row["trials"]),
                _us(row["best_seconds"]),
                _ratio(row["ratio"]),
                _when(row["newest"]),
            )
    else:
        table = _table(
            "target", "TVM", "space", "workloads", "records", "decisions", "trials", "best / untuned", "newest (UTC)"
        )
        for row in rows:
            table.add_row(
                _short(row["target"]),
                row["tvm_version"],
                row["space_version"],
                str(row["workloads"]),
                str(row["records"]),
                str(row["decisions"]),
                str(row["trials"]),
                _ratio(row["ratio"]),
                _when(row["newest"]),
            )
    _print(table)


@records_command.command("show")
@click.argument("key")
@_TARGET
@json_option
def show_record(key: str, target: str | None, as_json: bool) -> None:
    """Show the workload KEY, which may be the beginning of a key: its function, history, and best schedule.

    Without --target, records of all targets count. No match, or several, is an error that lists them.
    """
    from tvmflow.errors import InputError
    from tvmflow.tuning.records import Decision, Effort, Record, context_of

    with _open_records() as (store, sharing):
        _fetch(sharing)
        entries = [e for e in store.entries() if e.key.startswith(key) and not isinstance(e, Decision)]
        entries = [entry for entry in entries if _is_wanted(context_of(entry), target)]
    keys = sorted({entry.key for entry in entries})
    if len(keys) != 1:
        problem = f"is the beginning of {len(keys)} keys: {', '.join(keys[:5])}" if keys else "is no key of a record"
        raise InputError(f"{key!r} {problem}; `tvmflow records list --workloads` lists the keys")
    records = sorted((e for e in entries if isinstance(e, Record)), key=lambda record: record.created_at)
    efforts = [entry for entry in entries if isinstance(entry, Effort)]
    workload = next((e.workload for e in entries if not isinstance(e, Effort | Decision) and e.workload), "")
    best = min((r for r in records if context_of(r).is_current), key=lambda record: record.seconds, default=None)
    function, schedule = _function(workload), None if best is None else _schedule(best)
    if as_json:
        history = [
            {name: value for name, value in vars(record).items() if name not in ("workload", "trace")}
            for record in records
        ]
        document = {"key": keys[0], "function": function, "history": history, "schedule": schedule}
        click.echo(json.dumps({**document, "trials": sum(effort.trials for effort in efforts)}))
        return
    click.echo(f"workload {keys[0]}, {sum(effort.trials for effort in efforts)} trials")
    if function is not None:
        click.echo(f"\n{function.rstrip()}")
    if records:
        table = _table("when (UTC)", "target", "TVM", "space", "tuner", "trial", "us", "/ untuned")
        for record in records:
            ratio = record.seconds / record.baseline_seconds if record.baseline_seconds else None
            table.add_row(
                _when(record.created_at),
                _short(record.target),
                record.tvm_version,
                record.space_version,
                record.tuner,
                str(record.trial),
                _us(record.seconds),
                _ratio(ratio),
            )
        _print(table)
    if schedule is not None:
        click.echo(f"The best for this TVM and search space:\n\n{schedule.rstrip()}")


@records_command.command("export")
@click.argument("file", type=OutputFile(replaces=True))
@click.option("--all", "everything", is_flag=True, help="Everything, not only the best record of each workload.")
@_TARGET
@json_option
def export(file: Path, everything: bool, target: str | None, as_json: bool) -> None:
    """Write the best record of each workload, and the trials spent on it, to FILE as JSON lines."""
    from tvmflow.tuning.imports import export_records
    from tvmflow.tuning.record_store import write_entries
    from tvmflow.tuning.records import Effort, context_of

    with _open_records() as (store, sharing):
        _fetch(sharing)
        entries = [entry for entry in export_records(store, everything) if _is_wanted(context_of(entry), target)]
    write_entries(file, entries)
    number = sum(not isinstance(entry, Effort) for entry in entries)
    if as_json:
        click.echo(json.dumps({"file": str(file), "records": number}))
    else:
        click.echo(f"{number} records written to {file}")


@records_command.command("import")
@click.argument("files", nargs=-1, required=True, type=click.Path(path_type=Path, exists=True))
@click.option("--target", help="The target of MetaSchedule's records, e.g. native; by default the one that they name.")
@json_option
def import_(files: tuple[Path, ...], target: str | None, as_json: bool) -> None:
    """Import the records in FILES: our own files and folders, or MetaSchedule's JSON databases.

    A record of a database must replay on its workload and, where this machine can run it, give the right results.
    """
    from tvmflow.hardware.target import resolve
    from tvmflow.tuning.imports import import_metaschedule, import_records, is_database

    database_target = None if target is None else resolve(target)
    documents = []
    with _open_records() as (store, sharing):
        _fetch(sharing)
        for file in files:
            counts = (
                import_metaschedule(store, file, database_target) if is_database(file) else import_records(store, file)
            )
            documents.append({"file": str(file), "read": counts.read, "taken": counts.added, "refused": counts.refused})
            if not as_json:
                reasons = "".join(f"; {number} not: {reason}" for reason, number in counts.refused.items())
                click.echo(f"{file}: {counts.added} of {counts.read} records taken{reasons}")
        store.close()
        if sharing is not None:
            _attempt(sharing.send)
    if as_json:
        click.echo(json.dumps(documents))


@records_command.command("prune")
@click.option("--keep", type=click.IntRange(min=1), default=3, show_default=True, help="Records kept per workload.")
@json_option
def prune(keep: int, as_json: bool) -> None:
    """Keep the fastest records of each workload for this TVM and search space, and drop all others.

    Files that a run is writing meanwhile are left for the next time.
    """
    with _open_records() as (store, sharing):
        # Records that could not be fetched must not be removed.
        is_fetched = _fetch(sharing)
        counts = store.prune(keep)
        removals = 0
        if sharing is not None and is_fetched and _attempt(sharing.send) is not None:
            removals = _attempt(sharing.clear) or 0
    if as_json:
        document = {"before": counts.before, "after": counts.after, "files": counts.files, "objects": removals}
        click.echo(json.dumps(document))
    else:
        shared_files = f" and {removals} in the release store" if removals else ""
        click.echo(f"{counts.after} of {counts.before} entries kept, {counts.files} files{shared_files} removed")


@contextmanager
def _open_records() -> "Iterator[tuple[RecordStore, Sharing | None]]":
    """Open the store of the state folder, and its sharing with the release store where the settings name one."""
    from tvmflow.settings import Settings
    from tvmflow.tuning.record_store import RecordStore
    from tvmflow.tuning.sharing import Sharing

    settings = Settings.load()
    store = RecordStore(settings.state / "records")
    if not settings.share_records or not (settings.s3_endpoint or settings.s3_bucket):
        yield store, None
        return
    from tvmflow.services import open_records, open_store

    with open_store(settings) as releases:
        shared = open_records(settings, releases)
        yield store, None if shared is None else Sharing(store, shared)


def _fetch(sharing: "Sharing | None") -> bool:
    """Fetch the records of the release store, if there is one; return whether that succeeded."""
    return sharing is None or _attempt(sharing.fetch) is not None


def _attempt(action: Callable[[], int]) -> int | None:
    """Do something with the release store; when it fails, print the error and return None."""
    from tvmflow.errors import StoreError

    try:
        return action()
    except StoreError as error:
        click.echo(f"only the records of this machine: {error}", err=True)
        return None


def _is_wanted(context: "Context", target: str | None) -> bool:
    from tvmflow.hardware.target import resolve

    return target is None or context.target == resolve(target).canonical


def _summary(store: "RecordStore", context: "Context") -> dict[str, Any]:
    """Return the row of a context: numbers of its entries, and the geometric mean of best over untuned times."""
    from tvmflow.tuning.records import Decision, Effort

    rows = _by_workload(store, context)
    entries = store.entries(context)
    decisions = [entry for entry in entries if isinstance(entry, Decision)]
    decision_trials = sum(entry.trials for entry in entries if isinstance(entry, Effort) and entry.is_on_decisions)
    ratios = [row["ratio"] for row in rows if row["ratio"] is not None]
    return {
        **asdict(context),
        "workloads": len(rows),
        "records": sum(row["records"] for row in rows),
        "trials": decision_trials + sum(row["trials"] for row in rows),
        "ratio": statistics.geometric_mean(ratios) if ratios else None,
        "decisions": len({entry.key for entry in decisions}),
        "newest": max([*(row["newest"] for row in rows), *(entry.created_at for entry in decisions)]),
    }


def _by_workload(store: "RecordStore", context: "Context") -> list[dict[str, Any]]:
    """Return the rows of a context's workloads, the slowest first; the ratio of a workload without a record is 1."""
    from tvmflow.tuning.records import Decision, Effort, Record

    groups: dict[str, list[Entry]] = {}
    for entry in store.entries(context):
        if isinstance(entry, Decision) or (isinstance(entry, Effort) and entry.is_on_decisions):
            continue
        groups.setdefault(entry.key, []).append(entry)
    rows = []
    for key, entries in groups.items():
        best = min((e for e in entries if isinstance(e, Record)), key=lambda record: record.seconds, default=None)
        efforts = [entry for entry in entries if isinstance(entry, Effort)]
        untuned = [effort.baseline_seconds for effort in efforts if effort.baseline_seconds]
        seconds = best.seconds if best is not None else (untuned[-1] if untuned else None)
        ratio = None
        if best is None:
            ratio = 1.0 if untuned else None
        elif best.baseline_seconds:
            ratio = best.seconds / best.baseline_seconds
        rows.append(
            {
                "key": key,
                **asdict(context),
                "records": sum(isinstance(entry, Record) for entry in entries),
                "trials": sum(effort.trials for effort in efforts),
                "best_seconds": seconds,
                "ratio": ratio,
                "newest": max(entry.created_at for entry in entries),
            }
        )
    return sorted(rows, key=lambda row: -(row["best_seconds"] or 0.0))


def _function(workload: str) -> str | None:
    """Return a workload as TVMScript, None where there is none or this TVM cannot read it."""
    from tvm import ir

    try:
        return str(ir.load_json(workload).script()) if workload else None
    except Exception:  # Another TVM wrote it; TVM raises whatever it likes then.
        return None


def _schedule(record: "Record") -> str:
    """Return the steps of a record's schedule, or its trace where that does not replay."""
    from tvmflow.tuning.traces import schedule_steps

    try:
        return schedule_steps(record)
    except Exception:  # TVM raises whatever it likes for a trace that does not fit.
        return record.trace


def _table(*columns: str) -> "Table":
    from rich import box
    from rich.table import Table

    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for column in columns:
        is_text = column in ("workload", "target", "TVM", "space", "tuner", "newest (UTC)", "when (UTC)")
        table.add_column(column, no_wrap=True, justify="left" if is_text else "right")
    return table


def _print(table: "Table") -> None:

    from tvmflow.cli.display import output_console

    output_console(140).print(table)


def _short(target: str) -> str:
    """Return a short name of a target: its preset's, or else its kind, CPU and number of cores."""
    from tvmflow.errors import TargetError
    from tvmflow.hardware.target import presets, resolve

    for name in presets():
        try:
            if resolve(name).canonical == target:
                return name
        except TargetError:
            continue
    tvm = json.loads(target)
    words = [tvm.get("mcpu") or tvm.get("arch") or tvm.get("mtriple"), f"{tvm.get('num-cores', 1)} cores"]
    return " ".join(str(word) for word in (tvm.get("kind"), *words) if word)


def _us(seconds: float | None) -> str:
    return "-" if seconds is None else f"{seconds * 1e6:.1f}"


def _ratio(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f}"


def _when(text: str) -> str:
    return text[:19].replace("T", " ")
