"""The tuner's side of measuring: candidates built side by side, then checked and timed here or on devices."""

import itertools
import queue
import shutil
import tempfile
import time
from collections.abc import Callable, Generator, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import cached_property
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from tvmflow.tuning.cache_state import bytes_to_move, make_reader
from tvmflow.tuning.candidates import Argument, Candidate, Library
from tvmflow.tuning.runner import Device, DeviceRunner, Devices, LocalRunner, Runner
from tvmflow.tuning.worker_process import TrialError, WorkerProcess


class MeasurePool:
    """Workers that build candidates side by side on this machine, and runners that check and time them.

    There is one runner here, which measures one candidate at a time; or, with `device`, one for each device, and so
    many candidates are measured at once, each alone on its device. Whatever one request does, it does on one device.

    `target` is the canonical TVM target as JSON; `builders` their number; `threads` those a candidate runs with;
    `timeout` the seconds that a single build or run may take before its worker is killed; `cross_compiler` links for
    another architecture. `footprint` are the bytes of weights of the model whose functions are measured: as many are
    read before each call, so that it finds in the caches what it would within the model. No request outlives `deadline`
    (of `time.monotonic`) by more than it takes to kill a process.

    Raises RemoteError when the devices' tracker is not there or has none of their key. Any request raises TuneError
    when all devices are lost and none comes back.
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
        footprint: int = 0,
    ) -> None:
        self._target = target
        self._footprint = footprint
        self._threads = threads
        self._timeout = timeout
        self._deadline = deadline
        self._cross_compiler = cross_compiler
        self._devices = None if device is None else Devices(device, deadline)
        self._scratch = Path(tempfile.mkdtemp(prefix="tvmflow-tune-"))
        self._names = itertools.count()
        environment = {"TVM_NUM_THREADS": str(threads), "OMP_NUM_THREADS": str(threads)}
        # Without the compiler TVM loads in a fraction of the time, which a candidate that crashes costs again.
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

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """End every worker and remove what they built."""
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
        """Build all `candidates`; in the place of one that cannot be built stands the reason."""
        return list(self._building.map(self._build, candidates))

    def time(self, library: Library, limit: float = 1e9) -> float:
        """Seconds of a call, the least of a few samples; above `limit` it is measured roughly. Raises TrialError."""
        arguments = _plain(library.arguments)
        between = self._between
        return float(self._run("time", library=str(library.path), arguments=arguments, limit=limit, between=between))

    def times(
        self, libraries: Sequence[Library | TrialError], limit: Callable[[], float]
    ) -> Generator[float | TrialError]:
        """`time` of each in their order, on several devices side by side; what failed stands in its own place.

        `limit` is asked when a library's turn comes. Here, none is measured before it is asked for.
        """

        def one(library: Library | TrialError) -> float | TrialError:
            if isinstance(library, TrialError):
                return library
            try:
                return self.time(library, limit())
            except TrialError as error:
                return error

        if len(self._runners) == 1:
            yield from map(one, libraries)
            return
        futures = [self._running.submit(one, library) for library in libraries]
        try:
            for future in futures:
                yield future.result()
        finally:
            for future in futures:
                future.cancel()

    def compare(self, *libraries: Library) -> list[float]:
        """Seconds of a call of each, the least of a few samples measured in turn on one device. Raises TrialError."""
        arguments = [_plain(library.arguments) for library in libraries]
        paths = [str(library.path) for library in libraries]
        seconds = self._run("compare", libraries=paths, arguments=arguments, between=self._between)
        return [float(value) for value in seconds]

    def expect(self, reference: Library) -> None:
        """Run `reference`, for `check` to compare with. Raises TrialError."""
        self._run("expect", reference=str(reference.path), arguments=_plain(reference.arguments))

    def check(self, library: Library, reference: Library) -> None:
        """Raise TrialError unless `library` computes what `reference` does, from the same arguments."""
        arguments = _plain(library.arguments)
        difference = self._run("check", library=str(library.path), reference=str(reference.path), arguments=arguments)
        if difference is not None:
            raise TrialError(f"wrong result: {difference}")

    @cached_property
    def _between(self) -> dict[str, object] | None:
        """What the worker is to run before each sample; on a device, the bytes that it moves instead."""
        if self._footprint == 0:
            return None
        if self._devices is not None:
            return {"bytes": bytes_to_move(self._footprint)}
        built = self._build(make_reader(self._footprint, self._threads))
        if isinstance(built, TrialError):
            raise built
        return {"library": str(built.path), "arguments": _plain(built.arguments)}

    def _build(self, candidate: Candidate) -> Library | TrialError:
        path = self._scratch / f"{next(self._names)}.so"
        builder = self._idle_builders.get()
        try:
            work = {
                "func": candidate.func,
                "trace": candidate.trace,
                "target": self._target,
                "library": str(path),
                "cross_compiler": self._cross_compiler,
            }
            builder.request("build", work, self._allowed())
        except TrialError as error:
            return error
        finally:
            self._idle_builders.put(builder)
        return Library(path, candidate.arguments)

    def _run(self, operation: str, **arguments: object) -> Any:
        with self._runner() as runner:
            return runner.run(operation, arguments, self._allowed)

    @contextmanager
    def _runner(self) -> Iterator[Runner]:
        runner = self._idle_runners.get()
        try:
            yield runner
        finally:
            self._idle_runners.put(runner)

    def _allowed(self) -> float:
        return min(self._timeout, self._deadline - time.monotonic())


def _plain(arguments: Sequence[Argument]) -> list[tuple[tuple[int, ...], str]]:
    return [(argument.shape, argument.dtype) for argument in arguments]
