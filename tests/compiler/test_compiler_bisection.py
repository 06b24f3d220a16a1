"""Models that are compiled wrongly on purpose, by a converter or a pass, and the node that `bisect` names."""

from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
import tvm
from onnx import helper
from tvm import relax

from support.models import make_model
from tvmflow.arrays import Array
from tvmflow.bisection import Bisection, bisect
from tvmflow.compiler import graph
from tvmflow.compiler.onnx import CONVERTERS, Node
from tvmflow.compiler.passes.rewrite import Rewriter, rewriting
from tvmflow.errors import ExportError
from tvmflow.hardware.target import Target
from tvmflow.onnx_model.session import open_session, run_session
from tvmflow.tolerance import Bounds

BOUNDS = Bounds(rtol=1e-3, atol=1e-4)


def _chain() -> onnx.ModelProto:
    """y = softmax(exp(relu(tanh(x @ w) + b))), reshaped by a computed shape."""
    generator = np.random.default_rng(0)
    weights = {"w": generator.normal(size=(8, 8)).astype("float32"), "b": np.ones(8, "float32")}
    nodes = [
        helper.make_node("MatMul", ["x", "w"], ["m"], name="product"),
        helper.make_node("Tanh", ["m"], ["t"], name="squash"),
        helper.make_node("Add", ["t", "b"], ["a"], name="shift"),
        helper.make_node("Relu", ["a"], ["r"], name="rectify"),
        helper.make_node("Exp", ["r"], ["e"], name="grow"),
        helper.make_node("Shape", ["x"], ["s"], name="shape"),
        helper.make_node("Reshape", ["e", "s"], ["v"], name="view"),
        helper.make_node("Softmax", ["v"], ["y"], name="share"),
    ]
    return make_model(nodes, [("x", ["batch", 8])], ["y"], weights)


def _inputs() -> dict[str, Array]:
    return {"x": np.random.default_rng(1).normal(size=(4, 8)).astype("float32")}


def _halve(node: Node) -> relax.Expr:
    """Convert an operator as half of its operand, which is wrong."""
    return relax.op.multiply(node.inputs[0], relax.const(0.5, "float32"))


def _found(model: onnx.ModelProto, target: Target) -> Bisection:
    bisection = bisect(model, [_inputs()], target, BOUNDS)
    assert bisection is not None
    return bisection


def test_a_right_model_has_no_node_out_of_bounds(target: Target) -> None:
    assert bisect(_chain(), [_inputs()], target, BOUNDS) is None


@pytest.mark.long
def test_the_first_sample_that_shows_an_error_is_searched(target: Target, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(CONVERTERS, "Tanh", _halve)
    right = {"x": np.zeros((4, 8), "float32")}
    other_width = {"x": np.zeros((4, 9), "float32")}
    bisection = bisect(_chain(), [right, other_width, _inputs()], target, BOUNDS)
    assert bisection is not None
    assert bisection.node == "squash"


def test_a_wrong_converter_is_found_by_its_node_which_is_the_smallest_model_that_shows_it(
    target: Target, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setitem(CONVERTERS, "Tanh", _halve)
    bisection = _found(_chain(), target)
    assert (bisection.operator, bisection.node, bisection.output) == ("Tanh", "squash", "t")
    assert bisection.error > 0.1
    assert bisection.compiled_error == pytest.approx(bisection.error, rel=1e-4)
    assert bisection.onnxruntime_error is not None
    assert bisection.onnxruntime_error < 1e-6
    bisection.save(tmp_path / "found")
    model = onnx.load(tmp_path / "found" / "model.onnx")
    onnx.checker.check_model(model)
    assert [node.op_type for node in model.graph.node] == ["Tanh"]
    inputs, expected = (dict(np.load(tmp_path / "found" / f"{name}.npz")) for name in ("inputs", "expected"))
    outputs = run_session(open_session(tmp_path / "found" / "model.onnx"), inputs)
    np.testing.assert_allclose(outputs["t"], expected["t"], rtol=1e-5)


def test_a_wrong_pass_is_shown_by_the_nodes_that_it_joins(target: Target, monkeypatch: pytest.MonkeyPatch) -> None:
    def forget_exp(rewriter: Rewriter, call: relax.Call) -> relax.Expr | None:
        return None if rewriter.call(call.args[0], "nn.relu") is None else call.args[0]

    passes = graph.lower_passes

    def with_wrong_pass(*arguments: Any) -> list[tvm.transform.Pass]:
        return [rewriting("ForgetExp", {"exp": [forget_exp]}), *passes(*arguments)]

    monkeypatch.setattr(graph, "lower_passes", with_wrong_pass)
    bisection = _found(_chain(), target)
    assert (bisection.operator, bisection.node) == ("Exp", "grow")
    assert [node.op_type for node in bisection.reproduction.graph.node] == ["Relu", "Exp"]


@pytest.mark.long
def test_the_first_of_two_wrong_branches_is_found(target: Target, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(CONVERTERS, "Tanh", _halve)
    monkeypatch.setitem(CONVERTERS, "Add", _halve)
    assert _found(_chain(), target).node == "squash"


@pytest.mark.long
def test_fewer_models_are_compiled_than_the_model_has_nodes(target: Target, monkeypatch: pytest.MonkeyPatch) -> None:
    nodes = [helper.make_node("Relu", ["x"], ["v0"])]
    nodes += [helper.make_node("Abs" if i != 19 else "Tanh", [f"v{i}"], [f"v{i + 1}"]) for i in range(30)]
    model = make_model(nodes, [("x", [4, 8])], ["v30"])
    monkeypatch.setitem(CONVERTERS, "Tanh", _halve)
    bisection = _found(model, target)
    assert bisection.operator == "Tanh"
    assert bisection.builds < 10


def test_inputs_that_the_model_does_not_take_are_refused(target: Target) -> None:
    with pytest.raises(ExportError):
        bisect(_chain(), [{"x": np.zeros((4, 9), "float32")}], target, BOUNDS)


@pytest.mark.parametrize(
    ("actual", "is_met"),
    [([1.0, 2.0], True), ([1.0, 2.01], False), ([1.0, np.nan], False), ([1.0], False)],
    ids=["equal", "far", "no number", "shape"],
)
def test_a_result_is_within_bounds_or_not(actual: list[float], is_met: bool) -> None:
    assert BOUNDS.is_met(np.array([1.0, 2.0]), np.array(actual)) is is_met
