"""`tvmflow release`: the main job."""

import json
import os
from pathlib import Path
from typing import TYPE_CHECKING

import click

if TYPE_CHECKING:
    from rich.console import Console

    from flows.release import ReleaseSummary
    from tvmflow.settings import Settings


@click.command("release")
@click.argument("file", type=click.Path(path_type=Path))
@click.option("--target", "targets", multiple=True, help="Build for this target instead of the file's; repeatable.")
@click.option("--trials", type=click.IntRange(min=0), help="Tuning trials in total; 0 uses known records only.")
@click.option("--runs", type=click.IntRange(min=1), help="Timed runs of the bundle and of each peer in all.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON document.")
def release_command(file: Path, targets: tuple[str, ...], trials: int | None, runs: int | None, as_json: bool) -> None:
    """Release the model that FILE describes: export, import, tune, build, package, validate, benchmark, track, publish.

    Steps that nothing changed for are found done. Exit code 3: the bundle was measured and refused, nothing published.
    """
    from rich.console import Console

    from tvmflow import settings as machine
    from tvmflow import spec as release_file
    from tvmflow.cli.display import RichReporter

    # Said before Prefect is loaded: most mistakes are in the file or the settings, and the answer is instant.
    release_file.load(file)
    settings = machine.load()
    use_prefect(settings)
    console = Console(stderr=True)
    if not as_json:
        console.print(f"Releasing [bold]{file}[/]", highlight=False)
    reporter = RichReporter(console)
    with reporter.live():
        from flows.release import ReleaseSummary, release

        summary = ReleaseSummary.model_validate(
            release(str(file), targets=list(targets) or None, trials=trials, runs=runs)
        )
    if as_json:
        click.echo(json.dumps(summary.model_dump(mode="json")))
    else:
        show(summary, settings, Console())


def use_prefect(settings: "Settings") -> None:
    """Point Prefect at its server: the one that settings name, or its own in this process. Before it is imported."""
    from tvmflow.workspace import Workspace

    environment = {
        "PREFECT_SERVER_ANALYTICS_ENABLED": "false",
        "PREFECT_SERVER_EPHEMERAL_STARTUP_TIMEOUT_SECONDS": "120",
        "DO_NOT_TRACK": "1",
    }
    if settings.prefect_api_url is not None:
        environment["PREFECT_API_URL"] = settings.prefect_api_url
    else:
        home = Workspace(settings.state).folder / "prefect"
        home.mkdir(exist_ok=True)
        environment |= {
            "PREFECT_HOME": str(home),
            "PREFECT_SERVER_ALLOW_EPHEMERAL_MODE": "true",
            "PREFECT_LOGGING_TO_API_ENABLED": "false",
            # What fails is said once, in a sentence; Prefect would print its traceback as well.
            "PREFECT_LOGGING_LEVEL": "CRITICAL",
        }
    for name, value in environment.items():
        os.environ.setdefault(name, value)


def show(summary: "ReleaseSummary", settings: "Settings", console: "Console") -> None:
    """Print what a release came to: the figures of each target, the table of N runs, and where everything is."""
    from rich.table import Table

    table = Table(title=f"{summary.name} {summary.version}", title_justify="left")
    for column in ("target", "max error", "top-1 agreement", "p50", "p99", "vs ONNX Runtime", "vs PyTorch", "bundle"):
        table.add_column(column, justify="left" if column == "target" else "right")
    for item in summary.targets:
        latency = item.latency_ms or {}
        table.add_row(
            item.target,
            _number(item.max_abs_error, "{:.1e}"),
            _number(item.top1_agreement, "{:.2%}"),
            _number(latency.get("p50"), "{:.3g} ms"),
            _number(latency.get("p99"), "{:.3g} ms"),
            _number(item.ratio.get("onnxruntime"), "{:.2f}x"),
            _number(item.ratio.get("pytorch"), "{:.2f}x"),
            f"{item.bundle_size / 1e6:.2f} MB",
        )
    console.print(table)
    for item in summary.targets:
        if item.metric is not None:
            console.print(
                f"{item.target}: task metric {item.metric['bundle']:.4f}, the original's {item.metric['original']:.4f}",
                highlight=False,
            )
        if item.runs is not None:
            console.print(_runs(item.runs, item.total_seconds, item.target))
    where = Table.grid(padding=(0, 2))
    for item in summary.targets:
        where.add_row("bundle", item.bundle_path)
    where.add_row("MLflow", f"run {summary.mlflow_run_id}, {summary.mlflow_model}")
    where.add_row("release", summary.release_uri)
    console.print(where)
    if settings.s3_endpoint is None and settings.s3_bucket is None:
        console.print(f"Everything is kept in {os.path.relpath(settings.state)}.", highlight=False, style="dim")


def _runs(runs: int, seconds: dict[str, float], target: str) -> "object":
    from rich.table import Table

    names = {"pytorch": "PyTorch", "onnxruntime": "ONNX Runtime", "tvm": "TVM from Python"}
    table = Table(title=f"{runs} runs, {target}", title_justify="left")
    table.add_column("")
    table.add_column("seconds", justify="right")
    for key, name in names.items():
        if key in seconds:
            table.add_row(name, f"{seconds[key]:.4f}")
    return table


def _number(value: float | None, form: str) -> str:
    return "-" if value is None else form.format(value)
