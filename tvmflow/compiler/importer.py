"""Reads ONNX models into Relax: checks them, names what TVM cannot take, and keeps weights apart from the program."""

import contextlib
import io
import math
import warnings
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx.inliner
import tvm
from onnx import numpy_helper
from onnx.reference import ReferenceEvaluator
from tvm import relax
from tvm.relax.frontend.onnx import onnx_frontend

from tvmflow.bundle import TensorSpec
from tvmflow.compiler.onnx_operators import (
    CONTRIBUTED,
    CONVERTERS,
    FOLDED,
    NOT_STANDARD,
    Node,
    Refused,
    const,
    is_static,
)
from tvmflow.compiler.reason import reason
from tvmflow.errors import ModelImportError, UnsupportedOperatorError
from tvmflow.onnx_inputs import graph_inputs, name_free_dimensions

# TVM computes wrongly or not at all with floats of 8 bits and fewer, and whole numbers of fewer than 8.
_SMALL_TYPES = {
    number
    for name, number in onnx.TensorProto.DataType.items()
    if name.startswith(("FLOAT8", "FLOAT4", "FLOAT6")) or name in ("INT4", "UINT4", "INT2", "UINT2")
}
# Tensors with fewer elements stay in the program: scalars, shapes and axes steer the import itself.
_SMALLEST_WEIGHT = 17
# Whole numbers are tables of shapes and positions rather than weights until they are this many.
_SMALLEST_INTEGER_WEIGHT = 4097


@dataclass(frozen=True)
class Imported:
    """A model in Relax.

    `main` of `mod` takes the inputs in the order of `inputs`, then the weights in the order of `params`.
    """

    mod: tvm.IRModule
    params: dict[str, np.ndarray[Any, Any]]
    inputs: tuple[TensorSpec, ...]
    outputs: tuple[TensorSpec, ...]


def import_onnx(
    path: Path, shapes: Mapping[str, Sequence[int | str]] | None = None, label: str | None = None
) -> Imported:
    """Import an ONNX file of opset 7 or later into Relax.

    `shapes` fixes or renames symbolic dimensions of inputs by name: `{"x": (1, 3, 224, 224)}`, `{"x": ("batch", 10)}`.
    Dimensions that are symbolic in the file and not given stay symbolic; those without a name are called after their
    input and axis, as `x_0`. `label` is what messages call the file, by default its path.

    Raises UnsupportedOperatorError for operators that TVM's importer does not know, ModelImportError for a file that
    is damaged, shapes that contradict the model, and anything else that TVM's importer refuses.
    """
    label = label or str(path)
    model = _expand_functions(label, _load(Path(path), label))
    graph = model.graph
    free = graph_inputs(graph)
    renamed = _apply_shapes(label, graph, free, shapes or {})
    _check_operators(label, graph)
    _check_types(label, graph)
    opset = max((entry.version for entry in model.opset_import if entry.domain in ("", "ai.onnx")), default=1)
    importer = _Importer(graph, renamed)
    chatter = io.StringIO()
    try:
        with warnings.catch_warnings(), contextlib.redirect_stdout(chatter):
            warnings.simplefilter("ignore")
            mod = importer.from_onnx(graph, opset)
    except Refused as error:
        raise UnsupportedOperatorError(
            f"{label}: {importer.current_node} is not supported in this form ({error}); export the model without it"
        ) from error
    except tvm.error.OpNotImplemented as error:
        raise UnsupportedOperatorError(f"{label}: {reason(error)}; export the model without it") from error
    except Exception as error:  # TVM's converters raise every kind of exception for graphs they do not expect.
        where = f" at {importer.current_node}" if importer.current_node else ""
        raise ModelImportError(
            f"{label}: TVM cannot import the model{where}: {reason(error)}; {_advice(free)}"
        ) from error
    if any(node.op_type == "If" for node in graph.node):
        # The importer makes no dataflow block where there may be control flow; nothing is fused outside of one.
        mod = relax.transform.ConvertToDataflow()(mod)
    params = [value.numpy() for value in mod["main"].attrs.get("params", [])]
    names = [variable.name for variable in mod["main"].params][len(free) :]
    main = mod["main"].without_attr("params") if params else mod["main"]
    mod.update_func(mod.get_global_var("main"), main)
    inputs = tuple(
        _spec(value.name, variable.ty) for value, variable in zip(free, main.params[: len(free)], strict=True)
    )
    result = main.ret_ty
    results = list(result.fields) if isinstance(result, relax.TupleType) else [result]
    outputs = tuple(_spec(value.name, ty) for value, ty in zip(graph.output, results, strict=True))
    return Imported(mod, dict(zip(names, params, strict=True)), inputs, outputs)


