"""`tvmflow bisect`: find the node of an ONNX file that is compiled wrongly."""

import json
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import click

from tvmflow.cli.compile import parse_shapes
from tvmflow.cli.options import (
    NumberRange,
    check_output_folder,
    input_shapes_option,
    json_option,
    load_own_operators,
    model_argument,
    operator_option,
    precision_option,
    read_inputs,
    relative_error_option,
    target_option,
)
from tvmflow.errors import ExportError, MachineError, VerdictError

if TYPE_CHECKING:
    import onnx

    from tvmflow.arrays import Array


@click.command("bisect")
@model_argument
@target_option
@precision_option("The precision to compile in.")
@input_shapes_option(".")
@operator_option
@click.option("--inputs", type=click.Path(path_type=Path), help="An .npz by input name; without it, random inputs.")
@click.option("--rtol", type=NumberRange(min=0), help="The relative tolerance of each element.")
@click.option("--atol", type=NumberRange(min=0), help="The absolute tolerance of each element.")
@relative_error_option
@click.option(
    "-o",
    "--output",
    type=click.Path(path_type=Path, file_okay=False),
    help="The folder for the smallest model that shows the error; by default MODEL.bisect.",
)
@json_option
def bisect_command(
    model: Path,
    target: str,
    precision: str,
    input_shapes: str | None,
    operators: tuple[str, ...],
    inputs: Path | None,
    rtol: float | None,
    atol: float | None,
    max_relative_error: float | None,
    output: Path | None,
    as_json: bool,
) -> None:
    """Find the first node of the ONNX file MODEL whose output differs too much from ONNX Runtime's.

    Parts of the model are compiled and run in this process. The smallest model that shows the error is written with its
    inputs and with ONNX Runtime's outputs. An output may differ as much as `tvmflow compile` allows, unless --rtol,
    --atol or --max-relative-error is given. Exit code 3: an output differs by more than that.
    """
    are_elements_bounded = rtol is not None or atol is not None
    if max_relative_error is not None and are_elements_bounded:
        raise click.UsageError("--max-relative-error takes the place of --rtol and --atol; give the one or the others")
    from tasks.validate import why_not_here
    from tvmflow.cli.compile import make_spec

    folder = output or model.with_suffix(".bisect")
    check_output_folder(folder)
    spec = make_spec(model, target, parse_shapes(input_shapes or ""), {"precision": precision}, 0, operators)
    (resolved,) = spec.resolve_targets()
    refusal = why_not_here(resolved, spec.build.precision)
    if refusal is not None:
        raise MachineError(f"{refusal}; bisect on a machine that runs the target")
    # TVM reads it when it first runs a parallel region.
    os.environ.setdefault("TVM_NUM_THREADS", str(resolved.threads))

    from rich.console import Console

    from tvmflow.onnx_model.graph import rounds_activations
    from tvmflow.onnx_model.inputs import fix_shapes
    from tvmflow.onnx_model.reading import read_onnx
    from tvmflow.operators import define
    from tvmflow.runtime.library import without_torch
    from tvmflow.tolerance import Bounds

    with without_torch():
        from tvmflow.bisection import bisect
        from tvmflow.compiler import BuildOptions

    own = load_own_operators(operators)
    original = read_onnx(model)
    define(original, own)
    fix_shapes(original.graph, {item.name: item.shape for item in spec.inputs})
    samples = [read_inputs(inputs)] if inputs is not None else _make(model, original, spec.validation.samples)
    defaults = spec.bounds(rounds_activations=rounds_activations(original))
    bounds = Bounds(defaults.rtol, defaults.atol, defaults.max_relative_error)
    if max_relative_error is not None or are_elements_bounded:
        bounds = Bounds(rtol or 0.0, atol or 0.0, max_relative_error)
    console = Console(stderr=True)
    with console.status("compiling the whole model") as status:
        options = BuildOptions(precision=spec.build.precision)
        bisection = bisect(original, samples, resolved, bounds, options, status.update, own)
    if bisection is None:
        text = json.dumps({"within_bounds": True}) if as_json else f"{model}: all outputs are within the bounds"
        click.echo(text)
        return
    try:
        bisection.save(folder)
    except OSError as error:
        raise VerdictError(
            f"{model}: operator {bisection.operator}, node {bisection.node!r} is out of bounds, and {str(folder)!r} "
            f"cannot be written ({error.strerror}); choose another --output"
        ) from error
    if as_json:
        document = {"within_bounds": False, "operator": bisection.operator, "node": bisection.node}
        document |= {"output": bisection.output, "max_abs_error": bisection.error, "nodes": bisection.nodes}
        errors = {"compiled": bisection.compiled_error, "onnxruntime": bisection.onnxruntime_error}
        document["max_abs_error_beside_float64"] = errors
        click.echo(json.dumps({**document, "folder": str(folder), "builds": bisection.builds}))
    else:
        noun = "node" if bisection.nodes == 1 else "nodes"
        click.echo(f"{model}: operator {bisection.operator}, node {bisection.node!r} is the first out of bounds")
        click.echo(f"output {bisection.output!r} differs from ONNX Runtime's by up to {bisection.error:.3g}")
        if bisection.compiled_error is not None and bisection.onnxruntime_error is not None:
            click.echo(
                f"beside a computation in float64, the compiled model differs by up to {bisection.compiled_error:.3g}, "
                f"ONNX Runtime by up to {bisection.onnxruntime_error:.3g}"
            )
        click.echo(f"{folder}: a model of {bisection.nodes} {noun} that shows it, with inputs.npz and expected.npz")
    sys.exit(VerdictError.exit_code)


def _make(path: Path, model: "onnx.ModelProto", count: int) -> "list[dict[str, Array]]":
    """Return `count` random samples of the inputs, as `tvmflow compile` makes them.

    The first has sizes at which ONNX Runtime runs the model. Raises ExportError where it runs at none.
    """
    from tvmflow import samples
    from tvmflow.cli.sizes import find_inputs

    inputs_and_ranges = find_inputs(path, model)
    if inputs_and_ranges is None:
        raise ExportError(f"ONNX Runtime runs {path} at none of the sizes that were tried; give --inputs")
    inputs, ranges = inputs_and_ranges
    return [samples.make(inputs, ranges, index, 0, Path.cwd()) for index in range(count)]
