"""Prints how long N runs of a model take, deployed in each way: `python benchmarks/deployment.py [MODEL]`.

In PyTorch, in ONNX Runtime, in TVM from Python and from C++ (the same bundle), on a GPU and on 64-bit ARM, as a
Raspberry Pi is. What this machine cannot run is in the table with the reason. All rows but the emulated one take turns
in one run; the time is N times the median run, `/ PyTorch` the ratio of the medians, `error` the largest difference
from ONNX Runtime's outputs over their largest value. The C++ runner is built by CMake first.

--emulated adds ARM by qemu, with the packages g++-aarch64-linux-gnu and qemu-user: it shows that the numbers are the
same, its time says nothing of a device.
"""

import argparse
import json
import shutil
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Literal

import numpy as np
import prepare
import runners
from catalogue import MODELS, Model, find
from commandline import new_parser, positive, run_main, state_folder
from rich import box
from rich.console import Console
from rich.table import Table
from runners import Figures, RunnerJob

from tvmflow import npz
from tvmflow.errors import TvmflowError
from tvmflow.hardware.target import Target, host, resolve
from tvmflow.workspace import Record

_CPP = Path(__file__).parents[1] / "cpp"
_PI = "aarch64-cortex-a72"
_EMULATOR = ("qemu-aarch64", "-L", "/usr/aarch64-linux-gnu")
_TIMEOUT = 1800.0
_FEWEST_RUNS = 10
FromPython = Literal["onnxruntime", "pytorch", "tvmflow"]
FromCpp = Literal["cpp", "gpu", "arm", "emulated"]
Way = FromPython | FromCpp

# ONNX Runtime goes first: the others are compared with its outputs.
_PYTHON: dict[FromPython, str] = {
    "onnxruntime": "ONNX Runtime",
    "pytorch": "PyTorch",
    "tvmflow": "TVM from Python",
}


class Row(Record):
    """One way to run the model: the median and the least milliseconds per run, or the `reason` why it was not run.

    `error` is the largest difference from ONNX Runtime's outputs over their largest value.
    """

    title: str
    machine: str
    p50: float | None = None
    min: float | None = None
    error: float | None = None
    reason: str | None = None


class Document(Record):
    """The document that `--json` writes; latencies are milliseconds."""

    model: str
    batch: int
    threads: int
    rounds: int
    runs: int
    rows: dict[Way, Row]


class Unavailable(Exception):
    """This machine cannot run a row; the message says why."""