def _advice(inputs: Sequence[onnx.ValueInfoProto]) -> str:
    """What to do about a model that TVM cannot import: free dimensions are the usual reason."""
    dims = [dim for value in inputs for dim in value.type.tensor_type.shape.dim]
    symbols = list(dict.fromkeys(dim.dim_param for dim in dims if dim.dim_param))
    if not symbols:
        return "check it with onnx.checker or export it anew with another opset"
    return f"give the inputs fixed sizes for the free dimensions {', '.join(symbols)}, or export it anew"


def _load(path: Path, label: str) -> onnx.ModelProto:
    try:
        model = onnx.load(path)
        onnx.checker.check_model(model)
    except FileNotFoundError as error:
        raise ModelImportError(f"{label}: {error.strerror or 'file not found'}; expected an ONNX file") from error
    except Exception as error:  # protobuf, checker and external-data errors share no base class
        raise ModelImportError(f"{label} is not a valid ONNX model ({reason(error)}); export it again") from error
    if not model.graph.output:
        raise ModelImportError(f"{label} is not a valid ONNX model (it has no outputs); export it again")
    return model


def _apply_shapes(
    label: str,
    graph: onnx.GraphProto,
    inputs: Sequence[onnx.ValueInfoProto],
    shapes: Mapping[str, Sequence[int | str]],
) -> dict[str, int | str]:
    """Write `shapes` into the graph's inputs; a symbol fixed at one input is fixed at all.

    Returns what became of the file's own symbols.
    """
    known = {value.name: value for value in inputs}
    for name in shapes:
        if name not in known:
            close = get_close_matches(name, known, n=1)
            hint = f"did you mean {close[0]!r}?" if close else f"its inputs are {', '.join(map(repr, known))}"
            raise ModelImportError(f"{label} has no input {name!r}; {hint}")
    bound: dict[str, int | str] = {}
    for value in inputs:
        if not value.type.HasField("tensor_type"):
            raise ModelImportError(f"{label}: input {value.name!r} is no tensor; only tensor inputs are supported")
        tensor = value.type.tensor_type
        wanted = shapes.get(value.name)
        if not tensor.HasField("shape"):
            if wanted is None:
                raise ModelImportError(f"{label}: input {value.name!r} has no shape; give one")
            for _ in wanted:
                tensor.shape.dim.add()
    name_free_dimensions(graph)
    for value in inputs:
        wanted = shapes.get(value.name)
        dims = value.type.tensor_type.shape.dim
        if wanted is not None and len(wanted) != len(dims):
            raise ModelImportError(
                f"{label}: input {value.name!r} has {len(dims)} dimensions, the given shape {tuple(wanted)} "
                f"has {len(wanted)}"
            )
        for axis, dim in enumerate(dims):
            size = None if wanted is None else wanted[axis]
            if size is None:
                continue
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
            elif bound.setdefault(dim.dim_param, size) != size:
                raise ModelImportError(
                    f"{label}: dimension {dim.dim_param!r} is given both as {bound[dim.dim_param]!r} and {size!r}"
                )
    for value in inputs:
        for dim in value.type.tensor_type.shape.dim:
            size = bound.get(dim.dim_param) if dim.dim_param else None
            if isinstance(size, int):
                dim.dim_value = size
            elif size is not None:
                dim.dim_param = size
    return bound


def _nodes(graph: onnx.GraphProto) -> Iterator[onnx.NodeProto]:
    for node in graph.node:
        yield node
        for attribute in node.attribute:
            if attribute.HasField("g"):
                yield from _nodes(attribute.g)


