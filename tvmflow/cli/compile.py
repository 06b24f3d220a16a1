"""`tvmflow compile`: compile one ONNX file to one bundle, without registry and store."""

import dataclasses
import json
import re
import shlex
import shutil
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, get_args

import click

from tvmflow.cli.options import (
    OutputFile,
    input_shapes_option,
    json_option,
    model_argument,
    naming_output,
    operator_option,
    precision_option,
    relative_error_option,
    target_option,
)
from tvmflow.errors import InputError, VerdictError, naming_model
from tvmflow.files import replaceable, replacing

if TYPE_CHECKING:
    from tasks.build import Inspect
    from tasks.choose import Candidate, Choice
    from tasks.export import ExportResult
    from tvmflow.hardware.target import Target
    from tvmflow.settings import Settings
    from tvmflow.spec import Spec
    from tvmflow.workspace import Outcome

_SHAPE = re.compile(r"\s*(?P<name>[^\[\]]+?)\s*:\s*\[(?P<dims>[^\[\]]*)\]\s*,?")
Code = Literal["ll", "asm", "relax", "tir"]
_CODE: tuple[Code, ...] = get_args(Code)


class _Names(click.ParamType[tuple[str, ...]]):
    """Names separated by commas."""

    name = "names"

    def convert(
        self, value: str | tuple[str, ...], param: click.Parameter | None, ctx: click.Context | None
    ) -> tuple[str, ...]:
        if isinstance(value, tuple):
            return value
        return tuple(name for part in value.strip("[]").split(",") if (name := part.strip()))


class _Forms(click.ParamType[tuple[Code, ...]]):
    """Forms of code separated by commas."""

    name = "forms"

    def convert(
        self, value: str | tuple[Code, ...], param: click.Parameter | None, ctx: click.Context | None
    ) -> tuple[Code, ...]:
        names = value if isinstance(value, tuple) else _Names().convert(value, param, ctx)
        for name in names:
            if name not in _CODE:
                self.fail(f"{name!r} is not one of {', '.join(_CODE)}", param, ctx)
        return tuple(form for form in _CODE if form in names)


class _Setting(click.ParamType[tuple[str, Any]]):
    """NAME=VALUE, where a value that is JSON, as a number or true, becomes a value of its type."""

    name = "name=value"

    def convert(
        self, value: str | tuple[str, Any], param: click.Parameter | None, ctx: click.Context | None
    ) -> tuple[str, Any]:
        if isinstance(value, tuple):
            return value
        name, equals, text = value.partition("=")
        if not equals or not name.strip():
            self.fail(f"{value!r} is not of the form NAME=VALUE", param, ctx)
        text = text.strip()
        try:
            return name.strip(), json.loads(text.lower() if text in ("True", "False") else text)
        except ValueError:
            return name.strip(), text


