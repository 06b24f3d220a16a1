"""Turns: runners of one model that are measured in turn, each in a process of its own.

A process is stopped (SIGSTOP) while it is not its turn, so that its threads take no core from the others.
"""

import resource
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from threading import Barrier, BrokenBarrierError
from typing import Any, Generic, TypeVar

import numpy as np

from tasks.comparison import time_kernel
from tvmflow import samples
from tvmflow.arrays import NamedArrays
from tvmflow.comparison import Pair
from tvmflow.hardware.energy import joules_between, read_counters
from tvmflow.onnx_model.session import open_session, to_function
from tvmflow.processes.children import Child
from tvmflow.workspace import Record

Run = Callable[[NamedArrays], Any]
"""Runs a loaded model on inputs by name; returns the outputs in a form of its own."""


class TurnJob(Record):
    """One turn of a runner on the sample with the index `point` in the file `samples`.

    It makes `warmup` untimed runs, then timed ones: at least `runs`, until they have taken `seconds` together.
    `callers` threads make them concurrently; each of them makes all of the runs. The bundle uses `bundle_threads`
    threads, fewer than the `threads` of its peers where its build was faster on fewer.
    """

    runner: str
    onnx: Path
    bundle: Path
    samples: Path
    threads: int
    bundle_threads: int
    point: int = 0
    warmup: int = 1
    runs: int = 1
    seconds: float = 0.0
    callers: int = 1


class Turn(Record):
    """The seconds of each timed run of a turn, and what else was measured.

    There were `warmup` untimed runs before. `wall_seconds` are those from the start of the first timed run to the end
    of the last one. `load_seconds`, `first_seconds` and `error` are of the process, the same in each of its turns: the
    seconds of loading the model and of its first run, and the error of that run's outputs, 0 where nobody measures it.
    `peak_memory` is the process's, in bytes. `joules` are those of all runs of the turn; None where the machine does
    not tell them, and in the turn that loads the model.
    """

    seconds: tuple[float, ...]
    load_seconds: float
    peak_memory: int
    first_seconds: float = 0.0
    wall_seconds: float = 0.0
    error: float = 0.0
    warmup: int = 0
    joules: float | None = None


J = TypeVar("J", bound=TurnJob)
R = TypeVar("R", bound=str)


@dataclass(frozen=True)
class Round(Generic[R]):
    """The turns of one round of new processes, one per runner.

    `turns` are by the index of the point and the runner. `kernel_seconds` has the seconds of the reference kernel, a
    fixed computation that shows the processor's clock. `concurrent` has the turns of several callers by the number of
    callers and the runner.
    """

    turns: Mapping[tuple[int, R], Sequence[Turn]]
    kernel_seconds: Sequence[float]
    concurrent: Mapping[tuple[int, R], Turn] = field(default_factory=dict)

    def seconds(self, runner: R, point: int = 0) -> list[float]:
        """Return the seconds of all runs of a runner at the point with the index `point`."""
        return [value for turn in self.turns[point, runner] for value in turn.seconds]

    def pair(self, candidate: R, baseline: R, point: int = 0) -> Pair:
        """Return two runners compared turn by turn: turns with the same index were right after each other."""
        sides = [[turn.seconds for turn in self.turns[point, name]] for name in (candidate, baseline)]
        return Pair.of_turns(sides[0], sides[1], self.kernel_seconds)

    def joules(self, runner: R) -> float | None:
        """Return the joules of a run at the first point, None where the machine does not tell them."""
        energies = [(turn.joules, turn.warmup + len(turn.seconds)) for turn in self.turns[0, runner]]
        measurements = [(joules, runs) for joules, runs in energies if joules is not None]
        return (
            sum(joules for joules, _ in measurements) / sum(runs for _, runs in measurements) if measurements else None
        )


