"""Measures our bundle, ONNX Runtime, OpenVINO and PyTorch eager, which take turns, each in a process of its own.

A process stays alive between its rounds and is stopped meanwhile (SIGSTOP): the threads of a runner spin for a while
after a call, and would take time from the runner whose turn it is.
"""

import contextlib
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Literal, TypeVar

import numpy as np
import numpy.typing as npt

from tvmflow.errors import InputError, TvmflowError
from tvmflow.onnx_model.session import open_session, to_function
from tvmflow.processes.children import Child, Emit
from tvmflow.processes.launch import program_command
from tvmflow.source import Source, load_module, run_module
from tvmflow.tolerance import largest_error
from tvmflow.workspace import Record

Runner = Literal["tvmflow", "onnxruntime", "openvino", "openvino_default", "pytorch"]
# Wall time, or the CPU time of the process: with one thread, other work on the machine hardly shows in CPU time.
Clock = Literal["wall", "cpu"]
NamedArrays = Mapping[str, npt.NDArray[Any]]
Run = Callable[[NamedArrays], NamedArrays]
T = TypeVar("T", bound="Turn")

# ONNX Runtime goes first: the outputs of the others are compared with its outputs.
RUNNERS: tuple[Runner, ...] = ("onnxruntime", "tvmflow", "openvino", "openvino_default", "pytorch")
INSTALL_OPENVINO = "OpenVINO is not installed; `pip install -c constraints.txt openvino` adds its columns"
_FOLDER = Path(__file__).parent
_TIMEOUT = 1200.0
_FEWEST_RUNS = 3
# A round begins with untimed runs for this part of its seconds, which warm caches and threads.
_WARM_UP = 0.2


class RunnerJob(Record):
    """The job of one round: timed runs for `seconds`.

    ONNX Runtime writes its outputs to the file `expected`, and the other runners compare theirs with it. Our runner
    needs `bundle`, PyTorch `source`.
    """

    runner: Runner
    onnx: Path
    sample: Path
    expected: Path
    bundle: Path | None
    source: Source | None
    threads: int
    seconds: float
    clock: Clock = "wall"


class Turn(Record):
    """The result of a process that takes turns; `process` is its id."""

    process: int


class Round(Turn):
    """The seconds of every run of a round.

    `error` is the largest difference from ONNX Runtime's outputs over their largest value; `load_seconds` is the time
    of loading the model; `precision` is the type in which OpenVINO computes.
    """

    seconds: tuple[float, ...]
    error: float
    load_seconds: float
    precision: str = ""


class Figures(Record):
    """The figures of a runner over all its rounds, in milliseconds per run.

    `medians` are those of the rounds, `noise` is their range over their median. `runs` is the number of timed runs, and
    `error` the largest difference from ONNX Runtime's outputs over their largest value. `failure` is one sentence that
    says why the runner was not measured; the figures are None then.
    """

    p50: float | None = None
    min: float | None = None
    medians: tuple[float, ...] = ()
    noise: float | None = None
    runs: int = 0
    error: float | None = None
    load_seconds: float | None = None
    precision: str = ""
    failure: str | None = None


def clock(cpu_time: bool, threads: int) -> Clock:
    """Return the clock to use. Raises InputError for the CPU time of several threads, which would be their sum."""
    if cpu_time and threads != 1:
        raise InputError(f"--cpu-time adds up the time of {threads} threads; give --threads 1 as well")
    return "cpu" if cpu_time else "wall"


def available(names: Sequence[Runner]) -> dict[Runner, str | None]:
    """Return for each runner why it cannot be measured on this machine; None where it can."""
    missing = find_spec("openvino") is None
    return {name: INSTALL_OPENVINO if missing and name.startswith("openvino") else None for name in names}


class Turns:
    """A process that serves jobs and is stopped (SIGSTOP) between them."""

    def __init__(self, function: str, log: Path, paths: Sequence[Path] = (), torch: bool = False) -> None:
        self._child = Child(function, log=log, paths=(_FOLDER, *paths), torch=torch)

    def call(self, job: Record, kind: type[T]) -> T:
        """Continue the process, run one job in it, stop it again, and return the job's result as a `kind`.

        Raises the TvmflowError of the job, and StepError for a process that crashes or takes longer than 20 minutes.
        """
        return self._child.take_turn(job, kind, timeout=_TIMEOUT)

    def __enter__(self) -> "Turns":
        return self

    def __exit__(self, *_: object) -> None:
        self._child.close()


class Contest:
    """The runners' processes. Each is started at its first round and ends with the contest; logs are in `folder`."""

    def __init__(self, folder: Path, paths: Sequence[Path] = ()) -> None:
        self._folder, self._paths = folder, paths
        self._turns: dict[Runner, Turns] = {}
        self._stack = contextlib.ExitStack()

    def measure(
        self, job: RunnerJob, runners: Sequence[Runner], rounds: int, show: Callable[[str], None]
    ) -> dict[Runner, Figures]:
        """Measure one round of each runner after the other, `rounds` times, and return the figures by runner.

        A runner that fails takes no further part. `show` is called with a line of progress before each round.
        """
        failures = {name: reason for name, reason in available(runners).items() if reason is not None}
        results: dict[Runner, list[Round]] = {name: [] for name in RUNNERS if name in runners}
        for number in range(rounds):
            for name, completed in results.items():
                if name in failures:
                    continue
                show(f"{name}, round {number + 1} of {rounds}")
                try:
                    completed.append(self._process(name).call(job.model_copy(update={"runner": name}), Round))
                except TvmflowError as error:
                    failures[name] = str(error)
                    self._turns.pop(name).__exit__()
        return {
            name: Figures(failure=failures[name]) if name in failures else _summary(results[name]) for name in runners
        }

    def _process(self, name: Runner) -> Turns:
        if name not in self._turns:
            log = self._folder / f"runner-{name}.log"
            self._turns[name] = self._stack.enter_context(Turns("runners:work", log, self._paths, name == "pytorch"))
        return self._turns[name]

    def __enter__(self) -> "Contest":
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()