@click.command("compile")
@model_argument
@click.option("-o", "--output", type=OutputFile(replaces=True), required=True, help="The bundle to write.")
@target_option
@input_shapes_option(". A free dimension that the file leaves unnamed is called after its input and axis, as x_0.")
@operator_option
@precision_option("The type of the operands of convolutions and matrix products; int8 is for quantised models.")
@click.option(
    "--fast-algorithms",
    type=click.Choice(["allow", "forbid"]),
    default="allow",
    show_default=True,
    help="Whether to allow Winograd's algorithm, which multiplies less and rounds more.",
)
@relative_error_option
@click.option(
    "--desired-layout",
    type=click.Choice(["NHWC", "NCHW"]),
    default="NHWC",
    show_default=True,
    help="The layout of convolutions; NCHW has no fast schedules and is tens of times slower.",
)
@click.option("--opt-level", type=click.IntRange(0, 4), default=3, show_default=True, help="TVM's optimisation level.")
@click.option("--pass-config", type=_Setting(), multiple=True, help="An option of TVM's pass context. Repeatable.")
@click.option("--disabled-pass", type=_Names(), default=(), help="Passes to leave out, separated by commas.")
@click.option("--required-pass", type=_Names(), default=(), help="Passes to run at every level, separated by commas.")
@click.option(
    "--cross-compiler", metavar="COMMAND", help="The command that links the library, instead of the target's own."
)
@click.option(
    "--cross-compiler-options",
    default="",
    metavar="OPTIONS",
    help="Further options of the cross compiler, in one argument.",
)
@click.option("--trials", type=click.IntRange(min=0), default=0, show_default=True, help="Tuning trials in total.")
@click.option(
    "--tuning-records",
    type=click.Path(exists=True, path_type=Path),
    help="A file or folder of records, used before those of the state folder.",
)
@click.option("--explain", is_flag=True, help="Print the options of the cost model's decisions and their cycles.")
@click.option("--print-pass-times", is_flag=True, help="Print the milliseconds of each compiler pass.")
@click.option("--print-ir-before", type=_Names(), default=(), metavar="PASSES", help="Print the module before passes.")
@click.option("--print-ir-after", type=_Names(), default=(), metavar="PASSES", help="Print the module after passes.")
@click.option(
    "--dump-code",
    type=_Forms(),
    default=(),
    help=f"Write the code beside the output: {','.join(_CODE)}, separated by commas.",
)
@json_option
def compile_command(
    model: Path,
    output: Path,
    target: str,
    input_shapes: str | None,
    operators: tuple[str, ...],
    precision: str,
    fast_algorithms: str,
    max_relative_error: float | None,
    desired_layout: str,
    opt_level: int,
    pass_config: tuple[tuple[str, Any], ...],
    disabled_pass: tuple[str, ...],
    required_pass: tuple[str, ...],
    cross_compiler: str | None,
    cross_compiler_options: str,
    trials: int,
    tuning_records: Path | None,
    explain: bool,
    print_pass_times: bool,
    print_ir_before: tuple[str, ...],
    print_ir_after: tuple[str, ...],
    dump_code: tuple[Code, ...],
    as_json: bool,
) -> None:
    """Compile the ONNX file MODEL to a bundle, which is written if its outputs equal ONNX Runtime's within the bounds.

    Exit code 3: the outputs differ, no bundle was written.
    """
    if cross_compiler_options and not cross_compiler:
        raise click.UsageError("--cross-compiler-options needs --cross-compiler")
    linker = _linker(cross_compiler, cross_compiler_options)
    from tasks.build import Inspect
    from tvmflow.settings import Settings
    from tvmflow.workspace import Workspace

    settings = Settings.load()
    section = {
        "precision": precision,
        "fast_algorithms": fast_algorithms,
        "opt_level": opt_level,
        "config": dict(pass_config),
        # Without this pass a convolution keeps the model's own layout.
        "disabled_passes": (*disabled_pass, *(["ChannelsLast"] if desired_layout == "NCHW" else [])),
        "required_passes": required_pass,
    }
    spec = make_spec(model, target, parse_shapes(input_shapes or ""), section, trials, operators, max_relative_error)
    workspace = Workspace(settings.state)
    (resolved,) = spec.resolve_targets()
    if linker is not None:
        resolved = dataclasses.replace(resolved, cross_compiler=linker)
    inspect = Inspect(before=print_ir_before, after=print_ir_after, code=dump_code)
    with naming_model(str(model)):
        exported, best, choice = build_best(spec, settings, resolved, inspect, tuning_records)
    build, bundle, verdict = best.build, best.packaged.bundle, best.verdict
    # A refused build is worth a look, so the code is written before the verdict ends the command.
    inspected = json.loads(workspace.path(build.inspected).read_text())
    code_files = _dump(inspected["code"], output, model.stem)
    times: dict[str, float] = json.loads(workspace.path(build.pass_timings).read_text())
    if not as_json:
        _show(inspected["passes"], times if print_pass_times else {})
        if explain:
            _show_decisions(inspected["decisions"])
    _warn_of_absent_passes((*print_ir_before, *print_ir_after), inspected["passes"])
    if not verdict.passed:
        raise VerdictError(f"{model} is not written to {output}: {verdict.reasons[0]}; `tvmflow bisect` finds the node")
    _copy(workspace.path(bundle), output)
    error = verdict.original.max_abs_error if verdict.original is not None else None
    notes = [*exported.notes(), *verdict.notes]
    if as_json:
        document = {"bundle": str(output), "sha256": bundle.sha256, "size": bundle.size, "max_abs_error": error}
        document |= {"target": resolved.name, "precision": precision, "verified": verdict.verified}
        document |= {
            "notes": notes,
            "schedules": build.schedules,
            "code": [str(path) for path in code_files],
        }
        document |= {"choice": choice and choice.result.model_dump(mode="json", exclude={"sources"})}
        document |= {"passes": inspected["passes"]} if print_ir_before or print_ir_after else {}
        document |= {"pass_seconds": times} if print_pass_times else {}
        document |= {"decisions": inspected["decisions"]} if explain else {}
        click.echo(json.dumps(document))
        return
    for note in notes:
        click.echo(f"{output}: {note}")
    for path in code_files:
        click.echo(f"{path}: code")
    if choice is not None:
        click.echo(f"{output}: {choice.result.message}")
    if error is not None:
        suffix = "" if precision == "fp32" else f" in {precision}"
        click.echo(f"{output}: {resolved.name}{suffix}, largest difference from ONNX Runtime {error:.1e}")
    else:
        click.echo(f"{output}: {resolved.name}, not verified: this machine cannot run it")


