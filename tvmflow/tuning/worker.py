"""The worker process that builds, checks and times candidates for the tuner; it may crash or hang without harm.

It runs candidates itself or, between `connect` and `disconnect`, on a device.
"""

import contextlib
import json
import math
import os
import shlex
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tvmflow.hardware.target import request_amx
from tvmflow.processes.supervisor import Channel, forbid_torch
from tvmflow.runtime import library
from tvmflow.tuning.cache_state import warm_arguments

# One timed sample lasts about this long, so that the clock and the first cache misses do not matter.
_SAMPLE_SECONDS = 0.008
_SAMPLES = 5
_ROUNDS = 9
# Beyond this a candidate is too slow to be worth more than a single call.
_SLOW_SECONDS = 0.25
# With a preparation before each call: the number of samples, and the most calls that one sample stands for.
_COLD_SAMPLES = 8
# The name under which TVM's evaluator finds the function that prepares a call.
_PREPARATION = "tvmflow.tuning.prepare"
# The compiler keeps bfloat16 as its bits.
_BFLOAT16 = "uint16"


class _Operations:
    """The operations of a worker: each public method is one that the tuner may request."""

    def __init__(self) -> None:
        self._inputs: tuple[list[Any], list[Any]] = ([], [])
        self._expected: tuple[str, list[Any], list[Any]] = ("", [], [])
        self._place: _Place = _Place()
        self._preparation: tuple[dict[str, Any], _Preparation] | None = None

    def build(self, func: str, trace: str | None, target: str, library: str, cross_compiler: str | None) -> None:
        """Replay `trace` on `func` (JSON both), compile for `target` (JSON) and link to `library`.

        `func` stays as it is where `trace` is None. `cross_compiler` links for another architecture, None for this one.
        """
        import tvm

        from tvmflow.compiler.codegen import code_target
        from tvmflow.tuning.traces import replay

        prim_func = tvm.ir.load_json(func)
        if trace is not None:
            prim_func = replay(trace, prim_func)
        prim_func = prim_func.with_attr("global_symbol", "main").with_attr("tirx.is_scheduled", True)
        module = tvm.IRModule({"main": prim_func})
        executable = tvm.compile(module, code_target(json.loads(target)))
        executable.export_library(library, **({"fcompile": _linker(cross_compiler)} if cross_compiler else {}))

    def connect(self, host: str, port: int, match_key: str, seconds: float, threads: int) -> None:
        """Open a session on the device's server, which ends it after `seconds`; calls use at most `threads` threads."""
        self.disconnect()
        self._place = _Remote(host, port, match_key, seconds)
        self._place.limit_threads(threads)

    def disconnect(self) -> None:
        """Close the session, if there is one."""
        place, self._place, self._inputs = self._place, _Place(), ([], [])
        place.close()

    def drop_lost_device(self) -> bool:
        """Close the session if its device no longer answers, and return whether that is so."""
        if self._place.answers():
            return False
        self.disconnect()
        return True

    def time(
        self, library: str, arguments: list[Any], limit: float, preparation: dict[str, Any] | None = None
    ) -> float:
        """Return the seconds of a call, the least of a few samples; above `limit` there is one sample only.

        `preparation` says what to do before each sample: call a `library` with `arguments`, or move so many `bytes`. A
        sample is one call then; without a preparation it is as many calls as fill some milliseconds.
        """
        call = _Call(self._place, library, self._tensors(arguments), self._load_preparation(preparation))
        (estimate,) = call.seconds()
        if estimate > min(limit, _SLOW_SECONDS):
            return estimate
        return min(call.seconds(estimate, _SAMPLES if preparation is None else _COLD_SAMPLES))

    def compare(
        self, libraries: list[str], arguments: list[list[Any]], preparation: dict[str, Any] | None = None
    ) -> list[float]:
        """Return the seconds of a call of each library, the least of samples that they take in turn.

        They take turns so that other work on the machine slows all of them; it makes times longer, never shorter, hence
        the least. `preparation` says what to do before each sample: call a `library` with `arguments`, or move so many
        `bytes`; None means nothing.
        """
        prepare = self._load_preparation(preparation)
        pairs = zip(libraries, arguments, strict=True)
        calls = [_Call(self._place, library, self._tensors(shapes), prepare) for library, shapes in pairs]
        estimates = [call.seconds()[0] for call in calls]
        rounds = _ROUNDS if max(estimates) < _SLOW_SECONDS else 1
        samples = [
            [min(call.seconds(estimate)) for call, estimate in zip(calls, estimates, strict=True)]
            for _ in range(rounds)
        ]
        return [min(column) for column in zip(*samples, strict=True)]

    def _load_preparation(self, preparation: dict[str, Any] | None) -> "_Preparation | None":
        """The preparation that a request asks for; its library is loaded once."""
        if preparation is None:
            return None
        if "bytes" in preparation:
            return _Preparation(0, preparation["bytes"])
        if self._preparation is None or self._preparation[0] != preparation:
            reader = _load_reader(self._place, preparation["library"], preparation["arguments"])
            self._preparation = (preparation, reader)
        return self._preparation[1]

    def expect(self, reference: str, arguments: list[Any]) -> None:
        """Run `reference` on random input and keep its results."""
        import numpy as np

        inputs = _random_inputs(arguments, signed=True)
        expected = _run(self._place, reference, inputs)
        if not all(np.isfinite(array).all() for array in expected):
            # A logarithm or a root: outside its domain both sides would agree on nothing but NaN.
            inputs = _random_inputs(arguments, signed=False)
            expected = _run(self._place, reference, inputs)
        self._expected = (reference, inputs, expected)

    def check(self, library: str, reference: str, arguments: list[Any]) -> str | None:
        """Return how the results of `library` differ from those of `reference` on random inputs, None if they agree."""
        import numpy as np

        if self._expected[0] != reference:
            self.expect(reference, arguments)
        _, inputs, expected = self._expected
        for index, results in enumerate(zip(_run(self._place, library, inputs), expected, strict=True)):
            result, reference_result = map(_widen, results)
            if not np.issubdtype(reference_result.dtype, np.floating):
                is_equal = np.array_equal(result, reference_result)
            else:
                rtol = 1e-3 if results[1].dtype.itemsize >= 4 else 2e-2
                atol = 0.1 * rtol * float(np.nanmax(np.abs(reference_result), initial=0.0))
                is_equal = np.allclose(result, reference_result, rtol=rtol, atol=atol, equal_nan=True)
            if not is_equal:
                return f"argument {index} differs from the reference's"
        return None

    def _tensors(self, arguments: list[Any]) -> list[Any]:
        if self._inputs[0] != arguments:
            self._inputs = (arguments, [self._place.random(shape, dtype) for shape, dtype in arguments])
        return self._inputs[1]


