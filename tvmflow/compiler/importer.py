"""Reads ONNX models into Relax: checks the file, names what TVM cannot import, and keeps weights apart."""

import contextlib
import io
import math
import warnings
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from difflib import get_close_matches
from pathlib import Path
from typing import Any, Literal

import numpy as np
import onnx
import onnx.inliner
import tvm
from onnx import numpy_helper
from tvm import relax, tirx
from tvm.relax.frontend.onnx import onnx_frontend

from tvmflow.bundle import TensorSpec
from tvmflow.compiler.messages import shorten
from tvmflow.compiler.onnx import (
    BROADCASTING,
    CONTROL,
    CONVERTERS,
    FOLDED,
    NOT_STANDARD,
    TAKES_SIZES,
    Converter,
    FreeSizeError,
    Node,
    UnsupportedFormError,
    const,
    is_static,
)
from tvmflow.compiler.onnx.broadcasting import agree, agree_along, agree_but_for, agree_in_product, cast_to
from tvmflow.compiler.onnx.control import Value
from tvmflow.compiler.onnx.sizes import NotEvaluatedError, Quotient, SizeEvaluator, Sizes, materialise, run_reference
from tvmflow.compiler.onnx.values import dims_of
from tvmflow.errors import ModelImportError, UnsupportedOperatorError
from tvmflow.onnx_domains import with_own_domain
from tvmflow.onnx_graph import inner_nodes, nodes_of, standard_opset
from tvmflow.onnx_inputs import graph_inputs, name_free_dimensions
from tvmflow.onnx_outputs import drop_zip_maps

# Floats of 8 bits or fewer and integers of fewer than 8, with which TVM computes wrongly or not at all.
_SMALL_TYPES = {
    number
    for name, number in onnx.TensorProto.DataType.items()
    if name.startswith(("FLOAT8", "FLOAT4", "FLOAT6")) or name in ("INT4", "UINT4", "INT2", "UINT2")
}
# The operators of the standard that TVM's importer takes. It does not look at domains.
_STANDARD = onnx_frontend._get_convert_map().keys() - NOT_STANDARD | {"Constant"}
# The operators of ONNX Runtime on tensors in blocks of channels.
_LAYOUT_DOMAIN = "com.microsoft.nchwc"
# Tensors with fewer elements stay in the program: scalars, shapes and axes steer the import itself.
_SMALLEST_WEIGHT = 17
# Tensors of integers with fewer elements are tables of shapes and positions rather than weights.
_SMALLEST_INTEGER_WEIGHT = 4097


@dataclass(frozen=True)
class Imported:
    """A model in Relax.

    `main` of `mod` takes the inputs in the order of `inputs`, then the weights in the order of `params`, and returns
    the outputs in the order of `outputs`. Dimensions are in elements, a string is a symbolic dimension.
    """

    mod: tvm.IRModule
    params: dict[str, np.ndarray[Any, Any]]
    inputs: tuple[TensorSpec, ...]
    outputs: tuple[TensorSpec, ...]


@dataclass(frozen=True)
class Refusal:
    """Why a model cannot be imported.

    `operator` and `node` name the node in the way, and are empty where the file as a whole is. `reason` and `advice`
    are clauses without a full stop.
    """

    operator: str
    node: str
    reason: str
    advice: str

    @property
    def where(self) -> str:
        """The operator and the node, in words; empty where the file as a whole is in the way."""
        return f"operator {self.operator}, node {self.node!r}" if self.operator else ""


@dataclass(frozen=True)
class NodeRecord:
    """How one node of the graph was imported.

    `inputs` are its operands in Relax, by name. A `folded` node has a result that is known at import, so no code is
    generated for it. A node that fails because it reads what a refused node would compute is `unexamined`.
    """

    node: onnx.NodeProto
    inputs: Mapping[str, relax.Expr]
    status: Literal["converted", "folded", "refused", "unexamined"]
    refusal: Refusal | None = None


@dataclass
class Survey:
    """An import that goes on after a node that it refuses: all refusals at once, and how every node was imported.

    `free` are the free dimensions, each with the inputs and axes that have it. `imported` is the model, None where
    something is refused. `convert` converts nodes again: it takes a block builder, a node and its operands, and returns
    the results by name.
    """

    label: str
    refusals: tuple[Refusal, ...]
    nodes: tuple[NodeRecord, ...]
    free: Mapping[str, tuple[tuple[str, int], ...]]
    opset: int
    imported: Imported | None
    inputs: tuple[relax.Var, ...]
    params: Mapping[str, tuple[relax.Var, Any]]
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
    if survey.imported is None:
        kind = UnsupportedOperatorError if survey.is_operator_error else ModelImportError
        raise kind(f"{survey.label}: {describe_refusals(survey.refusals)}")
    return survey.imported