class CppRunner:
    """The C++ runner on one bundle; each call measures one turn.

    `command` starts the runner. `job` has the inputs, the expected outputs, the threads and the seconds of a turn.
    """

    def __init__(self, command: Sequence[str], bundle: Path, job: RunnerJob) -> None:
        self._command, self._bundle, self._job, self._repeat = command, bundle, job, _FEWEST_RUNS

    def __call__(self) -> Figures:
        """Measure one turn and return its figures.

        The first turn has ten runs; a later one has as many as fit into the job's `seconds`, by the mean time of the
        turn before. Raises Unavailable with the runner's own sentence.
        """
        with tempfile.TemporaryDirectory() as folder:
            output = Path(folder) / "out.npz"
            arguments = ["--inputs", str(self._job.sample), "--output", str(output), "--json"]
            numbers = {"repeat": self._repeat, "warmup": max(self._repeat // 5, 1), "threads": self._job.threads}
            arguments += [f"--{key}={value}" for key, value in numbers.items()]
            process = subprocess.run(
                [*self._command, str(self._bundle), *arguments],
                capture_output=True,
                text=True,
                timeout=_TIMEOUT,
            )
            if process.returncode != 0:
                refusal = process.stderr.strip().removeprefix("tvmflow-run: ")
                raise Unavailable(refusal or f"it ended by {process.returncode}")
            actual, expected = npz.read(output), npz.read(self._job.expected)
        differences = [
            np.max(np.abs(actual[f"output_{name}"] - array)) / (np.max(np.abs(array)) or 1.0)
            for name, array in expected.items()
        ]
        document = json.loads(process.stdout)
        times = document["latency_ms"]
        self._repeat = max(_FEWEST_RUNS, int(self._job.seconds * 1e3 / times["mean"]))
        return Figures(p50=times["p50"], min=times["min"], runs=document["runs"], error=float(np.max(differences)))


def build_runner(folder: Path, *options: str) -> Path:
    """Build the C++ runner in a folder, which may hold an earlier build, and return the path of the command.

    Raises Unavailable if that fails.
    """
    cmake = shutil.which("cmake")
    if cmake is None:
        raise Unavailable("cmake is not installed")
    for arguments in (
        ["-S", str(_CPP), "-B", str(folder), f"-DPython3_EXECUTABLE={sys.executable}", *options],
        ["--build", str(folder), "--parallel", str(host().cores)],
    ):
        process = subprocess.run([cmake, *arguments], capture_output=True, text=True, timeout=_TIMEOUT)
        if process.returncode != 0:
            lines = [line for line in process.stderr.splitlines() if line.strip()]
            raise Unavailable(f"the C++ runner cannot be built ({lines[0].strip() if lines else 'cmake failed'})")
    return folder / "tvmflow-run"


def gpu() -> Target:
    """Return the target of this machine's GPU. Raises Unavailable without an NVIDIA GPU."""
    query = shutil.which("nvidia-smi")
    if query is None:
        raise Unavailable("this machine shows no NVIDIA GPU")
    arguments = [query, "--query-gpu=compute_cap", "--format=csv,noheader"]
    process = subprocess.run(arguments, capture_output=True, text=True, timeout=60)
    capabilities = process.stdout.splitlines()
    if process.returncode != 0 or not capabilities:
        raise Unavailable("this machine shows no NVIDIA GPU")
    return resolve(f"cuda-sm{capabilities[0].replace('.', '')}")


def emulated(state: Path) -> tuple[str, ...]:
    """Build the runner for emulated ARM and return its command. Raises Unavailable where a tool is missing."""
    missing = [name for name in ("aarch64-linux-gnu-g++", _EMULATOR[0]) if shutil.which(name) is None]
    if missing:
        raise Unavailable(f"{' and '.join(missing)} not installed")
    wheels = state / f"wheels-aarch64-{version('apache-tvm')}-{version('apache-tvm-ffi')}"
    sysroot = state / "sysroot-aarch64"
    for folder, arguments in (
        (wheels, ["wheels.py", "--platform", "manylinux_2_28_aarch64"]),
        (sysroot, ["sysroot.py", "arm64"]),
    ):
        script, *options = arguments
        command = [sys.executable, str(_CPP / script), *options, str(folder)]
        if not folder.is_dir() and subprocess.run(command, capture_output=True, timeout=_TIMEOUT).returncode != 0:
            raise Unavailable(f"the libraries for ARM cannot be fetched here: cpp/{script} fails")
    toolchain = f"-DCMAKE_TOOLCHAIN_FILE={_CPP / 'aarch64-linux-gnu.cmake'}"
    libraries = (f"-DTVMFLOW_WHEELS={wheels}", f"-DTVMFLOW_SYSROOT={sysroot}")
    return (*_EMULATOR, str(build_runner(state / "cpp-aarch64", toolchain, *libraries)))


def measure(model: Model, arguments: argparse.Namespace, state: Path, report: Callable[[str], None]) -> Document:
    """Export and build the model, measure every row, and return all figures."""
    report("exporting")
    onnx = prepare.export(model, arguments.batch, state)
    sample = prepare.sample(model, arguments.batch, state)

    def bundle(target: Target) -> Path:
        report(f"building for {target.name}")
        name = f"{model.name}-batch{arguments.batch}-threads{arguments.threads}-{target.name}"
        return prepare.build(name, onnx, sample, target, state)

    here = f"this machine, {host().arch}"
    native = bundle(prepare.native(arguments.threads))
    job = RunnerJob(
        runner="tvmflow",
        onnx=onnx,
        sample=sample,
        expected=state / f"{model.name}-deployed-expected.npz",
        bundle=native,
        source=prepare.source(model),
        threads=arguments.threads,
        seconds=arguments.seconds,
    )

    def cpp() -> CppRunner:
        report("building the C++ runner")
        return CppRunner([str(build_runner(state / "cpp"))], native, job)

    def on_gpu() -> CppRunner:
        path = bundle(gpu())
        return CppRunner([str(build_runner(state / "cpp"))], path, job)

    def on_arm() -> CppRunner:
        if host().arch != "aarch64":
            raise Unavailable(f"this machine is {host().arch}; run the same command there, or give --emulated")
        return cpp()

    def by_qemu() -> CppRunner:
        command = emulated(state)
        return CppRunner(command, bundle(resolve(_PI)), job)

    ways: dict[FromCpp, tuple[str, Callable[[], CppRunner]]] = {
        "cpp": (here, cpp),
        "gpu": ("GPU", on_gpu),
        "arm": ("Raspberry Pi or other 64-bit ARM", on_arm),
    }
    if arguments.emulated:
        ways["emulated"] = (f"{_PI}, emulated", by_qemu)
    measured: dict[Way, list[Figures]] = {way: [] for way in (*_PYTHON, *ways)}
    reasons: dict[Way, str] = {}
    run: dict[FromCpp, CppRunner] = {}
    for way, (_, prepared) in ways.items():
        try:
            run[way] = prepared()
        except (Unavailable, TvmflowError) as error:
            reasons[way] = str(error)
    with runners.Contest(state, (model.folder,)) as contest:
        for number in range(arguments.rounds):
            for name in _PYTHON:
                report(f"{name}, round {number + 1} of {arguments.rounds}")
                measured[name].append(contest.measure(job, [name], 1, lambda step: None)[name])
            for way, turn in run.items():
                if way in reasons or (way == "emulated" and number > 0):
                    continue
                report(f"{way}, round {number + 1} of {arguments.rounds}")
                try:
                    measured[way].append(turn())
                except Unavailable as error:
                    reasons[way] = str(error)
    reasons.update({way: item.failure for way, rounds in measured.items() for item in rounds if item.failure})
    rows: dict[Way, Row] = {}
    for name, title in _PYTHON.items():
        rows[name] = _row(title, here, measured[name], reasons.get(name))
    for way, (machine, _) in ways.items():
        rows[way] = _row("TVM from C++", machine, measured[way], reasons.get(way))
    return Document(
        model=model.name,
        batch=arguments.batch,
        threads=arguments.threads,
        rounds=arguments.rounds,
        runs=arguments.runs,
        rows=rows,
    )


def _row(title: str, machine: str, rounds: Sequence[Figures], reason: str | None) -> Row:
    p50s = [item.p50 for item in rounds if item.p50 is not None]
    if reason is not None or not p50s:
        return Row(title=title, machine=machine, reason=reason)
    return Row(
        title=title,
        machine=machine,
        p50=statistics.median(p50s),
        min=min(item.min for item in rounds if item.min is not None),
        error=rounds[0].error,
    )


def show(document: Document) -> Table:
    """Return the table; a row that was not run has its reason in place of its figures."""
    table = Table(box=box.SIMPLE_HEAD)
    table.add_column(document.model)
    table.add_column("on")
    for heading in (f"{document.runs} runs, s", "p50 ms", "/ PyTorch", "error"):
        table.add_column(heading, justify="right", no_wrap=True)
    table.add_column("")
    peer = document.rows["pytorch"].p50
    for way, row in document.rows.items():
        if row.p50 is None or row.error is None:
            table.add_row(row.title, row.machine, "-", "-", "-", "-", f"not run: {row.reason}")
            continue
        ratio = f"{row.p50 / peer:.2f}" if peer and way != "emulated" else "-"
        time = f"{row.p50 * document.runs / 1e3:.3f}"
        remark = "not a device's time" if way == "emulated" else ""
        table.add_row(row.title, row.machine, time, f"{row.p50:.3f}", ratio, f"{row.error:.0e}", remark)
    return table


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """Return the options of the command line."""
    parser = new_parser(__doc__)
    parser.add_argument("model", nargs="?", default="digits", metavar="MODEL", help=f"of {', '.join(MODELS)} (digits)")
    parser.add_argument("--runs", type=positive, default=150, help="N (150)")
    parser.add_argument("--batch", type=positive, default=1, help="size of the first dimension of every input (1)")
    parser.add_argument("--rounds", type=positive, default=5, help="turns of each row (5)")
    parser.add_argument("--seconds", type=float, default=0.5, help="of timed runs in a turn (0.5)")
    parser.add_argument("--emulated", action="store_true", help="add the Raspberry Pi's bundle, emulated by qemu")
    return parser.parse_args(arguments)


def main() -> int:
    """Measure and print one table; return 1 when PyTorch or TVM on this machine's CPU could not be run."""
    arguments = parse()
    (model,) = find([arguments.model])
    state = state_folder(arguments)
    with Console(stderr=True).status("") as status:
        document = measure(model, arguments, state, status.update)
    Console(width=max(150, Console().width)).print(show(document), highlight=False)
    print(f"batch {document.batch}, threads {document.threads}, {document.rounds} rounds")
    if arguments.json is not None:
        arguments.json.write_text(document.model_dump_json(indent=1))
    ways: tuple[Way, ...] = (*_PYTHON, "cpp")
    return int(any(document.rows[way].p50 is None for way in ways))


if __name__ == "__main__":
    run_main(main)
