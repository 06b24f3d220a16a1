"""Operators of the user's own: a function says what they compute, a converter compiles them."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import helper
from tvm import relax, te

from support.arrays import normal, onnxruntime_outputs
from support.models import make_model
from tvmflow.arrays import Array
from tvmflow.bisection import bisect
from tvmflow.compiler import build, import_onnx
from tvmflow.compiler.onnx import Node, UnsupportedFormError
from tvmflow.errors import ExportError, ModelImportError, UnsupportedOperatorError
from tvmflow.hardware.target import Target
from tvmflow.operators import OwnOperator, define, load_operators, operator
from tvmflow.tolerance import Bounds

_FUNCTION = """
<domain: "org.example", opset_import: ["": 18]>
Scaled <factor: float = 3.0> (x) => (y) {
    number = Constant <value_float: float = @factor> ()
    y = Mul (x, number)
}
"""


def _operator(convert: Callable[[Node], Any]) -> dict[str, OwnOperator]:
    own = operator(_FUNCTION)(convert)
    return {own.name: own}


def _with_kernel(node: Node) -> relax.Expr:
    factor = node.attrs.get("factor", 3.0)

    def kernel(x: te.Tensor) -> te.Tensor:
        return te.compute(x.shape, lambda *i: x[i] * factor, name="scaled")

    return node.builder.call_te(kernel, node.inputs[0], primfunc_name_hint="scaled_by_hand")


def _model() -> onnx.ModelProto:
    nodes = [
        helper.make_node("MatMul", ["x", "w"], ["a"]),
        helper.make_node("Scaled", ["a"], ["b"], domain="org.example", name="first", factor=0.5),
        helper.make_node("Scaled", ["b"], ["y"], domain="org.example", name="second"),
    ]
    return make_model(nodes, [("x", [4, 8])], [("y", [4, 8])], {"w": normal(8, 8)})


@pytest.fixture
def defined(tmp_path: Path) -> Path:
    """The model with the definition of its operator."""
    model, path = _model(), tmp_path / "model.onnx"
    define(model, _operator(_with_kernel))
    onnx.save(model, path)
    return path


def test_a_converter_with_a_kernel_computes_what_the_function_says(
    defined: Path, run_built: Callable[..., list[Array]], target: Target
) -> None:
    x = normal(4, 8, seed=3)
    imported = import_onnx(defined, operators=_operator(_with_kernel))
    assert any("scaled_by_hand" in variable.name_hint for variable in imported.mod.get_global_vars())
    (expected,) = onnxruntime_outputs(defined, {"x": x}).values()
    np.testing.assert_allclose(run_built(build(imported, target), x)[0], expected, rtol=1e-5)


def test_without_a_converter_the_function_is_compiled(
    defined: Path, run_built: Callable[..., list[Array]], target: Target
) -> None:
    x = normal(4, 8, seed=3)
    (expected,) = onnxruntime_outputs(defined, {"x": x}).values()
    np.testing.assert_allclose(run_built(build(import_onnx(defined), target), x)[0], expected, rtol=1e-5)


def test_a_converter_that_computes_something_else_is_named_by_the_bisection(target: Target) -> None:
    own = _operator(lambda node: _with_kernel(node) if node.attrs["factor"] < 1 else node.apply("Neg", node.inputs[0]))
    model = _model()
    define(model, own)
    bisection = bisect(model, [{"x": normal(4, 8)}], target, Bounds(1e-3, 1e-4), operators=own)
    assert bisection is not None
    assert (bisection.operator, bisection.node) == ("org.example.Scaled", "second")


def test_a_converter_is_composed_of_operators_of_the_standard(
    defined: Path, run_built: Callable[..., list[Array]], target: Target
) -> None:
    own = _operator(lambda node: node.apply("Mul", node.inputs[0], relax.const(node.attrs.get("factor", 3.0))))
    x = normal(4, 8, seed=3)
    (expected,) = onnxruntime_outputs(defined, {"x": x}).values()
    actual = run_built(build(import_onnx(defined, operators=own), target), x)[0]
    np.testing.assert_allclose(actual, expected, rtol=1e-5)


def test_a_definition_in_the_file_stays(tmp_path: Path) -> None:
    model = _model()
    model.functions.append(onnx.parser.parse_function(_FUNCTION.replace("3.0", "7.0")))
    define(model, _operator(_with_kernel))
    (function,) = model.functions
    assert function.attribute_proto[0].f == 7.0


def test_a_form_that_a_converter_refuses_is_one_sentence(defined: Path) -> None:
    def refuse(node: Node) -> relax.Expr:
        raise UnsupportedFormError("a factor beside a mask")

    with pytest.raises(UnsupportedOperatorError, match=r"org\.example\.Scaled.*a factor beside a mask"):
        import_onnx(defined, operators=_operator(refuse))


def test_a_converter_that_fails_is_one_sentence(defined: Path) -> None:
    with pytest.raises(ModelImportError, match=r"org\.example\.Scaled, node 'first'.*its converter raised KeyError"):
        import_onnx(defined, operators=_operator(lambda node: node.attrs["gain"]))


@pytest.mark.parametrize(
    ("function", "message"),
    [("Twice (x) => { }", "cannot be read"), ("Twice (x) => (y) { y = Add (x, x) }", "needs a domain of its own")],
    ids=["no function", "no domain"],
)
def test_a_definition_that_is_no_function_of_a_domain_is_refused(function: str, message: str) -> None:
    with pytest.raises(ExportError, match=message):
        operator(function)


def test_a_function_that_is_no_operator_is_refused() -> None:
    with pytest.raises(ExportError, match="decorate it with"):
        load_operators(["support.arrays:normal"])