def survey_onnx(
    path: Path,
    shapes: Mapping[str, Sequence[int | str]] | None = None,
    label: str | None = None,
    operators: Mapping[str, Converter] | None = None,
) -> Survey:
    """Import an ONNX file as `import_onnx` does, and go on after what is refused.

    Raises ModelImportError for a file that is damaged and for shapes that contradict the model.
    """
    label = label or str(path)
    own = operators or {}
    model = _expand_functions(label, _load(Path(path), label), own.keys())
    graph = model.graph
    inputs = graph_inputs(graph)
    sizes = _apply_shapes(label, graph, inputs, shapes or {})
    opset = standard_opset(model) or 1
    importer = _Importer(model, sizes, _advice(inputs), own)
    importer.refusals.extend(_type_refusals(graph))
    output = io.StringIO()
    mod: tvm.IRModule | None = None
    try:
        _constants_to_initializers(graph)
        with warnings.catch_warnings(), contextlib.redirect_stdout(output):
            warnings.simplefilter("ignore")
            mod = importer.import_model(opset)
    except Exception as error:  # TVM raises every kind of exception for graphs that it does not expect.
        if not importer.records:
            # The inputs already are in the way; the nodes are none the less looked through.
            importer.refusals.extend(_missing_converter(node) for node in nodes_of(graph) if not importer.takes(node))
        if not importer.refusals:
            importer.refusals.append(Refusal("", "", f"TVM cannot import the model: {shorten(error)}", _advice(inputs)))
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
        imported=None if importer.refusals or mod is None else _imported(mod, importer, inputs),
        inputs=importer.input_variables(),
        params=importer.params(),
        convert=importer.convert_alone,
        is_operator_error=importer.is_operator_error,
    )


def _imported(mod: tvm.IRModule, importer: "_Importer", inputs: Sequence[onnx.ValueInfoProto]) -> Imported:
    """The importer's module, with its weights apart."""
    main = mod["main"]
    names = [variable.name for variable in main.params][len(inputs) :]
    input_types = [variable.ty for variable in main.params[: len(inputs)]]
    output_types = list(main.ret_ty.fields) if isinstance(main.ret_ty, relax.TupleType) else [main.ret_ty]
    return Imported(
        mod,
        {name: importer.params()[name][1].numpy() for name in names},
        tuple(_spec(value.name, ty) for value, ty in zip(inputs, input_types, strict=True)),
        tuple(_spec(value.name, ty) for value, ty in zip(importer.graph.output, output_types, strict=True)),
    )


# The most kinds of refusals that one sentence lists.
_MOST_LISTED = 6


def describe_refusals(refusals: Sequence[Refusal]) -> str:
    """Say in one sentence what is refused, where, why, and what to do; equal refusals of several nodes are one."""
    groups: dict[tuple[str, str, str], list[Refusal]] = {}
    for refusal in refusals:
        groups.setdefault((refusal.operator, refusal.reason, refusal.advice), []).append(refusal)
    if len(groups) == 1:
        (group,) = groups.values()
        return f"{_describe_group(group)}; {group[0].advice}"
    listed = [_describe_group(group) for group in groups.values()]
    more = f", and {len(listed) - _MOST_LISTED} more kinds" if len(listed) > _MOST_LISTED else ""
    return f"{', '.join(listed[:_MOST_LISTED])}{more}; `tvmflow doctor` says for each what to do"


def _describe_group(group: Sequence[Refusal]) -> str:
    first = group[0]
    more = f" and {len(group) - 1} more" if len(group) > 1 else ""
    return f"{first.where}{more}: {first.reason}" if first.operator else first.reason


def _advice(inputs: Sequence[onnx.ValueInfoProto]) -> str:
    """What to do about a model that TVM cannot import: free dimensions are the usual reason."""
    dims = [dim for value in inputs for dim in value.type.tensor_type.shape.dim]
    symbols = list(dict.fromkeys(dim.dim_param for dim in dims if dim.dim_param))
    if not symbols:
        return "check it with onnx.checker or export it anew with another opset"
    return f"give the inputs fixed sizes for the free dimensions {', '.join(symbols)}, or export it anew"


def _load(path: Path, label: str) -> onnx.ModelProto:
    try:
        model = with_own_domain(onnx.load(path))
        onnx.checker.check_model(model)
    except FileNotFoundError as error:
        raise ModelImportError(f"{label}: {error.strerror or 'file not found'}; expected an ONNX file") from error
    except Exception as error:  # protobuf, checker and external-data errors share no base class
        raise ModelImportError(f"{label} is not a valid ONNX model ({shorten(error)}); export it again") from error
    if not model.graph.output:
        raise ModelImportError(f"{label} is not a valid ONNX model (it has no outputs); export it again")
    drop_zip_maps(model)
    return model


