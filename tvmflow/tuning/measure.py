"""Measures candidates: builds them side by side, then runs, checks and times them here or on devices."""

import itertools
import queue
import shutil
import tempfile
import time
from collections.abc import Callable, Generator, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import cached_property
from pathlib import Path
from typing import Any, Protocol, Self

from tvmflow.hardware.target import Target, host
from tvmflow.runtime.threads import SPIN
from tvmflow.tuning.cache_state import bytes_to_move, bytes_to_read, make_reader
from tvmflow.tuning.candidates import Argument, Candidate, Library
from tvmflow.tuning.runner import Device, DeviceRunner, Devices, LocalRunner, Runner
from tvmflow.tuning.worker_process import TrialError, WorkerProcess


class Measurer(Protocol):
    """Builds candidates, runs and times them; `MeasurePool` does so in processes and on devices."""

    def build(self, candidates: Sequence[Candidate]) -> list[Library | TrialError]:
        """Build all `candidates`, and return for each of them its library, or the error if it cannot be built."""

    def time(self, library: Library, limit: float = 1e9) -> float:
        """Return the seconds of a call of `library`; above `limit` seconds, one rough sample is enough.

        Raises TrialError when the call fails.
        """

    def times(
        self, libraries: Sequence[Library | TrialError], limit: Callable[[], float]
    ) -> Generator[float | TrialError]:
        """Yield for each library, in order, the seconds of a call, or the error if it cannot be built or run.

        `limit` is called right before a library is timed, and returns the `limit` of `time` for it, in seconds.
        """

    def compare(self, *libraries: Library) -> list[float]:
        """Return the seconds of a call of each library, in order: the smallest of its samples.

        One process or device samples the libraries alternately, so that other load slows all of them alike. Raises
        TrialError when a call fails.
        """

    def expect(self, reference: Library) -> None:
        """Run `reference` and keep its results, with which `check` compares those of other libraries.

        The time limit of `check` then applies to the run of the other library alone. Raises TrialError when the run
        fails.
        """

    def check(self, library: Library, reference: Library) -> None:
        """Raise TrialError unless the results of `library` and `reference` are equal, within a tolerance."""


def use_measurer(
    measurer: Measurer | None,
    target: Target,
    *,
    threads: int,
    timeout: float,
    deadline: float,
    weights: int,
    device: Device | None = None,
) -> AbstractContextManager[Measurer]:
    """Return a context that gives `measurer` or, if that is None, a MeasurePool for the target, closed at its end.

    The pool has a builder for each core of this machine, and measures on `device` or, if that is None, on this machine.
    A candidate runs with `threads` threads; a build or run is killed after `timeout` seconds. `weights` is the number
    of bytes of the model's weights; as many, up to the size of the target's last-level cache, are read before each
    sample. No request outlives `deadline` (of `time.monotonic`). Raises RemoteError when the devices' tracker does not
    answer or has no device of their key.
    """
    if measurer is not None:
        return nullcontext(measurer)
    return MeasurePool(
        target.canonical,
        builders=host().cores,
        threads=threads,
        timeout=timeout,
        deadline=deadline,
        device=device,
        cross_compiler=target.cross_compiler,
        weights=bytes_to_read(weights, target),
    )


