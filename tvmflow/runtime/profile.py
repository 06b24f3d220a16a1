"""A profile of a run: the time of each function that TVM's virtual machine calls, measured by an instrument."""

import tempfile
import threading
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

from tvmflow.bundle import Manifest, extract, read_manifest
from tvmflow.runtime.uri import locate
from tvmflow.trace import Trace

RULE = "schedule_rule"
"""The attribute that names, in a bundle's `mod.json`, the rule that scheduled a function."""
# The function of the virtual machine that allocates memory; its second argument is the number of bytes, as a shape.
_ALLOCATION = "vm.builtin.alloc_storage"
MACHINE = "(virtual machine)"
"""The name of the profile's entry for the virtual machine's own work between the compiled functions."""


@dataclass(frozen=True)
class Call:
    """A call of a run: the function's name, its seconds, and the shapes and bytes of its arrays, inputs first.

    `bytes` is the sum over all arrays. `seconds` leaves out the calls that the function itself makes.
    """

    name: str
    shapes: tuple[tuple[int, ...], ...]
    bytes: int
    seconds: float


@dataclass(frozen=True)
class CompiledFunction:
    """A compiled function of a bundle: the rule that scheduled it ("" for none), and how many arrays it reads.

    `function` is the function before it was scheduled, TVM's PrimFunc.
    """

    rule: str
    inputs: int
    function: Any = field(repr=False, compare=False)

    def estimate_operations(self, shapes: Sequence[Sequence[int]]) -> float:
        """Return an estimate of the floating-point operations of a call whose arrays have these shapes, inputs first.

        It is 0 where they cannot be counted.
        """
        return estimate_operations(self.function, shapes)


@dataclass(frozen=True)
class FunctionTime:
    """A compiled function in one run: its number of calls, and the seconds and bytes (read and written) of all of them.

    `shapes` are the shapes of the arrays in its first call: the inputs, then the results.
    """

    name: str
    calls: int
    seconds: float
    bytes: int
    shapes: tuple[tuple[int, ...], ...]


def measure_functions(
    machine: Any,
    run: Callable[[], object],
    names: Collection[str],
    repeats: int,
    synchronize: Callable[[], object] = lambda: None,
) -> tuple[FunctionTime, ...]:
    """Time the functions that `run` calls in a virtual machine; return them, the slowest first.

    `names` are the compiled functions; all other functions are one entry, MACHINE. See `measure_calls` for the other
    parameters.
    """
    return group_calls(measure_calls(machine, run, repeats, synchronize), names)


def measure_calls(
    machine: Any, run: Callable[[], object], repeats: int, synchronize: Callable[[], object] = lambda: None
) -> tuple[Call, ...]:
    """Time all calls that `run` makes in a virtual machine (TVM's `VirtualMachine`); return them in their order.

    These are calls of compiled functions and of the virtual machine's own. `run` is called `repeats` times, and must
    make the same calls each time. The time of a call is the smallest of these runs, so that other load hardly changes
    it; it leaves out the calls within the call. `synchronize` is called after each call, to wait for a device that
    still works then. An instrument that `machine` had before is removed.
    """
    recorder = _Recorder(synchronize)
    machine.set_instrument(recorder)
    try:
        for _ in range(repeats):
            recorder.restart()
            run()
    finally:
        machine.set_instrument(None)
    return tuple(recorder.calls)


def record_trace(
    machine: Any, run: Callable[[], object], name: str, synchronize: Callable[[], object] = lambda: None
) -> Trace:
    """Call `run` once; return the trace of all calls in the virtual machine, also of the machine's own functions.

    The trace shows the calls on the calling thread. For each other thread it shows how much processor time the thread
    used during an innermost call, including the time in which it looked for work. A curve shows the bytes that the
    virtual machine has allocated in the run so far. `name` is the name of the trace; see `measure_calls` for the other
    parameters.
    """
    tracer = _Tracer(Trace(name), synchronize)
    machine.set_instrument(tracer)
    try:
        run()
    finally:
        machine.set_instrument(None)
    return tracer.trace


