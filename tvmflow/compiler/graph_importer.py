"""TVM's importer of ONNX graphs with our converters: goes through the nodes, and keeps what is known of each value."""

import contextlib
import io
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import onnx
import tvm
from tvm import relax, tirx
from tvm.relax.frontend.onnx import onnx_frontend

from tvmflow.arrays import Array
from tvmflow.compiler.hoisting import SMALLEST_WEIGHT
from tvmflow.compiler.messages import shorten
from tvmflow.compiler.onnx import (
    CONTROL,
    CONVERTERS,
    TAKES_SIZES,
    WINDOWED,
    Converter,
    FreeSizeError,
    Node,
    UnsupportedFormError,
    const,
    has_converter,
    is_static,
)
from tvmflow.compiler.onnx.broadcasting import (
    agree,
    agree_along,
    agree_but_for,
    agree_in_channels,
    agree_in_product,
)
from tvmflow.compiler.onnx.folding import computes_weights, evaluate_constants, evaluate_weights, is_foldable
from tvmflow.compiler.onnx.outlining import Value
from tvmflow.compiler.onnx.sizes import NotEvaluatedError, Quotient, SizeEvaluator, Sizes, materialise
from tvmflow.compiler.onnx.values import dims_of
from tvmflow.compiler.operators.common import numbers_of, tensor_of
from tvmflow.compiler.refusals import (
    COMPUTED_SIZES,
    ONE_TYPE,
    MixedTypesError,
    NoConverterError,
    Refusal,
    advise_on_error,
    check_types,
    missing_converter,
)
from tvmflow.compiler.size_checks import cast_to, check_sizes
from tvmflow.onnx_model.external_data import array_of
from tvmflow.onnx_model.graph import inner_nodes, names_read, node_name, operator_name
from tvmflow.onnx_model.ranks import is_squeeze_without_axes, squeezed_axes
from tvmflow.onnx_model.size_limits import BROADCASTING

# Tensors of integers with fewer elements stay in the program too: they are tables of shapes and positions.
_SMALLEST_INTEGER_WEIGHT = 4097


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


class _Tensors(dict[str, Any]):
    """Weights for TVM's converters: a tensor is made of an array when a converter reads it."""

    def __init__(self, weights: Mapping[str, tuple[relax.Var, Array]]) -> None:
        super().__init__()
        self._weights = weights

    def __contains__(self, name: object) -> bool:
        return name in self._weights

    def __getitem__(self, name: str) -> tuple[relax.Var, tvm.runtime.Tensor]:
        variable, value = self._weights[name]
        return variable, tensor_of(value)