def _apply_shapes(
    label: str,
    graph: onnx.GraphProto,
    inputs: Sequence[onnx.ValueInfoProto],
    shapes: Mapping[str, Sequence[int | str]],
) -> dict[str, int | str]:
    """Write `shapes` into the graph's inputs; a symbol that one input fixes is fixed at all.

    Returns the new size, or the new name, of each of the file's symbols that changes.
    """
    names = [value.name for value in inputs]
    for name in shapes:
        if name not in names:
            close = get_close_matches(name, names, n=1)
            hint = f"did you mean {close[0]!r}?" if close else f"its inputs are {', '.join(map(repr, names))}"
            raise ModelImportError(f"{label} has no input {name!r}; {hint}")
    changes: dict[str, int | str] = {}
    for value in inputs:
        if not value.type.HasField("tensor_type"):
            raise ModelImportError(f"{label}: input {value.name!r} is no tensor; only tensor inputs are supported")
        tensor = value.type.tensor_type
        shape = shapes.get(value.name)
        if not tensor.HasField("shape"):
            if shape is None:
                raise ModelImportError(f"{label}: input {value.name!r} has no shape; give one")
            for _ in shape:
                tensor.shape.dim.add()
    name_free_dimensions(graph)
    for value in inputs:
        dims = value.type.tensor_type.shape.dim
        shape = shapes.get(value.name, ())
        if value.name in shapes and len(shape) != len(dims):
            raise ModelImportError(
                f"{label}: input {value.name!r} has {len(dims)} dimensions, the given shape {tuple(shape)} "
                f"has {len(shape)}"
            )
        for axis, (dim, size) in enumerate(zip(dims, shape, strict=False)):
            if isinstance(size, int) and size < 1:
                raise ModelImportError(
                    f"{label}: dimension {axis} of input {value.name!r} must be positive, not {size}"
                )
            if dim.HasField("dim_value"):
                if size != dim.dim_value:
                    raise ModelImportError(
                        f"{label}: dimension {axis} of input {value.name!r} is fixed to {dim.dim_value} in the model, "
                        f"not {size!r}; export the model with a dynamic dimension"
                    )
            elif changes.setdefault(dim.dim_param, size) != size:
                raise ModelImportError(
                    f"{label}: dimension {dim.dim_param!r} is given both as {changes[dim.dim_param]!r} and {size!r}"
                )
    for value in inputs:
        for dim in value.type.tensor_type.shape.dim:
            change = changes.get(dim.dim_param) if dim.dim_param else None
            if isinstance(change, int):
                dim.dim_value = change
            elif change is not None:
                dim.dim_param = change
    return changes


def _expand_functions(label: str, model: onnx.ModelProto, own: Collection[str]) -> onnx.ModelProto:
    """Inline the model's functions but for `own`, and ONNX's function bodies of operators that have no converter.

    Attention is one: TVM's importer has a converter for another operator of that name.
    """
    try:
        if model.functions:
            defaults = {(item.domain, item.name): list(item.attribute_proto) for item in model.functions}
            inner = [node for item in model.functions for node in item.node]
            for node in (*nodes_of(model.graph), *inner):
                _add_defaults(node, defaults.get((node.domain, node.op_type), []))
            names = [(item.domain, item.name) for item in model.functions if f"{item.domain}.{item.name}" in own]
            model = onnx.inliner.inline_selected_functions(model, names, True)
        while nodes := [node for node in nodes_of(model.graph) if not has_converter(node) and is_function(node)]:
            for node in nodes:
                schema = onnx.defs.get_schema(node.op_type)
                _add_defaults(node, [attribute.default_value for attribute in schema.attributes.values()])
            _describe_weights(model.graph)
            names = sorted({("", node.op_type) for node in nodes})
            model = onnx.inliner.inline_selected_functions(model, names, False, True)
    except Exception as error:
        raise ModelImportError(
            f"{label}: the functions of the model cannot be inlined ({shorten(error)}); export it without functions"
        ) from error
    return model


def _describe_weights(graph: onnx.GraphProto) -> None:
    """Add types and shapes of weights: the inliner looks for them where an operator's body depends on its inputs."""
    described = {value.name for value in (*graph.input, *graph.value_info)}
    graph.value_info.extend(
        onnx.helper.make_tensor_value_info(weight.name, weight.data_type, weight.dims)
        for weight in graph.initializer
        if weight.name not in described
    )


def _add_defaults(node: onnx.NodeProto, defaults: Sequence[onnx.AttributeProto]) -> None:
    """Add the default values of absent attributes: the inliner would leave references to them."""
    names = {attribute.name for attribute in node.attribute}
    for default in defaults:
        if default.name not in names and default.type != onnx.AttributeProto.UNDEFINED:
            node.attribute.append(default)


def is_function(node: onnx.NodeProto) -> bool:
    """Whether ONNX defines the node's operator by other operators."""
    if node.domain not in ("", "ai.onnx") or not onnx.defs.has(node.op_type):
        return False
    schema: Any = onnx.defs.get_schema(node.op_type)
    return bool(schema.has_function or schema.has_context_dependent_function)


def has_converter(node: onnx.NodeProto) -> bool:
    """Whether TVM's importer or ours has a converter for the node's operator."""
    name = operator_name(node)
    return name in CONVERTERS or name in CONTROL or name in _STANDARD


def operator_name(node: onnx.NodeProto) -> str:
    """The operator's name, with its domain unless it is of the standard."""
    return f"{node.domain}.{node.op_type}" if node.domain not in ("", "ai.onnx") else str(node.op_type)


def node_name(node: onnx.NodeProto) -> str:
    """The node's name; its first output's where it has none."""
    return str(node.name or next(iter(node.output), "unnamed"))


def _missing_converter(node: onnx.NodeProto) -> Refusal:
    """The refusal of a node whose operator has no converter."""
    advice = "export the model without it"
    if node.domain == _LAYOUT_DOMAIN:
        # All of its operators have the same remedy.
        reason = "ONNX Runtime's layout optimization wrote it for one kind of processor"
        advice = "save the model from ONNX Runtime at the level ORT_ENABLE_EXTENDED, or use the one it was made of"
        return Refusal(f"{_LAYOUT_DOMAIN}.*", node_name(node), reason, advice)
    if node.domain.startswith("com.microsoft"):
        advice = "export the model anew, without the optimizer of ONNX Runtime, which writes this operator"
    elif node.domain and not node.domain.startswith("ai.onnx"):
        advice = "export the model without it, or give a converter of your own"
    reason = f"cannot be imported by TVM {tvm.__version__}"
    return Refusal(operator_name(node), node_name(node), reason, advice)


