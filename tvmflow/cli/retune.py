"""`tvmflow retune`: tune the costliest workloads in production, and release a faster build."""

import json
from pathlib import Path

import click

from tvmflow.cli.options import NumberRange, file_argument, json_option


@click.command("retune")
@file_argument
@click.option(
    "--minutes",
    type=NumberRange(min=0, min_open=True),
    default=30.0,
    show_default=True,
    help="The time to spend on tuning, of all targets together.",
)
@click.option("--channel", default="production", show_default=True, help="The channel whose release to make faster.")
@json_option
def retune_command(file: Path, minutes: float, channel: str, as_json: bool) -> None:
    """Tune the costliest workloads of a channel's release of FILE's model, and release a faster build.

    The new build and the channel's are measured alternately, and the new one becomes a release only if it is faster.
    Faster schedules are kept as records in any case.
    """
    from rich.console import Console

    from tvmflow import spec as release_file
    from tvmflow.cli.display import RichReporter, output_console
    from tvmflow.cli.prefect import prefect_server
    from tvmflow.cli.release import show
    from tvmflow.processes.imports import importing
    from tvmflow.settings import Settings

    release_file.load(file)
    settings = Settings.load()
    console = Console(stderr=True)
    if not as_json:
        console.print(f"Retuning [bold]{file}[/]", highlight=False)
    with prefect_server(settings) as await_server, RichReporter(console).live():
        with importing():
            import mlflow  # noqa: F401
            from flows.retune import RetuneSummary, retune

        await_server()
        summary = RetuneSummary.model_validate(retune(str(file), minutes=minutes, channel=channel))
    if as_json:
        click.echo(json.dumps(summary.model_dump(mode="json")))
        return
    output = output_console()
    if summary.release is not None:
        show(summary.release, settings, output)
    for item in summary.targets:
        output.print(
            f"{item.target}: {item.trials} trials on {', '.join(item.functions)}", highlight=False, soft_wrap=True
        )
    output.print(f"verdict  {summary.reason}, run {summary.mlflow_run_id}", highlight=False, soft_wrap=True)
