"""Small models computed in float64."""

import numpy as np
import pytest
from onnx import TensorProto, helper, numpy_helper

from support.models import make_model
from tvmflow.hardware import memory
from tvmflow.onnx_model.double_precision import compute


def test_constants_conversions_and_branches_are_computed_in_float64() -> None:
    third = np.array([1 / 3], "float32")
    constant = helper.make_node("Constant", [], ["k"], value=numpy_helper.from_array(third))
    branches = [
        helper.make_graph(
            [constant, helper.make_node("Mul", ["f", "k"], ["r"])],
            name,
            [],
            [helper.make_tensor_value_info("r", TensorProto.FLOAT, [None])],
        )
        for name in ("then", "else")
    ]
    nodes = [
        helper.make_node("Cast", ["x"], ["f"], to=TensorProto.FLOAT),
        helper.make_node("If", ["is_first"], ["a"], then_branch=branches[0], else_branch=branches[1]),
        helper.make_node("Add", ["a", "w"], ["y"]),
    ]
    inputs = [("x", [3], TensorProto.INT64), ("is_first", [], TensorProto.BOOL)]
    model = make_model(nodes, inputs, ["y"], {"w": np.array([1e-9], "float32")})
    outputs = compute(model, {"x": np.arange(3), "is_first": np.array(True)})
    assert outputs is not None
    assert outputs["y"].dtype == np.float64
    expected = np.arange(3) * third.astype("float64") + np.float64(np.float32(1e-9))
    np.testing.assert_allclose(outputs["y"], expected, rtol=1e-15)


def test_a_model_of_an_unknown_operator_is_not_computed() -> None:
    model = make_model([helper.make_node("Foo", ["x"], ["y"], domain="org.example")], [("x", [3])], ["y"])
    assert compute(model, {"x": np.zeros(3, "float32")}) is None


def test_an_operator_that_onnx_runtime_lacks_in_float64_is_computed_by_numpy() -> None:
    weights = {"w": np.full((1, 1, 1, 1), 1 / 3, "float32")}
    model = make_model([helper.make_node("Conv", ["x", "w"], ["y"])], [("x", [1, 1, 2, 2])], ["y"], weights)
    outputs = compute(model, {"x": np.ones((1, 1, 2, 2), "float32")})
    assert outputs is not None
    np.testing.assert_array_equal(outputs["y"], np.full((1, 1, 2, 2), np.float64(np.float32(1 / 3))))


def test_a_model_that_needs_too_much_memory_is_not_computed(monkeypatch: pytest.MonkeyPatch) -> None:
    nodes = [helper.make_node("Mul", ["x", "z"], ["all"]), helper.make_node("ReduceMax", ["all"], ["y"], keepdims=0)]
    model = make_model(nodes, [("x", [1, 8192]), ("z", [8192, 1])], ["y"])
    inputs = {"x": np.ones((1, 8192), "float32"), "z": np.ones((8192, 1), "float32")}
    outputs = compute(model, inputs)
    assert outputs is not None
    assert outputs["y"] == 1
    # All products are 512 MiB.
    monkeypatch.setattr(memory, "safe_bytes", lambda: 1 << 28)
    assert compute(model, inputs) is None