def _type_refusals(graph: onnx.GraphProto) -> list[Refusal]:
    """Refusals of values that are no tensors, of strings, and of types that TVM computes wrongly."""
    refusals = [
        Refusal("", "", f"output {output.name!r} is no tensor", "only tensor outputs are supported")
        for output in graph.output
        if not output.type.HasField("tensor_type")
    ]
    refusals += [
        Refusal("", "", f"{value.name!r} holds strings", "only tensors of numbers are supported")
        for value in (*graph.input, *graph.output)
        if value.type.tensor_type.elem_type == onnx.TensorProto.STRING
    ]
    types = {value.type.tensor_type.elem_type for value in (*graph.input, *graph.output)}
    types |= {tensor.data_type for tensor in graph.initializer}
    for node in nodes_of(graph):
        types |= {attribute.i for attribute in node.attribute if attribute.name in ("to", "output_dtype")}
    small = sorted(onnx.TensorProto.DataType.Name(item) for item in types & _SMALL_TYPES)
    if small:
        reason = f"tensors of {' and '.join(small)} are not supported"
        refusals.append(Refusal("", "", reason, "export the model with wider types"))
    return refusals


class _NoConverterError(Exception):
    """A node's operator has no converter."""


class _Importer(onnx_frontend.ONNXGraphImporter):  # type: ignore[misc]
    """TVM's importer with our converters; weights become parameters, and constant operands are evaluated.

    `sizes` are the new sizes or names of symbols that the shapes recorded in the graph still mention. A node that
    cannot be imported is a refusal with `advice`, and the import goes on with placeholders for its results. `own` are
    the caller's converters.
    """

    def __init__(
        self, model: onnx.ModelProto, sizes: Mapping[str, int | str], advice: str, own: Mapping[str, Converter]
    ) -> None:
        super().__init__({}, None, keep_params_in_input=True)
        self._own = own
        self.bb: relax.BlockBuilder
        self._nodes: dict[str, relax.Expr]
        self.refusals: list[Refusal] = []
        self.records: list[NodeRecord] = []
        self.is_operator_error = False
        self._advice = advice
        self._unexamined: set[str] = set()
        self._inferred: dict[str, onnx.TypeProto.Tensor] | None = None
        self._model = model
        self.evaluator = SizeEvaluator()
        self._control_nodes = 0
        self._functions: dict[tvm.ir.GlobalVar, relax.Function] = {}
        # Pairs of sizes by the value that says whether they are equal.
        self._equalities: dict[str, tuple[Any, Any]] = {}
        # The values that are known at import but for the free sizes in them.
        self._sizes_by_name: dict[str, Sizes] = {}
        graph = self.graph = model.graph
        self._sizes = sizes
        # The shapes that the exporter recorded, by node, for values whose shape TVM's inference loses.
        recorded = {value.name: value.type.tensor_type for value in (*graph.value_info, *graph.output)}
        self._recorded = {
            node.name: recorded[node.output[0]]
            for node in graph.node
            if node.name and len(node.output) == 1 and node.output[0] in recorded
        }

    def import_model(self, opset: int) -> tvm.IRModule:
        """Import the graph as `main`, which takes the inputs and then the weights that are read."""
        self.opset = opset
        self._parse_graph_initializers(self.graph)
        self._parse_graph_input(self.graph)
        inputs = list(self.input_variables())
        with self.bb.function("main", params=inputs):
            with self.bb.dataflow():
                self._construct_nodes(self.graph)
                outputs = [
                    self._in_symbols_of_inputs(self.tensor(self.value(output.name))) for output in self.graph.output
                ]
                output = self.bb.emit_output(outputs[0] if len(outputs) == 1 else relax.Tuple(outputs))
            self.bb.emit_func_output(output)
        mod = self.bb.get()
        main = mod["main"]
        used = set(relax.analysis.free_vars(main))
        weights = [variable for variable, _ in self._params.values() if variable in used]
        main = relax.Function([*inputs, *weights], main.body, main.ret_ty, attrs=main.attrs)
        others = {variable: func for variable, func in mod.functions_items() if isinstance(func, tirx.PrimFunc)}
        return tvm.IRModule({mod.get_global_var("main"): main, **others, **self._functions}, attrs=mod.attrs)

    def _parse_graph_initializers(self, graph: onnx.GraphProto) -> None:
        for tensor in graph.initializer:
            array = numpy_helper.to_array(tensor)
            smallest = _SMALLEST_INTEGER_WEIGHT if array.dtype.kind in "iub" else _SMALLEST_WEIGHT
            self._nodes[tensor.name] = const(array) if array.size < smallest else self._weight(tensor.name, array)

    def _weight(self, name: str, array: np.ndarray[Any, Any]) -> relax.Var:
        """The parameter for a weight; graphs of branches may have different weights of one name."""
        while name in self._params:
            variable, value = self._params[name]
            if str(value.dtype) == str(array.dtype) and np.array_equal(value.numpy(), array, equal_nan=True):
                return variable
            name = f"{name}_"
        variable = self._new_var(name, shape=array.shape, dtype=str(array.dtype))
        self._params[name] = (variable, tvm.runtime.tensor(np.asarray(array, order="C")))
        return variable

    # -- What control flow needs; see `control.Importer` ---------------------------------------------------------------

    def has_value(self, name: str) -> bool:
        """Return whether a value has this name."""
        return name in self._nodes

    def value(self, name: str) -> Value:
        """Return a value of the graph."""
        return Value(self._nodes[name], self._sizes_by_name.get(name))

    def set_value(self, name: str, value: Value) -> None:
        """Give a name to a value."""
        self._nodes[name] = value.expr
        self._sizes_by_name.pop(name, None)
        if value.sizes is not None:
            self._sizes_by_name[name] = value.sizes

    def tensor(self, value: Value) -> relax.Expr:
        """Return a value as a tensor: sizes that are known at import are computed for this use."""
        if value.sizes is not None:
            return materialise(self.bb, value.sizes)
        if isinstance(value.expr, relax.ShapeExpr):
            return self.bb.emit(relax.op.shape_to_tensor(value.expr))
        if tvm.ir.is_prim_expr(value.expr):
            return materialise(self.bb, self.evaluator.shape([value.expr]), ())
        return value.expr

    def elements(self, value: Value) -> np.ndarray[Any, Any] | None:
        """Return the elements of a value that are known at import; None for others."""
        return self._value_at_import(value.expr)

    def equal_sizes(self, name: str) -> tuple[Any, Any] | None:
        """Return the two sizes of which a value says whether they are equal; None for others."""
        return self._equalities.get(name)

    @contextlib.contextmanager
    def scope(self) -> Iterator[None]:
        """Forget at the end the names that are given within."""
        names = (self._nodes, self._sizes_by_name, self._equalities)
        self._nodes, self._sizes_by_name, self._equalities = (dict(those) for those in names)
        try:
            yield
        finally:
            self._nodes, self._sizes_by_name, self._equalities = names

    def import_graph(self, graph: onnx.GraphProto, inputs: Sequence[Value]) -> list[Value]:
        """Import the nodes of an inner graph; return its outputs."""
        self._parse_graph_initializers(graph)
        for name, value in zip(graph.input, inputs, strict=True):
            self.set_value(name.name, value)
        self._construct_nodes(graph)
        return [self.value(output.name) for output in graph.output]

    def attempt(self) -> Callable[[], None]:
        """Return a function that forgets the nodes and functions since then."""
        nodes, refusals, functions = len(self.records), len(self.refusals), dict(self._functions)

        def forget() -> None:
            del self.records[nodes:], self.refusals[refusals:]
            self._functions = functions

        return forget

    def add_function(self, variable: tvm.ir.GlobalVar, function: relax.Function) -> None:
        """Add a function to the module."""
        self._functions[variable] = function

    def unique_name(self, name: str) -> str:
        """Return a name that no function of the module has."""
        self._control_nodes += 1
        return f"{name}_{self._control_nodes}"

    def _check_for_unsupported_ops(self, graph: onnx.GraphProto) -> None:
        """Do nothing: `_construct_nodes` checks each node."""

    def _parse_graph_input(self, graph: onnx.GraphProto) -> None:
        super()._parse_graph_input(graph)
        self.evaluator.declare(self._symbols().values())

    def takes(self, node: onnx.NodeProto) -> bool:
        """Whether there is a converter for the node's operator."""
        return has_converter(node) or operator_name(node) in self._own

    def input_variables(self) -> tuple[relax.Var, ...]:
        """The graph's inputs, without its weights."""
        weights = {tensor.name for tensor in self.graph.initializer}
        return tuple(value for name, value in self._inputs.items() if name not in weights)

    def params(self) -> Mapping[str, tuple[relax.Var, Any]]:
        """The weights: the variable and the value of each, by name."""
        return dict(self._params)

    def convert_alone(
        self, builder: relax.BlockBuilder, node: onnx.NodeProto, operands: Mapping[str, relax.Expr]
    ) -> dict[str, relax.Expr]:
        """Convert a node again, with these operands and into this builder; return its results by name."""
        self.bb, self._nodes = builder, dict(operands)
        with warnings.catch_warnings(), contextlib.redirect_stdout(io.StringIO()):
            warnings.simplefilter("ignore")
            self._construct_node(node)
        return {name: self._nodes[name] for name in node.output if name}

    def _construct_nodes(self, graph: onnx.GraphProto) -> None:
        for node in graph.node:
            operands = {name: self._nodes[name] for name in node.input if name in self._nodes}
            reads = {name for inner in (node, *inner_nodes(node)) for name in inner.input}
            depends = bool(reads & self._unexamined)
            before = len(self.refusals)
            refusal: Refusal | None = None
            status: Literal["converted", "folded", "refused", "unexamined"] = "converted"
            try:
                is_folded = self._construct_node(node)
                status = "folded" if is_folded or self._is_known(node) else "converted"
            except Exception as error:  # TVM's converters raise every kind of exception for graphs they do not expect.
                if not isinstance(error, _NoConverterError) and (depends or len(self.refusals) > before):
                    # What is in the way is a node before it, or within it.
                    status = "unexamined"
                else:
                    refusal, status = self._refusal(node, error), "refused"
                    self.refusals.append(refusal)
            if depends or len(self.refusals) > before:
                self._unexamined.update(node.output)
            if status in ("refused", "unexamined"):
                for name in node.output:
                    self._nodes[name] = self._placeholder(name)
            self.records.append(NodeRecord(node, operands, status, refusal))

    def _construct_node(self, node: onnx.NodeProto) -> bool:
        """Import one node; return whether its results are known, so that nothing is left to compute."""
        if self._fold(node) or self._evaluate(node):
            return True
        if not self.takes(node):
            raise _NoConverterError
        if node.op_type in CONTROL and node.domain in ("", "ai.onnx"):
            return CONTROL[node.op_type](self, node)
        operands = {name: self._nodes[name] for name in node.input if name in self._nodes}
        takes_sizes = TAKES_SIZES.get(operator_name(node), ())
        for place, name in enumerate(node.input):
            if name in operands and place not in takes_sizes:
                self._nodes[name] = self.tensor(self.value(name))
        self._let_agree(node)
        try:
            self._convert_node(node)
        finally:
            # Another node may take the sizes for what they are.
            self._nodes.update(operands)
        return False

    def _convert_node(self, node: onnx.NodeProto) -> None:
        """Import a node by its converter, as TVM's importer does, which lets few operators take sizes for operands."""
        name = operator_name(node)
        inputs = [self._nodes[item] if item else None for item in node.input]
        if name not in ("Pad", "Split", "Tile") or not any(isinstance(item, relax.ShapeExpr) for item in inputs):
            graph = onnx.GraphProto(node=[node])
            graph.node[0].op_type = name
            super()._construct_nodes(graph)
            return
        attrs = {**self._parse_attr(node.attribute), "tvm_custom": {"name": name, "num_outputs": len(node.output)}}
        result = self._convert_operator(name, inputs, attrs, self.opset)
        self._nodes.update(zip(node.output, result if isinstance(result, relax.Tuple) else [result], strict=True))

    def _in_symbols_of_inputs(self, value: relax.Expr) -> relax.Expr:
        """A tensor whose dimensions are expressions of the inputs' dimensions, as a caller knows no others."""
        dims = dims_of(value) if isinstance(value.ty, relax.TensorType) else None
        sizes = [self.evaluator.expression(size) for size in dims or ()]
        if all(size is other for size, other in zip(sizes, dims or (), strict=True)):
            return value
        if all(self.evaluator.are_equal(*pair) for pair in zip(sizes, dims or (), strict=True)):
            return value
        return cast_to(self.bb, value, sizes)

    def _let_agree(self, node: onnx.NodeProto) -> None:
        """Cast the operands so that symbolic dimensions which the operator wants equal are the same expressions."""
        names = [name for name in node.input if name]
        operands = [self._nodes[name] for name in names]
        if operator_name(node) in BROADCASTING:
            operands = agree(self.bb, operands, self.evaluator)
        elif node.op_type == "Concat":
            axis = next((attribute.i for attribute in node.attribute if attribute.name == "axis"), 0)
            operands = agree_but_for(self.bb, operands, axis, self.evaluator)
        elif node.op_type == "MatMul":
            operands = agree_in_product(self.bb, operands, self.evaluator)
        elif node.op_type in ("GRU", "LSTM", "RNN"):
            places = [place for place in (0, 5, 6) if place < len(node.input) and node.input[place]]
            layout = next((attribute.i for attribute in node.attribute if attribute.name == "layout"), 0)
            names = [node.input[place] for place in places]
            batches = [self._nodes[name] for name in names]
            operands = agree_along(self.bb, batches, 0 if layout else 1, self.evaluator)
        self._nodes.update(zip(names, operands, strict=True))

    def _is_known(self, node: onnx.NodeProto) -> bool:
        """Whether all results of a node are constants or shapes."""
        values = [self._nodes.get(name) for name in node.output if name]
        known = (tvm.ir.GenericConst, relax.ShapeExpr)
        return all(isinstance(value, known) or tvm.ir.is_prim_expr(value) for value in values if value is not None)

    def _refusal(self, node: onnx.NodeProto, error: Exception) -> Refusal:
        """The refusal that an error of a converter means."""
        if isinstance(error, _NoConverterError):
            self.is_operator_error = True
            return _missing_converter(node)
        if isinstance(error, UnsupportedFormError):
            self.is_operator_error = True
            reason = f"not supported in this form ({error})"
            advice = self._advice if isinstance(error, FreeSizeError) else "export the model without it"
        elif operator_name(node) in self._own:
            reason, advice = f"its converter raised {type(error).__name__}: {shorten(error)}", "mend the converter"
        elif isinstance(error, tvm.error.OpNotImplemented):
            self.is_operator_error = True
            reason, advice = shorten(error), "export the model without it"
        else:
            reason, advice = f"TVM cannot import it: {shorten(error)}", self._advice
        return Refusal(operator_name(node), node_name(node), reason, advice)

    def _placeholder(self, name: str) -> relax.Var:
        """A variable for a result that cannot be computed, of the type that ONNX infers."""
        if self._inferred is None:
            try:
                inferred = onnx.shape_inference.infer_shapes(self._model).graph
                values = (*inferred.value_info, *inferred.output)
                self._inferred = {value.name: value.type.tensor_type for value in values}
            except Exception:  # The inference refuses graphs that runtimes take, and files beyond 2 GB.
                self._inferred = {}
        tensor = self._inferred.get(name)
        if tensor is None or tensor.elem_type in (onnx.TensorProto.UNDEFINED, onnx.TensorProto.STRING):
            return relax.Var("refused", relax.TensorType(ndim=-1, dtype="float32"))
        dtype = str(onnx.helper.tensor_dtype_to_np_dtype(tensor.elem_type))
        if not tensor.HasField("shape"):
            return relax.Var("refused", relax.TensorType(ndim=-1, dtype=dtype))
        symbols = self._symbols()
        shape = []
        for dim in tensor.shape.dim:
            size = dim.dim_value if dim.HasField("dim_value") else self._sizes.get(dim.dim_param, dim.dim_param)
            if isinstance(size, str):
                size = symbols[size] if size in symbols else tirx.Var(size or "refused", "int64")
            shape.append(size)
        return relax.Var("refused", relax.TensorType(shape, dtype))

    def _symbols(self) -> dict[str, tirx.Var]:
        """The symbolic dimensions of the inputs, by name."""
        return {
            dim.name: dim
            for variable in self._inputs.values()
            if isinstance(variable.ty.shape, relax.ShapeExpr)
            for dim in variable.ty.shape.values
            if isinstance(dim, tirx.Var)
        }

    def _value_at_import(self, expr: relax.Expr) -> np.ndarray[Any, Any] | None:
        """The value of a constant expression other than a weight; None for others."""
        if isinstance(expr, tvm.ir.GenericConst):
            return np.asarray(expr.value.numpy())
        if isinstance(expr, relax.ShapeExpr) and all(is_static(dim) for dim in expr.values):
            return np.array([int(dim) for dim in expr.values], "int64")
        if isinstance(expr, tirx.IntImm):
            return np.array(int(expr), "int64")
        return None

    def _constant(self, expr: relax.Expr) -> np.ndarray[Any, Any] | None:
        """The value of a constant expression or a weight; None for others."""
        if isinstance(expr, relax.Var) and expr.name in self._params:
            return np.asarray(self._params[expr.name][1].numpy())
        return self._value_at_import(expr)

    def _fold(self, node: onnx.NodeProto) -> bool:
        """Evaluate a node of constant operands, as models compute shapes and indices; return whether this was done."""
        if node.op_type not in FOLDED or node.domain not in ("", "ai.onnx") or not node.input:
            return False
        operands = [self._nodes[name] for name in node.input if name]
        if node.op_type in ("Shape", "Size"):
            ty = operands[0].ty
            shape = ty.shape if isinstance(ty, relax.TensorType) else None
            if not isinstance(shape, relax.ShapeExpr) or not all(is_static(dim) for dim in shape.values):
                return False
            # The elements do not matter, the shape does.
            values: list[Any] = [np.broadcast_to(np.float32(0), [int(dim) for dim in shape.values])]
        else:
            values = [self._value_at_import(operand) for operand in operands]
        if any(value is None for value in values) or _folded_size(node, values) > _LARGEST_FOLDED:
            return False
        names = [name for name in node.input if name]
        try:
            with np.errstate(all="ignore"):
                results = run_reference(node, dict(zip(names, values, strict=True)), self.opset)
        except Exception:  # The reference implementation has gaps; TVM's converter has its turn.
            return False
        if any(result.size > _LARGEST_FOLDED or result.dtype == object for result in results.values()):
            return False
        self._nodes.update({name: const(result) for name, result in results.items()})
        return True

    def _evaluate(self, node: onnx.NodeProto) -> bool:
        """Evaluate a node whose operands are sizes of tensors, some of them symbolic; return whether this was done."""
        if node.domain not in ("", "ai.onnx") or not node.input:
            return False
        try:
            if node.op_type in ("Shape", "Size"):
                results = [self._shape_value(node)]
            else:
                operands = [self._operand_sizes(name) if name else None for name in node.input]
                results = self.evaluator.evaluate(node, operands, self.opset)
        except NotEvaluatedError:
            self._keep_equality(node)
            return False
        for name, result in zip(node.output, results, strict=False):
            self._sizes_by_name.pop(name, None)
            if result.is_constant:
                self._nodes[name] = const(result.constant())
                continue
            self._sizes_by_name[name] = result
            whole = not any(isinstance(item, Quotient) for item in result.elements.reshape(-1))
            if whole and result.elements.ndim == 1:
                self._nodes[name] = relax.ShapeExpr(list(result.elements))
            elif whole and result.elements.ndim == 0:
                self._nodes[name] = result.elements.item()
            else:
                self._nodes[name] = materialise(self.bb, result)
        return True

    def _keep_equality(self, node: onnx.NodeProto) -> None:
        """Note of which sizes a node says whether they are equal."""
        if node.op_type in ("Cast", "Identity", "Reshape", "Squeeze") and node.input[0] in self._equalities:
            self._equalities[node.output[0]] = self._equalities[node.input[0]]
        if node.op_type == "Equal":
            with contextlib.suppress(NotEvaluatedError):
                operands = [self._operand_sizes(name).elements.reshape(-1).tolist() for name in node.input]
                if all(len(elements) == 1 and not isinstance(elements[0], Quotient | float) for elements in operands):
                    self._equalities[node.output[0]] = (operands[0][0], operands[1][0])

    def _operand_sizes(self, name: str) -> Sizes:
        """An operand whose value is known at import. Raises NotEvaluatedError for others."""
        sizes = self._sizes_by_name.get(name)
        if sizes is not None:
            return sizes
        value = self._value_at_import(self._nodes[name])
        if value is None:
            raise NotEvaluatedError
        return Sizes.of(value)

    def _shape_value(self, node: onnx.NodeProto) -> Sizes:
        """The shape of a tensor, of which Shape may take a part, or the number of its elements."""
        sizes = self._sizes_by_name.get(node.input[0])
        ty = self._nodes[node.input[0]].ty
        if sizes is not None:
            dims: list[Any] = list(sizes.elements.shape)
        elif isinstance(ty, relax.TensorType) and isinstance(ty.shape, relax.ShapeExpr):
            dims = list(ty.shape.values)
        else:
            raise NotEvaluatedError
        if node.op_type == "Size":
            return Sizes(self.evaluator.shape([self.evaluator.quotient(dims, [])]).elements.reshape(()), "int64")
        attributes = {attribute.name: attribute.i for attribute in node.attribute}
        return self.evaluator.shape(dims[attributes.get("start", 0) : attributes.get("end")])

    def _convert_operator(
        self, op_name: str, inputs: list[relax.Expr], attrs: dict[str, Any], opset: int
    ) -> relax.Expr:
        custom = attrs.get("tvm_custom", {})
        name = custom.get("name", "")
        converter = self._own.get(op_name) or CONVERTERS.get(op_name)
        converted = None
        if converter is not None:
            converted = converter(
                Node(
                    self.bb,
                    inputs,
                    attrs,
                    opset,
                    custom.get("num_outputs", 1),
                    self._constant,
                    self.evaluator,
                    self._convert_operator,
                )
            )
        if converted is None:
            converted = super()._convert_operator(op_name, inputs, attrs, opset)
        elif not isinstance(converted, relax.Tuple):
            converted = self.bb.normalize(converted)
        if (
            isinstance(converted, relax.Expr)
            and isinstance(converted.ty, relax.TensorType)
            and converted.ty.shape is None
        ):
            converted = self._with_shape(name, converted)
        return converted

    def _with_shape(self, node: str, value: relax.Expr) -> relax.Expr:
        """The value cast to the shape that the exporter recorded for the node's output, else with symbols for sizes."""
        recorded = self._recorded.get(node)
        if value.ty.dtype is None or value.ty.ndim < 0:
            return value
        unknown = [self.evaluator.unknown_size() for _ in range(int(value.ty.ndim))]
        if recorded is None or not recorded.HasField("shape") or len(recorded.shape.dim) != len(unknown):
            return self.bb.match_cast(value, relax.TensorType(unknown, value.ty.dtype))
        symbols = self._symbols()
        shape = []
        for dim, symbol in zip(recorded.shape.dim, unknown, strict=True):
            size = dim.dim_value if dim.HasField("dim_value") else self._sizes.get(dim.dim_param, dim.dim_param)
            shape.append(symbols.get(size, symbol) if isinstance(size, str) else size)
        return self.bb.match_cast(value, relax.TensorType(shape, value.ty.dtype))


