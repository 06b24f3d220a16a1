"""`tvmflow calibrate`: measure this machine's processor and write its profile."""

import json
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import click

from tvmflow.cli.options import OutputFile, json_option, naming_output
from tvmflow.errors import StepError

if TYPE_CHECKING:
    from tvmflow.hardware.profiles import Profile

# The numbers that are measured; the others are those of the nearest profile and of the kernel.
_MEASURED = ("multiply_adds", "latency", "loads", "stores", "read", "write", "shared", "count", "region")


@click.command("calibrate")
@click.option(
    "-o",
    "--output",
    type=OutputFile(),
    default=Path("machine.toml"),
    show_default=True,
    help="The profile to write.",
)
@click.option("--threads", type=click.IntRange(min=1), help="The cores that work together; by default all.")
@json_option
def calibrate_command(output: Path, threads: int | None, as_json: bool) -> None:
    """Measure this machine's processor in under a minute, and write its profile for the compiler.

    Vectors, each level of the memory on one core and on all, and parallel regions are measured; the caches' geometry
    comes from the kernel. Other work on the machine makes the figures worse. The target `native` uses the profile where
    TVMFLOW_PROFILE names the file.
    """
    from rich import box
    from rich.console import Console
    from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn
    from rich.table import Table

    from tvmflow.cli.display import output_console
    from tvmflow.hardware.profiles import to_toml, with_caches
    from tvmflow.hardware.target import host, resolve

    cores = threads or host().cores
    # TVM reads it at the first parallel call.
    os.environ["TVM_NUM_THREADS"] = str(cores)
    nearest = resolve("native").profile
    if nearest is None:
        raise StepError("this machine has no CPU that tvmflow builds for")
    columns = (SpinnerColumn(), TextColumn("measuring {task.description}"), BarColumn(bar_width=24))
    with Progress(*columns, console=Console(stderr=True), transient=True, disable=not sys.stderr.isatty()) as progress:
        task = progress.add_task("", total=None)

        def report(done: int, total: int, message: str) -> None:
            progress.update(task, completed=done, total=total, description=message)

        from tvmflow.runtime.library import without_torch

        with without_torch():
            from tvmflow.compiler.calibration import calibrate

        calibration = calibrate(with_caches(nearest), cores, report)
    profile = calibration.profile
    sources = {
        "calibrate": f"tvmflow calibrate on {cores} cores at {calibration.clock / 1e9:.2f} GHz",
        "nearest": f"the profile {nearest.name!r} of tvmflow, and the caches that the kernel tells",
    }
    text = to_toml(profile, sources, lambda path: "calibrate" if path.rpartition(".")[2] in _MEASURED else "nearest")
    with naming_output(output):
        output.write_text(text)
    if as_json:
        document = {"profile": str(output), "digest": profile.digest, "clock": calibration.clock}
        click.echo(json.dumps({**document, "numbers": json.loads(profile.to_json())}))
        return
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for heading in ("number", nearest.name, "measured"):
        table.add_column(heading, justify="left" if heading == "number" else "right")
    for path, before, after in _list_differences(nearest, profile):
        table.add_row(path, before, after)
    output_console().print(table)
    click.echo(f"{output}: export TVMFLOW_PROFILE={output.absolute()}")


def _list_differences(before: "Profile", after: "Profile") -> list[tuple[str, str, str]]:
    """The measured numbers: path, value of the nearest profile, measured value."""
    rows = []
    tables = [("memory", before.memory, after.memory), ("cores", before.cores, after.cores)]
    caches = [(key, getattr(before, key), getattr(after, key)) for key in ("first", "second", "third")]
    vectors = [(f"vectors.{item.bits}", before.vectors_of(item.bits), item) for item in after.vectors]
    for path, old, new in (*vectors, *caches, *tables):
        for key in _MEASURED:
            if hasattr(new, key):
                rows.append((f"{path}.{key}", f"{getattr(old, key, 0):g}", f"{getattr(new, key):g}"))
    return rows
