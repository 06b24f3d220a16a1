"""`tvmflow run`: run a bundle on the arrays of an .npz file, time it, and show where the time goes."""

import json
import math
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import Path
from typing import TYPE_CHECKING

import click

from tvmflow.cli.options import NumberRange, OutputFile, json_option, naming_output, read_inputs, trace_option
from tvmflow.errors import BundleError, InputError

if TYPE_CHECKING:
    from tvmflow.arrays import Array
    from tvmflow.runtime import CompiledModel, Timings
    from tvmflow.runtime.profile import FunctionTime
    from tvmflow.runtime.tracker import Address


@click.command("run")
@click.argument("bundle")
@click.option("--inputs", type=click.Path(path_type=Path), help="An .npz by input name; without it, the golden sample.")
@click.option("-o", "--output", "--outputs", "output", type=OutputFile(), help="The .npz to write.")
@click.option(
    "--fill-mode",
    type=click.Choice(["zeros", "ones", "random"]),
    help="Make the inputs; random ones are uniform within the range of the bundle's typical ones.",
)
@click.option(
    "--size", "sizes", multiple=True, help="With --fill-mode, a symbolic dimension's size: batch=4. Repeatable."
)
@click.option("--device", type=click.Choice(["cpu", "cuda"]), help="Refuse a bundle that is not built for it.")
@click.option("--repeat", type=click.IntRange(min=1), default=1, show_default=True, help="Measurements.")
@click.option("--number", type=click.IntRange(min=1), default=1, show_default=True, help="Runs per measurement.")
@click.option("--warmup", type=click.IntRange(min=0), default=0, show_default=True, help="Untimed runs before them.")
@click.option("--end-to-end", is_flag=True, help="Time the whole call: inputs checked and copied, outputs fetched.")
@click.option("--print-time", is_flag=True, help="Print mean, median, max, min and standard deviation.")
@click.option("--print-top", type=click.IntRange(min=1), metavar="N", help="Print the N largest values of each output.")
@click.option("--profile", is_flag=True, help="Print the time of each compiled function.")
@trace_option("when each function of one more run began and how long it took")
@click.option("--rpc-tracker", metavar="HOST:PORT", help="Run on a server of TVM's RPC, found through this tracker.")
@click.option("--rpc-key", metavar="KEY", help="The server's key at the tracker.")
@click.option(
    "--rpc-timeout",
    type=NumberRange(min=1),
    default=300,
    show_default=True,
    help="The timeout of a run there, in seconds.",
)
@json_option
def run_command(
    bundle: str,
    inputs: Path | None,
    output: Path | None,
    fill_mode: str | None,
    sizes: tuple[str, ...],
    device: str | None,
    repeat: int,
    number: int,
    warmup: int,
    end_to_end: bool,
    print_time: bool,
    print_top: int | None,
    profile: bool,
    trace: Path | None,
    rpc_tracker: str | None,
    rpc_key: str | None,
    rpc_timeout: float,
    as_json: bool,
) -> None:
    """Check BUNDLE, a path or URI, run it, and write its outputs by name and as output_0, output_1, ..."""
    if fill_mode is not None and inputs is not None:
        raise click.UsageError("--inputs and --fill-mode both say what to run on; give one")
    if sizes and fill_mode is None:
        raise click.UsageError("--size needs --fill-mode: other inputs have sizes of their own")
    if (rpc_tracker is None) != (rpc_key is None):
        raise click.UsageError("--rpc-tracker and --rpc-key go together")
    for option, is_given in (("--profile", profile), ("--trace", trace is not None)):
        if rpc_tracker is not None and is_given:
            raise click.UsageError(f"{option} works on this machine only; leave out --rpc-tracker")
    if not profile:
        # Running needs no compiler, and TVM's runtime alone loads in a fraction of the time.
        os.environ.setdefault("TVM_USE_RUNTIME_LIB", "1")
    file_inputs = None if inputs is None else read_inputs(inputs)

    def work(model: "CompiledModel") -> _Run:
        if device is not None and device != (built_for := "cuda" if model.manifest.arch == "cuda" else "cpu"):
            raise click.BadParameter(
                f"{bundle!r} is built for {built_for}; compile for another target", param_hint="--device"
            )
        filled_inputs = None
        if fill_mode is not None:
            all_sizes = _sizes(model, sizes)
            try:
                filled_inputs = fill_inputs(model, fill_mode, all_sizes)
            except (MemoryError, ValueError) as error:  # NumPy has a largest array.
                text = ", ".join(f"{name}={size}" for name, size in all_sizes.items())
                raise InputError(f"memory cannot hold inputs of these sizes ({text}); give smaller ones") from error
        arrays = model.check_inputs(file_inputs or filled_inputs or model.sample[0])
        results = model(**arrays)
        measure = model.benchmark if end_to_end else model.time_function
        times = measure(arrays, repeat=repeat, number=number, warmup=warmup)
        if trace is not None:
            _write_trace(trace, model, arrays)
        times_of_functions = _profile(bundle, model, arrays, repeat) if profile else None
        return _Run(results, times, times_of_functions, model.manifest.labels)

    if rpc_tracker is None or rpc_key is None:
        from tvmflow import runtime

        with runtime.load(bundle) as model:
            run = work(model)
    else:
        from tvmflow.runtime import remote

        address = _address(rpc_tracker)
        run = remote.run(_path(bundle), address.host, address.port, rpc_key, rpc_timeout, work)
    if output is not None:
        _write(output, run.outputs)
    if as_json:
        click.echo(json.dumps(_document(run, output, end_to_end, print_top)))
        return
    for name, array in run.outputs.items():
        click.echo(f"{name}: {array.dtype.name}{list(array.shape)}")
    for name, values in _top(run.outputs, print_top).items():
        pairs = (_describe_element(index, value, run.labels.get(name), run.outputs[name]) for index, value in values)
        click.echo(f"{name}, largest of the last axis: {', '.join(pairs)}")
    _show_times(run.times, table=print_time, end_to_end=end_to_end)
    if run.profile is not None:
        _show_profile(run.profile)
    if output is not None:
        click.echo(f"written to {output}")
    if trace is not None:
        click.echo(f"trace written to {trace}; https://ui.perfetto.dev shows it")


