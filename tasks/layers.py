"""Layers: the calls of a bundle's compiled functions in one run, and the nodes of the ONNX model that each computes.

The compiler fuses and rewrites nodes, so that no name leads from a function back to the model. The values do: but for
its error and the order of its axes, the result of a function is a value that ONNX Runtime computes for a node.
"""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import permutations
from typing import TYPE_CHECKING, Any

import numpy as np

from tvmflow.arrays import Array, NamedArrays
from tvmflow.hardware.target import Target, processor
from tvmflow.onnx_model.graph import names_read, node_name, operator_name, scope_of
from tvmflow.onnx_model.session import compute_values
from tvmflow.report.insight import Layer, Level, Peaks
from tvmflow.runtime.profile import Call, CompiledFunction, tensors_of

if TYPE_CHECKING:
    import onnx

# Results of more bytes than this in all are not compared with ONNX Runtime's values, which take as much memory.
_LARGEST_RESULTS = 1 << 30
# The elements of a result by which its value is looked for, and the largest difference between the two: the root mean
# square over the standard deviation of the value. That of two values that have nothing to do with each other is 1.4.
_PROBED, _LARGEST_DIFFERENCE = 128, 0.3
# The axes longer than one that are tried in every order.
_MOST_AXES = 5


def find_layers(
    machine: Any,
    run: Callable[[], object],
    functions: Mapping[str, CompiledFunction],
    calls: Sequence[Call],
    graph: "onnx.ModelProto",
    sample: NamedArrays,
) -> tuple[Layer, ...]:
    """Return the calls of compiled functions that `run` makes in a virtual machine, in their order.

    `run` is called once. `machine` is TVM's virtual machine, `functions` are the bundle's compiled functions by name.
    `calls` are the timed calls of an earlier run, also those of other functions. `graph` is the ONNX model, and
    `sample` the inputs of the run. Raises ExportError when ONNX Runtime cannot run the model.
    """
    calls = [call for call in calls if call.name in functions]
    sizes = sum(4 * math.prod(call.shapes[-1]) for call in calls if call.shapes)
    values = _Values(graph, compute_values(graph, sample) if sizes <= _LARGEST_RESULTS else {})
    observer = _Observer(functions, values)
    machine.set_instrument(observer)
    try:
        run()
    finally:
        machine.set_instrument(None)
    scopes: dict[int, tuple[str, ...]] = {}
    for index, result in reversed(list(enumerate(observer.results))):
        scopes[index] = values.scope(result.nodes) or scopes.get(index, ())
        for source in result.reads:
            # A result that is no value of the model is a part of the layer that reads it.
            scopes[source] = scopes[index]
    return tuple(
        Layer(
            function=call.name,
            rule=functions[call.name].rule,
            scope=scopes[index] or (call.name,),
            operators=tuple(operator_name(node) for node in result.nodes),
            nodes=tuple(node_name(node) for node in result.nodes),
            reads=result.reads,
            shape=call.shapes[-1] if call.shapes else (),
            ms=call.seconds * 1e3,
            gflop=functions[call.name].estimate_operations(call.shapes) / 1e9,
            megabytes=call.bytes / 1e6,
            error=result.error,
        )
        for index, (call, result) in enumerate(zip(calls, observer.results, strict=True))
    )


def measure_peaks(target: Target, threads: int) -> Peaks:
    """Return the peak arithmetic and memory rates of this machine on `threads` threads.

    They are the rates per cycle in the profile of the target's processor times the clock, which is measured.
    """
    from tvmflow.compiler.calibration import measure_clock
    from tvmflow.compiler.machine import machine

    cpu, clock = machine(target), measure_clock(target)
    levels = {"second cache": cpu.second, "third cache": cpu.third}
    caches = [
        Level(
            name=name,
            bytes=float(cache.size * (threads if cache.cores == 1 else 1)),
            gigabytes_per_second=threads * cache.read_rate(threads) * clock / 1e9,
        )
        for name, cache in levels.items()
        if cache is not None
    ]
    memory = Level(
        name="memory", bytes=None, gigabytes_per_second=threads * cpu.memory.read_rate(threads) * clock / 1e9
    )
    return Peaks(
        processor=processor(),
        threads=threads,
        gigahertz=clock / 1e9,
        gflops=2 * threads * cpu.lanes * cpu.vectors.multiply_adds * clock / 1e9,
        levels=(*caches, memory),
    )


