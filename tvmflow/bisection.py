"""The search for the first node of an ONNX model that is compiled wrongly, and for a small model that shows it."""

import tempfile
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import onnx
from onnx import numpy_helper

from tvmflow import npz
from tvmflow.arrays import Array
from tvmflow.compiler import BuildOptions, build, import_onnx
from tvmflow.compiler.onnx import Converter
from tvmflow.errors import ExportError, TvmflowError
from tvmflow.hardware.target import Target
from tvmflow.onnx_model import double_precision
from tvmflow.onnx_model.external_data import save
from tvmflow.onnx_model.graph import names_read, node_name, operator_name
from tvmflow.onnx_model.session import compute_values
from tvmflow.tolerance import Bounds, largest_error

# Values that the importer reads must be constants: shapes and axes, which have one dimension and few elements.
_LARGEST_SHAPE = 64

_Program = Callable[[Mapping[str, Array]], dict[str, Array]]


@dataclass(frozen=True)
class Bisection:
    """The result of a search: a node whose result is out of bounds though all values that it reads are within them.

    `operator` and `node` name it. `error` is the largest absolute error of its output `output`; infinite where the
    shapes differ. `reproduction` is a small model of `nodes` nodes that shows the error: on `inputs` ONNX Runtime
    returns `expected`, and the compiled model differs from this by more than the bounds. The search compiled `builds`
    models.

    `compiled_error` and `onnxruntime_error` are the largest differences of both from the small model's `output` in
    float64; None where that cannot be computed.
    """

    operator: str
    node: str
    output: str
    error: float
    nodes: int
    reproduction: onnx.ModelProto
    inputs: Mapping[str, Array]
    expected: Mapping[str, Array]
    builds: int
    compiled_error: float | None
    onnxruntime_error: float | None

    def save(self, folder: Path) -> None:
        """Write `model.onnx`, `inputs.npz` and `expected.npz` into a folder; create the folder if it is missing."""
        folder.mkdir(parents=True, exist_ok=True)
        save(self.reproduction, folder / "model.onnx")
        npz.write(folder / "inputs.npz", self.inputs)
        npz.write(folder / "expected.npz", self.expected)


def bisect(
    model: onnx.ModelProto,
    samples: Iterable[Mapping[str, Array]],
    target: Target,
    bounds: Bounds,
    options: BuildOptions | None = None,
    report: Callable[[str], None] = lambda _: None,
    operators: Mapping[str, Converter] | None = None,
) -> Bisection | None:
    """Find the first node whose compiled result differs from ONNX Runtime's by more than the bounds.

    `samples` are inputs by name; the search is on the first of them on which an output is out of bounds. Samples after
    the first may have sizes that ONNX Runtime does not take, and are left out then. The search compiles parts of the
    model that end at one node, about twice the logarithm of the number of nodes. It follows one such output; `report`
    gets a line for each part. `options` of the build are by default those of `BuildOptions`. `operators` are converters
    of the caller's own, by domain and operator as in `org.example.Twice`. Returns None if all outputs are within the
    bounds, or if the first output beyond them is no node's result. Raises ExportError where ONNX Runtime cannot run the
    model, and the compiler's errors where the whole model cannot be compiled.
    """
    run: _Program | None = None
    for inputs in samples:
        try:
            search = _Search(model, inputs, target, bounds, options or BuildOptions(), report, operators or {})
        except ExportError:
            if run is None:
                raise
            continue
        whole, fed = search.part(range(len(search.nodes)), search.graph_outputs)
        run = run or search.compile(whole)
        outputs = search.errors_of(whole, fed, run)
        first = next((name for name in search.graph_outputs if outputs.get(name) is not None), None)
        if first in search.producers:
            return _bisection(search, search.producers[first])
    return None


