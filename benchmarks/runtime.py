"""Prints what the runtime costs beside ONNX Runtime, on one model: `python benchmarks/runtime.py [MODEL]`.

Each figure is the median over the rounds. In a round each of the two runs in a new process, one after the other. A
ratio is ours over ONNX Runtime's, so below one ours is less.

import       the runtime and NumPy: TVM's runtime library here, the package onnxruntime there
load         our bundle is unpacked and each of its files checked against its digest; with `--weights apart` its library
             packs them; ONNX Runtime optimises its graph and packs weights
first call   threads start and memory is taken
steady call  the least of many, NumPy arrays in and out, checked
memory       the most that the process ever held
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Literal

import prepare
from catalogue import MODELS, find
from commandline import new_parser, positive, run_main, state_folder
from rich import box
from rich.console import Console
from rich.table import Table

from tvmflow.errors import StepError
from tvmflow.workspace import Record

Name = Literal["tvmflow", "onnxruntime"]
_TIMEOUT = 600
# Both begin and end alike; `load` and `call` are of one of them. VmHWM belongs to this program alone, whereas the
# maximum that getrusage tells begins with that of the process that started it.
_PROGRAM = """
import json, sys, time
path, sample, threads, calls = sys.argv[1], sys.argv[2], int(sys.argv[3]), int(sys.argv[4])
start = time.perf_counter()
{load}
with np.load(sample) as archive:
    inputs = {{name: archive[name] for name in archive.files}}
start = time.perf_counter()
{call}
first = time.perf_counter() - start
steady = first
for _ in range(calls):
    start = time.perf_counter()
    {call}
    steady = min(steady, time.perf_counter() - start)
with open("/proc/self/status") as status:
    memory = next(int(line.split()[1]) for line in status if line.startswith("VmHWM:"))
print(json.dumps(dict(imported=imported, load=load, first=first, steady=steady, memory=memory * 1024)))
"""
_PARTS: dict[Name, dict[str, str]] = {
    "tvmflow": {
        "load": """
import numpy as np
from tvmflow import runtime
from tvmflow.runtime import library
library.load()
imported, start = time.perf_counter() - start, time.perf_counter()
model = runtime.load(path, threads=threads)
load = time.perf_counter() - start
""",
        "call": "model(**inputs)",
    },
    "onnxruntime": {
        "load": """
import numpy as np
import onnxruntime
imported, start = time.perf_counter() - start, time.perf_counter()
options = onnxruntime.SessionOptions()
options.intra_op_num_threads = threads
model = onnxruntime.InferenceSession(path, options, providers=["CPUExecutionProvider"])
load = time.perf_counter() - start
""",
        "call": "model.run(None, inputs)",
    },
}
_ROWS = {
    "imported": ("import", 1e3, "ms"),
    "load": ("load", 1e3, "ms"),
    "first": ("first call", 1e3, "ms"),
    "steady": ("steady call", 1e6, "us"),
    "memory": ("memory", 2**-20, "MiB"),
}


class Cost(Record):
    """The cost of one process: seconds to import, to load, and of the first and a steady call; bytes of memory."""

    imported: float
    load: float
    first: float
    steady: float
    memory: float


class Document(Record):
    """The medians of both runtimes, and our figures over ONNX Runtime's."""

    model: str
    threads: int
    rounds: int
    costs: dict[Name, Cost]
    ratios: Cost


def measure(name: Name, path: Path, sample: Path, threads: int, calls: int) -> Cost:
    """Measure a runtime in a new process and return its cost.

    `path` is the bundle for `tvmflow`, the ONNX file for `onnxruntime`; `calls` is the number of steady calls. Raises
    StepError with the last line of the process's error output when it fails.
    """
    environment = {key: value for key, value in os.environ.items() if not key.startswith("TVM_")}
    process = subprocess.run(
        [sys.executable, "-c", _PROGRAM.format(**_PARTS[name]), str(path), str(sample), str(threads), str(calls)],
        env={**environment, "TVM_USE_RUNTIME_LIB": "1"},
        capture_output=True,
        text=True,
        timeout=_TIMEOUT,
        check=False,
    )
    if process.returncode:
        reason = (process.stderr.strip().splitlines() or [f"exit code {process.returncode}"])[-1]
        raise StepError(f"the process that measures {name} failed: {reason}")
    return Cost.model_validate(json.loads(process.stdout.splitlines()[-1]))


def summary(model: str, threads: int, rounds: dict[Name, list[Cost]]) -> Document:
    """Return the medians over the rounds, and their ratios."""
    costs = {
        name: Cost(**{field: statistics.median(getattr(item, field) for item in items) for field in Cost.model_fields})
        for name, items in rounds.items()
    }
    ours, theirs = costs["tvmflow"], costs["onnxruntime"]
    ratios = Cost(**{field: getattr(ours, field) / getattr(theirs, field) for field in Cost.model_fields})
    return Document(model=model, threads=threads, rounds=len(rounds["tvmflow"]), costs=costs, ratios=ratios)


def show(document: Document) -> Table:
    """Return the figures as a table."""
    table = Table(box=box.SIMPLE_HEAD)
    table.add_column(document.model)
    for title in ("", "tvmflow", "ONNX Runtime", "ratio"):
        table.add_column(title, justify="right")
    for field, (title, scale, unit) in _ROWS.items():
        figures = (f"{getattr(document.costs[name], field) * scale:.1f}" for name in _PARTS)
        table.add_row(title, unit, *figures, f"{getattr(document.ratios, field):.2f}")
    return table


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """Return the options of the command line."""
    parser = new_parser(__doc__)
    parser.add_argument("model", nargs="?", default="digits", metavar="MODEL", help=f"of {', '.join(MODELS)} (digits)")
    parser.add_argument("--batch", type=positive, default=1, help="size of the first dimension of every input (1)")
    parser.add_argument("--weights", choices=("inside", "apart"), default="inside", help="`build.weights` (inside)")
    parser.add_argument("--rounds", type=positive, default=7, help="processes of each (7)")
    parser.add_argument("--calls", type=positive, default=2000, help="steady calls of a process (2000)")
    return parser.parse_args(arguments)


def main() -> int:
    """Measure one model and print the table."""
    arguments = parse()
    (model,) = find([arguments.model])
    state = state_folder(arguments)
    rounds: dict[Name, list[Cost]] = {name: [] for name in _PARTS}
    with Console(stderr=True).status("") as status:
        status.update(f"{model.name}: export and build")
        sample = prepare.sample(model, arguments.batch, state)
        onnx = prepare.export(model, arguments.batch, state)
        target = prepare.native(arguments.threads)
        bundle = prepare.build(model.name, onnx, sample, target, state, weights=arguments.weights)
        paths: dict[Name, Path] = {"tvmflow": bundle, "onnxruntime": onnx}
        # The first of each only brings the files into memory.
        for number in range(arguments.rounds + 1):
            for name, path in paths.items():
                status.update(f"{name}, round {number} of {arguments.rounds}")
                cost = measure(name, path, sample, arguments.threads, arguments.calls)
                if number:
                    rounds[name].append(cost)
    document = summary(model.name, arguments.threads, rounds)
    Console().print(show(document), highlight=False)
    print(f"batch {arguments.batch}, threads {document.threads}, medians of {document.rounds} processes each")
    if arguments.json is not None:
        arguments.json.write_text(document.model_dump_json(indent=1))
    return 0


if __name__ == "__main__":
    run_main(main)