class Processes(Generic[R]):
    """The processes of one round, which `start` starts in random order; a context manager that ends them.

    `kernel_seconds` has the seconds of the reference kernel, which runs before each turn.
    """

    def __init__(
        self, runners: Sequence[R], start: Callable[[R], Child], timeout: float, random: np.random.Generator
    ) -> None:
        """Start no process yet; one that takes longer than `timeout` seconds for a turn is killed."""
        self.kernel_seconds: list[float] = []
        self._runners, self._start, self._timeout, self._random = runners, start, timeout, random
        self._children: dict[str, Child] = {}
        self._with_model: set[str] = set()
        self._stack = ExitStack()

    def shuffle(self) -> list[R]:
        """Return the runners in random order."""
        return [self._runners[index] for index in self._random.permutation(len(self._runners))]

    def take_turn(self, job: TurnJob) -> Turn:
        """Let the job's runner take a turn. Raises what the runner raises, StepError where its process crashes."""
        self.kernel_seconds += time_kernel()
        before = read_counters()
        turn = self._children[job.runner].take_turn(job, Turn, timeout=self._timeout)
        joules = joules_between(before, read_counters())
        loads_model = job.runner not in self._with_model
        self._with_model.add(job.runner)
        return turn.model_copy(update={"joules": None if loads_model else joules})

    def __enter__(self) -> "Processes[R]":
        with self._stack as stack:
            for runner in self.shuffle():
                self._children[runner] = stack.enter_context(self._start(runner))
            self._stack = stack.pop_all()
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()


@dataclass(frozen=True)
class _Model:
    """The model of a runner's process; the other fields are those of `Turn`."""

    run: Run
    load_seconds: float
    first_seconds: float
    error: float


_model: _Model | None = None


def make_turn(
    job: J,
    loaders: Mapping[str, Callable[[J], Run]],
    measure_error: Callable[[Any, NamedArrays], float] = lambda outputs, expected: 0.0,
) -> Turn:
    """Make one turn in the runner's own process.

    The first turn in a process also loads the model with the runner's entry of `loaders`, and makes its first run;
    `measure_error` gets the outputs of that run and the sample's.
    """
    global _model
    inputs, expected = _load_sample(job.samples, job.point)
    if _model is None:
        start = time.perf_counter()
        run = loaders[job.runner](job)
        ready = time.perf_counter()
        outputs = run(inputs)
        end = time.perf_counter()
        _model = _Model(run, ready - start, end - ready, measure_error(outputs, expected))
    model = _model
    seconds, wall_seconds = time_runs(lambda: model.run(inputs), job.warmup, job.runs, job.seconds, job.callers)
    return Turn(
        seconds=tuple(seconds),
        load_seconds=model.load_seconds,
        peak_memory=resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
        first_seconds=model.first_seconds,
        wall_seconds=wall_seconds,
        error=model.error,
        warmup=job.warmup,
    )


def time_runs(
    run: Callable[[], object], warmup: int, runs: int, seconds: float = 0.0, callers: int = 1
) -> tuple[list[float], float]:
    """Call `run` `warmup` times untimed, then timed: at least `runs` times, until that has taken `seconds`.

    Where `callers` is above one, so many threads do so, and begin their timed runs together. Returns the seconds of
    each timed run, and those from the start of the first to the end of the last. Raises what `run` raises.
    """
    barrier = Barrier(callers)
    spans: list[tuple[float, float]] = []

    def call() -> list[float]:
        try:
            for _ in range(warmup):
                run()
            barrier.wait()
            begin, times, total = time.perf_counter(), list[float](), 0.0
            while len(times) < runs or total < seconds:
                start = time.perf_counter()
                run()
                times.append(time.perf_counter() - start)
                total += times[-1]
        except BaseException:
            # The others would wait for this one for ever.
            barrier.abort()
            raise
        spans.append((begin, time.perf_counter()))
        return times

    if callers == 1:
        series = [call()]
    else:
        with ThreadPoolExecutor(callers) as pool:
            futures = [pool.submit(call) for _ in range(callers)]
        errors = [error for future in futures if (error := future.exception()) is not None]
        for error in sorted(errors, key=lambda error: isinstance(error, BrokenBarrierError)):
            raise error
        series = [future.result() for future in futures]
    return [value for each in series for value in each], max(end for _, end in spans) - min(begin for begin, _ in spans)


def load_bundle(job: TurnJob) -> Run:
    """Load the bundle. Raises BundleError where it does not run here."""
    from tvmflow import runtime

    model = runtime.load(job.bundle, threads=job.bundle_threads)
    return lambda inputs: model(**inputs)


def load_onnxruntime(job: TurnJob) -> Run:
    """Load the ONNX file into ONNX Runtime, with all of its optimisations."""
    return to_function(open_session(job.onnx, job.threads, exact=False))


@lru_cache(maxsize=1)
def _load_sample(path: Path, point: int) -> tuple[NamedArrays, NamedArrays]:
    return samples.load(path)[point]
