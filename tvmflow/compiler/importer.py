"""Reads ONNX models into Relax: checks them, names what TVM cannot take, and keeps weights apart from the program."""

import contextlib
import io
import warnings
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import tvm
from onnx import numpy_helper
from tvm import relax
from tvm.relax.frontend.onnx import onnx_frontend

from tvmflow.bundle import TensorSpec
from tvmflow.compiler.reason import reason
from tvmflow.errors import ModelImportError, UnsupportedOperatorError

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


def import_onnx(path: Path, shapes: Mapping[str, Sequence[int | str]] | None = None) -> Imported:
    """Import an ONNX file of opset 7 or later into Relax.

    `shapes` fixes or renames symbolic dimensions of inputs by name: `{"x": (1, 3, 224, 224)}`, `{"x": ("batch", 10)}`.
    Dimensions that are symbolic in the file and not given stay symbolic.

    Raises UnsupportedOperatorError for operators that TVM's importer does not know, ModelImportError for a file that
    is damaged, shapes that contradict the model, and anything else that TVM's importer refuses.
    """
    path = Path(path)
    model = _load(path)
    graph = model.graph
    weights = {tensor.name for tensor in graph.initializer}
    free = [value for value in graph.input if value.name not in weights]
    renamed = _apply_shapes(path, graph, free, shapes or {})
    _check_operators(path, graph)
    opset = max((entry.version for entry in model.opset_import if entry.domain in ("", "ai.onnx")), default=1)
    importer = _Importer(graph, renamed)
    chatter = io.StringIO()
    try:
        with warnings.catch_warnings(), contextlib.redirect_stdout(chatter):
            warnings.simplefilter("ignore")
            mod = importer.from_onnx(graph, opset)
    except tvm.error.OpNotImplemented as error:
        raise UnsupportedOperatorError(f"{path}: {reason(error)}; export the model without it") from error
    except Exception as error:  # TVM's converters raise every kind of exception for graphs they do not expect.
        where = f" at {importer.current_node}" if importer.current_node else ""
        raise ModelImportError(
            f"{path}: TVM cannot import the model{where}: {reason(error)}; "
            "check it with onnx.checker or export it anew with another opset"
        ) from error
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


def _load(path: Path) -> onnx.ModelProto:
    try:
        model = onnx.load(path)
        onnx.checker.check_model(model)
    except FileNotFoundError as error:
        raise ModelImportError(f"{path}: {error.strerror or 'file not found'}; expected an ONNX file") from error
    except Exception as error:  # protobuf, checker and external-data errors share no base class
        raise ModelImportError(f"{path} is not a valid ONNX model ({reason(error)}); export it again") from error
    if not model.graph.output:
        raise ModelImportError(f"{path} is not a valid ONNX model (it has no outputs); export it again")
    return model


