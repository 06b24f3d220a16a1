"""Reads ONNX models into Relax: checks the file, names what TVM cannot import, and keeps weights apart."""

import contextlib
import io
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import onnx
import tvm
from tvm import relax

from tvmflow.arrays import Array, in_order
from tvmflow.bundle import TensorSpec
from tvmflow.compiler.graph_importer import GraphImporter, NodeRecord
from tvmflow.compiler.graph_preparation import apply_shapes, constants_to_initializers, expand_functions, load_model
from tvmflow.compiler.hoisting import hoist_weights
from tvmflow.compiler.messages import shorten
from tvmflow.compiler.onnx import Converter, is_static
from tvmflow.compiler.operators.widening import tie
from tvmflow.compiler.refusals import (
    Refusal,
    advise,
    advise_on_error,
    describe_refusals,
    missing_converter,
    mixed_type_refusals,
    type_refusals,
)
from tvmflow.errors import ModelImportError, UnsupportedOperatorError
from tvmflow.onnx_model.graph import nodes_of, standard_opset
from tvmflow.onnx_model.inputs import graph_inputs
from tvmflow.onnx_model.number_types import compute_in_float32, has_type, reads_bits


@dataclass(frozen=True)
class Imported:
    """A model in Relax.

    `main` of `mod` takes the inputs in the order of `inputs`, then the weights, whose names are those of its
    parameters, and returns the outputs in the order of `outputs`. Weights are in `params`, except the transposes of
    others: `transposes` has the names of both. Dimensions are in elements, a string is a symbolic dimension. `smallest`
    has lower bounds of symbolic dimensions, by name: below them a window of a convolution or pooling is larger than its
    data.
    """

    mod: tvm.IRModule
    params: dict[str, Array]
    inputs: tuple[TensorSpec, ...]
    outputs: tuple[TensorSpec, ...]
    smallest: Mapping[str, int] = field(default_factory=dict)
    transposes: Mapping[str, str] = field(default_factory=dict)

    def weights(self) -> dict[relax.Var, Array]:
        """Return all weights by the parameters of `main`."""
        transposes = {name: in_order(self.params[table].T) for name, table in self.transposes.items()}
        values = {**self.params, **transposes}
        return {variable: values[variable.name] for variable in self.mod["main"].params[len(self.inputs) :]}


@dataclass
class Survey:
    """The result of an import that goes on after a node that it refuses: all refusals, and how each node was imported.

    `label` names the file in messages. `free` are the free dimensions, each with the inputs and axes that have it.
    `finish` returns the model; where something is refused, there is none. `inputs` are the variables of the inputs, and
    `params` the variable and the value of each weight, by name. `convert` converts nodes again: it takes a block
    builder, a node and its operands by name, and returns the results by name. `is_operator_error` is true where a
    refused operator has no converter or has a form that is not supported.
    """

    label: str
    refusals: tuple[Refusal, ...]
    nodes: tuple[NodeRecord, ...]
    free: Mapping[str, tuple[tuple[str, int], ...]]
    opset: int
    finish: Callable[[], Imported] = field(repr=False)
    inputs: tuple[relax.Var, ...]
    params: Mapping[str, tuple[relax.Var, Array]]
    convert: Callable[[relax.BlockBuilder, onnx.NodeProto, Mapping[str, relax.Expr]], dict[str, relax.Expr]] = field(
        repr=False
    )
    is_operator_error: bool


def import_onnx(
    path: Path,
    shapes: Mapping[str, Sequence[int | str]] | None = None,
    label: str | None = None,
    operators: Mapping[str, Converter] | None = None,
) -> Imported:
    """Import an ONNX file of opset 7 or later into Relax.

    `shapes` fixes or renames symbolic dimensions of inputs by name: `{"x": (1, 3, 224, 224)}`, `{"x": ("batch", 10)}`.
    Other symbolic dimensions stay symbolic; one without a name is called after its input and axis, as `x_0`. Messages
    call the file `label`, by default its path. `operators` are converters of the caller's own, by domain and operator
    as in `org.example.Twice`; a function of that name in the file is not inlined.

    Raises UnsupportedOperatorError for an operator without a converter, ModelImportError for a file that is damaged,
    for shapes that contradict the model, and for anything else that TVM's importer refuses. The message names all that
    is refused.
    """
    survey = survey_onnx(path, shapes, label, operators)
    if survey.refusals:
        kind = UnsupportedOperatorError if survey.is_operator_error else ModelImportError
        raise kind(f"{survey.label}: {describe_refusals(survey.refusals)}")
    return survey.finish()