@dataclass(frozen=True)
class _Function:
    """A function of the profile: its time, its share of the whole, and its schedule's rule ("" for none)."""

    rule: str
    time: "FunctionTime"
    share: float


@dataclass(frozen=True)
class _Run:
    """The outputs, the times and, if it was requested, the profile of a bundle's runs; the labels of its outputs."""

    outputs: "dict[str, Array]"
    times: "Timings"
    profile: list[_Function] | None
    labels: Mapping[str, Sequence[str]]


def fill_inputs(model: "CompiledModel", mode: str, sizes: Mapping[str, int]) -> "dict[str, Array]":
    """Return arrays by input name for these sizes of the symbolic dimensions; `mode` is zeros, ones or random.

    `sizes` must have the size of every symbolic dimension. Random numbers lie between the smallest and the largest
    value that the input has in the bundle's typical inputs, so that indices remain valid. If these are equal, random
    numbers of a floating-point input lie between 0 and 1. A random bool is false or true, whatever the sample has.
    Where the sample's array is empty, all random numbers are 0. Raises BundleError for a sample that lacks an input.
    """
    import numpy as np

    generator = np.random.default_rng(0)
    arrays: dict[str, Array] = {}
    for spec in model.inputs:
        shape = tuple(sizes[dim] if isinstance(dim, str) else dim for dim in spec.shape)
        example = _example(model, spec.name)
        if mode != "random" or example.size == 0:
            arrays[spec.name] = np.full(shape, mode == "ones", spec.dtype)
        elif example.dtype == bool:
            arrays[spec.name] = generator.integers(0, 2, shape).astype(bool)
        elif np.issubdtype(example.dtype, np.integer):
            arrays[spec.name] = generator.integers(example.min(), example.max(), shape, spec.dtype, endpoint=True)
        else:
            low, high = float(example.min()), float(example.max())
            low, high = (low, high) if low < high else (0.0, 1.0)
            arrays[spec.name] = generator.uniform(low, high, shape).astype(spec.dtype)
    return arrays


def _example(model: "CompiledModel", name: str) -> "Array":
    """Return an input of the bundle's typical ones. Raises BundleError where it is not among them."""
    try:
        return model.typical_inputs[name]
    except KeyError as error:
        raise BundleError(
            f"bundle {model.manifest.name!r}: its golden sample lacks input {name!r}; give --inputs, or build it again"
        ) from error


def _sizes(model: "CompiledModel", options: Sequence[str]) -> dict[str, int]:
    """Return the sizes of the symbolic dimensions: those of the options NAME=SIZE, else the golden sample's."""
    sizes: dict[str, int] = {}
    for spec in model.inputs:
        for dim, size in zip(spec.shape, _example(model, spec.name).shape, strict=True):
            if isinstance(dim, str):
                sizes[dim] = size
    for text in options:
        name, equals, value = text.partition("=")
        if not equals or not re.fullmatch(r"[0-9]{1,18}", value.strip()):
            raise click.BadParameter(f"{text!r} is not of the form NAME=SIZE, as batch=4", param_hint="--size")
        if name not in sizes:
            close = get_close_matches(name, sizes, n=1)
            hint = f"did you mean {close[0]!r}?" if close else f"its names are {', '.join(sizes) or 'none'}"
            raise click.BadParameter(f"the bundle has no symbolic dimension {name!r}; {hint}", param_hint="--size")
        low, high = model.manifest.dimensions.get(name, (1, None))
        if int(value) < low or (high is not None and int(value) > high):
            raise click.BadParameter(
                f"{name} is {value}, expected {low} to {'any' if high is None else high}", param_hint="--size"
            )
        sizes[name] = int(value)
    return sizes


