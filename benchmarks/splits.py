"""Prints what the split of the work allows on many threads: `python benchmarks/splits.py [MODEL|FILE.onnx ...]`.

Nothing runs. Each model is scheduled for a target, and the loops of every function are counted: the table has, for each
number of threads, the time of an even split over the time of the longest share, each function weighted by its estimated
cycles. A loop that is not parallel runs on one thread. The cost of parallel regions, memory that cores share, and other
programs come on top of this bound.
"""

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import prepare
from catalogue import find
from commandline import new_parser, positive, run_main, state_folder
from rich import box
from rich.console import Console
from rich.table import Table

from tvmflow.hardware.target import Target, resolve
from tvmflow.workspace import Record

if TYPE_CHECKING:
    from tvmflow.compiler.machine import Machine

# The numbers of threads, and the least share for some of them.
_THREADS = (1, 2, 4, 8, 16, 32, 64)
_GOALS = {16: 0.8, 64: 0.6}


class Function(Record):
    """A compiled function: its rule, its calls in a run, and by number of threads the cycles of a call."""

    name: str
    rule: str
    calls: int
    cycles: dict[int, float]

    def bound(self, threads: int) -> float:
        """Return the cycles of an even split on so many threads over those of the thread with the most work."""
        return bound([self], threads)


def bound(functions: Sequence[Function], threads: int) -> float:
    """Return the cycles of an even split over those of the threads with the most work, summed over all calls.

    The result is 1 at best, and also for functions without work.
    """
    whole, longest = (sum(item.calls * item.cycles[count] for item in functions) for count in (1, threads))
    return whole / threads / longest if longest else 1.0


def cycles(stmt: Any, threads: int, machine: "Machine") -> float:
    """Estimate the cycles of a scheduled statement on `threads` threads: those of the thread with the most work.

    A thread gets neighbouring iterations of a parallel loop. Arithmetic and copies of vectors count by the throughput
    of the processor's units, without waiting for memory; loops of unknown length count once.
    """
    from tvm import tirx
    from tvm.s_tir import SBlockRealize

    from tvmflow.compiler.schedules import transposes
    from tvmflow.compiler.schedules.common import walk

    def units(value: Any) -> float:
        operations = sum(
            "float" in str(node.ty) and any(hasattr(node, name) for name in ("a", "args")) for node in walk(value)
        )
        return max(math.ceil(operations / 2) / machine.vectors.multiply_adds, 1 / machine.vectors.loads)

    def visit(node: Any, threads: int) -> float:
        if isinstance(node, tirx.For):
            extent = int(node.extent) if isinstance(node.extent, tirx.IntImm) else 1
            if node.kind == tirx.ForKind.VECTORIZED:
                return math.ceil(extent / machine.lanes) * visit(node.body, threads)
            if node.kind == tirx.ForKind.PARALLEL:
                return math.ceil(extent / threads) * visit(node.body, 1)
            return extent * visit(node.body, threads)
        if isinstance(node, tirx.SeqStmt):
            return sum(visit(part, threads) for part in node.seq)
        if isinstance(node, SBlockRealize):
            return visit(node.block.body, threads)
        if isinstance(node, tirx.BufferStore):
            return units(node.value)
        if isinstance(node, tirx.Evaluate):
            rows, columns = transposes.find_tile(node) or (0, 0)
            return rows * math.ceil(columns / machine.lanes) / machine.vectors.stores
        parts = [getattr(node, name, None) for name in ("body", "then_case", "else_case")]
        return sum(visit(part, threads) for part in parts if part is not None)

    return visit(stmt, threads)