def _expand_functions(label: str, model: onnx.ModelProto) -> onnx.ModelProto:
    """Replace the model's own functions, and operators that only ONNX's definition as a function makes known, by these.

    Attention is one: TVM's importer knows another operator by that name.
    """
    try:
        if model.functions:
            model = onnx.inliner.inline_local_functions(model)
        while nodes := [node for node in _nodes(model.graph) if not _is_known(node) and _is_function(node)]:
            for node in nodes:
                _add_defaults(node)
            names = sorted({("", node.op_type) for node in nodes})
            model = onnx.inliner.inline_selected_functions(model, names, False, True)
    except Exception as error:
        raise ModelImportError(
            f"{label}: the functions of the model cannot be inlined ({reason(error)}); export it without functions"
        ) from error
    return model


def _add_defaults(node: onnx.NodeProto) -> None:
    """Write out the attributes that are not given: the inliner leaves references to them."""
    given = {attribute.name for attribute in node.attribute}
    for name, attribute in onnx.defs.get_schema(node.op_type).attributes.items():
        if name not in given and attribute.default_value.type != onnx.AttributeProto.UNDEFINED:
            node.attribute.append(attribute.default_value)


def _is_function(node: onnx.NodeProto) -> bool:
    if node.domain not in ("", "ai.onnx") or not onnx.defs.has(node.op_type):
        return False
    schema: Any = onnx.defs.get_schema(node.op_type)
    return bool(schema.has_function or schema.has_context_dependent_function)


def _is_known(node: onnx.NodeProto) -> bool:
    """Whether TVM's importer or ours has a converter for the node's operator."""
    if node.domain in ("", "ai.onnx"):
        known = onnx_frontend._get_convert_map().keys() - NOT_STANDARD
        return node.op_type in known | CONVERTERS.keys() | {"If", "Constant"}
    return node.domain == "com.microsoft" and node.op_type in CONTRIBUTED


def _check_operators(label: str, graph: onnx.GraphProto) -> None:
    """Name every operator that has no converter, with the first node that uses it."""
    unknown: dict[str, str] = {}
    for node in _nodes(graph):
        if not _is_known(node):
            name = f"{node.domain}.{node.op_type}" if node.domain not in ("", "ai.onnx") else node.op_type
            unknown.setdefault(name, node.name or (node.output[0] if node.output else "unnamed"))
    if unknown:
        listed = ", ".join(f"{operator} (node {node!r})" for operator, node in unknown.items())
        noun = "operator" if len(unknown) == 1 else "operators"
        raise UnsupportedOperatorError(
            f"{label}: {noun} {listed} cannot be imported by TVM {tvm.__version__}; export the model without"
        )


def _check_types(label: str, graph: onnx.GraphProto) -> None:
    """Refuse what no tensor of numbers can hold."""
    for output in graph.output:
        if not output.type.HasField("tensor_type"):
            raise ModelImportError(f"{label}: output {output.name!r} is no tensor; only tensor outputs are supported")
    for value in (*graph.input, *graph.output):
        if value.type.tensor_type.elem_type == onnx.TensorProto.STRING:
            raise ModelImportError(f"{label}: {value.name!r} holds strings; only tensors of numbers are supported")
    types = {value.type.tensor_type.elem_type for value in (*graph.input, *graph.output)}
    types |= {tensor.data_type for tensor in graph.initializer}
    for node in _nodes(graph):
        types |= {attribute.i for attribute in node.attribute if attribute.name in ("to", "output_dtype")}
    small = sorted(onnx.TensorProto.DataType.Name(item) for item in types & _SMALL_TYPES)
    if small:
        raise ModelImportError(
            f"{label}: tensors of {' and '.join(small)} are not supported; export the model with wider types"
        )