def _profile(bundle: str, model: "CompiledModel", arrays: "Mapping[str, Array]", repeats: int) -> list[_Function]:
    from tvmflow.runtime.profile import MACHINE, compiled_functions, measure_functions

    functions = compiled_functions(bundle, model.manifest)
    times = measure_functions(model.machine, lambda: model(**arrays), functions, repeats, model.device.sync)
    total = sum(item.seconds for item in times)
    return [
        _Function("" if item.name == MACHINE else functions[item.name].rule, item, item.seconds / total)
        for item in times
    ]


def _write_trace(path: Path, model: "CompiledModel", arrays: "Mapping[str, Array]") -> None:
    from tvmflow.runtime.profile import record_trace

    machine = model.machine
    model(**arrays)  # the first run of a machine allocates what later ones use again
    trace = record_trace(machine, lambda: model(**arrays), model.manifest.name, model.device.sync)
    with naming_output(path):
        trace.write(path)


def _top(outputs: "Mapping[str, Array]", count: int | None) -> dict[str, list[tuple[int, float]]]:
    """Return the largest values in the first row of each output, with their indices along the last axis."""
    import numpy as np

    if count is None:
        return {}
    top = {}
    for name, array in outputs.items():
        if array.size:
            row = array.reshape(-1, array.shape[-1] if array.ndim else 1)[0].astype(np.float64)
            top[name] = [(int(index), float(row[index])) for index in np.argsort(-row, kind="stable")[:count]]
    return top


def _describe_element(index: int, value: float, labels: Sequence[str] | None, output: "Array") -> str:
    """An element of an output as `[index] value`, with its label in the place of what stands for it."""
    if labels and output.dtype.kind == "f" and index < len(labels):
        return f"[{labels[index]}] {value:.6g}"
    if labels and output.dtype.kind == "i" and 0 <= value < len(labels):
        return f"[{index}] {labels[int(value)]}"
    return f"[{index}] {value:.6g}"


def _document(run: _Run, output: Path | None, end_to_end: bool, print_top: int | None) -> dict[str, object]:
    times = run.times
    figures = {"mean": times.mean, "p50": times.median, "max": times.max, "min": times.min, "std": times.std}
    document: dict[str, object] = {
        "outputs": {
            name: {"shape": list(array.shape), "dtype": array.dtype.name} for name, array in run.outputs.items()
        },
        "output": output and str(output),
        "runs": len(times.seconds) * times.number,
        "end_to_end": end_to_end,
        "latency_ms": {name: seconds * 1e3 for name, seconds in figures.items()},
    }
    if print_top is not None:
        document["top"] = {
            name: [{"index": index, "value": value if math.isfinite(value) else None} for index, value in values]
            for name, values in _top(run.outputs, print_top).items()
        }
    if run.profile is not None:
        document["profile"] = [
            {
                "name": item.time.name,
                "rule": item.rule,
                "calls": item.time.calls,
                "microseconds": item.time.seconds * 1e6,
                "share": item.share,
            }
            for item in run.profile
        ]
    return document


def _show_times(times: "Timings", *, table: bool, end_to_end: bool) -> None:
    count = len(times.seconds) * times.number
    runs = f"{count} run{'s' * (count > 1)}{', end to end' if end_to_end else ''}"
    if not table:
        click.echo(
            f"{runs}: mean {times.mean * 1e3:.3f} ms, median {times.median * 1e3:.3f} ms, min {times.min * 1e3:.3f} ms"
        )
        return
    click.echo(f"{runs}, in ms:")
    click.echo("".join(f"{heading:>10}" for heading in ("mean", "median", "max", "min", "std")))
    figures = (times.mean, times.median, times.max, times.min, times.std)
    click.echo("".join(f"{seconds * 1e3:>10.3f}" for seconds in figures))


def _show_profile(functions: Sequence[_Function]) -> None:
    names = max(len("function"), *(len(item.time.name) for item in functions))
    rules = max(len("rule"), *(len(item.rule) for item in functions))
    click.echo(f"{'function':<{names}}  {'rule':<{rules}}  {'calls':>5}  {'us':>9}  {'share':>6}")
    for item in functions:
        name, calls, micro = item.time.name, item.time.calls, item.time.seconds * 1e6
        click.echo(f"{name:<{names}}  {item.rule:<{rules}}  {calls:>5}  {micro:>9.1f}  {item.share:>6.1%}")


def _address(text: str) -> "Address":
    from tvmflow.runtime.tracker import Address

    try:
        return Address.parse(text)
    except ValueError as error:
        raise click.BadParameter(str(error), param_hint="--rpc-tracker") from error


def _path(bundle: str) -> Path:
    if "://" in bundle:
        raise click.BadParameter(
            f"{bundle!r} is no file: a bundle is sent to the server from this machine, give its path",
            param_hint="BUNDLE",
        )
    return Path(bundle)


def _write(path: Path, results: "dict[str, Array]") -> None:
    from tvmflow import npz

    numbered = {f"output_{index}": array for index, array in enumerate(results.values())}
    with naming_output(path):
        npz.write(path, {**numbered, **results})