def split(onnx: Path, target: Target, threads: Sequence[int]) -> list[Function]:
    """Schedule an ONNX file for a target, and return its functions with their cycles on each number of threads."""
    from tvmflow import compiler
    from tvmflow.compiler import cost
    from tvmflow.compiler.machine import machine
    from tvmflow.compiler.schedules import schedule

    cpu = machine(target)
    functions = []
    for item in compiler.workloads(compiler.lower(compiler.import_onnx(onnx), target)):
        scheduled, rule = schedule(item.func, cpu)
        sizes = [math.prod(map(int, parameter.shape)) * 4 for parameter in item.func.params]
        computing = cycles(scheduled.body, 1, cpu)
        # Where a core waits for its data rather than for its units, all loops of the function take longer.
        alone = replace(cpu, cores=1)
        moving = cost.move_cycles(sizes[-1], sum(sizes[:-1]), sum(sizes), alone)
        wait = max(1.0, moving / computing) if computing else 1.0
        by_threads = {count: wait * cycles(scheduled.body, count, cpu) for count in threads}
        functions.append(Function(name=item.name, rule=rule, calls=item.calls, cycles=by_threads))
    return functions


def show(bounds: Mapping[str, Mapping[int, float]], title: str) -> Table:
    """Return the table: a line for each model; `x` marks a share below the goal."""
    table = Table(box=box.SIMPLE_HEAD, title=title, title_justify="left")
    table.add_column("model")
    for count in _THREADS:
        table.add_column(f"{count}" + (f" (goal {_GOALS[count]:.0%})" if count in _GOALS else ""), justify="right")
    for name, by_threads in bounds.items():
        marks = {count: " x" if share < _GOALS.get(count, 0) else "" for count, share in by_threads.items()}
        table.add_row(name, *(f"{share:.0%}{marks[count]}" for count, share in by_threads.items()))
    return table


def show_worst(functions: Sequence[Function], threads: int, top: int) -> Table:
    """Return the table of the functions that lose the most cycles to the split on `threads` threads."""
    table = Table(box=box.SIMPLE_HEAD)
    for heading in ("function", "rule", "calls", f"bound at {threads}", "share of the time"):
        table.add_column(heading, justify="left" if heading in ("function", "rule") else "right", overflow="fold")
    total = sum(item.calls * item.cycles[threads] for item in functions)
    losses = sorted(functions, key=lambda item: item.calls * (item.cycles[1] / threads - item.cycles[threads]))
    for item in losses[:top]:
        share = item.calls * item.cycles[threads] / total
        table.add_row(item.name, item.rule, str(item.calls), f"{item.bound(threads):.0%}", f"{share:.1%}")
    return table


def main() -> None:
    """Print the table, and with `--top` the functions that the split slows down most."""
    parser = new_parser(__doc__)
    parser.add_argument("models", nargs="*", metavar="MODEL", help="a name of catalogue.py, or an ONNX file (all)")
    parser.add_argument("--target", default="x86-64-v4-amx", help="whose profile is read (x86-64-v4-amx)")
    parser.add_argument("--top", type=int, default=0, help="print the functions that lose most")
    parser.add_argument("--at", type=positive, default=16, choices=_THREADS, help="threads of --top (16)")
    arguments = parser.parse_args()
    state = state_folder(arguments)
    target = resolve(arguments.target)
    target = replace(target, tvm={**target.tvm, "num-cores": arguments.threads})
    files = {name: Path(name) for name in arguments.models if name.endswith(".onnx")}
    names = [name for name in arguments.models if name not in files]
    if names or not files:
        files |= {model.name: prepare.export(model, 1, state) for model in find(names)}
    bounds: dict[str, dict[int, float]] = {}
    document: dict[str, Any] = {}
    console = Console(width=max(120, Console().width))
    for name, onnx in files.items():
        functions = split(onnx, target, _THREADS)
        bounds[name] = {count: bound(functions, count) for count in _THREADS}
        document[name] = {"bounds": bounds[name], "functions": [item.model_dump(mode="json") for item in functions]}
        if arguments.top:
            console.print(name, show_worst(functions, arguments.at, arguments.top))
    model = "" if target.profile is None else f", profile {target.profile.model}"
    console.print(show(bounds, f"target {target.name}{model}, built for {arguments.threads} threads"))
    if arguments.json is not None:
        arguments.json.write_text(json.dumps(document, indent=1))


if __name__ == "__main__":
    run_main(main)