def _bisection(search: "_Search", last: int) -> Bisection:
    """Find the first node whose result is out of bounds, as that of the node at `last` is, and a small model of it."""
    place = search.first_bad(last)
    nodes = search.smallest(place)
    part, fed = search.part(nodes, search.results_of(place))
    run = search.compile(part)
    errors = search.errors_of(part, fed, run)
    output, error = next((name, error) for name, error in errors.items() if error is not None)
    node, in_double = search.nodes[place], double_precision.compute(part, fed)
    exact = None if in_double is None else in_double[output]
    return Bisection(
        operator=operator_name(node),
        node=node_name(node),
        output=output,
        error=error,
        nodes=len(part.graph.node),
        reproduction=part,
        inputs=fed,
        expected={value.name: search.values[value.name] for value in part.graph.output},
        builds=search.builds,
        compiled_error=None if exact is None else largest_error(exact, run(fed)[output]),
        onnxruntime_error=None if exact is None else largest_error(exact, search.values[output]),
    )


class _Search:
    """The model, the values that ONNX Runtime computes for all of its nodes, and the parts that were compiled."""

    def __init__(
        self,
        model: onnx.ModelProto,
        inputs: Mapping[str, Array],
        target: Target,
        bounds: Bounds,
        options: BuildOptions,
        report: Callable[[str], None],
        operators: Mapping[str, Converter],
    ) -> None:
        self.builds = 0
        self._model, self._inputs, self._target = model, inputs, target
        self._bounds, self._options, self._report, self._operators = bounds, options, report, operators
        graph = model.graph
        self.nodes: list[onnx.NodeProto] = list(graph.node)
        self.graph_outputs = [value.name for value in graph.output]
        self.producers = {name: place for place, node in enumerate(self.nodes) for name in node.output if name}
        self._initializers = {tensor.name: tensor for tensor in graph.initializer}
        self._declared = {value.name: value for value in (*graph.value_info, *graph.output, *graph.input)}
        constant = set(self._initializers)
        self._constant_nodes: set[int] = set()
        for place, node in enumerate(self.nodes):
            if names_read(node) <= constant:
                self._constant_nodes.add(place)
                constant.update(node.output)
        self._constant = constant
        self._is_bad: dict[int, bool] = {}
        self.values = compute_values(model, inputs)

    def results_of(self, place: int) -> list[str]:
        """Return the names of a node's results that are tensors."""
        return [name for name in self.nodes[place].output if name in self.values]

    def ancestors(self, place: int) -> set[int]:
        """Return the indices of the nodes that a node's results depend on, and its own."""
        nodes, waiting = {place}, [place]
        while waiting:
            sources = self._sources(waiting.pop()) - nodes
            nodes |= sources
            waiting += sources
        return nodes

    def _sources(self, place: int) -> set[int]:
        """The nodes whose results a node reads."""
        return {self.producers[name] for name in names_read(self.nodes[place]) if name in self.producers}

    def first_bad(self, place: int) -> int:
        """Return the first node out of bounds among those that `place`, a node out of bounds, depends on."""
        while True:
            self._is_bad[place] = True
            places = sorted(self.ancestors(place) - self._constant_nodes)
            low, high = -1, len(places) - 1
            while high - low > 1:
                middle = (low + high) // 2
                low, high = (low, middle) if self.is_bad(places[middle]) else (middle, high)
            place = places[high]
            # Another branch may have left the bounds before this node.
            sources = sorted(self._sources(place))
            earlier = next((item for item in sources if item not in self._constant_nodes and self.is_bad(item)), None)
            if earlier is None:
                return place
            place = earlier

    def is_bad(self, place: int) -> bool:
        """Whether a node's results are out of bounds when the model up to this node is compiled."""
        if place not in self._is_bad:
            names = self.results_of(place)
            self._is_bad[place] = bool(names) and self._shows(self.ancestors(place), names)
        return self._is_bad[place]

    def smallest(self, place: int) -> set[int]:
        """Return the nodes within the smallest distance before a node out of bounds that still show the error."""
        names, whole = self.results_of(place), self.ancestors(place) - self._constant_nodes
        distance = 0
        near = {place}
        while near != whole and not self._shows(near, names):
            distance += 1
            near |= {source for item in near for source in self._sources(item)} & whole
        return near

    def _shows(self, places: Collection[int], names: Sequence[str]) -> bool:
        """Whether a part is out of bounds. A part that cannot be compiled by itself shows nothing."""
        try:
            return any(error is not None for error in self.errors(places, names).values())
        except TvmflowError:
            return False

    def errors(self, places: Iterable[int], names: Sequence[str]) -> dict[str, float | None]:
        """Return the largest error of each of these results of a part, None for one within the bounds."""
        return self.errors_of(*self.part(places, names))

    def errors_of(
        self, part: onnx.ModelProto, fed: Mapping[str, Array], run: _Program | None = None
    ) -> dict[str, float | None]:
        """Return the largest error of each output of a part on its inputs, None for an output within the bounds.

        `run` is the compiled part; without it, the part is compiled.
        """
        actual = (run or self.compile(part))(fed)
        return {
            name: None if self._bounds.is_met(self.values[name], array) else largest_error(self.values[name], array)
            for name, array in actual.items()
            if name in self.values
        }

    def compile(self, part: onnx.ModelProto) -> _Program:
        """Compile a part, and return what runs it in this process: a function of its inputs to its outputs, by name."""
        self.builds += 1
        last = part.graph.node[-1]
        self._report(f"{self.builds}: {len(part.graph.node)} nodes to {last.op_type} {last.name or last.output[0]!r}")
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "model.onnx"
            save(part, path)
            imported = import_onnx(path, label="the part of the model", operators=self._operators)
        program = build(imported, self._target, self._options).load()
        names = [value.name for value in part.graph.output]

        def run(fed: Mapping[str, Array]) -> dict[str, Array]:
            arrays = program.run(*(np.asarray(fed[spec.name], order="C") for spec in imported.inputs))
            return dict(zip(names, arrays, strict=True))

        return run

    def part(self, places: Iterable[int], names: Sequence[str]) -> tuple[onnx.ModelProto, dict[str, Array]]:
        """Return the model of these nodes that computes these results, and the values of its inputs.

        Constants that the nodes read, and the nodes that compute them, belong to the part. Small vectors of integers
        are constants there too.
        """
        own_places = set(places) - self._constant_nodes
        reads = {name for place in own_places for name in names_read(self.nodes[place])}
        constants = {self.producers[name] for name in reads if self.producers.get(name) in self._constant_nodes}
        for place in [*constants, *({self.producers[name] for name in names} & self._constant_nodes)]:
            constants |= self.ancestors(place)
        nodes = [self.nodes[place] for place in sorted(own_places | constants)]
        results = {name for node in nodes for name in node.output}
        outside = {name for node in nodes for name in names_read(node)} - results
        part = onnx.ModelProto()
        part.CopyFrom(self._model)
        graph = part.graph
        for field in ("node", "initializer", "input", "output", "value_info"):
            graph.ClearField(field)
        graph.node.extend(nodes)
        feeds: dict[str, Array] = {}
        for name in sorted(outside):
            if name in self._initializers:
                graph.initializer.append(self._initializers[name])
            elif name in self._inputs:
                graph.input.append(self._declared[name])
                feeds[name] = self._inputs[name]
            elif _is_shape(value := self.values[name]):
                graph.initializer.append(numpy_helper.from_array(value, name))
            else:
                element = onnx.helper.np_dtype_to_tensor_dtype(value.dtype)
                graph.input.append(onnx.helper.make_tensor_value_info(name, element, value.shape))
                feeds[name] = value
        for name in names:
            value = self.values[name]
            element = onnx.helper.np_dtype_to_tensor_dtype(value.dtype)
            unknown = onnx.helper.make_tensor_value_info(name, element, [None] * value.ndim)
            graph.output.append(self._declared.get(name, unknown))
        inner = sorted((results - set(names)) & self._declared.keys() & self.values.keys())
        graph.value_info.extend(self._declared[name] for name in inner)
        return part, feeds


def _is_shape(value: Array) -> bool:
    return value.dtype.kind in "iub" and value.ndim <= 1 and value.size <= _LARGEST_SHAPE
