"""Parsing and rendering of requests: small ones at once, large ones in a process of their own.

The event loop must stay free to answer probes. A thread would not do: Python's JSON parser holds the interpreter until
it has read the whole text.
"""

import asyncio
import multiprocessing
import os
from collections.abc import Callable, Mapping
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from typing import TYPE_CHECKING, ParamSpec, TypeVar

from tvmflow.bundle import Manifest
from tvmflow.processes.launch import die_with_parent
from tvmflow.serving import protocol
from tvmflow.serving.protocol import InferRequest, InferResponse

if TYPE_CHECKING:
    from tvmflow.arrays import Array


# Text of this many bytes is parsed in about a millisecond; a number is rendered in about twenty bytes.
_SMALL_BYTES = 1 << 17
_BYTES_PER_NUMBER = 20

P = ParamSpec("P")
T = TypeVar("T")


class Converter:
    """Parses requests and renders responses; its process starts with the first large one and ends with `close`."""

    def __init__(self) -> None:
        self._pool: ProcessPoolExecutor | None = None

    async def parse(self, body: bytes, header_length: str | None, manifest: Manifest) -> InferRequest:
        """Parse the body of a request for the model of a manifest, in another process where the body is large.

        `header_length` is the number of bytes of JSON, None for a body without binary data. Raises InputError for a
        body that breaks the protocol, or has inputs or outputs that are not the model's.
        """
        # Binary data takes no time to read, unless it is strings.
        size = len(body)
        if header_length is not None and not protocol.takes_strings(manifest):
            size = min(size, protocol.header_size(header_length))
        return await self.run(size, protocol.parse, body, header_length, manifest)

    async def render(
        self, request: InferRequest, name: str, version: str, results: "Mapping[str, Array]"
    ) -> InferResponse:
        """Render the response to a request: `results` are the outputs by name, `name` and `version` the model's.

        Raises InputError for NaN or infinity in an output that the request wants as JSON.
        """
        numbers = sum(results[output.name].size for output in request.outputs if not output.is_binary)
        # The inputs are needed no more, and would travel to the process.
        answered = InferRequest(request.id, {}, request.outputs)
        size = numbers * _BYTES_PER_NUMBER + len(request.id or "")
        return await self.run(size, protocol.render, answered, name, version, results)

    async def run(self, size: int, function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """Return the result of a function, which another process calls where it works on more than 128 KiB."""
        if size <= _SMALL_BYTES:
            return function(*args, **kwargs)
        if self._pool is None:
            context = multiprocessing.get_context("spawn")
            self._pool = ProcessPoolExecutor(1, context, initializer=die_with_parent, initargs=(os.getpid(),))
        try:
            return await asyncio.wrap_future(self._pool.submit(function, *args, **kwargs))
        except BrokenProcessPool:
            self._pool = None
            raise

    def close(self) -> None:
        """End the process after the conversion that it is running.

        Calls of `parse` and `render` that wait for the process raise `CancelledError`. The converter cannot be used
        afterwards.
        """
        if self._pool is not None:
            self._pool.shutdown(wait=True, cancel_futures=True)