def survey_onnx(
    path: Path,
    shapes: Mapping[str, Sequence[int | str]] | None = None,
    label: str | None = None,
    operators: Mapping[str, Converter] | None = None,
) -> Survey:
    """Import an ONNX file of opset 7 or later into Relax, and go on after a node that is refused.

    `shapes` fixes or renames symbolic dimensions of inputs by name. Messages call the file `label`, by default its
    path. `operators` are converters of the caller's own, by domain and operator as in `org.example.Twice`. Raises
    ModelImportError for a file that is damaged and for shapes that contradict the model.
    """
    label = label or str(path)
    own = operators or {}
    model = expand_functions(label, load_model(Path(path), label), own.keys())
    of_types = _compute_in_float32(model)
    graph = model.graph
    inputs = graph_inputs(graph)
    sizes = apply_shapes(label, graph, inputs, shapes or {})
    opset = standard_opset(model) or 1
    of_types += type_refusals(graph)

    def attempt(smallest: Mapping[str, int]) -> tuple[GraphImporter, tvm.IRModule | None, Exception | None]:
        importer = GraphImporter(model, sizes, advise(inputs), own, smallest)
        importer.refusals.extend(of_types)
        try:
            constants_to_initializers(graph)
            with warnings.catch_warnings(), contextlib.redirect_stdout(io.StringIO()):
                warnings.simplefilter("ignore")
                return importer, importer.import_model(opset), None
        except Exception as error:  # TVM raises every kind of exception for graphs that it does not expect.
            return importer, None, error

    importer, mod, error = attempt({})
    if importer.evaluator.lacks_bounds and importer.evaluator.smallest:
        # Nodes that compute shapes stand before those that say how large the inputs are at least.
        importer, mod, error = attempt(importer.evaluator.smallest)
    if error is not None:
        if not importer.records:
            # The inputs already are in the way; the nodes are none the less looked through.
            importer.refusals.extend(missing_converter(node) for node in nodes_of(graph) if not importer.takes(node))
        if not importer.refusals:
            reason = f"TVM cannot import the model: {shorten(error)}"
            advice = advise_on_error(error, "export the model anew with another opset")
            importer.refusals.append(Refusal("", "", reason, advice))
    free: dict[str, list[tuple[str, int]]] = {}
    for value in inputs:
        for axis, dim in enumerate(value.type.tensor_type.shape.dim):
            if dim.dim_param:
                free.setdefault(dim.dim_param, []).append((value.name, axis))
    return Survey(
        label=label,
        refusals=tuple(importer.refusals),
        nodes=tuple(importer.records),
        free={name: tuple(places) for name, places in free.items()},
        opset=opset,
        finish=partial(_imported, mod, importer, inputs),
        inputs=importer.input_variables(),
        params=importer.params(),
        convert=importer.convert_alone,
        is_operator_error=importer.is_operator_error,
    )


def _compute_in_float32(model: onnx.ModelProto) -> list[Refusal]:
    """Let a model in float16 compute in float32; return refusals of nodes that mix the two types.

    Afterwards their operands differ no more.
    """
    if not has_type(model, onnx.TensorProto.FLOAT16) or reads_bits(model):
        return []
    refusals = mixed_type_refusals(model)
    compute_in_float32(model)
    return refusals


def _imported(mod: tvm.IRModule, importer: "GraphImporter", inputs: Sequence[onnx.ValueInfoProto]) -> Imported:
    """The importer's module, with its weights apart: those of the file, then the constants that the importer made."""
    names = [variable.name for variable in mod["main"].params][len(inputs) :]
    mod, constants = hoist_weights(mod)
    params = {name: in_order(importer.params()[name][1]) for name in names} | constants
    transposes = _transposes(params)
    main = mod["main"]
    input_types = [variable.ty for variable in main.params[: len(inputs)]]
    output_types = list(main.ret_ty.fields) if isinstance(main.ret_ty, relax.TupleType) else [main.ret_ty]
    return Imported(
        mod,
        {name: value for name, value in params.items() if name not in transposes},
        tuple(_spec(value.name, ty) for value, ty in zip(inputs, input_types, strict=True)),
        tuple(_spec(value.name, ty) for value, ty in zip(importer.graph.output, output_types, strict=True)),
        importer.evaluator.smallest,
        transposes,
    )


def _transposes(params: Mapping[str, Array]) -> dict[str, str]:
    """The names of matrices that are transposes of earlier ones, with the names of these.

    A model that looks up words in the table by which it scores words has such matrices.
    """
    transposes: dict[str, str] = {}
    others: dict[tuple[int, ...], list[str]] = {}
    for name, value in params.items():
        if value.ndim == 2:
            alike = others.get(value.shape[::-1], [])
            table = next((other for other in alike if tie(value, params[other])), None)
            if table is None:
                others.setdefault(value.shape, []).append(name)
            else:
                transposes[name] = table
    return transposes


def _spec(name: str, ty: relax.TensorType) -> TensorSpec:
    dims = ty.shape.values if isinstance(ty.shape, relax.ShapeExpr) else ["?"] * ty.ndim
    return TensorSpec(name, tuple(int(dim) if is_static(dim) else str(dim) for dim in dims), str(ty.dtype))