def build_best(
    spec: "Spec",
    settings: "Settings",
    target: "Target",
    inspect: "Inspect | None" = None,
    tuning_records: Path | None = None,
) -> "tuple[ExportResult, Candidate, Outcome[Choice] | None]":
    """Build the model of a release file for one target; return its export, the build to ship, and the choice of it.

    The choice says why it is this build; it is None where there was only one. The progress of the steps is shown.
    `inspect` names the parts of the build to keep for a person to read, None none. With `tuning_records`, a file or
    folder, the build has these records, whatever they gain. Raises TvmflowError when a step fails.
    """
    from rich.console import Console

    from tasks.candidates import TargetBuilder, tunings_to_build
    from tasks.export import ExportJob, export
    from tasks.original import find_original
    from tasks.relax_import import ImportJob, relax_import
    from tasks.step import StepRunner
    from tasks.tune import TuneJob, tune, with_records
    from tvmflow.cli.display import RichReporter
    from tvmflow.processes.children import shared_imports
    from tvmflow.workspace import Workspace

    workspace = Workspace(settings.state)
    runner = StepRunner.of(spec, settings, workspace)
    with RichReporter(Console(stderr=True)).live(), shared_imports():
        exported = export(runner, ExportJob.of(spec, find_original(spec, workspace))).result
        imported = relax_import(runner, ImportJob.of(spec, exported)).result
        tuned = tune(runner, TuneJob.of(spec, imported, target)).result
        tunings = tunings_to_build(workspace, tuned)
        if tuning_records is not None:
            tunings = (with_records(workspace, tuned, tuning_records, target),)
        key = settings.signing_key
        builder = TargetBuilder(runner, spec, exported, imported, target, signing_key=key, inspect=inspect)
        return exported, *builder.best(builder.candidates(tunings))


def parse_shapes(text: str) -> dict[str, tuple[int | str, ...]]:
    """Return shapes by input name from text like `x:[1,3] mask:[batch,128]`; a word is a symbolic dimension.

    Raises click.BadParameter for text of another form.
    """
    shapes: dict[str, tuple[int | str, ...]] = {}
    position = 0
    while text[position:].strip():
        match = _SHAPE.match(text, position)
        if match is None:
            raise click.BadParameter(
                f'{text!r} cannot be read; write the shapes as "input:[1,3,224,224] mask:[1,128]"',
                param_hint="--input-shapes",
            )
        dims = [dim.strip() for dim in match["dims"].split(",") if dim.strip()]
        is_number = re.compile("-?[0-9]{1,18}").fullmatch
        shapes[match["name"].strip("\"'")] = tuple(int(dim) if is_number(dim) else dim for dim in dims)
        position = match.end()
    return shapes


def _linker(command: str | None, options: str) -> str | None:
    """Return the command line of the linker; None for the target's own linker."""
    if command is None:
        return None
    for text, hint in ((command, "--cross-compiler"), (options, "--cross-compiler-options")):
        try:
            words = shlex.split(text)
        except ValueError as error:
            raise click.BadParameter(f"{text!r} cannot be read ({error})", param_hint=hint) from error
        if text is command and not words:
            raise click.BadParameter("it names no command", param_hint=hint)
    return f"{command} {options}".strip()