class GraphImporter(onnx_frontend.ONNXGraphImporter):  # type: ignore[misc]
    """TVM's importer with our converters; weights become parameters, and constant operands are evaluated.

    `sizes` maps symbols to their new sizes or names: the shapes recorded in the graph still have the old symbols. A
    node that cannot be imported is reported in `refusals`, and the import goes on with placeholders for its results.
    `advice` is the advice of refusals that have no better one. `own` are the caller's converters, by operator.
    `smallest` gives lower bounds of free dimensions, by name.
    """

    def __init__(
        self,
        model: onnx.ModelProto,
        sizes: Mapping[str, int | str],
        advice: str,
        own: Mapping[str, Converter],
        smallest: Mapping[str, int] | None = None,
    ) -> None:
        super().__init__({}, None, keep_params_in_input=True)
        # The variable and the value of each weight, by name; `_params` shows them to TVM's converters.
        self._weights: dict[str, tuple[relax.Var, Array]] = {}
        self._params = _Tensors(self._weights)
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
        self.evaluator = SizeEvaluator(smallest)
        self._control_nodes = 0
        self._has_undone = False
        self._functions: dict[tvm.ir.GlobalVar, relax.Function] = {}
        # Pairs of sizes by the value that says whether they are equal.
        self._equalities: dict[str, tuple[Any, Any]] = {}
        # The sequences that a loop has concatenated already.
        self._concatenated: set[str] = set()
        # The values that are known at import but for the free sizes in them.
        self._sizes_by_name: dict[str, Sizes] = {}
        graph = self.graph = model.graph
        self._sizes = sizes
        # The shapes that the exporter recorded, by node, for values whose shape TVM's inference loses.
        types = {value.name: value.type.tensor_type for value in (*graph.value_info, *graph.output)}
        self._recorded = {
            node.name: types[node.output[0]]
            for node in graph.node
            if node.name and len(node.output) == 1 and node.output[0] in types
        }

    def import_model(self, opset: int) -> tvm.IRModule:
        """Import the graph as `main`, which takes the inputs and then those weights that it reads.

        `opset` is the version of the ONNX standard that the model uses.
        """
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
        if self._has_undone:
            main = _without_calls_of_others(main, self._functions)
        variables = set(relax.analysis.free_vars(main))
        weights = [variable for variable, _ in self._weights.values() if variable in variables]
        main = relax.Function([*inputs, *weights], main.body, main.ret_ty, attrs=main.attrs)
        others = {variable: func for variable, func in mod.functions_items() if isinstance(func, tirx.PrimFunc)}
        return tvm.IRModule({mod.get_global_var("main"): main, **others, **self._functions}, attrs=mod.attrs)

    def _parse_graph_initializers(self, graph: onnx.GraphProto) -> None:
        for tensor in graph.initializer:
            self._nodes[tensor.name] = self._initial(tensor.name, array_of(tensor))

    def _initial(self, name: str, array: Array) -> relax.Expr:
        """An array that is known at import: a constant, or a parameter where it is large."""
        smallest = _SMALLEST_INTEGER_WEIGHT if array.dtype.kind in "iub" else SMALLEST_WEIGHT
        return const(array) if array.size < smallest else self._weight(name, array)

    def _weight(self, name: str, array: Array) -> relax.Var:
        """The parameter for a weight; graphs of branches may have different weights of one name."""
        while name in self._weights:
            variable, value = self._weights[name]
            if value.dtype == array.dtype and np.array_equal(value, array, equal_nan=True):
                return variable
            name = f"{name}_"
        variable = self._new_var(name, shape=array.shape, dtype=str(array.dtype))
        self._weights[name] = (variable, array)
        return variable

    # -- What control flow needs; see `outlining.Importer` -------------------------------------------------------------

    def has_value(self, name: str) -> bool:
        """Return whether a value has this name."""
        return name in self._nodes

    def value(self, name: str) -> Value:
        """Return the graph's value called `name`. Raises KeyError for an unknown name."""
        return Value(self._nodes[name], self._sizes_by_name.get(name))

    def set_value(self, name: str, value: Value) -> None:
        """Give a name to a value."""
        self._nodes[name] = value.expr
        self._sizes_by_name.pop(name, None)
        if value.sizes is not None:
            self._sizes_by_name[name] = value.sizes

    def bind(self, names: Iterable[str]) -> None:
        """Compute the named values that are expressions still, so that no branch and no iteration computes them."""
        for name in sorted(names):
            if isinstance(self._nodes.get(name), relax.Call):
                self._nodes[name] = self.bb.emit(self._nodes[name])

    def set_concatenated(self, name: str, value: Value) -> None:
        """Give the name of a sequence to the tensor that its concatenation will be."""
        self.set_value(name, value)
        self._concatenated.add(name)

    def tensor(self, value: Value) -> relax.Expr:
        """Return a value as a Relax tensor.

        For a shape, a number or an array of sizes of tensors, this emits the code that computes the tensor.
        """
        if value.sizes is not None:
            return materialise(self.bb, value.sizes)
        if isinstance(value.expr, relax.ShapeExpr):
            return self.bb.emit(relax.op.shape_to_tensor(value.expr))
        if tvm.ir.is_prim_expr(value.expr):
            return materialise(self.bb, self.evaluator.shape([value.expr]), ())
        return value.expr

    def elements(self, value: Value) -> Array | None:
        """Return the elements of a value that is known at import; None for a weight and for every other value."""
        return self._value_at_import(value.expr)

    def equal_sizes(self, name: str) -> tuple[Any, Any] | None:
        """Return the two sizes that the value `name` compares with Equal; None if it is no such comparison."""
        return self._equalities.get(name)

    @contextlib.contextmanager
    def scope(self) -> Iterator[None]:
        """Return a context whose end restores the names of values that were known at its start."""
        names = (self._nodes, self._sizes_by_name, self._equalities)
        self._nodes, self._sizes_by_name, self._equalities = (dict(those) for those in names)
        try:
            yield
        finally:
            self._nodes, self._sizes_by_name, self._equalities = names

    def import_graph(self, graph: onnx.GraphProto, inputs: Sequence[Value]) -> list[Value]:
        """Import the nodes of an inner graph with these values for its inputs, in order; return its outputs."""
        self._parse_graph_initializers(graph)
        for name, value in zip(graph.input, inputs, strict=True):
            self.set_value(name.name, value)
        self._construct_nodes(graph)
        return [self.value(output.name) for output in graph.output]

    def checkpoint(self) -> Callable[[], None]:
        """Return a function that undoes an import: it removes records, refusals and functions added after this call."""
        nodes, refusals, functions = len(self.records), len(self.refusals), dict(self._functions)

        def undo() -> None:
            del self.records[nodes:], self.refusals[refusals:]
            self._functions = functions
            self._has_undone = True

        return undo

    def add_function(self, variable: tvm.ir.GlobalVar, function: relax.Function) -> None:
        """Add a function to the module that `import_model` returns; it replaces one with the same `variable`."""
        self._functions[variable] = function

    def unique_name(self, name: str) -> str:
        """Return a name for a new function of the module: `name` with a number that counts up."""
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
        """Return the variables of the graph's inputs, without its weights."""
        weights = {tensor.name for tensor in self.graph.initializer}
        return tuple(value for name, value in self._inputs.items() if name not in weights)

    def params(self) -> Mapping[str, tuple[relax.Var, Array]]:
        """Return the variable and the value of each weight, which nobody may change, by name."""
        return dict(self._weights)

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
                if not isinstance(error, NoConverterError) and (depends or len(self.refusals) > before):
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
        if self._fold(node) or self._evaluate(node) or self._fold_weights(node):
            return True
        if not self.takes(node):
            raise NoConverterError
        if node.op_type in CONTROL and node.domain in ("", "ai.onnx"):
            self.bind(names_read(node))
            return CONTROL[node.op_type](self, node)
        if node.op_type == "ConcatFromSequence" and node.input[0] in self._concatenated:
            self.set_value(node.output[0], self.value(node.input[0]))
            return False
        operands = {name: self._nodes[name] for name in node.input if name in self._nodes}
        tensors = {name: value.ty for name, value in operands.items() if isinstance(value.ty, relax.TensorType)}
        check_types(node, {name: str(ty.dtype) for name, ty in tensors.items() if ty.dtype is not None}, self.opset)
        takes_sizes = TAKES_SIZES.get(operator_name(node), ())
        for place, name in enumerate(node.input):
            if name in operands and place not in takes_sizes:
                self._nodes[name] = self.tensor(self.value(name))
            elif name in operands and node.op_type == "Range" and place == 1:
                self._nodes[name] = self._as_whole(name)
        self._let_agree(node)
        try:
            self._convert_node(self._with_axes(node))
        finally:
            # Another node may take the sizes for what they are.
            self._nodes.update(operands)
        if operator_name(node) in WINDOWED:
            for size in (dims_of(self._nodes[node.output[0]]) or ())[2:]:
                if isinstance(size, int) and size < 1:
                    raise UnsupportedFormError("a window that is larger than its data")
                self.evaluator.require(size)
        return False

    def _as_whole(self, name: str) -> relax.Expr:
        """A size that the model has as a float as the size itself; other values as they are."""
        sizes = self._sizes_by_name.get(name)
        item = None if sizes is None or sizes.elements.ndim else sizes.elements.item()
        return item.size if isinstance(item, Quotient) and item.factor == 1 else self._nodes[name]

    def _convert_node(self, node: onnx.NodeProto) -> None:
        """Import a node by its converter, as TVM's importer does, which lets few operators take sizes for operands."""
        name = operator_name(node)
        inputs = [self._nodes[item] if item else None for item in node.input]
        has_sizes = any(isinstance(item, relax.ShapeExpr) or tvm.ir.is_prim_expr(item) for item in inputs)
        if name not in ("OneHot", "Pad", "Split", "Tile", "TopK") or not has_sizes:
            graph = onnx.GraphProto(node=[node])
            graph.node[0].op_type = name
            super()._construct_nodes(graph)
            return
        attrs = {**self._parse_attr(node.attribute), "tvm_custom": {"name": name, "num_outputs": len(node.output)}}
        result = self._convert_operator(name, inputs, attrs, self.opset)
        self._nodes.update(zip(node.output, result if isinstance(result, relax.Tuple) else [result], strict=True))

    def _parse_attr(self, attr_proto: Iterable[onnx.AttributeProto]) -> dict[str, Any]:
        """The attributes of a node by name, as TVM's importer reads them; it refuses a list without elements."""
        attrs: dict[str, Any] = super()._parse_attr([item for item in attr_proto if not _is_empty(item)])
        return attrs

    def _with_axes(self, node: onnx.NodeProto) -> onnx.NodeProto:
        """A Squeeze that, by the file, removes all symbolic dimensions or none, with its axes; other nodes as they are.

        The model checks that dimensions which it keeps are not one.
        """
        if not is_squeeze_without_axes(node):
            return node
        dims = dims_of(self._nodes[node.input[0]]) or []
        axes = squeezed_axes(self._model, node, [size if isinstance(size, int) else None for size in dims])
        if axes is None:
            return node
        for size in (size for axis, size in enumerate(dims) if axis not in axes and not isinstance(size, int)):
            larger = self.evaluator.greatest(size, 2)
            if not self.evaluator.are_equal(larger, size):
                check_sizes(self.bb, [larger], [size])
        # Without an axis the attribute would mean all of them.
        if not axes:
            return onnx.helper.make_node("Identity", node.input[:1], node.output, node.name)
        return onnx.helper.make_node("Squeeze", node.input[:1], node.output, node.name, axes=axes)

    def _in_symbols_of_inputs(self, value: relax.Expr) -> relax.Expr:
        """The tensor `value` with its dimensions written in those of the inputs: a caller knows no others."""
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
        elif operator_name(node) in ("BatchNormalization", "GroupNormalization", "InstanceNormalization"):
            operands = agree_in_channels(self.bb, operands, self.evaluator)
        elif node.op_type == "MatMul":
            operands = agree_in_product(self.bb, operands, self.evaluator)
        elif node.op_type in ("GRU", "LSTM", "RNN"):
            places = [place for place in (0, 5, 6) if place < len(node.input) and node.input[place]]
            layout = next((attribute.i for attribute in node.attribute if attribute.name == "layout"), 0)
            names = [node.input[place] for place in places]
            batches = [self._nodes[name] for name in names]
            operands = agree_along(self.bb, batches, 0 if layout else 1, self.evaluator)
        elif node.op_type == "GridSample":
            operands = agree_along(self.bb, operands, 0, self.evaluator)
        self._nodes.update(zip(names, operands, strict=True))

    def _is_known(self, node: onnx.NodeProto) -> bool:
        """Whether all results of a node are constants or shapes."""
        values = [self._nodes.get(name) for name in node.output if name]
        kinds = (tvm.ir.GenericConst, relax.ShapeExpr)
        return all(isinstance(value, kinds) or tvm.ir.is_prim_expr(value) for value in values if value is not None)

    def _refusal(self, node: onnx.NodeProto, error: Exception) -> Refusal:
        """The refusal that an error of a converter means."""
        if isinstance(error, NoConverterError):
            self.is_operator_error = True
            return missing_converter(node)
        if isinstance(error, UnsupportedFormError):
            self.is_operator_error = True
            reason = f"not supported in this form ({error})"
            default = self._advice_on_sizes(node) if isinstance(error, FreeSizeError) else "export the model without it"
            advice = error.advice or default
        elif isinstance(error, MixedTypesError):
            reason, advice = str(error), ONE_TYPE
        elif operator_name(node) in self._own:
            reason, advice = f"its converter raised {type(error).__name__}: {shorten(error)}", "mend the converter"
        elif isinstance(error, tvm.error.OpNotImplemented):
            self.is_operator_error = True
            reason, advice = shorten(error), "export the model without it"
        else:
            reason, advice = f"TVM cannot import it: {shorten(error)}", advise_on_error(error, self._advice)
        return Refusal(operator_name(node), node_name(node), reason, advice)

    def _advice_on_sizes(self, node: onnx.NodeProto) -> str:
        """What to do about a node that needs fixed sizes: the inputs' sizes do not decide all sizes in a model."""
        free = set(self._symbols().values())
        operands = [self._nodes[name] for name in node.input if name in self._nodes]
        tensors = [operand for operand in operands if isinstance(operand.ty, relax.TensorType)]
        dims = [dims_of(operand) for operand in tensors]
        sizes = [self.evaluator.expression(size) for shape in dims for size in shape or () if not is_static(size)]
        symbols = {symbol for size in sizes for symbol in tirx.analysis.undefined_vars(size, [])}
        is_decided = free and symbols <= free and not any(shape is None for shape in dims)
        return self._advice if is_decided else COMPUTED_SIZES

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

    def _value_at_import(self, expr: relax.Expr) -> Array | None:
        """The value of a constant expression other than a weight; None for others."""
        if isinstance(expr, tvm.ir.GenericConst):
            return numbers_of(expr)
        if isinstance(expr, relax.ShapeExpr) and all(is_static(dim) for dim in expr.values):
            return np.array([int(dim) for dim in expr.values], "int64")
        if isinstance(expr, tirx.IntImm):
            return np.array(int(expr), "int64")
        return None

    def _constant(self, expr: relax.Expr) -> Array | None:
        """The value of a constant expression or a weight; None for others."""
        if isinstance(expr, relax.Var) and expr.name in self._weights:
            return self._weights[expr.name][1]
        return self._value_at_import(expr)

    def _is_constant(self, expr: relax.Expr) -> bool:
        """Whether an expression is a weight or a constant."""
        return isinstance(expr, tvm.ir.GenericConst) or (isinstance(expr, relax.Var) and expr.name in self._weights)

    def _fold(self, node: onnx.NodeProto) -> bool:
        """Evaluate a node of constant operands, as models compute shapes and indices; return whether this was done."""
        if not is_foldable(node):
            return False
        operands = [self._nodes[name] for name in node.input if name]
        if node.op_type in ("Shape", "Size"):
            dims = dims_of(operands[0]) if isinstance(operands[0].ty, relax.TensorType) else None
            if dims is None or not all(is_static(dim) for dim in dims):
                return False
            # The elements do not matter, the shape does.
            values: list[Any] = [np.broadcast_to(np.float32(0), dims)]
        else:
            values = [self._value_at_import(operand) for operand in operands]
        results = None if any(value is None for value in values) else evaluate_constants(node, values, self.opset)
        self._nodes.update({name: const(result) for name, result in (results or {}).items()})
        return results is not None

    def _fold_weights(self, node: onnx.NodeProto) -> bool:
        """Evaluate a node whose operands are weights and constants; return whether this was done."""
        operands = [self._nodes[name] for name in node.input if name]
        if not computes_weights(node) or not all(map(self._is_constant, operands)):
            return False
        values = [value for value in map(self._constant, operands) if value is not None]
        results = evaluate_weights(node, values, self.opset)
        for name, result in (results or {}).items():
            self._nodes[name] = self._initial(name, result)
        return results is not None

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
        file_type = self._recorded.get(node)
        if value.ty.dtype is None or value.ty.ndim < 0:
            return value
        unknown = [self.evaluator.unknown_size() for _ in range(int(value.ty.ndim))]
        if file_type is None or not file_type.HasField("shape") or len(file_type.shape.dim) != len(unknown):
            return self.bb.match_cast(value, relax.TensorType(unknown, value.ty.dtype))
        symbols = self._symbols()
        shape = []
        for dim, symbol in zip(file_type.shape.dim, unknown, strict=True):
            size = dim.dim_value if dim.HasField("dim_value") else self._sizes.get(dim.dim_param, dim.dim_param)
            shape.append(symbols.get(size, symbol) if isinstance(size, str) else size)
        return self.bb.match_cast(value, relax.TensorType(shape, value.ty.dtype))


def _without_calls_of_others(
    function: relax.Function, functions: Mapping[tvm.ir.GlobalVar, relax.Function]
) -> relax.Function:
    """The function without calls of Relax functions that are not there, and without what depends on them.

    An import that was undone leaves them, and nothing else reads them.
    """
    absent: set[relax.Var] = set()
    blocks = []
    for block in function.body.blocks:
        bindings = []
        for binding in block.bindings:
            read: set[Any] = set()
            relax.analysis.post_order_visit(binding.value, read.add)
            callee = getattr(binding.value, "op", None)
            if (isinstance(callee, tvm.ir.GlobalVar) and callee not in functions) or not absent.isdisjoint(read):
                absent.add(binding.var)
            else:
                bindings.append(binding)
        blocks.append(type(block)(bindings))
    body = relax.SeqExpr(blocks, function.body.body)
    return relax.Function(function.params, body, function.ret_ty, function.is_pure, function.attrs)


def _is_empty(attribute: onnx.AttributeProto) -> bool:
    """Whether an attribute has no value, as a list without elements."""
    return {field.name for field, _ in attribute.ListFields()} <= {"name", "type", "doc_string"}