def _apply_shapes(
    path: Path,
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
            raise ModelImportError(f"{path} has no input {name!r}; {hint}")
    bound: dict[str, int | str] = {}
    for value in inputs:
        if not value.type.HasField("tensor_type"):
            raise ModelImportError(f"{path}: input {value.name!r} is no tensor; only tensor inputs are supported")
        tensor = value.type.tensor_type
        wanted = shapes.get(value.name)
        if not tensor.HasField("shape"):
            if wanted is None:
                raise ModelImportError(f"{path}: input {value.name!r} has no shape; give one")
            for _ in wanted:
                tensor.shape.dim.add()
        dims = tensor.shape.dim
        if wanted is not None and len(wanted) != len(dims):
            raise ModelImportError(
                f"{path}: input {value.name!r} has {len(dims)} dimensions, the given shape {tuple(wanted)} "
                f"has {len(wanted)}"
            )
        for axis, dim in enumerate(dims):
            if not dim.HasField("dim_value") and not dim.dim_param:
                dim.dim_param = f"{value.name}_{axis}"
            size = None if wanted is None else wanted[axis]
            if size is None:
                continue
            if isinstance(size, int) and size < 1:
                raise ModelImportError(f"{path}: dimension {axis} of input {value.name!r} must be positive, not {size}")
            if dim.HasField("dim_value"):
                if size != dim.dim_value:
                    raise ModelImportError(
                        f"{path}: dimension {axis} of input {value.name!r} is fixed to {dim.dim_value} in the model, "
                        f"not {size!r}; export the model with a dynamic dimension"
                    )
            elif bound.setdefault(dim.dim_param, size) != size:
                raise ModelImportError(
                    f"{path}: dimension {dim.dim_param!r} is given both as {bound[dim.dim_param]!r} and {size!r}"
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


def _check_operators(path: Path, graph: onnx.GraphProto) -> None:
    """Name every operator that TVM's importer does not know, with the first node that uses it."""
    known = {*onnx_frontend._get_convert_map(), "If", "Constant"}
    unknown: dict[str, str] = {}
    for node in _nodes(graph):
        if node.op_type not in known:
            name = f"{node.domain}.{node.op_type}" if node.domain not in ("", "ai.onnx") else node.op_type
            unknown.setdefault(name, node.name or (node.output[0] if node.output else "unnamed"))
    if unknown:
        listed = ", ".join(f"{operator} (node {node!r})" for operator, node in unknown.items())
        noun = "operator" if len(unknown) == 1 else "operators"
        raise UnsupportedOperatorError(
            f"{path}: {noun} {listed} cannot be imported by TVM {tvm.__version__}; export the model without"
        )


class _Importer(onnx_frontend.ONNXGraphImporter):  # type: ignore[misc]
    """TVM's importer, with weights as parameters and clipping as operators that layouts and fusion understand."""

    def __init__(self, graph: onnx.GraphProto, renamed: Mapping[str, int | str]) -> None:
        super().__init__({}, None, keep_params_in_input=True)
        self.current_node = ""
        self._renamed = renamed
        # What the exporter recorded on shapes, by node, for values whose shape TVM's inference loses.
        recorded = {value.name: value.type.tensor_type for value in (*graph.value_info, *graph.output)}
        self._recorded = {
            node.name: recorded[node.output[0]]
            for node in graph.node
            if node.name and len(node.output) == 1 and node.output[0] in recorded
        }
        self._constants_to_initializers(graph)

    @staticmethod
    def _constants_to_initializers(graph: onnx.GraphProto) -> None:
        kept = []
        for node in graph.node:
            tensors = [attribute.t for attribute in node.attribute if attribute.name == "value"]
            if node.op_type == "Constant" and tensors:
                tensors[0].name = node.output[0]
                graph.initializer.append(tensors[0])
            else:
                kept.append(node)
        del graph.node[:]
        graph.node.extend(kept)

    def _parse_graph_initializers(self, graph: onnx.GraphProto) -> None:
        for tensor in graph.initializer:
            array = numpy_helper.to_array(tensor)
            smallest = _SMALLEST_INTEGER_WEIGHT if array.dtype.kind in "iub" else _SMALLEST_WEIGHT
            if array.size < smallest:
                self._nodes[tensor.name] = relax.const(tvm.runtime.tensor(np.asarray(array, order="C")))
                continue
            variable = self._new_var(tensor.name, shape=array.shape, dtype=str(array.dtype))
            self._nodes[tensor.name] = variable
            self._params[tensor.name] = (variable, tvm.runtime.tensor(np.asarray(array, order="C")))

    def _convert_operator(
        self, op_name: str, inputs: list[relax.Expr], attrs: dict[str, Any], opset: int
    ) -> relax.Expr:
        name = attrs.get("tvm_custom", {}).get("name", "")
        self.current_node = f"operator {op_name}, node {name!r}"
        converted = None
        if op_name == "Clip":
            converted = self._clip(inputs, attrs, opset)
        elif op_name == "Range":
            converted = self._range(inputs)
        elif op_name == "Gather":
            converted = self._gather(inputs, attrs)
        if converted is None:
            converted = super()._convert_operator(op_name, inputs, attrs, opset)
        else:
            converted = self.bb.normalize(converted)
        if isinstance(converted, relax.Expr) and isinstance(converted.ty, relax.TensorType) and not converted.ty.shape:
            converted = self._with_recorded_shape(name, converted)
        self.current_node = ""
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

    def _gather(self, inputs: list[relax.Expr], attrs: dict[str, Any]) -> relax.Expr | None:
        """Gather by known indices or along a known dimension; TVM's converter measures it at run time."""
        data, indices = inputs[0], inputs[1]
        axis = attrs.get("axis", 0)
        if isinstance(data, tvm.ir.GenericConst) or not isinstance(data.ty, relax.TensorType) or not data.ty.shape:
            return None
        if not isinstance(indices.ty, relax.TensorType):
            return None
        extent = int(data.ty.shape.values[axis]) if _is_int(data.ty.shape.values[axis]) else None
        wanted = indices.value.numpy() if isinstance(indices, tvm.ir.GenericConst) else None
        if extent is None and (wanted is None or (wanted < 0).any()):
            return None
        if wanted is not None:
            positive = np.asarray(np.where(wanted < 0, wanted + (extent or 0), wanted), dtype=wanted.dtype)
            indices = relax.const(tvm.runtime.tensor(positive))
        else:
            dtype = indices.ty.dtype.dtype
            negative = relax.op.less(indices, relax.const(0, dtype))
            indices = relax.op.where(negative, relax.op.add(indices, relax.const(extent, dtype)), indices)
        return relax.op.take(data, indices, axis, mode="clip")

    def _range(self, inputs: list[relax.Expr]) -> relax.Expr | None:
        """Whole-number ranges over symbolic dimensions, whose length TVM's converter would compute at run time."""
        bounds = []
        for bound in inputs:
            if isinstance(bound, tvm.ir.GenericConst) and bound.value.numpy().dtype.kind == "i":
                bounds.append(tvm.tirx.IntImm("int64", int(bound.value.numpy())))
            elif tvm.ir.is_prim_expr(bound) and str(bound.ty) == "int64":
                bounds.append(bound)
            else:
                return None
        start, stop, step = bounds
        dtype = "int64"
        if isinstance(inputs[0], tvm.ir.GenericConst):
            dtype = str(inputs[0].ty.dtype)
        if _is_int(start) and _is_int(stop):
            return None
        return relax.op.arange(start, stop, step, dtype)

    def _clip(self, inputs: list[relax.Expr], attrs: dict[str, Any], opset: int) -> relax.Expr | None:
        """Clip with constant bounds as relu or maximum, then minimum; None where a bound is computed."""
        x = inputs[0]
        bounds: list[float | None] = []
        for position, key in ((1, "min"), (2, "max")):
            if opset < 11:
                bounds.append(attrs.get(key))
                continue
            bound = inputs[position] if len(inputs) > position else None
            if bound is not None and not isinstance(bound, tvm.ir.GenericConst):
                return None
            value = None if bound is None else bound.value.numpy().reshape(-1)[0]
            bounds.append(None if value is None or np.isnan(value) else value)
        low, high = bounds
        dtype = x.ty.dtype.dtype
        if low is not None:
            x = relax.op.nn.relu(x) if low == 0 else relax.op.maximum(x, relax.const(low, dtype))
            x = self.bb.normalize(x) if high is None else self.bb.emit(x)
        if high is not None:
            x = relax.op.minimum(x, relax.const(high, dtype))
        return x


def _spec(name: str, ty: relax.TensorType) -> TensorSpec:
    dims = ty.shape.values if isinstance(ty.shape, relax.ShapeExpr) else ["?"] * ty.ndim
    return TensorSpec(name, tuple(int(dim) if _is_int(dim) else str(dim) for dim in dims), str(ty.dtype))


def _is_int(dim: Any) -> bool:
    return isinstance(dim, int | tvm.tirx.IntImm)
