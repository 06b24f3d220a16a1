"""The process that builds, checks and times candidates for the tuner; it may crash or hang without harm to others.

It runs them itself, or on a device: between `connect` and `disconnect` everything that is loaded is loaded there.
"""

import contextlib
import ctypes
import json
import os
import shlex
import signal
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tvmflow.runtime import library
from tvmflow.tuning.process import read_frame, write_frame

_PR_SET_PDEATHSIG = 1
# One timed sample lasts about this long, so that the clock and the first cache misses do not matter.
_SAMPLE_SECONDS = 0.008
_SAMPLES = 5
_ROUNDS = 9
# Beyond this a candidate is too slow to be worth more than a single call.
_SLOW_SECONDS = 0.25


class _Operations:
    """What a worker can be asked for; each public method is one operation."""

    def __init__(self) -> None:
        self._inputs: tuple[list[Any], list[Any]] = ([], [])
        self._expected: tuple[str, list[Any], list[Any]] = ("", [], [])
        self._place: _Place = _Place()

    def build(self, func: str, trace: str | None, target: str, library: str, cross_compiler: str | None) -> None:
        """Replay `trace` on `func` (JSON both), compile for `target` (JSON) and link to `library`."""
        import tvm

        from tvmflow.tuning.records import replay

        prim_func = tvm.ir.load_json(func)
        if trace is not None:
            prim_func = replay(trace, prim_func)
        prim_func = prim_func.with_attr("global_symbol", "main").with_attr("tirx.is_scheduled", True)
        module = tvm.IRModule({"main": prim_func})
        built = tvm.compile(module, tvm.target.Target(json.loads(target)))
        built.export_library(library, **({"fcompile": _linker(cross_compiler)} if cross_compiler else {}))

    def connect(self, host: str, port: int, word: str, seconds: float, threads: int) -> None:
        """Open a session on the device's server, which ends it after `seconds`; calls use at most `threads` threads."""
        self.disconnect()
        self._place = _Remote(host, port, word, seconds)
        self._place.limit_threads(threads)

    def disconnect(self) -> None:
        """Close the session, if there is one."""
        place, self._place, self._inputs = self._place, _Place(), ([], [])
        place.close()

    def _lost(self) -> bool:
        """Whether the session's device is gone, which is closed then."""
        if self._place.answers():
            return False
        self.disconnect()
        return True

    def time(self, library: str, arguments: list[Any], limit: float) -> float:
        """Seconds of a call, the least of a few samples; one that is slower than `limit` is measured only once."""
        call = _Call(self._place, library, self._tensors(arguments))
        (estimate,) = call.seconds(1)
        if estimate > min(limit, _SLOW_SECONDS):
            return estimate
        return min(call.seconds(_calls_per_sample(estimate), _SAMPLES))

    def compare(self, libraries: list[str], arguments: list[list[Any]]) -> list[float]:
        """Seconds of a call of each library, measured in turn so that all meet the same machine: the least of each.

        Whatever else the machine does makes times longer, never shorter.
        """
        pairs = zip(libraries, arguments, strict=True)
        calls = [_Call(self._place, library, self._tensors(shapes)) for library, shapes in pairs]
        estimates = [call.seconds(1)[0] for call in calls]
        rounds = _ROUNDS if max(estimates) < _SLOW_SECONDS else 1
        numbers = [_calls_per_sample(estimate) for estimate in estimates]
        samples = [
            [call.seconds(number)[0] for call, number in zip(calls, numbers, strict=True)] for _ in range(rounds)
        ]
        return [min(column) for column in zip(*samples, strict=True)]

    def expect(self, reference: str, arguments: list[Any]) -> None:
        """Run `reference` on random input and keep what it computes."""
        import numpy as np

        inputs = _random_inputs(arguments, signed=True)
        expected = _run(self._place, reference, inputs)
        if not all(np.isfinite(array).all() for array in expected):
            # A logarithm or a root: outside its domain both sides would agree on nothing but NaN.
            inputs = _random_inputs(arguments, signed=False)
            expected = _run(self._place, reference, inputs)
        self._expected = (reference, inputs, expected)

    def check(self, library: str, reference: str, arguments: list[Any]) -> str | None:
        """How the results of `library` differ from those of `reference` on random input, or None if they agree."""
        import numpy as np

        if self._expected[0] != reference:
            self.expect(reference, arguments)
        _, inputs, expected = self._expected
        for index, (got, want) in enumerate(zip(_run(self._place, library, inputs), expected, strict=True)):
            if not np.issubdtype(want.dtype, np.floating):
                agree = np.array_equal(got, want)
            else:
                rtol = 1e-3 if want.dtype.itemsize >= 4 else 2e-2
                atol = 0.1 * rtol * float(np.nanmax(np.abs(want), initial=0.0))
                agree = np.allclose(got, want, rtol=rtol, atol=atol, equal_nan=True)
            if not agree:
                return f"argument {index} differs from the reference's"
        return None

    def _tensors(self, arguments: list[Any]) -> list[Any]:
        if self._inputs[0] != arguments:
            self._inputs = (arguments, [self._place.random(shape, dtype) for shape, dtype in arguments])
        return self._inputs[1]