class _Importer(onnx_frontend.ONNXGraphImporter):  # type: ignore[misc]
    """TVM's importer, with weights as parameters, known values folded and some operators converted here."""

    def __init__(self, graph: onnx.GraphProto, renamed: Mapping[str, int | str]) -> None:
        super().__init__({}, None, keep_params_in_input=True)
        self.current_node = ""
        self._graph = graph
        self._renamed = renamed
        # What the exporter recorded on shapes, by node, for values whose shape TVM's inference loses.
        recorded = {value.name: value.type.tensor_type for value in (*graph.value_info, *graph.output)}
        self._recorded = {
            node.name: recorded[node.output[0]]
            for node in graph.node
            if node.name and len(node.output) == 1 and node.output[0] in recorded
        }
        _constants_to_initializers(graph)

    def _parse_graph_initializers(self, graph: onnx.GraphProto) -> None:
        for tensor in graph.initializer:
            array = numpy_helper.to_array(tensor)
            smallest = _SMALLEST_INTEGER_WEIGHT if array.dtype.kind in "iub" else _SMALLEST_WEIGHT
            if array.size < smallest:
                self._nodes[tensor.name] = const(array)
                continue
            variable = self._new_var(tensor.name, shape=array.shape, dtype=str(array.dtype))
            self._nodes[tensor.name] = variable
            self._params[tensor.name] = (variable, tvm.runtime.tensor(np.asarray(array, order="C")))

    def _check_for_unsupported_ops(self, graph: onnx.GraphProto) -> None:
        """Checked before the import."""

    def _construct_nodes(self, graph: onnx.GraphProto) -> None:
        for node in graph.node:
            self.current_node = f"operator {node.op_type}, node {node.name or (*node.output, '')[0]!r}"
            if self._fold(node) or self._take_branch(node):
                continue
            if node.op_type not in _TAKE_SHAPES:
                for name in node.input:
                    if isinstance(self._nodes.get(name), relax.ShapeExpr):
                        self._nodes[name] = self.bb.emit(relax.op.shape_to_tensor(self._nodes[name]))
            super()._construct_nodes(onnx.GraphProto(node=[node]))
        self.current_node = ""
        if graph is self._graph:
            for output in graph.output:
                value = self._nodes[output.name]
                if tvm.ir.is_prim_expr(value):
                    value = self.bb.emit(relax.op.shape_to_tensor(relax.ShapeExpr([value])))
                    self._nodes[output.name] = self.bb.emit(relax.op.squeeze(value, [0]))
                elif isinstance(value, relax.ShapeExpr):
                    self._nodes[output.name] = self.bb.emit(relax.op.shape_to_tensor(value))

    def _known(self, expr: relax.Expr) -> np.ndarray[Any, Any] | None:
        """The value of an expression that is known at import."""
        if isinstance(expr, tvm.ir.GenericConst):
            return np.asarray(expr.value.numpy())
        if isinstance(expr, relax.ShapeExpr) and all(is_static(dim) for dim in expr.values):
            return np.array([int(dim) for dim in expr.values], "int64")
        if isinstance(expr, tvm.tirx.IntImm):
            return np.array(int(expr), "int64")
        return None

    def _constant(self, expr: relax.Expr) -> np.ndarray[Any, Any] | None:
        """The value of an expression that is known at import or a weight."""
        if isinstance(expr, relax.Var) and expr.name in self._params:
            return np.asarray(self._params[expr.name][1].numpy())
        return self._known(expr)

    def _fold(self, node: onnx.NodeProto) -> bool:
        """Evaluate a node whose operands are known; models compute many of their shapes and indices so."""
        if node.op_type not in FOLDED or node.domain not in ("", "ai.onnx") or not node.input:
            return False
        operands = [self._nodes[name] for name in node.input if name]
        if node.op_type in ("Shape", "Size"):
            ty = operands[0].ty
            shape = ty.shape if isinstance(ty, relax.TensorType) else None
            if not isinstance(shape, relax.ShapeExpr) or not all(is_static(dim) for dim in shape.values):
                return False
            # Only the shape counts, whatever the elements are.
            values: list[Any] = [np.broadcast_to(np.float32(0), [int(dim) for dim in shape.values])]
        else:
            values = [self._known(operand) for operand in operands]
        if any(value is None for value in values) or _folded_size(node, values) > _LARGEST_FOLDED:
            return False
        names = [name for name in node.input if name]
        try:
            with np.errstate(all="ignore"):
                evaluator = ReferenceEvaluator(node, opsets={"": self.opset})
                results = evaluator.run(None, dict(zip(names, values, strict=True)))
            results = [np.asarray(result) for result in results]
        except Exception:  # The reference implementation has gaps; TVM's converter has its turn.
            return False
        if any(result.size > _LARGEST_FOLDED or result.dtype == object for result in results):
            return False
        for name, result in zip(node.output, results, strict=False):
            self._nodes[name] = const(result)
        return True

    def _take_branch(self, node: onnx.NodeProto) -> bool:
        """Import only the branch that a known condition takes."""
        condition = self._known(self._nodes[node.input[0]]) if node.op_type == "If" else None
        if condition is None:
            return False
        wanted = "then_branch" if condition.reshape(-1)[0] else "else_branch"
        branch = next(attribute.g for attribute in node.attribute if attribute.name == wanted)
        for tensor in branch.initializer:
            self._nodes[tensor.name] = const(numpy_helper.to_array(tensor))
        self._construct_nodes(branch)
        for name, result in zip(node.output, branch.output, strict=True):
            self._nodes[name] = self._nodes[result.name]
        return True

    def _convert_operator(
        self, op_name: str, inputs: list[relax.Expr], attrs: dict[str, Any], opset: int
    ) -> relax.Expr:
        custom = attrs.get("tvm_custom", {})
        name = custom.get("name", "")
        converter = CONVERTERS.get(op_name)
        converted = None
        if converter is not None:
            node = Node(self.bb, inputs, attrs, opset, custom.get("num_outputs", 1), self._constant)
            converted = converter(node)
        if converted is None:
            converted = super()._convert_operator(op_name, inputs, attrs, opset)
        elif not isinstance(converted, relax.Tuple):
            converted = self.bb.normalize(converted)
        if (
            isinstance(converted, relax.Expr)
            and isinstance(converted.ty, relax.TensorType)
            and converted.ty.shape is None
        ):
            converted = self._with_recorded_shape(name, converted)
        return converted

    def _with_recorded_shape(self, node: str, value: relax.Expr) -> relax.Expr:
        recorded = self._recorded.get(node)
        if recorded is None or not recorded.HasField("shape") or value.ty.dtype is None:
            return value
        symbols = {
            dim.name: dim
            for variable in self._inputs.values()
            if isinstance(variable.ty.shape, relax.ShapeExpr)
            for dim in variable.ty.shape.values
            if isinstance(dim, tvm.tirx.Var)
        }
        shape = []
        for dim in recorded.shape.dim:
            size = dim.dim_value if dim.HasField("dim_value") else self._renamed.get(dim.dim_param, dim.dim_param)
            size = symbols.get(size) if isinstance(size, str) else size
            if size is None:
                return value
            shape.append(size)
        return self.bb.match_cast(value, relax.TensorType(shape, value.ty.dtype))