def compiled_functions(path_or_uri: Path | str, manifest: Manifest) -> dict[str, CompiledFunction]:
    """Return the compiled functions of a bundle by name.

    A release at `path_or_uri` has several bundles: the one with this `manifest` is read. Needs the whole package tvm,
    not its runtime library alone. Raises BundleError for a damaged bundle, StoreError when a release cannot be fetched.
    """
    import tvm

    files = locate(path_or_uri)
    file = next(file for file in files if read_manifest(file) == manifest)
    with tempfile.TemporaryDirectory(prefix="tvmflow-") as folder:
        extract(file, Path(folder))
        return find_functions(tvm.ir.load_json((Path(folder) / "mod.json").read_text()))


def find_functions(lowered: Any) -> dict[str, CompiledFunction]:
    """Return the compiled functions of a lowered module (TVM's IRModule) by name."""
    import tvm

    inputs: dict[str, int] = {}

    def count_inputs(node: Any) -> None:
        if isinstance(node, tvm.relax.Call) and node.op == call_tir:
            inputs[str(node.args[0].name_hint)] = len(node.args[1].fields)

    call_tir = tvm.ir.Op.get("relax.call_tir")
    functions = {str(variable.name_hint): function for variable, function in lowered.functions_items()}
    for function in functions.values():
        if isinstance(function, tvm.relax.Function):
            tvm.relax.analysis.post_order_visit(function, count_inputs)
    return {
        name: CompiledFunction(
            str((function.attrs or {}).get(RULE, "")),
            inputs.get(name, len(function.params) - 1),
            function,
        )
        for name, function in functions.items()
        if isinstance(function, tvm.tirx.PrimFunc)
    }


def estimate_operations(function: Any, shapes: Sequence[Sequence[int]] = ()) -> float:
    """Return an estimate of the floating-point operations of a call of an unscheduled function (TVM's PrimFunc).

    `shapes` are those of the arrays of the call, in the order of the function's parameters; they give symbolic sizes.
    Without them a loop of symbolic length counts as one iteration. The estimate is 0 if TVM cannot count the
    operations, as in a tensor intrinsic, and where a loop's length does not follow from the shapes.
    """
    import tvm

    arrays = [parameter for parameter in function.params if hasattr(parameter, "shape")]
    sizes = {
        dimension: size
        for array, shape in zip(arrays, shapes, strict=False)
        for dimension, size in zip(array.shape, shape, strict=False)
        if isinstance(dimension, tvm.tirx.Var)
    }
    try:
        body = _bind_sizes(function.body, sizes) if sizes else function.body
        return float(tvm.s_tir.analysis.estimate_tir_flops(tvm.IRModule({"main": function.with_body(body)})))
    except Exception:  # TVM raises many types for operations that it cannot count.
        return 0.0


def _bind_sizes(stmt: Any, sizes: Mapping[Any, int]) -> Any:
    """A statement whose loops have the lengths that follow from these values of variables; raises ValueError else."""
    from tvm import sym, tirx
    from tvm.s_tir import SBlock, SBlockRealize

    analyzer = sym.Analyzer()
    for variable, size in sizes.items():
        analyzer.bind(variable, tirx.const(size, variable.ty.dtype))

    def bind(stmt: Any) -> Any:
        if isinstance(stmt, tirx.SeqStmt):
            return tirx.SeqStmt([bind(part) for part in stmt.seq])
        if isinstance(stmt, tirx.For):
            extent = analyzer.simplify(stmt.extent)
            if not isinstance(extent, tirx.IntImm):
                raise ValueError(f"a loop of unknown length {stmt.extent}")
            return tirx.For(stmt.loop_var, stmt.min, extent, stmt.kind, bind(stmt.body), stmt.thread_binding)
        if isinstance(stmt, SBlockRealize):
            block = stmt.block
            parts = (block.iter_vars, block.reads, block.writes, block.name_hint, bind(block.body), block.init)
            return SBlockRealize(
                stmt.iter_values, stmt.predicate, SBlock(*parts, block.alloc_buffers, block.match_buffers)
            )
        if isinstance(stmt, tirx.IfThenElse):
            other = None if stmt.else_case is None else bind(stmt.else_case)
            return tirx.IfThenElse(stmt.condition, bind(stmt.then_case), other)
        return stmt

    return bind(stmt)


@dataclass
class _OpenCall:
    """A call that has begun and not ended: its place in the run, its start, and the seconds of the calls within it."""

    position: int
    start: float
    inner_seconds: float = 0.0


