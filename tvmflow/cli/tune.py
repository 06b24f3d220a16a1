"""`tvmflow tune`: tune a model's workloads within a budget; every later release uses the records."""

import json
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

import click

from tvmflow.cli.options import NumberRange, file_argument, json_option

if TYPE_CHECKING:
    from rich.console import Console

    from tasks.tune import TuneResult
    from tvmflow.spec import Spec, Tune
    from tvmflow.workspace import Outcome


@click.command("tune")
@file_argument
@click.option("--minutes", type=NumberRange(min=0, min_open=True), help="The time to spend, for each target.")
@click.option("--trials", type=click.IntRange(min=0), help="Trials to measure in all, earlier ones included.")
@click.option(
    "--until",
    metavar="PART",
    help="End when another minute is expected to save less of the model's time than this, as 2%; earlier runs count.",
)
@click.option(
    "--early-stopping",
    metavar="N",
    type=click.IntRange(min=1),
    help="Leave a workload alone after N trials in a row that were not faster, by default 256.",
)
@click.option("--device", metavar="KEY", help="Measure on the devices with this key, not here.")
@click.option("--tracker", metavar="HOST:PORT", help="The devices' tracker; by default it is `tvmflow devices up`'s.")
@click.option("--target", "targets", multiple=True, help="Tune for this target instead of the file's; repeatable.")
@json_option
def tune_command(
    file: Path,
    minutes: float | None,
    trials: int | None,
    until: str | None,
    early_stopping: int | None,
    device: str | None,
    tracker: str | None,
    targets: tuple[str, ...],
    as_json: bool,
) -> None:
    """Tune the model that FILE describes, for --minutes, --trials or --until, on this machine or on devices.

    Without these options the file's own budget is used. Each faster schedule becomes a record at once: an interrupt
    loses none, the next run continues, and the next release uses them. Nothing is released.
    """
    if minutes is not None and trials is not None:
        raise click.UsageError("--minutes and --trials are two budgets; give one")
    if tracker is not None and device is None:
        raise click.UsageError("--tracker names the place of devices; give their key with --device")
    from rich.console import Console

    from tvmflow import spec as release_file
    from tvmflow.cli.devices import own_tracker, tracker_address
    from tvmflow.cli.display import RichReporter, output_console
    from tvmflow.settings import Settings

    spec = release_file.load(file)
    settings = Settings.load()
    if targets:
        spec = release_file.amend(spec, {"targets": list(targets)}, str(file))
    options = {"minutes": minutes, "trials": trials, "until": until, "early_stopping": early_stopping}
    budget = _budget(spec, {key: value for key, value in options.items() if value is not None})
    address = None
    if device is not None:
        address = str(tracker_address(tracker or own_tracker(settings.state)))
    from tasks.curve import open_curve
    from tasks.export import ExportJob, export
    from tasks.original import find_original
    from tasks.relax_import import ImportJob, relax_import
    from tasks.step import StepRunner
    from tasks.train import TrainJob, train
    from tasks.tune import DeviceKey, TuneJob, tune_more
    from tvmflow.processes.children import shared_imports
    from tvmflow.services import open_records, open_services, open_workspace

    measured_on = None if device is None or address is None else DeviceKey(key=device, tracker=address)
    console = Console(stderr=True)
    if not as_json:
        console.print(f"Tuning [bold]{file}[/]", highlight=False)
    with (
        open_services(settings, spec.store, spec.registry) as services,
        shared_imports(),
        RichReporter(console).live(),
    ):
        workspace = open_workspace(settings, services.store, spec.store)
        runner = StepRunner.of(spec, settings, workspace)
        shared = open_records(settings, services.store, spec.store)
        weights = train(runner, TrainJob.of(spec)).result.weights if spec.train is not None else None
        original = find_original(spec, workspace, weights, services.registry, trusts_pickle=settings.trust == "pickle")
        exported = export(runner, ExportJob.of(spec, original)).result
        imported = relax_import(runner, ImportJob.of(spec, exported)).result
        tuned = {}
        for target in spec.resolve_targets():
            job = TuneJob.of(spec, imported, target)
            with open_curve(spec, workspace, services.registry, target, budget) as curve:
                outcome = tune_more(runner, job, budget, device=measured_on, curve=curve.path, shared=shared)
                curve.finish(outcome)
            tuned[target.name] = outcome
            if curve.error is not None:  # The records are kept all the same.
                console.print(f"the curve is not in MLflow: {curve.error}", highlight=False, soft_wrap=True)
    if as_json:
        results = {name: _document(outcome.result) for name, outcome in tuned.items()}
        click.echo(json.dumps({"name": spec.name, "device": device, "targets": results}))
        return
    output = output_console()
    for name, outcome in tuned.items():
        _show(name, outcome, output)


def _budget(spec: "Spec", options: "Mapping[str, object]") -> "Tune":
    """Return the budget of this run: from the options of the command line, else from the release file.

    Raises UsageError where there is none, SpecError for an option that is out of range.
    """
    from tvmflow.spec import amend

    changes = {f"tune.{key}": value for key, value in options.items()}
    if options.keys() & {"minutes", "trials", "until"}:
        changes = {"tune.minutes": None, "tune.trials": None, "tune.until": None, **changes}
    budget = amend(spec, changes, "the budget on the command line").tune
    if not budget.has_budget and "trials" not in options:
        raise click.UsageError("the release file has no tuning budget; give --minutes, --trials or --until")
    return budget


def _show(target: str, outcome: "Outcome[TuneResult]", console: "Console") -> None:
    """Print the workloads, the costliest first: microseconds of a call before and after."""
    from rich import box
    from rich.table import Table

    result = outcome.result
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for column in ("workload", "calls", "before us", "now us", "now / before", "trials", ""):
        table.add_column(column, no_wrap=True, justify="left" if column in ("workload", "") else "right")
    workloads = [item for item in result.workloads if item.status != "skipped"]
    for item in sorted(workloads, key=lambda item: -item.calls * (item.best_seconds or item.baseline_seconds or 0.0)):
        before, now = item.baseline_seconds, item.best_seconds
        table.add_row(
            item.name,
            str(item.calls),
            "-" if before is None else f"{before * 1e6:.1f}",
            "-" if now is None else f"{now * 1e6:.1f}",
            "-" if before is None or now is None else f"{now / before:.2f}",
            str(item.trials),
            item.status,
        )
    console.print(f"{target}: {result.coverage}, {result.trials} trials in {outcome.seconds:.0f} s", highlight=False)
    if result.untuned_ms is not None and result.latency_ms is not None:
        ratio = f" ({result.latency_ms / result.untuned_ms:.2f})" if result.untuned_ms else ""
        console.print(
            f"estimated latency: {result.untuned_ms:.3f} ms untuned, {result.latency_ms:.3f} ms now{ratio}",
            highlight=False,
        )
    console.print(table)
    skipped = Counter(item.reason for item in result.workloads if item.status == "skipped")
    for reason, count in skipped.items():
        console.print(f"{count} not tuned: {reason}", highlight=False, soft_wrap=True)


def _document(result: "TuneResult") -> dict[str, object]:
    """A result as --json prints it: the digest is `known` there, and the keys are `looked_up`."""
    document = result.model_dump(mode="json", exclude={"sources"})
    document["known"] = document.pop("records_digest")
    document["looked_up"] = document.pop("lookup_keys")
    return document
