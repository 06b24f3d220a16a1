"""The one thread that runs models, and how requests that wait for it are put together into batches."""

import threading
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from typing import TYPE_CHECKING, Any, TypeVar
from weakref import WeakKeyDictionary

import numpy as np

from tvmflow.bundle import Manifest
from tvmflow.runtime import CompiledModel

if TYPE_CHECKING:
    import numpy.typing as npt

    Array = npt.NDArray[Any]
    Arrays = dict[str, Array]

# Requests that may wait; beyond, the server says that it is overloaded instead of answering ever later.
MOST_WAITING = 1024

T = TypeVar("T")


class OverloadedError(Exception):
    """As many requests wait as may."""


def batch_dimension(manifest: Manifest) -> str | None:
    """The symbolic dimension along which requests can be put together: the first of every input and output.

    None if there is none, or if it stands elsewhere too, where concatenation would not extend it.
    """
    shapes = [spec.shape for spec in (*manifest.inputs, *manifest.outputs)]
    names = {shape[0] if shape else None for shape in shapes}
    name = names.pop() if len(names) == 1 else None
    if not isinstance(name, str) or any(name in shape[1:] for shape in shapes):
        return None
    return name


class _Request:
    """One call of a model that waits for its turn."""

    def __init__(self, model: CompiledModel, arrays: "Arrays", batched: str | None) -> None:
        self.model = model
        self.arrays = arrays
        self.done: Future[Arrays] = Future()
        self.arrived = time.monotonic()
        # What has to be equal for two requests to run together; None: it runs alone.
        self.key = batched and (model, tuple(array.shape[1:] for array in arrays.values()))
        self.rows = next(iter(arrays.values())).shape[0] if batched else 1


class Batcher:
    """Runs models in a thread of its own, requests together where the batch dimension is symbolic.

    A request starts at once when the thread is free and `max_delay` (seconds) is 0: batches come about from what
    arrives while another one runs. Otherwise the first of a batch waits up to that long for others. A batch has at most
    `max_batch` rows, unless a single request brings more. `on_batch` is told the rows of each.
    """

    def __init__(self, *, max_batch: int, max_delay: float, on_batch: Callable[[int], object]) -> None:
        self._max_batch = max_batch
        self._max_delay = max_delay
        self._on_batch = on_batch
        self._dimensions: WeakKeyDictionary[CompiledModel, str | None] = WeakKeyDictionary()
        self._waiting: deque[_Request | Callable[[], object]] = deque()
        self._changed = threading.Condition()
        self._hurried = False
        self._closed = False
        # TVM's worker threads belong to the thread that calls a model: one fixed thread, one pool.
        self._thread = threading.Thread(target=self._run, name="tvmflow-models", daemon=True)
        self._thread.start()

    def submit(self, model: CompiledModel, arrays: "Arrays") -> "Future[Arrays]":
        """Queue checked inputs, in the model's order; raises OverloadedError when too many wait already."""
        if model not in self._dimensions:
            self._dimensions[model] = batch_dimension(model.manifest)
        request = _Request(model, arrays, self._dimensions[model])
        with self._changed:
            if len(self._waiting) >= MOST_WAITING:
                raise OverloadedError
            self._waiting.append(request)
            self._changed.notify()
        return request.done

    def call(self, function: Callable[[], T]) -> "Future[T]":
        """Run something else in the thread, after all that waits now."""
        done: Future[T] = Future()
        with self._changed:
            self._waiting.append(lambda: _settle(done, function))
            self._changed.notify()
        return done

    def hurry(self) -> None:
        """Wait for no more requests to fill a batch."""
        with self._changed:
            self._hurried = True
            self._changed.notify()

    def close(self) -> None:
        """Run what waits, then end the thread."""
        with self._changed:
            self._hurried = self._closed = True
            self._changed.notify()
        self._thread.join()

    def _run(self) -> None:
        while True:
            with self._changed:
                while not self._waiting:
                    if self._closed:
                        return
                    self._changed.wait()
                first = self._waiting.popleft()
                batch = self._gather(first) if isinstance(first, _Request) else []
            if isinstance(first, _Request):
                self._answer([request for request in batch if request.done.set_running_or_notify_cancel()])
            else:
                first()
            # Or the last batch, and its model, would be kept until the next comes.
            del first, batch

    def _gather(self, first: _Request) -> list[_Request]:
        """The requests to run with `first`; the lock is held, and let go while waiting for more."""
        batch = [first]
        if first.key is None:
            return batch
        high = first.model.manifest.dimensions.get(str(first.model.inputs[0].shape[0]), (1, None))[1]
        limit = self._max_batch if high is None else min(self._max_batch, high)
        room = limit - first.rows
        while True:
            # In order of arrival, and only from the front: nobody is overtaken for ever.
            while self._waiting and room > 0:
                following = self._waiting[0]
                if not isinstance(following, _Request) or following.key != first.key or following.rows > room:
                    return batch
                self._waiting.popleft()
                batch.append(following)
                room -= following.rows
            left = first.arrived + self._max_delay - time.monotonic()
            if room <= 0 or left <= 0 or self._hurried:
                return batch
            self._changed.wait(left)

    def _answer(self, batch: list[_Request]) -> None:
        if not batch:
            return
        self._on_batch(sum(request.rows for request in batch))
        model = batch[0].model
        try:
            if len(batch) == 1:
                batch[0].done.set_result(model(**batch[0].arrays))
                return
            together = {name: np.concatenate([request.arrays[name] for request in batch]) for name in batch[0].arrays}
            results = model(**together)
        except Exception as error:
            # Whatever it is, it belongs to these requests: the thread goes on.
            for request in batch:
                request.done.set_exception(error)
            return
        start = 0
        for request in batch:
            end = start + request.rows
            request.done.set_result({name: array[start:end] for name, array in results.items()})
            start = end


def _settle(done: "Future[T]", function: Callable[[], T]) -> None:
    try:
        done.set_result(function())
    except Exception as error:
        done.set_exception(error)