class _Recorder:
    """The instrument that the virtual machine calls before and after each function."""

    def __init__(self, synchronize: Callable[[], object]) -> None:
        self.calls: list[Call] = []
        self._synchronize = synchronize
        self._position = 0
        # Each is within the one before it.
        self._open: list[_OpenCall] = []

    def restart(self) -> None:
        """Begin a run: the next call is the first one of a run."""
        self._position = 0

    def __call__(self, func: Any, name: str, before: bool, _result: Any, *args: Any) -> int:
        if before:
            if self._position == len(self.calls):
                tensors = tensors_of(args)
                shapes = tuple(tuple(int(dim) for dim in value.shape) for value in tensors)
                moved_bytes = sum(int(np.prod(value.shape)) * np.dtype(str(value.dtype)).itemsize for value in tensors)
                self.calls.append(Call(str(name), shapes, moved_bytes, float("inf")))
            self._open.append(_OpenCall(self._position, time.perf_counter()))
            self._position += 1
            return 0
        self._synchronize()
        ended = self._open.pop()
        seconds = time.perf_counter() - ended.start
        if self._open:
            self._open[-1].inner_seconds += seconds
        call = self.calls[ended.position]
        self.calls[ended.position] = replace(call, seconds=min(call.seconds, seconds - ended.inner_seconds))
        return 0


class _Tracer:
    """The instrument that adds each call to a trace."""

    def __init__(self, trace: Trace, synchronize: Callable[[], object]) -> None:
        self.trace = trace
        self._synchronize = synchronize
        caller = threading.get_native_id()
        tasks = Path("/proc/self/task")
        others = sorted(int(task.name) for task in tasks.iterdir()) if tasks.is_dir() else []
        # Linux numbers the clock of a thread's processor time so (clock_getcpuclockid).
        self._clocks = {f"thread {task}": ~task << 3 | 6 for task in others if task != caller}
        self._caller = f"thread {caller}, the caller"
        self._allocated_bytes = 0
        self._starts: list[tuple[float, dict[str, float]]] = []
        self._is_innermost = False

    def __call__(self, func: Any, name: str, before: bool, _result: Any, *args: Any) -> int:
        if before:
            self._is_innermost = True
            used_before = self._processor_seconds()
            self._starts.append((time.perf_counter(), used_before))
            return 0
        self._synchronize()
        end = time.perf_counter()
        start, used_before = self._starts.pop()
        shapes = " ".join("x".join(map(str, value.shape)) or "scalar" for value in tensors_of(args))
        self.trace.add_slice(self._caller, str(name), start, end - start, shapes=shapes)
        # A worker's time stands at the innermost of calls within calls, once.
        for thread, used in self._processor_seconds().items() if self._is_innermost else ():
            seconds = min(used - used_before.get(thread, used), end - start)
            if seconds > 0:
                self.trace.add_slice(thread, str(name), start, seconds)
        self._is_innermost = False
        if name == _ALLOCATION:
            self._allocated_bytes += int(np.prod(args[1]))
            self.trace.add_count("allocated bytes", end, self._allocated_bytes)
        return 0

    def _processor_seconds(self) -> dict[str, float]:
        """The processor time of each other thread so far; without threads that have ended."""
        seconds = {}
        for thread, clock in self._clocks.items():
            with suppress(OSError):
                seconds[thread] = time.clock_gettime(clock)
        return seconds


def tensors_of(args: Sequence[Any]) -> list[Any]:
    """Return the tensors among the arguments of a call in the virtual machine."""
    return [value for value in args if hasattr(value, "shape") and hasattr(value, "dtype")]


def group_calls(calls: Sequence[Call], names: Collection[str]) -> tuple[FunctionTime, ...]:
    """Add up the calls of each function and return the sums, the slowest first.

    All functions that are not in `names` are one entry, MACHINE, with 0 bytes and no shapes.
    """
    groups: dict[str, list[Call]] = {}
    for call in calls:
        groups.setdefault(call.name if call.name in names else MACHINE, []).append(call)
    functions = [
        FunctionTime(
            name=name,
            calls=len(group),
            seconds=sum(call.seconds for call in group),
            bytes=sum(call.bytes for call in group) if name in names else 0,
            shapes=group[0].shapes if name in names else (),
        )
        for name, group in groups.items()
    ]
    return tuple(sorted(functions, key=lambda function: -function.seconds))