@contextlib.contextmanager
def busy_processes(count: int) -> Iterator[None]:
    """Keep `count` processes computing while the body runs, as other programs of a shared machine do."""
    processes = [subprocess.Popen(program_command([sys.executable, "-c", "while True: pass"])) for _ in range(count)]
    try:
        yield
    finally:
        for process in processes:
            process.kill()
            process.wait()


# The model that this process loaded last: its run, error, seconds of loading, and precision.
_loaded: dict[tuple[str, Path], tuple[Run, float, float, str]] = {}


def work(job: RunnerJob, emit: Emit) -> Round:
    """Run one round of a runner in the runner's own process and return its times.

    A process also loads the model before the first round with it, and compares its outputs with ONNX Runtime's.
    """
    with np.load(job.sample) as archive:
        inputs = {name: archive[name] for name in archive.files}
    key = (job.runner, job.onnx)
    if key not in _loaded:
        _loaded.clear()
        start = time.perf_counter()
        run, precision = _LOADERS[job.runner](job)
        load_seconds = time.perf_counter() - start
        _loaded[key] = run, _error(run(inputs), job), load_seconds, precision
    run, error, load_seconds, precision = _loaded[key]
    clock = {"wall": time.perf_counter, "cpu": time.process_time}[job.clock]
    _timed(run, inputs, job.seconds * _WARM_UP, clock)
    seconds = _timed(run, inputs, job.seconds, clock)
    return Round(
        seconds=tuple(seconds), error=error, process=os.getpid(), load_seconds=load_seconds, precision=precision
    )


def _timed(run: Run, inputs: NamedArrays, seconds: float, clock: Callable[[], float]) -> list[float]:
    times, total = list[float](), 0.0
    while total < seconds or len(times) < _FEWEST_RUNS:
        start = clock()
        run(inputs)
        times.append(clock() - start)
        total += times[-1]
    return times


def _largest(array: npt.NDArray[Any]) -> float:
    """The largest magnitude of an array's finite elements."""
    values = array.astype(np.float64)
    return float(np.max(np.abs(values[np.isfinite(values)]), initial=0.0))


def _error(outputs: NamedArrays, job: RunnerJob) -> float:
    """The largest difference from ONNX Runtime's outputs, in order, over their largest value."""
    if job.runner == "onnxruntime":
        with job.expected.open("wb") as stream:
            np.savez(stream, **{f"{index}": value for index, value in enumerate(outputs.values())})  # type: ignore[arg-type]
        return 0.0
    with np.load(job.expected) as archive:
        expected = [archive[name] for name in archive.files]
    differences = [
        largest_error(theirs, ours) / (_largest(theirs) or 1.0)
        for ours, theirs in zip(outputs.values(), expected, strict=True)
    ]
    # Not max(), which may pass over a NaN.
    return float(np.max(differences))


def _tvmflow(job: RunnerJob) -> tuple[Run, str]:
    from tvmflow import runtime

    if job.bundle is None:
        raise ValueError("there is no bundle")
    model = runtime.load(job.bundle, threads=job.threads)
    return (lambda inputs: model(**inputs)), ""


def _onnxruntime(job: RunnerJob) -> tuple[Run, str]:
    run = to_function(open_session(job.onnx, job.threads, exact=False))
    return (lambda inputs: run(dict(inputs))), ""


def _openvino(job: RunnerJob, precision: str | None) -> tuple[Run, str]:
    import openvino

    options: dict[str, Any] = {"PERFORMANCE_HINT": "LATENCY", "INFERENCE_NUM_THREADS": job.threads, "NUM_STREAMS": 1}
    if precision is not None:
        options["INFERENCE_PRECISION_HINT"] = precision
    compiled = openvino.Core().compile_model(str(job.onnx), "CPU", options)
    request = compiled.create_infer_request()

    def run(inputs: NamedArrays) -> NamedArrays:
        # Inputs and outputs are shared, so that OpenVINO copies as little as it can.
        outputs = request.infer(dict(inputs), share_inputs=True, share_outputs=True)
        return {str(index): value for index, value in enumerate(outputs.values())}

    return run, compiled.get_property("INFERENCE_PRECISION_HINT").to_string()


def _pytorch(job: RunnerJob) -> tuple[Run, str]:
    import torch

    if job.source is None:
        raise ValueError("there is no PyTorch model")
    torch.set_num_threads(job.threads)
    torch.manual_seed(0)
    module = load_module(job.source)
    return (lambda inputs: run_module(module, dict(inputs), ())), ""


_LOADERS: dict[str, Callable[[RunnerJob], tuple[Run, str]]] = {
    "tvmflow": _tvmflow,
    "onnxruntime": _onnxruntime,
    "openvino": partial(_openvino, precision="f32"),
    "openvino_default": partial(_openvino, precision=None),
    "pytorch": _pytorch,
}


def _summary(rounds: Sequence[Round]) -> Figures:
    seconds = [value for item in rounds for value in item.seconds]
    medians = [float(np.median(item.seconds)) for item in rounds]
    return Figures(
        p50=float(np.median(seconds)) * 1e3,
        min=min(seconds) * 1e3,
        medians=tuple(value * 1e3 for value in medians),
        noise=(max(medians) - min(medians)) / float(np.median(medians)),
        runs=len(seconds),
        error=rounds[0].error,
        load_seconds=rounds[0].load_seconds,
        precision=rounds[0].precision,
    )