class _Place:
    """This machine as the place where libraries are loaded and tensors live."""

    def load(self, library: str) -> Any:
        """Load a library and return its module."""
        import tvm

        return tvm.runtime.load_module(library)

    def tensor(self, array: Any) -> Any:
        """Return a tensor with the values of `array`."""
        import tvm

        return tvm.runtime.tensor(array, device=self.device())

    def random(self, shape: list[int], dtype: str) -> Any:
        """Return a tensor of random values."""
        (array,) = _random_inputs([(shape, dtype)], signed=True)
        return self.tensor(array)

    def device(self) -> Any:
        """Return the place's CPU."""
        import tvm

        return tvm.cpu()

    def answers(self) -> bool:
        """Return whether the place is still there."""
        return True

    def close(self) -> None:
        """Leave the place."""


class _Remote(_Place):
    """A device as the place, through a session with its RPC server."""

    def __init__(self, host: str, port: int, match_key: str, seconds: float) -> None:
        from tvm import rpc

        self._session = rpc.connect(host, port, match_key, session_timeout=seconds)
        self._libraries: dict[str, Any] = {}

    def load(self, library: str) -> Any:
        """Send a library there once, because overwriting a loaded library crashes it; load it and return its module."""
        if library not in self._libraries:
            self._session.upload(library)
            self._libraries[library] = self._session.load_module(Path(library).name)
        return self._libraries[library]

    def random(self, shape: list[int], dtype: str) -> Any:
        """Return a tensor of random values, made on the device unless they are indices: sending takes longer."""
        import tvm

        if not dtype.startswith("float"):
            return super().random(shape, dtype)
        try:
            fill = self._session.get_function("tvm.contrib.random.random_fill_for_measure")
        except AttributeError:  # The server has a small runtime, without this function.
            return super().random(shape, dtype)
        tensor = tvm.runtime.empty(shape, dtype, self.device())
        fill(tensor)
        return tensor

    def device(self) -> Any:
        """Return the place's CPU."""
        return self._session.cpu()

    def limit_threads(self, threads: int) -> None:
        """Let calls use at most `threads`; the server's own number stays where it is lower."""
        self._session.get_function("runtime.config_threadpool")(0, threads)

    def answers(self) -> bool:
        """Return whether the session still answers."""
        try:
            self._session.get_function("runtime.NumThreads")()
        except Exception:  # TVM raises errors of many types for a closed connection.
            return False
        return True

    def close(self) -> None:
        """Close the session; otherwise the server would wait until its last object is gone here."""
        self._libraries.clear()
        with contextlib.suppress(Exception):
            self._session.get_function("CloseRPCConnection")()


