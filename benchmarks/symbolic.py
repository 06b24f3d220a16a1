"""Measures what free dimensions cost: `python benchmarks/symbolic.py [MODEL|FILE.onnx ...]`.

Of each model two bundles are built: with free dimensions, and with the sizes of the run fixed. Both take turns in one
process; `free / fixed` is the ratio of the smallest times, which other work on the machine disturbs least. A file has
the free dimensions that it says, and runs at sizes at which ONNX Runtime runs it. A model of the catalogue gets free
ones: the batch, the height and the width of images, or the length of texts.
"""

import argparse
import json
import math
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np
import onnx
import prepare
from catalogue import Model, find
from commandline import new_parser, positive, run_main, state_folder
from rich import box
from rich.console import Console
from rich.table import Table

from tvmflow.errors import InputError, TvmflowError
from tvmflow.hardware.target import Target
from tvmflow.processes import children
from tvmflow.processes.children import Emit
from tvmflow.workspace import Record

_SCRIPT = Path(__file__)
# A model is slow with free dimensions above this ratio.
_GOAL = 1.25
_IMAGE = 4
_LONGEST_TEXT = 512


class SymbolicJob(Record):
    """The job to build an ONNX file with free and with fixed dimensions, and to time both in `rounds` of turns."""

    onnx: Path
    sample: Path
    target: Target
    rounds: int
    repeats: int


class Comparison(Record):
    """Milliseconds of a run, and seconds of a build, with free and with fixed dimensions; `sizes` are the free ones."""

    free: float
    fixed: float
    free_build: float
    fixed_build: float
    sizes: dict[str, int]

    @property
    def ratio(self) -> float:
        """The time with free dimensions over that with fixed ones."""
        return self.free / self.fixed


def work(job: SymbolicJob, emit: Emit) -> Comparison:
    """Build and time a model in a child process."""
    from tvmflow import compiler, runtime

    with np.load(job.sample) as archive:
        arrays = dict(archive.items())
    inputs = compiler.import_onnx(job.onnx).inputs
    sizes = {
        size: length
        for item in inputs
        for size, length in zip(item.shape, arrays[item.name].shape, strict=True)
        if isinstance(size, str)
    }
    if not sizes:
        raise InputError(f"no input of {job.onnx} has a free dimension")
    fixed = {item.name: arrays[item.name].shape for item in inputs}
    runs, builds = {}, {}
    with tempfile.TemporaryDirectory() as folder:
        for way, shapes in {"free": {}, "fixed": fixed}.items():
            bundle = Path(folder) / f"{way}.tar.gz"
            start = time.perf_counter()
            prepare.build_bundle(
                prepare.BuildJob(
                    name=way,
                    onnx=job.onnx,
                    sample=job.sample,
                    shapes=shapes,
                    target=job.target,
                    state=bundle.parent,
                    output=bundle,
                )
            )
            builds[way] = time.perf_counter() - start
            runs[way] = partial(runtime.load(bundle, threads=job.target.threads), **arrays)
    best = dict.fromkeys(runs, math.inf)
    for _ in range(job.rounds):
        for way, run in runs.items():
            run()
            for _ in range(job.repeats):
                start = time.perf_counter()
                run()
                best[way] = min(best[way], time.perf_counter() - start)
    return Comparison(
        free=1e3 * best["free"],
        fixed=1e3 * best["fixed"],
        free_build=builds["free"],
        fixed_build=builds["fixed"],
        sizes=sizes,
    )


def free_model(model: Model, state: Path) -> tuple[Path, Path]:
    """Return the ONNX file of a model of the catalogue with free dimensions, and its inputs, an `.npz`."""
    if any(len(item.shape) + 1 != _IMAGE for item in model.inputs):
        free = replace(model, free={1: ("length", _LONGEST_TEXT)})
        return prepare.export(free, 1, state), prepare.sample(model, 1, state)
    file = onnx.load(prepare.export(model, 1, state))
    for item in file.graph.input:
        dims = item.type.tensor_type.shape.dim
        for axis, name in ((0, "batch"), (2, "height"), (3, "width")):
            dims[axis].dim_param = name
    # They have the sizes that were fixed.
    file.graph.ClearField("value_info")
    for item in file.graph.output:
        item.type.tensor_type.ClearField("shape")
    path = state / f"{model.name}-symbolic.onnx"
    onnx.save(file, path)
    return path, prepare.sample(model, 1, state)


def show(results: Sequence[tuple[str, Comparison]]) -> Table:
    """Return the table of all models."""
    table = Table(box=box.SIMPLE_HEAD)
    for heading in ("model", "sizes", "free ms", "fixed ms", "free / fixed", "free build s", "fixed build s"):
        table.add_column(heading, justify="left" if heading in ("model", "sizes") else "right")
    for name, item in results:
        table.add_row(
            name,
            ", ".join(f"{size} {length}" for size, length in item.sizes.items()),
            f"{item.free:.3f}",
            f"{item.fixed:.3f}",
            f"{item.ratio:.2f}" + ("" if item.ratio <= _GOAL else " !"),
            f"{item.free_build:.1f}",
            f"{item.fixed_build:.1f}",
        )
    return table


def _size(text: str) -> tuple[str, int]:
    name, _, number = text.rpartition("=")
    if not name:
        raise argparse.ArgumentTypeError(f"{text!r} is no size of a dimension, such as batch=8")
    return name, positive(number)


def main() -> int:
    """Measure the models and print them; return 1 if one could not be measured."""
    parser = new_parser(__doc__)
    parser.add_argument("models", nargs="*", metavar="MODEL|FILE.onnx", help="names of the catalogue, and files (all)")
    parser.add_argument("--rounds", type=positive, default=10, help="turns of each build (10)")
    parser.add_argument("--repeats", type=positive, default=10, help="runs in a turn (10)")
    parser.add_argument(
        "--size", type=_size, action="append", default=[], metavar="NAME=N", help="of a file's dimension"
    )
    arguments = parser.parse_args()
    state = state_folder(arguments)
    names = arguments.models or [model.name for model in find([])]
    results: list[tuple[str, Comparison]] = []
    failures: list[str] = []
    with Console(stderr=True).status("") as status:
        for name in names:
            status.update(name)
            if name.endswith(".onnx"):
                path, sample = Path(name), prepare.sample_for(Path(name), state, dict(arguments.size))
            else:
                path, sample = free_model(*find([name]), state)
            job = SymbolicJob(
                onnx=path.absolute(),
                sample=sample,
                target=prepare.native(arguments.threads),
                rounds=arguments.rounds,
                repeats=arguments.repeats,
            )
            log = state / "symbolic.log"
            try:
                item = children.call("symbolic:work", job, Comparison, log=log, timeout=600, paths=(_SCRIPT.parent,))
                results.append((Path(name).stem, item))
            except TvmflowError as error:
                failures.append(f"{name}: {error}")
    if results:
        Console(width=max(140, Console().width)).print(show(results), highlight=False)
        above = sum(item.ratio > _GOAL for _, item in results)
        print(f"{above} of {len(results)} models above {_GOAL}, threads {arguments.threads}")
    print(*failures, sep="\n", end="\n" if failures else "", file=sys.stderr)
    if arguments.json is not None:
        figures = [{"model": name, "ratio": item.ratio, **item.model_dump()} for name, item in results]
        arguments.json.write_text(json.dumps(figures, indent=1))
    return 1 if failures else 0


if __name__ == "__main__":
    run_main(main)
