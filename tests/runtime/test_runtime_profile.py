"""Profiles and traces of calls within calls, as those of loops and branches, in a virtual machine without a model."""

import hashlib
import json
import threading
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tvmflow.runtime.profile import group_calls, measure_calls, record_trace

INNER = "tests.profile.inner"


def _nested(inner: Callable[[Any], Any]) -> tuple[Any, Callable[[], object]]:
    """A virtual machine and its run: `main` calls `middle` once, and that calls `inner` twice."""
    import tvm
    from tvm import relax

    tvm.register_global_func(INNER, inner, override=True)
    builder = relax.ExecBuilder()
    for name, calls in (("middle", [INNER, INNER]), ("main", ["middle"])):
        with builder.function(name, num_inputs=1):
            for call in calls:
                builder.emit_call(call, args=[builder.r(0)], dst=builder.r(0))
            builder.emit_ret(builder.r(0))
    machine = relax.VirtualMachine(builder.get(), tvm.cpu())
    return machine, partial(machine["main"], tvm.runtime.tensor(np.zeros((2, 3), np.float32)))


def test_a_call_has_the_time_that_the_calls_within_it_do_not_have() -> None:
    seconds: list[float] = []

    def inner(value: Any) -> Any:
        start = time.perf_counter()
        while time.perf_counter() < start + 2e-3:
            pass
        return value

    machine, run = _nested(inner)

    def timed_run() -> None:
        start = time.perf_counter()
        run()
        seconds.append(time.perf_counter() - start)

    calls = measure_calls(machine, timed_run, repeats=2)
    assert [(call.name, call.shapes, call.bytes) for call in calls] == [
        ("middle", ((2, 3),), 24),
        (INNER, ((2, 3),), 24),
        (INNER, ((2, 3),), 24),
    ]
    assert sum(call.seconds for call in calls) <= min(seconds)
    (first, second) = group_calls(calls, {INNER})
    assert (first.name, first.calls, second.name) == (INNER, 2, "(virtual machine)")
    assert first.seconds == pytest.approx(calls[1].seconds + calls[2].seconds)


def test_a_run_that_fails_within_a_call_leaves_the_next_profile_whole() -> None:
    results = [ValueError("a broken kernel")]

    def inner(value: Any) -> Any:
        if results:
            raise results.pop()
        return value

    machine, run = _nested(inner)
    with pytest.raises(ValueError, match="a broken kernel"):
        measure_calls(machine, run, repeats=1)
    assert [call.name for call in measure_calls(machine, run, repeats=1)] == ["middle", INNER, INNER]


def test_the_time_of_a_worker_stands_once_at_the_innermost_call(tmp_path: Path) -> None:
    is_over = threading.Event()

    def spend() -> None:
        while not is_over.is_set():
            hashlib.sha256(bytes(100_000)).digest()

    worker = threading.Thread(target=spend)
    worker.start()
    clock = time.pthread_getcpuclockid(worker.ident or 0)

    def inner(value: Any) -> Any:
        before = time.clock_gettime(clock)
        while time.clock_gettime(clock) == before:
            pass
        return value

    try:
        record_trace(*_nested(inner), "nested").write(tmp_path / "trace.json")
    finally:
        is_over.set()
        worker.join()
    events = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    (thread,) = [event["tid"] for event in events if event.get("args", {}).get("name") == f"thread {worker.native_id}"]
    slices = [event for event in events if event["ph"] == "X"]
    assert [event["name"] for event in slices if event["tid"] == thread] == [INNER, INNER]
    assert [event["name"] for event in slices if event["tid"] == 1] == [INNER, INNER, "middle"]
