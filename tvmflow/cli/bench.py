"""`tvmflow bench`: compare the build of an ONNX file with other runtimes on this machine."""

import json
from pathlib import Path
from typing import TYPE_CHECKING

import click

from tvmflow.cli.compile import build_best, make_spec, parse_shapes
from tvmflow.cli.options import (
    NumberRange,
    OutputFile,
    input_shapes_option,
    json_option,
    model_argument,
    naming_output,
    operator_option,
    precision_option,
    relative_error_option,
)
from tvmflow.errors import VerdictError, naming_model

if TYPE_CHECKING:
    from collections.abc import Mapping

    from tasks.peers import Contest, Peer
    from tvmflow.arrays import Array
    from tvmflow.bundle import Manifest

_PEERS = ("onnxruntime", "openvino", "torch", "torch.compile")


class _Peers(click.ParamType["tuple[Peer, ...]"]):
    """Names of peers separated by commas."""

    name = "peers"

    def convert(
        self, value: "str | tuple[Peer, ...]", param: click.Parameter | None, ctx: click.Context | None
    ) -> "tuple[Peer, ...]":
        if isinstance(value, tuple):
            return value
        names = [name.strip() for name in value.split(",") if name.strip()]
        for name in names:
            if name not in _PEERS:
                self.fail(f"{name!r} is not one of {', '.join(_PEERS)}", param, ctx)
        return tuple(peer for peer in _PEERS if peer in names)  # type: ignore[misc]


@click.command("bench")
@model_argument
@click.option(
    "--against",
    type=_Peers(),
    default="onnxruntime",
    show_default=True,
    help=f"The runtimes to compare with: {','.join(_PEERS)}, separated by commas.",
)
@input_shapes_option(".")
@operator_option
@precision_option("The type of the operands of convolutions and matrix products of our build.")
@relative_error_option
@click.option("--trials", type=click.IntRange(min=0), default=0, show_default=True, help="Tuning trials in total.")
@click.option("--threads", type=click.IntRange(min=1), help="Threads of every runner; all cores unless given.")
@click.option(
    "--seconds",
    type=NumberRange(min=0),
    default=120.0,
    show_default=True,
    help="The time to measure, in eight rounds or more.",
)
@click.option("--html", type=OutputFile(), help="Write a page with the figures.")
@json_option
def bench_command(
    model: Path,
    against: "tuple[Peer, ...]",
    input_shapes: str | None,
    operators: tuple[str, ...],
    precision: str,
    max_relative_error: float | None,
    trials: int,
    threads: int | None,
    seconds: float,
    html: Path | None,
    as_json: bool,
) -> None:
    """Measure the build of the ONNX file MODEL beside other runtimes, in turn and in fresh processes, on one sample.

    A ratio is our latency over the other's: below one, ours is faster. It stands with its interval, which holds the
    true ratio with a probability of 99 %. A percentile without enough runs is "-". Free dimensions have sizes at which
    the model runs, of 256 at most where it can; --input-shapes fixes others.
    """
    from rich.console import Console

    from tasks.peers import hold_contest
    from tvmflow import samples
    from tvmflow.bundle import read_manifest
    from tvmflow.hardware.target import host
    from tvmflow.settings import Settings
    from tvmflow.workspace import Workspace

    settings = Settings.load()
    build: dict[str, object] = {"precision": precision}
    spec = make_spec(model, "native", parse_shapes(input_shapes or ""), build, trials, operators, max_relative_error)
    (target,) = spec.resolve_targets()
    with naming_model(str(model)):
        exported, best, _ = build_best(spec, settings, target)
    if not best.verdict.passed:
        raise VerdictError(f"{model} is not measured: {best.verdict.reasons[0]}")
    workspace = Workspace(settings.state)
    bundle = workspace.path(best.packaged.bundle)
    sample_file = workspace.path(exported.samples)
    sizes = sizes_of(read_manifest(bundle), samples.load(sample_file)[0][0])
    with Console(stderr=True).status("measuring") as status:
        contest = hold_contest(
            workspace.path(exported.onnx),
            bundle,
            sample_file,
            against,
            threads=threads or host().cores,
            seconds=seconds,
            log=settings.state / "logs" / spec.name / "bench.log",
            timeout=settings.step_timeout_minutes * 60,
            progress=lambda done, rounds: status.update(f"measuring, round {done + 1} of {rounds}"),
        )
    ratios = {peer: {"ratio": item.ratio, **item.interval.model_dump()} for peer, item in contest.comparisons.items()}
    document = {**contest.model_dump(mode="json"), "ratios": ratios, "sizes": sizes}
    if html is not None:
        from tvmflow.report.bench import write_page

        with naming_output(html):
            html.write_text(write_page(model.name, document, [*describe_ratios(contest), *describe_sizes(sizes)]))
    if as_json:
        click.echo(json.dumps(document))
    else:
        _show(contest, sizes)


def sizes_of(manifest: "Manifest", inputs: "Mapping[str, Array]") -> dict[str, int]:
    """Return the sizes of the free dimensions of a bundle's `inputs`, arrays by name."""
    return {
        dimension: size
        for item in manifest.inputs
        for dimension, size in zip(item.shape, inputs[item.name].shape, strict=True)
        if isinstance(dimension, str)
    }


def describe_sizes(sizes: "Mapping[str, int]") -> list[str]:
    """Return the sentence that names the sizes of free dimensions; none for a model without."""
    if not sizes:
        return []
    words = ", ".join(f"{name} {size}" for name, size in sizes.items())
    return [f"free dimensions have sizes at which the model runs: {words}; --input-shapes fixes others"]


def describe_ratios(contest: "Contest") -> list[str]:
    """Return a sentence for each comparison, and one for each peer that was not measured."""
    sentences = [item.describe("our", f"{peer}'s") for peer, item in contest.comparisons.items()]
    return [*sentences, *(f"{peer} was not measured: {reason}" for peer, reason in contest.failures.items())]


def _show(contest: "Contest", sizes: "Mapping[str, int]") -> None:
    from rich import box
    from rich.console import Console
    from rich.table import Table

    from tasks.peers import PERCENTILES

    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    headings = ("", "ratio", *(f"p{which} ms" for which in PERCENTILES), "runs/s", "load ms", "first ms", "MB", "J/run")
    for heading in headings:
        table.add_column(heading, justify="right" if heading else "left", no_wrap=True)
    for runner, item in contest.figures.items():
        comparison = None if runner == "tvmflow" else contest.comparisons[runner]
        table.add_row(
            runner,
            "" if comparison is None else f"{comparison.ratio:.3f} ({comparison.interval})",
            *(item.percentile(which) for which in PERCENTILES),
            f"{item.throughput:.1f}",
            f"{item.load_ms:.0f}",
            f"{item.first_ms:.1f}",
            f"{item.peak_memory / 1e6:.0f}",
            "-" if item.joules is None else f"{item.joules:.3g}",
        )
    Console(width=150).print(table, highlight=False)
    for sentence in (*describe_ratios(contest), *describe_sizes(sizes)):
        click.echo(sentence)