class MeasurePool:
    """Workers that build candidates side by side on this machine, and runners that check and time them.

    On this machine one runner measures one candidate at a time. With `device` there is one runner for each device, so
    that many candidates are measured at once, each alone on its device. A single request uses one device only.

    `target` is the canonical TVM target as JSON; `builders` the number of workers that build; `threads` the number of
    threads that a candidate runs with; `timeout` the seconds after which the worker of a single build or run is killed;
    `cross_compiler` links for another architecture. `weights` are the bytes of weights of the model whose functions are
    measured: as many are read before each sample, so that a call finds the caches as within the model. No request
    outlives `deadline` (of `time.monotonic`) by more than the time to kill a process.

    Raises RemoteError when the devices' tracker does not answer or has no device of their key. Any request raises
    TuneError when all devices are lost and none comes back.
    """

    def __init__(
        self,
        target: str,
        *,
        builders: int,
        threads: int,
        timeout: float,
        deadline: float,
        device: Device | None = None,
        cross_compiler: str | None = None,
        weights: int = 0,
    ) -> None:
        self._target = target
        self._weights = weights
        self._threads = threads
        self._timeout = timeout
        self._deadline = deadline
        self._cross_compiler = cross_compiler
        self._devices = None if device is None else Devices(device, deadline)
        self._scratch = Path(tempfile.mkdtemp(prefix="tvmflow-tune-"))
        self._numbers = itertools.count()
        environment = {
            "TVM_NUM_THREADS": str(threads),
            "TVM_THREAD_POOL_SPIN_COUNT": str(SPIN),
            "OMP_NUM_THREADS": str(threads),
        }
        # Without the compiler TVM loads in a fraction of the time, and each crash of a candidate loads it again.
        runtime = {**environment, "TVM_USE_RUNTIME_LIB": "1"}
        self._builders = [
            WorkerProcess(self._scratch / f"builder{index}.log", environment) for index in range(builders)
        ]
        measurers = [
            WorkerProcess(self._scratch / f"runner{index}.log", runtime)
            for index in range(1 if self._devices is None else self._devices.count)
        ]
        self._workers = (*measurers, *self._builders)
        self._runners: list[Runner] = [
            LocalRunner(worker) if self._devices is None else DeviceRunner(worker, self._devices, threads)
            for worker in measurers
        ]
        self._idle_builders: queue.SimpleQueue[WorkerProcess] = queue.SimpleQueue()
        self._idle_runners: queue.SimpleQueue[Runner] = queue.SimpleQueue()
        for builder in self._builders:
            self._idle_builders.put(builder)
        for runner in self._runners:
            self._idle_runners.put(runner)
        for worker in self._workers:
            worker.start()
        self._building = ThreadPoolExecutor(builders, "tvmflow-builder")
        self._running = ThreadPoolExecutor(len(self._runners), "tvmflow-runner")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """End every worker and remove the libraries that they built."""
        if self._devices is not None:
            self._devices.stop()
        for worker in self._workers:
            worker.stop()
        self._building.shutdown(cancel_futures=True)
        self._running.shutdown(cancel_futures=True)
        for worker in self._workers:
            worker.end()
        shutil.rmtree(self._scratch, ignore_errors=True)

    def build(self, candidates: Sequence[Candidate]) -> list[Library | TrialError]:
        """Build all `candidates`, and return for each of them its library, or the error if it cannot be built."""
        return list(self._building.map(self._build, candidates))

    def time(self, library: Library, limit: float = 1e9) -> float:
        """Return the seconds of a call, the least of a few samples; a call longer than `limit` is sampled once.

        `limit` is in seconds. Raises TrialError when the call fails.
        """
        arguments = _plain(library.arguments)
        preparation = self._preparation
        return float(
            self._run("time", library=str(library.path), arguments=arguments, limit=limit, preparation=preparation)
        )

    def times(
        self, libraries: Sequence[Library | TrialError], limit: Callable[[], float]
    ) -> Generator[float | TrialError]:
        """Yield for each library, in order, the seconds of a call, or the error if it cannot be built or run.

        `limit` is called right before a library is timed, and returns a number of seconds: a longer call is sampled
        once. On several devices libraries are measured side by side; on this machine each is measured only when the
        caller takes its value.
        """

        def time_one(library: Library | TrialError) -> float | TrialError:
            if isinstance(library, TrialError):
                return library
            try:
                return self.time(library, limit())
            except TrialError as error:
                return error

        if len(self._runners) == 1:
            yield from map(time_one, libraries)
            return
        futures = [self._running.submit(time_one, library) for library in libraries]
        try:
            for future in futures:
                yield future.result()
        finally:
            for future in futures:
                future.cancel()

    def compare(self, *libraries: Library) -> list[float]:
        """Return the seconds of a call of each library, in order: the smallest of its samples.

        One worker process, or one device, samples the libraries alternately, so that other load slows all of them
        alike. Raises TrialError when a call fails.
        """
        arguments = [_plain(library.arguments) for library in libraries]
        paths = [str(library.path) for library in libraries]
        seconds = self._run("compare", libraries=paths, arguments=arguments, preparation=self._preparation)
        return [float(value) for value in seconds]

    def expect(self, reference: Library) -> None:
        """Run `reference` and keep its results for `check`. Raises TrialError when the run fails."""
        self._run("expect", reference=str(reference.path), arguments=_plain(reference.arguments))

    def check(self, library: Library, reference: Library) -> None:
        """Raise TrialError unless the results of `library` and `reference` are equal, within a tolerance."""
        arguments = _plain(library.arguments)
        difference = self._run("check", library=str(library.path), reference=str(reference.path), arguments=arguments)
        if difference is not None:
            raise TrialError(f"wrong result: {difference}")

    @cached_property
    def _preparation(self) -> dict[str, object] | None:
        """The action of the worker before each sample: it calls the reader or, on a device, moves as many bytes."""
        if self._weights == 0:
            return None
        if self._devices is not None:
            return {"bytes": bytes_to_move(self._weights)}
        reader = self._build(make_reader(self._weights, self._threads))
        if isinstance(reader, TrialError):
            raise reader
        return {"library": str(reader.path), "arguments": _plain(reader.arguments)}

    def _build(self, candidate: Candidate) -> Library | TrialError:
        path = self._scratch / f"{next(self._numbers)}.so"
        builder = self._idle_builders.get()
        try:
            arguments = {
                "func": candidate.func,
                "trace": candidate.trace,
                "target": self._target,
                "library": str(path),
                "cross_compiler": self._cross_compiler,
            }
            builder.request("build", arguments, self._remaining_seconds())
        except TrialError as error:
            return error
        finally:
            self._idle_builders.put(builder)
        return Library(path, candidate.arguments)

    def _run(self, operation: str, **arguments: object) -> Any:
        with self._idle_runner() as runner:
            return runner.run(operation, arguments, self._remaining_seconds)

    @contextmanager
    def _idle_runner(self) -> Iterator[Runner]:
        runner = self._idle_runners.get()
        try:
            yield runner
        finally:
            self._idle_runners.put(runner)

    def _remaining_seconds(self) -> float:
        return min(self._timeout, self._deadline - time.monotonic())


def _plain(arguments: Sequence[Argument]) -> list[tuple[tuple[int, ...], str]]:
    return [(argument.shape, argument.dtype) for argument in arguments]