_LARGEST_FOLDED = 4096


def _folded_size(node: onnx.NodeProto, values: Sequence[np.ndarray[Any, Any]]) -> float:
    """The number of elements of a foldable node's result, where it may exceed that of the operands; else 0."""
    if node.op_type in ("ConstantOfShape", "Expand", "Tile"):
        sizes = values[-1].astype("float64")
        return float(np.prod(sizes) * (1 if node.op_type == "ConstantOfShape" else values[0].size))
    if node.op_type == "Range":
        start, stop, step = (float(value) for value in values)
        return abs((stop - start) / step) if step else math.inf
    return 0.0


def _constants_to_initializers(graph: onnx.GraphProto) -> None:
    """Turn Constant nodes, whatever attribute holds the value, into initializers."""
    others = []
    for node in graph.node:
        for attribute in node.attribute:
            if attribute.type == onnx.AttributeProto.GRAPH:
                _constants_to_initializers(attribute.g)
        tensor = _constant_tensor(node) if node.op_type == "Constant" else None
        if tensor is None:
            others.append(node)
        else:
            tensor.name = node.output[0]
            graph.initializer.append(tensor)
    del graph.node[:]
    graph.node.extend(others)


def _constant_tensor(node: onnx.NodeProto) -> onnx.TensorProto | None:
    if len(node.attribute) != 1:
        return None
    attribute = node.attribute[0]
    value: Any = onnx.helper.get_attribute_value(attribute)
    if attribute.name == "value":
        tensor: onnx.TensorProto = attribute.t
        return tensor
    dtype = {"value_float": "float32", "value_floats": "float32", "value_int": "int64", "value_ints": "int64"}
    if attribute.name not in dtype:
        return None
    return numpy_helper.from_array(np.array(value, dtype[attribute.name]))


def _spec(name: str, ty: relax.TensorType) -> TensorSpec:
    dims = ty.shape.values if isinstance(ty.shape, relax.ShapeExpr) else ["?"] * ty.ndim
    return TensorSpec(name, tuple(int(dim) if is_static(dim) else str(dim) for dim in dims), str(ty.dtype))