class _Call:
    """A call of a loaded library with its arguments, after an optional preparation."""

    def __init__(self, place: _Place, library: str, tensors: list[Any], preparation: "_Preparation | None") -> None:
        self._module = place.load(library)
        self._device = place.device()
        self._tensors = tensors
        self._preparation = preparation

    def seconds(self, estimate: float = math.inf, samples: int = 1) -> list[float]:
        """Return `samples` measurements of a call that takes about `estimate` seconds, after one that does not count.

        A sample is the mean of as many calls as fill some milliseconds. With a preparation it is one call, and there
        are more samples of calls that are short.
        """
        each = estimate if self._preparation is None else estimate + self._preparation.seconds
        number, options = max(1, round(_SAMPLE_SECONDS / max(each, 1e-7))), {}
        if self._preparation is not None:
            number, samples, options = 1, samples * min(number, _COLD_SAMPLES), self._preparation.options
        evaluator = self._module.time_evaluator("main", self._device, number=number, repeat=samples, **options)
        return [float(seconds) for seconds in evaluator(*self._tensors).results]


@dataclass(frozen=True)
class _Preparation:
    """A preparation before each sample, which takes about `seconds`: `bytes` to move, or the name of a `function`."""

    seconds: float
    bytes: int = 0
    function: str = ""

    @property
    def options(self) -> dict[str, Any]:
        """The options of TVM's evaluator for it."""
        return {"f_preproc": self.function} if self.function else {"cache_flush_bytes": self.bytes}


def _load_reader(place: _Place, library: str, arguments: list[Any]) -> _Preparation:
    """The preparation that reads as many bytes as the model has weights, and then a call's warm arguments.

    `library` is that of `make_reader`. Within a model another function has just written the warm arguments, each thread
    a part of them.
    """
    import numpy as np
    import tvm_ffi

    data, total = _random_inputs(arguments, signed=True)
    tensors, small = ([place.tensor(array) for array in (values, total)] for values in (data, data[:, :1]))
    main = place.load(library)["main"]
    threads, _, lanes = data.shape

    def prepare(*values: Any) -> None:
        main(*tensors)
        for index in warm_arguments([(value.shape, str(value.dtype)) for value in values]):
            value = values[index]
            steps = np.dtype(str(value.dtype)).itemsize * math.prod(value.shape) // total.nbytes
            if steps:
                main(value._create_view((threads, steps, lanes), "float32"), tensors[1])
        main(*small)  # The threads of the pool are awake, as they are within a model.

    tvm_ffi.register_global_func(_PREPARATION, prepare, override=True)
    start = time.perf_counter()
    main(*tensors)
    return _Preparation(time.perf_counter() - start, function=_PREPARATION)


def _random_inputs(arguments: list[Any], *, signed: bool) -> list[Any]:
    """Return random arrays, the same at every call; integers that may be indices are 0, which every array has."""
    import numpy as np

    generator = np.random.default_rng(0)
    arrays = []
    for shape, dtype in arguments:
        if dtype in ("int32", "int64", "uint32", "uint64"):
            arrays.append(np.zeros(shape, dtype))
        elif dtype == "bool":
            arrays.append(generator.integers(0, 2, shape).astype(bool))
        elif dtype == _BFLOAT16:
            bits = generator.uniform(-1.0 if signed else 0.1, 1.0, shape).astype(np.float32).view(np.uint32)
            arrays.append((bits >> 16).astype(dtype))
        elif "int" in dtype:
            limits = np.iinfo(dtype)
            arrays.append(generator.integers(limits.min, limits.max, shape, dtype, endpoint=True))
        else:
            arrays.append(generator.uniform(-1.0 if signed else 0.1, 1.0, shape).astype(dtype))
    return arrays


def _widen(array: Any) -> Any:
    """An array of bfloat16's bits as float32, any other array as it is."""
    import numpy as np

    return (array.astype(np.uint32) << 16).view(np.float32) if str(array.dtype) == _BFLOAT16 else array


def _run(place: _Place, library: str, inputs: list[Any]) -> list[Any]:
    """Return every argument after a call: comparing all of them needs no knowledge of which are outputs."""
    tensors = [place.tensor(array) for array in inputs]
    place.load(library)["main"](*tensors)
    return [tensor.numpy() for tensor in tensors]


def _linker(command: str) -> Any:
    """The function that links a library with a cross compiler; `command` is its name and its options."""
    from tvm.support import cc

    compiler, *options = shlex.split(command)
    return cc.cross_compiler(compiler, options, get_target_triple=cc.get_target_by_dump_machine(compiler))


def main() -> None:
    """Serve the tuner's requests until it closes the pipe."""
    forbid_torch()
    channel = Channel()
    operations = _Operations()
    if os.environ.get("TVM_USE_RUNTIME_LIB"):
        library.load()  # With its extras, which candidates may call.
        request_amx()
    import tvm  # noqa: F401 -- so that the first request does not pay for it

    channel.send({"ready": True})
    while (request := channel.receive()) is not None:
        operation: Callable[..., Any] = getattr(operations, request["operation"])
        try:
            reply = {"value": operation(**request["arguments"])}
        except Exception as error:
            traceback.print_exc()
            lines = str(error).strip().splitlines() or [""]
            reply = {"error": f"{type(error).__name__}: {lines[-1].strip()}", "is_lost": operations.drop_lost_device()}
        channel.send(reply)


if __name__ == "__main__":
    main()
