"""`tvmflow release`: release the model of a release file."""

import json
import os
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import click

from tvmflow.cli.options import file_argument, json_option, trace_option

if TYPE_CHECKING:
    from collections.abc import Iterator

    from rich.console import Console

    from flows.release import ReleaseSummary, TargetSummary
    from tvmflow.progress import Reporter
    from tvmflow.settings import Settings


@click.command("release")
@file_argument
@click.option("--target", "targets", multiple=True, help="Build for this target instead of the file's; repeatable.")
@click.option("--trials", type=click.IntRange(min=0), help="Tuning trials in total; 0 uses known records only.")
@click.option("--runs", type=click.IntRange(min=1), help="Timed runs of the bundle and of each peer in all.")
@trace_option("when each step began and how long it took")
@json_option
def release_command(
    file: Path, targets: tuple[str, ...], trials: int | None, runs: int | None, trace: Path | None, as_json: bool
) -> None:
    """Release the model that FILE describes: export, import, tune, build, package, validate, benchmark, track, publish.

    Cached steps are skipped. Exit code 3: the bundle was measured and refused, nothing was published.
    """
    from rich.console import Console

    from tvmflow import spec as release_file
    from tvmflow.cli.display import RichReporter, output_console
    from tvmflow.cli.prefect import prefect_server
    from tvmflow.processes.imports import importing
    from tvmflow.settings import Settings

    # Read before Prefect is loaded: most mistakes are in the file or the settings, and these errors come at once.
    release_file.load(file)
    settings = Settings.load()
    console = Console(stderr=True)
    if not as_json:
        console.print(f"Releasing [bold]{file}[/]", highlight=False)
    reporter = RichReporter(console)
    with prefect_server(settings) as await_server, reporter.live(), tracing(trace, file.stem, reporter):
        # The flow's modules are imported while the server starts in another process.
        with importing():
            import mlflow  # noqa: F401
            from flows.release import ReleaseSummary, release

        await_server()
        summary = ReleaseSummary.model_validate(
            release(str(file), targets=list(targets) or None, trials=trials, runs=runs)
        )
    if as_json:
        click.echo(json.dumps(summary.model_dump(mode="json")))
    else:
        # A file or a pipe has no terminal width.
        show(summary, settings, output_console())


@contextmanager
def tracing(path: Path | None, name: str, reporter: "Reporter") -> "Iterator[None]":
    """Write a trace of the steps that the body runs to `path`, even if the body fails; do nothing if `path` is None.

    `name` is the title of the trace. Meanwhile `reporter` takes the place of the current reporter and gets the steps'
    events, too. Raises InputError when `path` cannot be written; where the body fails, its error stays and
    gets this as a note.
    """
    from tvmflow.cli.options import naming_output
    from tvmflow.errors import InputError
    from tvmflow.progress import TracingReporter, reporting_to
    from tvmflow.trace import Trace

    if path is None:
        yield
        return
    trace = Trace(name)
    try:
        with reporting_to(TracingReporter(trace, reporter)):
            yield
    except BaseException as error:
        try:
            with naming_output(path):
                trace.write(path)
        except InputError as second:
            error.add_note(str(second))
        raise
    with naming_output(path):
        trace.write(path)


def show(summary: "ReleaseSummary", settings: "Settings", console: "Console") -> None:
    """Print the outcome of a release: each target's figures, and the places of bundles, release and MLflow run."""
    from rich import box
    from rich.table import Table

    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    has_sizes = any(point.sizes for item in summary.targets for point in item.measurements)
    headings = [
        "target",
        *(["at"] if has_sizes else []),
        "p50 ms",
        "p90 ms",
        "/ ONNX RT",
        "/ PyTorch",
        "error",
        "same top-1",
        "MB",
    ]
    for heading in headings:
        table.add_column(heading, justify="left" if heading in ("target", "at") else "right", no_wrap=True)
    for item in summary.targets:
        shared = (_number(item.max_abs_error, "{:.1e}"), _number(item.top1_agreement, "{:.2%}"), _megabytes(item))
        if not item.measurements:
            table.add_row(item.target, *([""] if has_sizes else []), *("-" * 4), *shared)
        for index, point in enumerate(item.measurements):
            latency = point.runners["tvm"].latency_ms
            table.add_row(
                item.target if index == 0 else "",
                *([point.label] if has_sizes else []),
                f"{latency.p50:.3f}",
                _number(latency.p90, "{:.3f}"),
                _number(point.ratio.get("onnxruntime"), "{:.2f}"),
                _number(point.ratio.get("pytorch"), "{:.2f}"),
                *(shared if index == 0 else ("", "", "")),
            )
    console.print(table)
    for item in summary.targets:
        for line in _lines(item):
            console.print(f"{item.target}: {line}", highlight=False)
    places = [("bundle", item.bundle_path) for item in summary.targets]
    places.append(("MLflow", f"{summary.mlflow_model}, run {summary.mlflow_run_id}"))
    places.append(("release", f"{summary.name} {summary.version}, {summary.release_uri}"))
    if settings.s3_endpoint is None and settings.s3_bucket is None:
        places.append(("state", f"all of it is kept in {os.path.relpath(settings.state)}"))
    places += [("channel", item.message) for item in summary.promotions]
    places += [("warning", sentence) for sentence in summary.warnings]
    for label, place in places:
        # Not wrapped, since people copy these lines.
        console.print(f"{label:<8} {place}", highlight=False, soft_wrap=True)


def _missing_percentiles(runs: int) -> "Iterator[str]":
    """Yield a sentence where the runs are too few for p90, or for p99."""
    from tvmflow.comparison import runs_needed

    missing = [f"p{which} needs {runs_needed(which) - runs} more" for which in (90, 99) if runs < runs_needed(which)]
    if missing:
        yield f"{runs} runs are too few for some percentiles: {', '.join(missing)}"


def _lines(item: "TargetSummary") -> "Iterator[str]":
    yield from item.notes
    if item.metric is not None:
        yield f"task metric {item.metric['bundle']:.4f}, the original's {item.metric['original']:.4f}"
    yield item.tuning
    if item.choice is not None:
        yield item.choice.message
    if not item.measurements:
        return
    typical = item.measurements[0]
    names = {"pytorch": "PyTorch", "onnxruntime": "ONNX Runtime", "tvm": "TVM from Python"}
    seconds = {str(runner): figures.total_seconds for runner, figures in typical.runners.items()}
    yield from _missing_percentiles(item.runs or 0)
    yield f"all {item.runs} runs together took: " + ", ".join(
        f"{name} {seconds[key]:.3f} s" for key, name in names.items() if key in seconds
    )
    if item.busyness is not None:
        yield item.busyness


def _megabytes(item: "TargetSummary") -> str:
    return f"{item.bundle_size / 1e6:.2f}"


def _number(value: float | None, form: str) -> str:
    return "-" if value is None else form.format(value)
