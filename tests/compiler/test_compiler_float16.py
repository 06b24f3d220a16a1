"""Files in float16: they compute in float32, and their bundles hold the weights in two bytes."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest
from onnx import TensorProto, helper
from tvm import relax

from support.arrays import normal
from tvmflow.arrays import Array
from tvmflow.compiler import build, import_onnx
from tvmflow.compiler.importer import survey_onnx
from tvmflow.compiler.passes.simplify import remove_identities
from tvmflow.hardware.target import Target

HALF = TensorProto.FLOAT16


def _halves(*shape: int, seed: int = 0) -> Array:
    return normal(*shape, seed=seed).astype("float16")


def _check(path: Path, target: Target, *arrays: Array) -> list[Array]:
    """The outputs, which are those of ONNX Runtime but for the last digit of a float16."""
    session = onnxruntime.InferenceSession(path, providers=["CPUExecutionProvider"])
    expected = session.run(None, {value.name: array for value, array in zip(session.get_inputs(), arrays, strict=True)})
    actual = build(import_onnx(path), target).load().run(*arrays)
    for output, other in zip(actual, expected, strict=True):
        assert output.dtype == other.dtype
        np.testing.assert_allclose(output, other, rtol=2e-3, atol=2e-3 * np.abs(other).max())
    return actual


def _operators_on_float16(path: Path) -> set[str]:
    """The operators of an imported model that read or compute float16."""
    bindings = [binding for block in import_onnx(path).mod["main"].body.blocks for binding in block.bindings]
    calls = [binding.value for binding in bindings if isinstance(binding.value, relax.Call)]
    return {call.op.name for call in calls if any("float16" in str(value.ty) for value in (call, *call.args))}


def test_a_network_computes_in_float32(make_model: Any, target: Target) -> None:
    """Two outputs, one of which is read by the other's nodes too, and a value that is float32 in the file."""
    weights = {
        "k": _halves(24, 8, 3, 3) / 8,
        "s": np.ones(24, "float16"),
        "b": _halves(24, seed=1),
        "d": _halves(24, 40),
    }
    nodes = [
        helper.make_node("Conv", ["x", "k"], ["c"], pads=[1, 1, 1, 1]),
        helper.make_node("InstanceNormalization", ["c", "s", "b"], ["n"]),
        helper.make_node("Gelu", ["n"], ["g"], approximate="tanh"),
        helper.make_node("GlobalAveragePool", ["g"], ["pooled"]),
        helper.make_node("Flatten", ["pooled"], ["flat"]),
        helper.make_node("MatMul", ["flat", "d"], ["logits"]),
        helper.make_node("Cast", ["logits"], ["wide"], to=TensorProto.FLOAT),
        helper.make_node("Softmax", ["wide"], ["probabilities"], axis=1),
        helper.make_node("Cast", ["probabilities"], ["again"], to=HALF),
        helper.make_node("Mul", ["again", "logits"], ["weighted"]),
    ]
    outputs = [("logits", None, HALF), "probabilities", ("weighted", None, HALF)]
    path = make_model(nodes, [("x", ["batch", 8, 14, 14], HALF)], outputs, weights, opset=20)
    _check(path, target, _halves(2, 8, 14, 14))
    assert _operators_on_float16(path) == {"relax.astype"}


@pytest.mark.few(5)
@pytest.mark.parametrize("operator", ["Acos", "Atan", "Cosh", "Sinh", "Mish", "HardSigmoid", "LRN", "Softplus", "Erf"])
def test_operators_are_those_of_float32(operator: str, make_model: Any, target: Target) -> None:
    attributes = {"size": 3} if operator == "LRN" else {}
    nodes = [
        helper.make_node("Tanh", ["x"], ["t"]),
        helper.make_node(operator, ["t"], ["y"], **attributes),
    ]
    path = make_model(nodes, [("x", [1, 6, 5, 5], HALF)], [("y", None, HALF)], opset=18)
    _check(path, target, _halves(1, 6, 5, 5))


@pytest.mark.parametrize("truth", [True, False])
def test_branches_read_inputs_and_outputs_by_their_names(truth: bool, make_model: Any, target: Target) -> None:
    """Within a branch, `x` is the input of the model, `y` one of its outputs, and `w` a weight of the branch."""

    def branch(operator: str, operand: str) -> onnx.GraphProto:
        weight = onnx.numpy_helper.from_array(np.array([2.0, 3.0], "float16"), "w")
        result = helper.make_tensor_value_info(f"{operand}_{operator}", HALF, [4, 2])
        return helper.make_graph(
            [helper.make_node(operator, [operand, "w"], [result.name])], operator, [], [result], [weight]
        )

    nodes = [
        helper.make_node("Exp", ["x"], ["y"]),
        helper.make_node("If", ["c"], ["z"], then_branch=branch("Mul", "x"), else_branch=branch("Add", "y")),
    ]
    inputs = [("x", [4, 2], HALF), ("c", [], TensorProto.BOOL)]
    path = make_model(nodes, inputs, [("y", None, HALF), ("z", [4, 2], HALF)])
    _check(path, target, _halves(4, 2), np.array(truth))


