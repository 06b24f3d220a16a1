"""The batcher: one thread that runs models, and joins waiting requests into batches."""

import threading
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from functools import partial
from typing import TYPE_CHECKING, TypeVar
from weakref import WeakKeyDictionary

import numpy as np

from tvmflow.bundle import Manifest
from tvmflow.errors import InputError
from tvmflow.runtime import CompiledModel
from tvmflow.serving.limits import OverloadedError

if TYPE_CHECKING:
    from tvmflow.arrays import NamedArrays


# The most requests that may wait. A further one is refused: otherwise answers would take longer and longer.
QUEUE_LIMIT = 1024

T = TypeVar("T")


def batch_dimension(manifest: Manifest) -> str | None:
    """Return the symbolic dimension along which requests can be joined: the first of every input and output.

    Returns None if there is none, or if it is also another dimension of a tensor, which joining would not extend.
    """
    shapes = [spec.shape for spec in (*manifest.inputs, *manifest.outputs)]
    names = {shape[0] if shape else None for shape in shapes}
    name = names.pop() if len(names) == 1 else None
    if not isinstance(name, str) or any(name in shape[1:] for shape in shapes):
        return None
    return name


class _Request:
    """One call of a model that waits for its turn."""

    def __init__(self, model: CompiledModel, arrays: "NamedArrays", dimension: str | None) -> None:
        self.model = model
        self.arrays = arrays
        self.result: Future[NamedArrays] = Future()
        self.arrival = time.monotonic()
        # Requests with equal keys can run together; one without a key runs alone.
        self.key = dimension and (model, tuple(array.shape[1:] for array in arrays.values()))
        self.rows = next(iter(arrays.values())).shape[0] if dimension else 1


class Batcher:
    """A thread that runs models, and joins requests into batches where the batch dimension is symbolic.

    With a `max_delay` of 0 seconds, a batch starts as soon as the thread is free, with the requests that arrived while
    the batch before it ran. Otherwise the first request of a batch waits up to `max_delay` for others. A batch of
    several requests has at most `max_batch` rows, and no more than the model's batch dimension allows. `on_batch` gets
    the number of rows of each batch.
    """

    def __init__(self, *, max_batch: int, max_delay: float, on_batch: Callable[[int], object]) -> None:
        self._max_batch = max_batch
        self._max_delay = max_delay
        self._on_batch = on_batch
        self._dimensions: WeakKeyDictionary[CompiledModel, str | None] = WeakKeyDictionary()
        self._waiting: deque[_Request | Callable[[], object]] = deque()
        self._change = threading.Condition()
        self._is_hurried = False
        self._is_closed = False
        self._busy_since: float | None = None
        # A model's workers serve one caller at a time: one thread calls the models.
        self._thread = threading.Thread(target=self._run, name="tvmflow-models", daemon=True)
        self._thread.start()

    def submit(self, model: CompiledModel, arrays: "NamedArrays") -> "Future[NamedArrays]":
        """Queue inputs, which have been checked and are in the model's order; return the future of the outputs.

        The future carries the model's error if it fails. Raises OverloadedError when QUEUE_LIMIT requests wait.
        """
        if model not in self._dimensions:
            self._dimensions[model] = batch_dimension(model.manifest)
        request = _Request(model, arrays, self._dimensions[model])
        with self._change:
            if len(self._waiting) >= QUEUE_LIMIT:
                raise OverloadedError
            self._waiting.append(request)
            self._change.notify()
        return request.result

    @property
    def busy_seconds(self) -> float:
        """The seconds for which the thread has run its batch, or the function given to `call`; 0 if it is idle."""
        since = self._busy_since
        return 0.0 if since is None else time.monotonic() - since

    def discard(self, result: "Future[NamedArrays]") -> None:
        """Take a request out of the queue, if it still waits; `result` is its future, which is cancelled."""
        if not result.cancel():
            return
        with self._change:
            self._waiting = deque(
                item for item in self._waiting if not isinstance(item, _Request) or item.result is not result
            )

    def call(self, function: Callable[[], T]) -> "Future[T]":
        """Queue a function, to run in the batcher's thread; return the future of its result."""
        result: Future[T] = Future()
        with self._change:
            self._waiting.append(lambda: _settle(result, function))
            self._change.notify()
        return result

    def hurry(self) -> None:
        """Start waiting requests at once: from now on no batch waits for more requests."""
        with self._change:
            self._is_hurried = True
            self._change.notify()

    def close(self, timeout: float | None = None) -> bool:
        """Run all that is queued and end the thread; return whether it has ended.

        Waits for that at most `timeout` seconds, None for as long as it takes.
        """
        with self._change:
            self._is_hurried = self._is_closed = True
            self._change.notify()
        self._thread.join(timeout)
        return not self._thread.is_alive()

    def _run(self) -> None:
        while True:
            with self._change:
                while not self._waiting:
                    if self._is_closed:
                        return
                    self._change.wait()
                first = self._waiting.popleft()
                batch = self._gather(first) if isinstance(first, _Request) else []
            self._busy_since = time.monotonic()
            if isinstance(first, _Request):
                self._answer([request for request in batch if request.result.set_running_or_notify_cancel()])
            else:
                first()
            self._busy_since = None
            # Otherwise these names would keep the last batch and its model in memory until the next batch.
            del first, batch

    def _gather(self, first: _Request) -> list[_Request]:
        """The requests to run with `first`. The caller holds the lock, which is free while this waits for others."""
        batch = [first]
        if first.key is None:
            return batch
        high = first.model.manifest.dimensions.get(str(first.model.inputs[0].shape[0]), (1, None))[1]
        limit = self._max_batch if high is None else min(self._max_batch, high)
        room = limit - first.rows
        while True:
            # In order of arrival and from the front only, so that no request is overtaken.
            while self._waiting and room > 0:
                following = self._waiting[0]
                if not isinstance(following, _Request) or following.key != first.key or following.rows > room:
                    return batch
                self._waiting.popleft()
                batch.append(following)
                room -= following.rows
            remaining = first.arrival + self._max_delay - time.monotonic()
            if room <= 0 or remaining <= 0 or self._is_hurried:
                return batch
            self._change.wait(remaining)

    def _answer(self, batch: list[_Request]) -> None:
        """Run the requests of a batch together, and give each its rows of the outputs."""
        if not batch:
            return
        self._on_batch(sum(request.rows for request in batch))
        model = batch[0].model
        if len(batch) == 1:
            _settle(batch[0].result, partial(model, **batch[0].arrays))
            return
        try:
            joined = {name: np.concatenate([request.arrays[name] for request in batch]) for name in batch[0].arrays}
            results = model(**joined)
        except InputError:
            # An input is wrong in a way that only a run shows: alone, the others have their answers.
            for request in batch:
                _settle(request.result, partial(model, **request.arrays))
            return
        except Exception as error:
            # Whatever failed, it concerns these requests only: the thread goes on.
            for request in batch:
                request.result.set_exception(error)
            return
        start = 0
        for request in batch:
            end = start + request.rows
            request.result.set_result({name: array[start:end] for name, array in results.items()})
            start = end


def _settle(future: "Future[T]", function: Callable[[], T]) -> None:
    """Give a future the result of a function, or its exception."""
    try:
        future.set_result(function())
    except Exception as error:
        future.set_exception(error)