def make_spec(
    model: Path,
    target: str,
    shapes: dict[str, tuple[int | str, ...]],
    build: dict[str, object],
    trials: int,
    operators: tuple[str, ...] = (),
    max_relative_error: float | None = None,
) -> "Spec":
    """Return the release file that a command line describes: one ONNX file, one target, the section `build`.

    `shapes` are new shapes by input name, `trials` is the number of tuning trials, `operators` are the user's own, of
    modules in the current folder. `max_relative_error` is the bound of that name, None the default bounds. Raises
    InputError for a shape of an input that the model does not have, ExportError for a file that is not ONNX, and
    SpecError for a wrong target or option.
    """
    from tvmflow import spec as release_file
    from tvmflow.onnx_model.reading import declared_inputs, read_onnx

    bound = {} if max_relative_error is None else {"max_relative_error": max_relative_error}
    document: dict[str, object] = {
        "name": re.sub(r"[^A-Za-z0-9._-]", "-", model.stem).lstrip("-._") or "model",
        "model": {"onnx": str(model.absolute()), "operators": list(operators)},
        "targets": [target],
        "build": build,
        "tune": {"trials": trials},
        "validate": {"top1_agreement": None, **bound},
        "gates": {"unverified_targets": "allow"},
    }
    if shapes:
        inputs = declared_inputs(read_onnx(model), shapes)
        absent = set(shapes) - {item.name for item in inputs}
        if absent:
            raise InputError(
                f"{model} has no input {sorted(absent)[0]!r}; its inputs are {', '.join(item.name for item in inputs)}"
            )
        document["inputs"] = [
            {**item.model_dump(mode="json"), "shape": list(shapes.get(item.name, item.shape))} for item in inputs
        ]
    return release_file.parse(document, Path.cwd(), str(model))


def _dump(code: dict[str, str], output: Path, stem: str) -> list[Path]:
    """Write the forms of the code beside the output; return the files."""
    paths = []
    for form, text in code.items():
        path = output.parent / f"{stem}.{form}"
        with naming_output(path):
            path.write_text(text)
        paths.append(path)
    return paths


def _show(passes: list[dict[str, str]], times: dict[str, float]) -> None:
    for item in passes:
        click.echo(f"# {item['when']} {item['name']}\n{item['text']}")
    if times:
        width = max(map(len, times))
        click.echo(f"{'pass':<{width}}  {'ms':>9}")
        for name, seconds in times.items():
            click.echo(f"{name:<{width}}  {seconds * 1e3:>9.3f}")
        click.echo(f"{'all':<{width}}  {sum(times.values()) * 1e3:>9.3f}")


def _show_decisions(decisions: list[dict[str, Any]]) -> None:
    """Print each decision: its options with their estimated cycles, the choice and how much faster than the next."""
    for item in decisions:
        cycles, choice = item["cycles"], item["choice"]
        others = [value for name, value in cycles.items() if name != choice]
        click.echo(f"{item['kind']}: {item['subject']}")
        for name, value in cycles.items():
            margin = f"  chosen, {min(others) / value - 1:+.0%} of the next best" if name == choice else ""
            click.echo(f"  {name:<12} {value:>12.0f} cycles{margin}")
    if not decisions:
        click.echo("the cost model had no decision to take")


def _warn_of_absent_passes(names: tuple[str, ...], passes: list[dict[str, str]]) -> None:
    for name in sorted(set(names) - {item["name"] for item in passes}):
        click.echo(f"pass {name!r} did not run; see --print-pass-times for those that do", err=True)


def _copy(bundle: Path, output: Path) -> None:
    """Copy the bundle to the output, which is complete or unchanged afterwards, unless it is a device or a pipe."""
    with naming_output(output):
        if not replaceable(output):
            output.write_bytes(bundle.read_bytes())
            return
        with bundle.open("rb") as source, replacing(output, 0o644) as file:
            shutil.copyfileobj(source, file)