_LARGEST_FOLDED = 4096
# TVM's importer gives these operators shape expressions; all others get tensors.
_TAKE_SHAPES = {
    *("Reshape", "Resize", "ConstantOfShape", "Gather", "Slice", "Shape", "Expand"),
    *("Concat", "Equal", "Where", "Cast", "CastLike", "Squeeze"),
}


def _folded_size(node: onnx.NodeProto, values: Sequence[np.ndarray[Any, Any]]) -> float:
    """How many elements a foldable node's result may have, for those that may have many more than their operands."""
    if node.op_type in ("ConstantOfShape", "Expand", "Tile"):
        sizes = values[-1].astype("float64")
        return float(np.prod(sizes) * (1 if node.op_type == "ConstantOfShape" else values[0].size))
    if node.op_type == "Range":
        start, stop, step = (float(value) for value in values)
        return abs((stop - start) / step) if step else math.inf
    return 0.0


def _constants_to_initializers(graph: onnx.GraphProto) -> None:
    """Constant nodes, whatever attribute their value is in, become initializers."""
    kept = []
    for node in graph.node:
        for attribute in node.attribute:
            if attribute.type == onnx.AttributeProto.GRAPH:
                _constants_to_initializers(attribute.g)
        tensor = _constant_tensor(node) if node.op_type == "Constant" else None
        if tensor is None:
            kept.append(node)
        else:
            tensor.name = node.output[0]
            graph.initializer.append(tensor)
    del graph.node[:]
    graph.node.extend(kept)


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