def test_names_that_the_file_has_are_not_taken(make_model: Any, target: Target) -> None:
    nodes = [
        helper.make_node("Neg", ["x"], ["x_as_float32"]),
        helper.make_node("Add", ["x_as_float32", "x"], ["x_as_float32_"]),
        helper.make_node("Sub", ["x_as_float32_", "x"], ["y"]),
    ]
    path = make_model(nodes, [("x", [3], HALF)], [("y", None, HALF)])
    (result,) = _check(path, target, np.array([1.0, 2.0, -3.0], "float16"))
    np.testing.assert_array_equal(result, np.array([-1.0, -2.0, 3.0], "float16"))


def test_bits_of_float16_are_read_as_they_are(make_model: Any, target: Target) -> None:
    nodes = [helper.make_node("BitCast", ["x"], ["y"], to=TensorProto.INT16)]
    path = make_model(nodes, [("x", [5], HALF)], [("y", None, TensorProto.INT16)], opset=26)
    x = _halves(5)
    (result,) = build(import_onnx(path), target).load().run(x)
    np.testing.assert_array_equal(result, x.view("int16"))


@pytest.mark.parametrize(
    ("operands", "reason"),
    [(("x", "w"), "'x' is float16, 'w' float32"), (("t", "w"), "'t' is float16, 'w' float32")],
    ids=["an input", "a result"],
)
def test_nodes_of_float16_and_float32_are_refused(operands: Sequence[str], reason: str, make_model: Any) -> None:
    nodes = [helper.make_node("Tanh", ["x"], ["t"]), helper.make_node("Add", list(operands), ["y"], "mixed")]
    path = make_model(nodes, [("x", [3], HALF)], [("y", None, HALF)], {"w": np.ones(3, "float32")})
    refusals = survey_onnx(path).refusals
    assert [(refusal.operator, refusal.node) for refusal in refusals] == [("Add", "mixed")]
    assert reason in refusals[0].reason


@pytest.mark.long
def test_a_library_holds_the_weights_in_two_bytes(make_model: Any, target: Target, tmp_path: Path) -> None:
    """A table of words, a dense layer and a convolution for Winograd's algorithm."""
    weights = {"q": _halves(3000, 48), "d": _halves(48, 480), "k": _halves(48, 48, 3, 3)}
    nodes = [
        helper.make_node("Gather", ["q", "words"], ["a"]),
        helper.make_node("MatMul", ["a", "d"], ["y"]),
        helper.make_node("Conv", ["image", "k"], ["z"], pads=[1, 1, 1, 1]),
    ]
    inputs = [("words", [1, 20], TensorProto.INT64), ("image", [1, 48, 16, 16], HALF)]
    path = make_model(nodes, inputs, [("y", None, HALF), ("z", None, HALF)], weights)
    words = np.random.default_rng(0).integers(0, 3000, (1, 20))
    _check(path, target, words, _halves(1, 48, 16, 16))
    build(import_onnx(path), target).export(tmp_path / "mod.so")
    stored = sum(weight.nbytes for weight in weights.values())
    # The code of such a library takes less than 100 KiB.
    assert stored < (tmp_path / "mod.so").stat().st_size < 1.1 * stored + 100 * 1024


_MOVES = {
    "a concatenation": [("Concat", ["x", "z"], {"axis": 1})],
    "a transpose": [("Transpose", ["x"], {"perm": [1, 0]})],
    "several": [
        ("Concat", ["x", "z"], {"axis": 0}),
        ("Unsqueeze", ["v0", "axes"], {}),
        ("Gather", ["v1", "places"], {}),
    ],
    "a choice": [("Greater", ["x", "z"], {}), ("Where", ["v0", "z", "half"], {})],
}


@pytest.mark.few(2)
@pytest.mark.parametrize("case", _MOVES)
def test_numbers_that_only_move_stay_float16(case: str, make_model: Any, target: Target) -> None:
    nodes = [helper.make_node(name, ins, [f"v{place}"], **more) for place, (name, ins, more) in enumerate(_MOVES[case])]
    nodes[-1].output[0] = "y"
    weights = {"axes": np.array([1]), "places": np.array([2, 0, 1]), "half": np.array(0.5, "float16")}
    read = {name for node in nodes for name in node.input}
    inputs = [(name, ["rows", "few"], HALF) for name in "xz" if name in read]
    path = make_model(nodes, inputs, [], {name: weights[name] for name in weights if name in read})
    model = onnx.load(path)
    model.graph.output.append(helper.make_empty_tensor_value_info("y"))
    model.graph.output[0].type.tensor_type.elem_type = HALF
    onnx.save(model, path)
    arrays = [_halves(5, 3, seed=seed) for seed in range(len(inputs))]
    arrays[0][0] = np.array([np.inf, -0.0, np.nan], "float16")
    session = onnxruntime.InferenceSession(path, providers=["CPUExecutionProvider"])
    (expected,) = session.run(None, dict(zip([name for name, *_ in inputs], arrays, strict=True)))
    (actual,) = build(import_onnx(path), target).load().run(*arrays)
    np.testing.assert_array_equal(actual, expected)
    moved = remove_identities()(import_onnx(path).mod)["main"].script()
    # Numbers are compared in float32.
    assert moved.count("astype") == (2 if case == "a choice" else 0)
