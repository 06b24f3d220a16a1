"""`tvmflow doctor`: report how an ONNX file will be compiled, before any build."""

import dataclasses
import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import click

from tvmflow.cli.compile import parse_shapes
from tvmflow.cli.options import (
    input_shapes_option,
    json_option,
    load_own_operators,
    model_argument,
    operator_option,
    precision_option,
    target_option,
)

if TYPE_CHECKING:
    from rich.console import Console

    from tvmflow.compiler.diagnosis import Diagnosis
    from tvmflow.operators import OwnOperator
    from tvmflow.spec import Dimension

_REFUSED = 4


@click.command("doctor")
@model_argument
@target_option
@precision_option("The precision to compile for.")
@input_shapes_option("; other dimensions stay free.")
@operator_option
@json_option
def doctor_command(
    model: Path, target: str, precision: str, input_shapes: str | None, operators: tuple[str, ...], as_json: bool
) -> None:
    """Explain for every operator of the ONNX file MODEL how it will be compiled, or why it cannot be and what to do.

    Nothing is built. Each kind of node is lowered by itself, and "rule" is the schedule rule that takes it. "fast"
    means that a rule was written for it, or that it is fused into a neighbour; "fallback", that only the general
    schedule takes it; "folded", that it is computed at import. "time" is the expected share of the run time, from
    operations and bytes. Exit code 4: something is refused.
    """
    from rich.console import Console

    from tvmflow.cli.display import output_console
    from tvmflow.hardware.target import resolve
    from tvmflow.runtime.library import without_torch

    with without_torch():
        from tvmflow.compiler.diagnosis import diagnose

    own, shapes = load_own_operators(operators), parse_shapes(input_shapes or "")
    with Console(stderr=True).status(f"reading {model}"):
        ranges = _ranges(model, shapes, own)
        sizes = {name: item.typical_size for name, item in ranges.items()}
        resolved = resolve(target)
        diagnosis = diagnose(model, resolved, precision, shapes, sizes, operators=own)  # type: ignore[arg-type]
    if as_json:
        limits = {
            "smallest": {name: item.min for name, item in ranges.items()},
            "largest": {name: item.max for name, item in ranges.items()},
        }
        document = {**dataclasses.asdict(diagnosis), **limits, "refused": bool(diagnosis.refusals)}
        click.echo(json.dumps(document))
    else:
        _show(diagnosis, ranges, output_console(160))
    if diagnosis.refusals:
        sys.exit(_REFUSED)


def _ranges(
    model: Path, shapes: dict[str, tuple[int | str, ...]], operators: "dict[str, OwnOperator]"
) -> "dict[str, Dimension]":
    """Return the ranges of the free dimensions, empty where ONNX Runtime does not run the model."""
    from tvmflow.cli.sizes import find_inputs
    from tvmflow.errors import ExportError, ModelImportError
    from tvmflow.onnx_model.inputs import fix_shapes
    from tvmflow.onnx_model.reading import read_onnx
    from tvmflow.operators import define

    try:
        original = read_onnx(model)
    except ExportError:  # diagnose says it.
        return {}
    define(original, operators)
    fix_shapes(original.graph, shapes)
    try:
        inputs_and_ranges = find_inputs(model, original)
    except (ExportError, ModelImportError):
        return {}
    return {} if inputs_and_ranges is None else inputs_and_ranges[1]


def _show(diagnosis: "Diagnosis", ranges: "dict[str, Dimension]", console: "Console") -> None:
    from rich import box
    from rich.markup import escape
    from rich.table import Table

    def line(text: str) -> None:
        console.print(escape(text), highlight=False, soft_wrap=True)

    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for column in ("operator", "nodes", "verdict", "rule", "time", "first node"):
        table.add_column(column, justify="right" if column in ("nodes", "time") else "left")
    notes: dict[str, list[str]] = {}
    for item in diagnosis.operators:
        share = "-" if item.share is None or item.verdict == "folded" else f"{item.share:.1%}"
        cells = (item.operator, str(item.nodes), item.verdict, item.rule or "-", share, item.node)
        table.add_row(*map(escape, cells))
        if item.verdict in ("fallback", "unexamined"):
            note = f"{item.reason}{'; ' if item.advice else ''}{item.advice}"
            notes.setdefault(f"{item.verdict}: {note}", []).append(item.operator)
    console.print(table)
    for note, operators in notes.items():
        line(f"{', '.join(dict.fromkeys(operators))}: {note}")
    for name, places in diagnosis.free.items():
        where = ", ".join(f"axis {axis} of {value!r}" for value, axis in places)
        sizes = _sizes(ranges.get(name))
        line(f"free dimension {name}: {where}; {sizes} (times are for {diagnosis.sizes[name]})")
    for coverage in diagnosis.coverage:
        share = "" if coverage.share is None else f"{coverage.share:.0%} of the expected time"
        line(f"{coverage.precision}: {'; '.join(filter(None, (share, coverage.reason)))}")
    for refusal in diagnosis.refusals:
        where = f"{refusal.where}: " if refusal.operator else ""
        line(f"refused: {where}{refusal.reason}; {refusal.advice}")
    total = sum(item.nodes for item in diagnosis.operators)
    count = len(diagnosis.refusals)
    verdict = f"{count} {'refusal' if count == 1 else 'refusals'}" if count else "nothing is refused"
    line(f"{diagnosis.model} for {diagnosis.target} in {diagnosis.precision}: {total} nodes, {verdict}")


def _sizes(dimension: "Dimension | None") -> str:
    if dimension is None:
        return "no size was found at which ONNX Runtime runs"
    return f"runs at {dimension.min} alone" if dimension.min == dimension.max else f"runs from {dimension.min}"
