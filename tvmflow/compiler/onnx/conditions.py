"""The operator If.

The branch of a condition that is known at import is imported in place of the node. What is decided when the model runs
becomes functions of the module, which the virtual machine calls: one for each branch.
"""

from collections.abc import Sequence
from typing import Any

import onnx
from tvm import relax, tirx

from tvmflow.compiler.onnx.node import FreeSizeError, UnsupportedFormError
from tvmflow.compiler.onnx.outlining import (
    Function,
    Importer,
    Type,
    Value,
    call,
    decide,
    either,
    graph_of,
    outline,
    scalar,
    set_results,
    tensors,
)
from tvmflow.compiler.onnx.values import dims_of, is_static
from tvmflow.compiler.size_checks import cast_to
from tvmflow.onnx_model.graph import nodes_of


def convert_if(importer: Importer, node: onnx.NodeProto) -> bool:
    """Import If; return whether the nodes of one branch took its place.

    They do for a condition that is known at import. They also do if the results of the branches have different ranks
    and the condition compares two sizes: the `then` branch is imported, and the model checks when it runs that the
    sizes are equal. Otherwise each branch becomes a function, and the model calls one of them. Raises FreeSizeError for
    other branches whose results have different ranks, and UnsupportedFormError for results of different types.
    """
    then_graph, else_graph = (graph_of(node, name) for name in ("then_branch", "else_branch"))
    condition = importer.value(node.input[0])
    elements = importer.elements(condition)
    if elements is not None:
        with importer.scope():
            values = importer.import_graph(then_graph if elements.reshape(-1)[0] else else_graph, [])
        set_results(importer, node, values)
        return True
    undo, scope, name = importer.checkpoint(), importer.evaluator.symbols(), importer.unique_name("if")
    equality = importer.equal_sizes(node.input[0])

    def import_then() -> list[Value]:
        with importer.scope():
            _make_equal(importer, then_graph, equality)
            return importer.import_graph(then_graph, [])

    def import_else() -> list[Value]:
        with importer.scope():
            return importer.import_graph(else_graph, [])

    with importer.evaluator.one_of_two() as end_half:
        branches = [outline(importer, f"{name}_then", [], scope, lambda: tensors(importer, import_then()))]
        end_half()
        branches.append(outline(importer, f"{name}_else", [], scope, lambda: tensors(importer, import_else())))
    pairs = list(zip(branches[0].results, branches[1].results, strict=True))
    if any(len(one.dims) != len(other.dims) for one, other in pairs):
        undo()
        with importer.scope():
            # Exporters remove a dimension that may be one; the rest of a model takes one number of dimensions only.
            if not _make_equal(importer, then_graph, equality):
                raise FreeSizeError("branches whose results have different numbers of dimensions")
            values = importer.import_graph(then_graph, [])
        set_results(importer, node, values)
        return True
    if any(one.dtype != other.dtype for one, other in pairs):
        raise UnsupportedFormError("branches whose results have different types")
    results = [either(importer, *pair) for pair in pairs]
    calls = [branch.call([]) for branch in branches]
    choice = _outline_choice(importer, name, scope, scalar(importer, condition), calls, results)
    set_results(importer, node, map(Value, call(importer, choice, [])))
    return False


def _outline_choice(
    importer: Importer,
    name: str,
    scope: Sequence[tirx.Var],
    condition: relax.Expr,
    calls: Sequence[relax.Call],
    results: Sequence[Type],
) -> Function:
    """Make the function that does one of two calls."""
    return outline(importer, name, [], scope, lambda: decide(importer, condition, *calls), results)


def _make_equal(importer: Importer, graph: onnx.GraphProto, equality: tuple[Any, Any] | None) -> bool:
    """Give tensors that a graph reads one of two equal sizes for the other; return whether one has that dimension.

    That the sizes are equal is checked when the model runs.
    """
    size, target = equality or (None, None)
    if is_static(size):
        size, target = target, size
    has_any = False
    for name in sorted({name for node in nodes_of(graph) for name in node.input if importer.has_value(name)}):
        expr = importer.value(name).expr
        dims = dims_of(expr) or []
        equal = [size is not None and importer.evaluator.are_equal(dim, size) for dim in dims]
        if any(equal):
            dims = [target if is_equal else dim for dim, is_equal in zip(dims, equal, strict=True)]
            importer.set_value(name, Value(cast_to(importer.bb, expr, dims)))
            has_any = True
    return has_any
