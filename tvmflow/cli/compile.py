"""`tvmflow compile`: one ONNX file to one bundle, without registry and store."""

import json
import os
import re
import shutil
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

import click

from tvmflow.errors import InputError, StepError, VerdictError

if TYPE_CHECKING:
    from tvmflow.spec import Spec

_SHAPE = re.compile(r"\s*(?P<name>[^\[\]]+?)\s*:\s*\[(?P<dims>[^\[\]]*)\]\s*,?")


@click.command("compile")
@click.argument("model", type=click.Path(path_type=Path))
@click.option(
    "-o", "--output", type=click.Path(path_type=Path, dir_okay=False), required=True, help="The bundle to write."
)
@click.option(
    "--target", default="native", show_default=True, help="A preset, or a TVM target such as 'llvm -mcpu=znver4'."
)
@click.option("--input-shapes", help='Shapes by input, e.g. "input:[1,3,224,224] mask:[batch,128]".')
@click.option(
    "--precision",
    type=click.Choice(["fp32", "bf16", "int8"]),
    default="fp32",
    show_default=True,
    help="What convolutions and matrix products compute in; int8 is for quantised models.",
)
@click.option("--trials", type=click.IntRange(min=0), default=0, show_default=True, help="Tuning trials in total.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON document.")
def compile_command(
    model: Path, output: Path, target: str, input_shapes: str | None, precision: str, trials: int, as_json: bool
) -> None:
    """Compile the ONNX file MODEL to a bundle, compared with ONNX Runtime before it is written.

    Exit code 3: the outputs differ, nothing was written.
    """
    from rich.console import Console

    from tasks import build, export, package, relax_import, tune, validate
    from tasks.step import Context
    from tvmflow import settings as machine
    from tvmflow.cli.display import RichReporter
    from tvmflow.workspace import Workspace

    settings = machine.load()
    spec = _spec(model, target, parse_shapes(input_shapes or ""), precision, trials)
    context = Context(spec, settings, Workspace(settings.state))
    (resolved,) = spec.resolved_targets()
    with RichReporter(Console(stderr=True)).live():
        exported = export.export.fn(context)
        imported = relax_import.relax_import.fn(context, exported)
        tuned = tune.tune.fn(context, imported, resolved)
        built = build.build.fn(context, imported, tuned, resolved)
        packaged = package.package.fn(context, exported, imported, tuned, built, resolved)
        verdict = validate.validate.fn(context, exported, packaged, resolved).result
    if not verdict.passed:
        raise VerdictError(f"{model} is not written to {output}: {verdict.reasons[0]}")
    _copy(context.file(packaged.result.bundle), output)
    error = verdict.original.max_abs_error if verdict.original is not None else None
    if as_json:
        bundle = packaged.result.bundle
        document = {"bundle": str(output), "sha256": bundle.sha256, "size": bundle.size, "max_abs_error": error}
        document |= {"target": resolved.name, "precision": precision, "verified": verdict.verified}
        click.echo(json.dumps(document))
    elif error is not None:
        narrow = "" if precision == "fp32" else f" in {precision}"
        click.echo(f"{output}: {resolved.name}{narrow}, largest difference from ONNX Runtime {error:.1e}")
    else:
        click.echo(f"{output}: {resolved.name}, not verified: this machine cannot run it")


def parse_shapes(text: str) -> dict[str, tuple[int | str, ...]]:
    """Shapes by input name from `name:[d0,d1] name:[d0]`; a dimension that is no number is a name."""
    shapes: dict[str, tuple[int | str, ...]] = {}
    position = 0
    while text[position:].strip():
        found = _SHAPE.match(text, position)
        if found is None:
            raise InputError(f'input shapes {text!r} cannot be read; write them as "input:[1,3,224,224] mask:[1,128]"')
        dims = [dim.strip() for dim in found["dims"].split(",") if dim.strip()]
        shapes[found["name"].strip("\"'")] = tuple(int(dim) if dim.lstrip("-").isdigit() else dim for dim in dims)
        position = found.end()
    return shapes


def _spec(model: Path, target: str, shapes: dict[str, tuple[int | str, ...]], precision: str, trials: int) -> "Spec":
    from tasks.export import described_by, read_onnx
    from tvmflow import spec as release_file

    document: dict[str, object] = {
        "name": re.sub(r"[^A-Za-z0-9._-]", "-", model.stem).lstrip("-._") or "model",
        "model": {"onnx": str(model.absolute())},
        "targets": [target],
        "build": {"precision": precision},
        "tune": {"trials": trials},
        "validate": {"top1_agreement": None},
        "gates": {"unverified_targets": "allow"},
    }
    if shapes:
        inputs = described_by(read_onnx(model))
        unknown = set(shapes) - {item.name for item in inputs}
        if unknown:
            raise InputError(
                f"{model} has no input {sorted(unknown)[0]!r}; its inputs are {', '.join(item.name for item in inputs)}"
            )
        document["inputs"] = [
            {**item.model_dump(mode="json"), "shape": list(shapes.get(item.name, item.shape))} for item in inputs
        ]
    return release_file.parse(document, Path.cwd(), str(model))


def _copy(bundle: Path, output: Path) -> None:
    """Copy whole or not at all."""
    partial = None
    try:
        descriptor, partial = tempfile.mkstemp(dir=output.parent, prefix=f".{output.name}.")
        os.close(descriptor)
        shutil.copyfile(bundle, partial)
        Path(partial).chmod(0o644)
        Path(partial).replace(output)
    except OSError as error:
        if partial is not None:
            Path(partial).unlink(missing_ok=True)
        raise StepError(f"{str(output)!r} cannot be written ({error.strerror}); choose another place") from error