class _Place:
    """This machine, where libraries are loaded and tensors live."""

    def load(self, library: str) -> Any:
        """The library's module."""
        import tvm

        return tvm.runtime.load_module(library)

    def tensor(self, array: Any) -> Any:
        """A tensor with the values of `array`."""
        import tvm

        return tvm.runtime.tensor(array, device=self.device())

    def random(self, shape: list[int], dtype: str) -> Any:
        """A tensor of values to time with."""
        (array,) = _random_inputs([(shape, dtype)], signed=True)
        return self.tensor(array)

    def device(self) -> Any:
        """Its CPU."""
        import tvm

        return tvm.cpu()

    def answers(self) -> bool:
        """Whether it is still there."""
        return True

    def close(self) -> None:
        """Leave it."""


class _Remote(_Place):
    """A device, seen through a session with its RPC server."""

    def __init__(self, host: str, port: int, word: str, seconds: float) -> None:
        from tvm import rpc

        self._session = rpc.connect(host, port, word, session_timeout=seconds)
        self._loaded: dict[str, Any] = {}

    def load(self, library: str) -> Any:
        """The library's module, after sending it there, once: to overwrite a library that is loaded is to crash it."""
        if library not in self._loaded:
            self._session.upload(library)
            self._loaded[library] = self._session.load_module(Path(library).name)
        return self._loaded[library]

    def random(self, shape: list[int], dtype: str) -> Any:
        """A tensor of values to time with, made there where they are not to be an index: sending them takes longer."""
        import tvm

        if not dtype.startswith("float"):
            return super().random(shape, dtype)
        try:
            fill = self._session.get_function("tvm.contrib.random.random_fill_for_measure")
        except AttributeError:  # A server whose runtime is a small one.
            return super().random(shape, dtype)
        tensor = tvm.runtime.empty(shape, dtype, self.device())
        fill(tensor)
        return tensor

    def device(self) -> Any:
        """Its CPU."""
        return self._session.cpu()

    def limit_threads(self, threads: int) -> None:
        """Let calls use at most `threads`; the server's own number stays where it is lower."""
        self._session.get_function("runtime.config_threadpool")(0, threads)

    def answers(self) -> bool:
        """Whether the session still does."""
        try:
            self._session.get_function("runtime.NumThreads")()
        except Exception:  # TVM has many words for a closed connection.
            return False
        return True

    def close(self) -> None:
        """Close the session; else the server waits until its last object is gone here."""
        self._loaded.clear()
        with contextlib.suppress(Exception):
            self._session.get_function("CloseRPCConnection")()


class _Call:
    """A loaded library together with its arguments."""

    def __init__(self, place: _Place, library: str, tensors: list[Any]) -> None:
        self._module = place.load(library)
        self._device = place.device()
        self._tensors = tensors

    def seconds(self, number: int, repeat: int = 1) -> list[float]:
        """Mean seconds of `number` calls in a row, `repeat` times, after one call that does not count."""
        evaluator = self._module.time_evaluator("main", self._device, number=number, repeat=repeat)
        return [float(seconds) for seconds in evaluator(*self._tensors).results]


def _calls_per_sample(seconds: float) -> int:
    return max(1, round(_SAMPLE_SECONDS / max(seconds, 1e-7)))


def _random_inputs(arguments: list[Any], *, signed: bool) -> list[Any]:
    """The same random arrays every time; indices are zero, since only zero is inside every array."""
    import numpy as np

    generator = np.random.default_rng(0)
    arrays = []
    for shape, dtype in arguments:
        if dtype in ("int32", "int64", "uint32", "uint64"):
            arrays.append(np.zeros(shape, dtype))
        elif dtype == "bool":
            arrays.append(generator.integers(0, 2, shape).astype(bool))
        elif "int" in dtype:
            limits = np.iinfo(dtype)
            arrays.append(generator.integers(limits.min, limits.max, shape, dtype, endpoint=True))
        else:
            arrays.append(generator.uniform(-1.0 if signed else 0.1, 1.0, shape).astype(dtype))
    return arrays


def _run(place: _Place, library: str, inputs: list[Any]) -> list[Any]:
    """Every argument after a call; comparing all of them needs no knowledge of which are outputs."""
    tensors = [place.tensor(array) for array in inputs]
    place.load(library)["main"](*tensors)
    return [tensor.numpy() for tensor in tensors]


def _linker(command: str) -> Any:
    """What links a library with the cross compiler that `command` names, followed by its options."""
    from tvm.support import cc

    compiler, *options = shlex.split(command)
    return cc.cross_compiler(compiler, options, get_target_triple=cc.get_target_by_dump_machine(compiler))


def main() -> None:
    """Serve requests until the tuner closes the pipe or dies."""
    if sys.platform == "linux":
        # A worker in an endless loop would never see that the pipe is closed: the kernel ends it.
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    # tvm_ffi imports torch where it is installed, which costs seconds and is not needed here.
    sys.modules["torch"] = None  # type: ignore[assignment]
    requests = sys.stdin.buffer
    with os.fdopen(os.dup(1), "wb") as replies:
        os.dup2(2, 1)  # Whatever a library prints must not land between two replies.
        operations = _Operations()
        if os.environ.get("TVM_USE_RUNTIME_LIB"):
            library.load()  # With its extras, which candidates may call.
        import tvm  # noqa: F401 -- so that the first request does not pay for it

        write_frame(replies, {"ready": True})
        while (request := read_frame(requests)) is not None:
            operation: Callable[..., Any] = getattr(operations, request.pop("operation"))
            try:
                write_frame(replies, {"value": operation(**request)})
            except Exception as error:
                traceback.print_exc()
                lines = str(error).strip().splitlines() or [type(error).__name__]
                told = f"{type(error).__name__}: {lines[-1].strip()}"
                write_frame(replies, {"error": told, "lost": operations._lost()})


if __name__ == "__main__":
    main()
