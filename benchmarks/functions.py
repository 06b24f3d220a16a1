"""Prints how a built model spends its time: `python benchmarks/functions.py MODEL|FILE.onnx`.

There is one line per compiled function: its schedule rule, its calls in one run, the time of all these calls, their
share, and the GFLOP/s and GB/s of reads and writes that follow. The time of a call is the smallest of all runs, which
other work on the machine disturbs least. A file with free dimensions runs at sizes at which ONNX Runtime runs it.
"""

import json
import os
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any, get_args

import numpy as np
import prepare
from commandline import new_parser, run_main, state_folder
from rich import box
from rich.console import Console
from rich.table import Table

from tvmflow.hardware.target import Precision, Target
from tvmflow.processes import children
from tvmflow.processes.children import Emit
from tvmflow.runtime.profile import estimate_operations, group_calls, measure_calls
from tvmflow.workspace import Record

if TYPE_CHECKING:
    from tvmflow.compiler import CompiledModel

_SCRIPT = Path(__file__)


class ProfileJob(Record):
    """The job to build an ONNX file for this machine and to time its functions over `repeats` runs."""

    onnx: Path
    sample: Path
    target: Target
    precision: Precision
    repeats: int


class Function(Record):
    """A compiled function: microseconds of all its calls in one run, and the operations and bytes of all of them.

    `shapes` are the shapes of the arrays in its first call, the result last.
    """

    name: str
    rule: str
    calls: int
    microseconds: float
    flops: float
    bytes: int
    shapes: tuple[tuple[int, ...], ...]


class Profile(Record):
    """The functions of a model, the slowest first, and the microseconds of a whole run without the instrument."""

    functions: tuple[Function, ...]
    whole: float


def work(job: ProfileJob, emit: Emit) -> Profile:
    """Build a model and time its functions in a child process."""
    os.environ["TVM_NUM_THREADS"] = str(job.target.threads)
    from tvmflow import compiler

    model = compiler.build(compiler.import_onnx(job.onnx), job.target, compiler.BuildOptions(precision=job.precision))
    return time_functions(model, job.sample, job.repeats)


def time_functions(model: "CompiledModel", sample: Path, repeats: int) -> Profile:
    """Run a built model `repeats` times on the inputs of an `.npz`, and return the times of its functions."""
    import tvm

    lowered = tvm.ir.load_json(model.ir_json)
    compiled = {
        str(var.name_hint): func for var, func in lowered.functions_items() if isinstance(func, tvm.tirx.PrimFunc)
    }
    loaded = model.load()
    machine, main = loaded.machine, loaded.machine["main"]
    with np.load(sample) as archive:
        inputs = [*(tvm.runtime.tensor(archive[name]) for name in archive.files), *loaded.weights]
    whole = min(_timed(main, inputs) for _ in range(max(3, repeats)))
    rules = dict(model.schedules)
    calls = measure_calls(machine, lambda: main(*inputs), repeats)
    operations = {
        call: estimate_operations(compiled[call[0]], call[1]) if call[0] in compiled else 0.0
        for call in {(call.name, call.shapes) for call in calls}
    }
    functions = tuple(
        Function(
            name=item.name,
            rule=rules.get(item.name, ""),
            calls=item.calls,
            microseconds=item.seconds * 1e6,
            flops=sum(operations[call.name, call.shapes] for call in calls if call.name == item.name),
            bytes=item.bytes,
            shapes=item.shapes,
        )
        for item in group_calls(calls, rules)
    )
    return Profile(functions=functions, whole=whole * 1e6)


def _timed(main: Any, inputs: list[Any]) -> float:
    start = time.perf_counter()
    main(*inputs)
    return time.perf_counter() - start


def profile(onnx: Path, sample: Path, threads: int, precision: Precision, repeats: int, state: Path) -> Profile:
    """Build an ONNX file for this machine and time its functions; the log is in `state`."""
    target = prepare.native(threads)
    job = ProfileJob(onnx=onnx, sample=sample, target=target, precision=precision, repeats=repeats)
    log = state / f"{onnx.stem}-functions.log"
    return children.call("functions:work", job, Profile, log=log, timeout=3600, paths=(_SCRIPT.parent,))


def show(name: str, result: Profile, top: int | None) -> Table:
    """Return the table of one model, with its `top` slowest functions, all of them without `top`."""
    total = sum(function.microseconds for function in result.functions)
    title = f"{name}: {result.whole:.0f} us for a run, {total:.0f} us in its functions"
    table = Table(box=box.SIMPLE_HEAD, title=title, title_justify="left")
    for heading in ("function", "rule", "calls", "us", "share", "GFLOP/s", "GB/s", "shapes of the first call"):
        is_text = heading in ("function", "rule", "shapes of the first call")
        table.add_column(heading, justify="left" if is_text else "right", overflow="fold")
    for function in result.functions[:top]:
        seconds = function.microseconds * 1e-6
        table.add_row(
            function.name,
            function.rule,
            str(function.calls),
            f"{function.microseconds:.0f}",
            f"{function.microseconds / total:.1%}",
            f"{function.flops / seconds * 1e-9:.1f}" if function.flops else "",
            f"{function.bytes / seconds * 1e-9:.1f}" if function.bytes else "",
            " ".join("x".join(map(str, shape)) or "scalar" for shape in function.shapes),
        )
    return table


def main() -> None:
    """Print one table per model."""
    parser = new_parser(__doc__)
    parser.add_argument("models", nargs="+", metavar="MODEL", help="a name of catalogue.py, or an ONNX file")
    parser.add_argument("--batch", type=int, default=1)
    parser.add_argument("--repeats", type=int, default=20, help="runs; each call's time is the smallest (20)")
    parser.add_argument("--precision", choices=get_args(Precision), default="fp32", help="of the build (fp32)")
    parser.add_argument("--top", type=int, help="print only this many functions")
    arguments = parser.parse_args()
    state = state_folder(arguments)
    document: dict[str, Any] = {}
    for name in arguments.models:
        onnx, sample = prepare.file_and_sample(name, arguments.batch, state)
        result = profile(onnx, sample, arguments.threads, arguments.precision, arguments.repeats, state)
        document[name] = result.model_dump(mode="json")
        Console(width=max(160, Console().width)).print(show(name, result, arguments.top))
    if arguments.json is not None:
        arguments.json.write_text(json.dumps(document, indent=1))


if __name__ == "__main__":
    run_main(main)