@dataclass(frozen=True)
class _Result:
    """A call's result: the calls whose results it reads, the nodes that it computes, and its error (see `Layer`)."""

    reads: tuple[int, ...]
    nodes: "tuple[onnx.NodeProto, ...]"
    error: float | None


@dataclass
class _Observer:
    """The instrument that the virtual machine calls before and after each function; it keeps the results in order."""

    functions: Mapping[str, CompiledFunction]
    values: "_Values"
    results: list[_Result] = field(default_factory=list)
    _writers: dict[int, int] = field(default_factory=dict)

    def __call__(self, func: Any, name: str, before: bool, _result: Any, *args: Any) -> int:
        function = self.functions.get(str(name))
        if function is None or before:
            return 0
        tensors = tensors_of(args)
        pointers = (tensor.data_ptr() for tensor in tensors[: function.inputs])
        reads = {self._writers[pointer] for pointer in pointers if pointer in self._writers}
        results = tensors[function.inputs :]
        nodes, error = (
            self.values.find(max(results, key=lambda tensor: tensor.numel()).numpy()) if results else ((), None)
        )
        for tensor in results:
            self._writers[tensor.data_ptr()] = len(self.results)
        self.results.append(_Result(tuple(sorted(reads)), nodes, error))
        return 0


class _Values:
    """The values of an ONNX model that depend on its inputs; each node is handed out once, to the first that asks."""

    def __init__(self, model: "onnx.ModelProto", values: Mapping[str, Array]) -> None:
        self._nodes = list(model.graph.node)
        self._weights = {item.name: math.prod(item.dims) for item in model.graph.initializer}
        self._producers: dict[str, int] = {}
        variable = {item.name for item in model.graph.input}
        for index, node in enumerate(self._nodes):
            if variable & names_read(node):
                variable.update(node.output)
                self._producers |= dict.fromkeys(node.output, index)
        self._values = {name: values[name] for name in self._producers if name in values}
        self._claims: set[int] = set()

    def scope(self, nodes: "Sequence[onnx.NodeProto]") -> tuple[str, ...]:
        """Return the scope of the node with the most weights, of the last one where none has any; () without nodes."""
        weights = [sum(self._weights.get(name, 0) for name in node.input) for node in nodes]
        return scope_of(nodes[max(range(len(nodes)), key=lambda index: (weights[index], index))]) if nodes else ()

    def find(self, result: Array) -> "tuple[tuple[onnx.NodeProto, ...], float | None]":
        """Return the nodes that compute a result and were not handed out before, and its error, as in `Layer`.

        The error is None, and there are no nodes, for a result that is no value of the model.
        """
        # At random, for places at equal distances may be the same in several orders of the axes.
        places = np.random.default_rng(0).integers(0, result.size, min(result.size, _PROBED))
        ours = result.reshape(-1)[places].astype(np.float64)
        best: tuple[float, int, str, Array] | None = None
        for name, value in self._values.items():
            if value.size != result.size or value.size < 2 or value.dtype.kind not in "fiub":
                continue
            for view in _orders(value):
                theirs = view[np.unravel_index(places, view.shape)].astype(np.float64)
                distance = float(np.max(np.abs(theirs - ours)))
                # Of equal values, as before and after a Reshape, the last one is meant.
                if best is None or (distance, -self._producers[name]) < best[:2]:
                    best = distance, -self._producers[name], name, view
        if best is None:
            return (), None
        expected, actual = best[3].reshape(-1).astype(np.float64), result.reshape(-1).astype(np.float64)
        difference = np.abs(expected - actual)
        if not float(np.sqrt(np.mean(difference**2))) <= _LARGEST_DIFFERENCE * float(np.std(expected)):
            return (), None
        nodes = sorted(self._take(self._producers[best[2]]))
        largest = float(np.max(np.abs(expected)))
        return tuple(self._nodes[index] for index in nodes), float(np.max(difference)) / largest if largest else None

    def _take(self, last: int) -> Iterator[int]:
        """Yield a node and those that it depends on, without those that were handed out before."""
        waiting = [last]
        while waiting:
            index = waiting.pop()
            if index not in self._claims:
                self._claims.add(index)
                yield index
                names = names_read(self._nodes[index])
                waiting += [self._producers[name] for name in names if name in self._producers]


def _orders(value: Array) -> Iterator[Array]:
    """Yield a value with its axes in every order, without axes of length one; the first is its own order."""
    squeezed = value.squeeze()
    if squeezed.ndim > _MOST_AXES:
        yield squeezed
        return
    for axes in permutations(range(squeezed.ndim)):
        yield squeezed.transpose(axes)
