"""The arithmetic of validation: how far outputs are apart, and when they are out of bounds."""

import math
from pathlib import Path
from typing import Any, NoReturn

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

from support.arrays import normal
from support.models import save_amplifier, save_model
from tasks import rounding
from tasks.reference import _dataset, join, score, split
from tasks.rounding import Rounding
from tasks.validate import _compare, _metric_reasons, _notes, _reasons
from tvmflow.errors import ExportError
from tvmflow.onnx_model import double_precision
from tvmflow.onnx_model.rounding import change_last_bits
from tvmflow.onnx_model.session import open_session, run_session
from tvmflow.spec import TaskMetric, Validate, parse
from tvmflow.tolerance import Bounds

_NAN, _INF = float("nan"), float("inf")


def _pair(expected: Any, actual: Any, dtype: Any = np.float32) -> tuple[dict[str, Any], dict[str, Any]]:
    return {"y": np.asarray(expected, dtype)}, {"y": np.asarray(actual, dtype)}


def test_equal_outputs_are_at_no_distance() -> None:
    result = _compare("pytorch", [_pair([[1, 2, 3]], [[1, 2, 3]])])
    assert (result.max_abs_error, result.max_rel_error, result.cosine) == (0.0, 0.0, 1.0)
    assert result.top1_agreement == 1.0


def test_the_worst_error_of_all_samples_and_outputs_counts() -> None:
    expected, actual = (
        {"a": np.array([1.0, 10.0]), "b": np.array([0.5])},
        {"a": np.array([1.0, 10.5]), "b": np.array([0.25])},
    )
    result = _compare("pytorch", [_pair([1, 2], [1, 2]), (expected, actual)])
    assert result.max_abs_error == pytest.approx(0.5)
    # Relative to the largest value of each output: 0.5 of 10, and 0.25 of 0.5.
    assert result.max_rel_error == pytest.approx(0.5)
    assert result.samples == 2


@pytest.mark.parametrize(
    ("expected", "actual", "error"),
    [
        ([_NAN, 1], [_NAN, 1], 0.0),
        ([_INF, 1], [_INF, 1], 0.0),
        ([_NAN, 1], [0, 1], _INF),
        ([0, 1], [_NAN, 1], _INF),
        ([_INF, 1], [-_INF, 1], _INF),
        ([0, 1], [_INF, 1], _INF),
    ],
)
@pytest.mark.filterwarnings("error")
def test_values_that_are_not_finite_are_equal_or_infinitely_far_apart(
    expected: list[float], actual: list[float], error: float
) -> None:
    assert _compare("pytorch", [_pair(expected, actual)]).max_abs_error == error


@pytest.mark.parametrize(
    ("expected", "actual", "cosine"),
    [
        ([0, 0], [0, 0], 1.0),
        ([0, 0], [1, 0], 0.0),
        ([1, 0], [0, 1], 0.0),
        ([1, 1], [2, 2], 1.0),
        ([1, 0], [-1, 0], -1.0),
    ],
)
def test_the_cosine_of_outputs(expected: list[float], actual: list[float], cosine: float) -> None:
    assert _compare("pytorch", [_pair(expected, actual)]).cosine == pytest.approx(cosine)


def test_another_shape_is_infinitely_far_apart() -> None:
    result = _compare("pytorch", [_pair([[1, 2]], [[1], [2]])])
    assert math.isinf(result.max_abs_error)
    assert result.top1_agreement == 0.0


def test_small_integers_do_not_wrap_around() -> None:
    assert _compare("pytorch", [_pair([0, 255], [255, 0], np.uint8)]).max_abs_error == 255


def test_the_top_1_agreement_is_over_all_rows() -> None:
    expected, actual = [[0, 1], [1, 0], [0, 1], [1, 0]], [[0, 1], [0, 1], [0, 1], [1, 0]]
    assert _compare("pytorch", [_pair(expected, actual)]).top1_agreement == 0.75


def test_outputs_without_classes_have_no_top_1_agreement() -> None:
    assert _compare("pytorch", [_pair([[1], [2]], [[1], [2]])]).top1_agreement is None
    assert _compare("pytorch", [_pair(1.0, 1.0)]).top1_agreement is None


def _judged(pairs: list[Any], **bounds: Any) -> list[str]:
    return _reasons(Validate.model_validate(bounds), _compare("pytorch", pairs), pairs)


def test_outputs_within_the_tolerance_pass() -> None:
    assert _judged([_pair([100.0, 1.0], [100.1, 1.0])], rtol=2e-3, atol=0) == []
    assert _judged([_pair([_NAN, _INF], [_NAN, _INF])], rtol=0, atol=0, top1_agreement=None) == []


def test_outputs_beyond_the_tolerance_are_named() -> None:
    pairs = [({"a": np.ones(2), "b": np.ones(2)}, {"a": np.ones(2), "b": np.full(2, 1.5)})]
    (reason,) = _judged(pairs)
    assert reason.startswith("output 'b' differs from the original by up to 0.5")


def test_each_output_is_reported_with_its_own_error() -> None:
    pairs = [({"a": np.ones(2), "b": np.ones(2)}, {"a": np.full(2, 3.0), "b": np.full(2, 1.5)})]
    first, second = _judged(pairs)
    assert "output 'a' differs from the original by up to 2," in first
    assert "output 'b' differs from the original by up to 0.5," in second


def test_another_top_1_is_out_of_bounds_however_close_the_outputs_are() -> None:
    pairs = [_pair([[1.0, 1.00001]], [[1.00001, 1.0]])]
    (reason,) = _judged(pairs)
    assert reason == "top-1 agreement is 0.0000, 1 is asked for"
    assert _judged(pairs, top1_agreement=None) == []


@pytest.mark.parametrize("bounds", [{"top1_agreement": None}, {"max_relative_error": 0.5}])
def test_another_shape_is_out_of_bounds_and_named(bounds: dict[str, Any]) -> None:
    (reason,) = _judged([_pair([[1, 2]], [[1, 2]]), _pair([[1, 2]], [[1], [2]])], **bounds)
    assert reason.endswith("and the original's have different shapes, [2, 1] and [1, 2]")


@pytest.mark.parametrize(
    ("metric", "original", "is_refused"),
    [(0.7, 0.8, False), (0.6999, 0.8, True), (math.nan, 0.8, True), (0.1, math.nan, False)],
)
def test_a_metric_may_drop_by_what_is_allowed_and_must_be_a_number(
    metric: float, original: float, is_refused: bool
) -> None:
    # In binary fractions, 0.8 - 0.1 is more than 0.7.
    task = TaskMetric(dataset="data:held_out", drop=0.1)
    assert bool(_metric_reasons(task, metric, original)) == is_refused


def test_accuracy_is_the_share_of_right_classes() -> None:
    task = TaskMetric(dataset="data:held_out")
    outputs = {"logits": np.array([[0, 1], [1, 0], [0, 1], [1, 0]])}
    assert score(task, outputs, np.array([1, 0, 0, 0])) == 0.75


def test_samples_that_are_whole_inputs_are_run_one_by_one_and_their_outputs_stacked() -> None:
    inputs = {"state": np.arange(24).reshape(3, 2, 4), "rate": np.array([8, 16, 32])}
    chunks = split(inputs, 3, None, fixed=False)
    assert [(chunk["state"].shape, chunk["rate"].shape) for chunk in chunks] == [((2, 4), ())] * 3
    joined = join(chunks, 3, one_by_one=True)
    assert all(np.array_equal(joined[name], array) for name, array in inputs.items())


@pytest.mark.parametrize(
    ("value", "part"),
    [
        (({"x": np.zeros((2, 4))}, np.zeros(3)), "input 'x' has 2 samples, there are 3 labels"),
        (({"z": np.zeros((2, 4))}, np.zeros(2)), "gives the inputs z; the model takes x"),
        (({"x": np.zeros((0, 4))}, np.zeros(0)), "is empty"),
        (({"x": 1.0}, np.zeros(1)), "'x' is a single number"),
        (({"x": np.zeros(2)}, 0), "'labels' is a single number"),
        (np.zeros(2), "must return"),
        (None, "must return"),
    ],
    ids=["labels", "name", "empty", "scalar", "scalar labels", "array", "nothing"],
)
def test_held_out_data_of_the_wrong_form_is_refused(value: object, part: str) -> None:
    with pytest.raises(ExportError, match=r"dataset 'data:held_out'.*" + part):
        _dataset(value, "data:held_out", ("x",))


def test_a_bound_on_the_relative_error_stands_in_the_place_of_tolerances() -> None:
    pairs = [_pair([[100.0, 0.0]], [[100.0, 1.5]])]
    result = _compare("onnxruntime", pairs)
    assert _reasons(Validate(), result, pairs)
    assert _reasons(Validate(max_relative_error=0.02), result, pairs) == []
    (reason,) = _reasons(Validate(max_relative_error=0.01), result, pairs)
    assert "by up to 0.015 of its largest value, beyond max_relative_error 0.01" in reason


@pytest.mark.parametrize("actual", [[[_NAN, 1.0]], [[_INF, 1.0]], [[2.0, 1.0, 3.0]]])
def test_no_relative_error_allows_what_is_no_number_or_has_another_shape(actual: Any) -> None:
    pairs = [_pair([[2.0, 1.0]], actual)]
    assert _reasons(Validate(max_relative_error=0.5), _compare("onnxruntime", pairs), pairs)


def test_reduced_precision_has_a_wider_bound_that_the_release_file_can_replace(tmp_path: Path) -> None:
    model = {"name": "n", "model": {"factory": "m:f"}, "inputs": [{"name": "x", "shape": [1]}]}

    def bounds(precision: str, **validate: Any) -> Validate:
        document = {**model, "build": {"precision": precision}, "validate": validate, "targets": ["x86-64-v4-bf16"]}
        return parse(document, tmp_path).bounds()

    assert bounds("fp32").max_relative_error is None
    assert bounds("bf16", samples=2).max_relative_error == 0.05
    assert bounds("int8").max_relative_error == 0.05
    assert bounds("int8", max_relative_error=0.5).max_relative_error == 0.5
    assert bounds("bf16", rtol=1e-2).max_relative_error is None


@pytest.mark.parametrize(
    ("samples", "note"),
    [
        ([[[0, 0], [0, 0]], [[0, 0]]], "'y' is 0"),
        ([[_NAN, _NAN], [_NAN]], "'y' is nan"),
        ([[], []], "'y' is empty"),
        ([[1.5], [1.5]], "'y' is 1.5"),
        ([[1.5]], None),
        ([[0, 0], [0, 1]], None),
        ([[0, 0], [1, 1]], None),
    ],
)
def test_outputs_that_are_one_number_prove_little(samples: list[Any], note: str | None) -> None:
    notes = _notes([{"y": np.asarray(values, np.float32)} for values in samples])
    assert len(notes) == (note is not None)
    assert all(f"the same number in all samples ({note})" in text for text in notes)


def test_one_output_that_answers_is_enough() -> None:
    assert _notes([{"a": np.zeros(3), "b": np.array([1, 2])}]) == ()
    (note,) = _notes([{"a": np.zeros(3), "b": np.array([True, True])}])
    assert "('a' is 0, 'b' is 1)" in note


@pytest.mark.parametrize(("factor", "explains"), [(1.0, False), (1e7, True)])
def test_a_model_that_amplifies_rounding_is_named_as_the_cause(tmp_path: Path, factor: float, explains: bool) -> None:
    path = save_amplifier(tmp_path / "model.onnx", factor)
    inputs = {"x": normal(1, 8, 9, 9)}
    optimized = run_session(open_session(path), inputs)
    text = Rounding(path, [inputs], [optimized]).explain(0.5)
    assert ("amplifies rounding errors" in text) is explains
    assert ("`validate.max_relative_error` there or as --max-relative-error" in text) is explains


def test_weights_changed_in_their_last_bit_show_what_optimizations_do_not(tmp_path: Path) -> None:
    """A file of operators that ONNX Runtime's optimizations leave as they are, as a quantised LSTM is."""
    path = tmp_path / "model.onnx"
    nodes = [
        helper.make_node("MatMul", ["x", "w"], ["h"]),
        helper.make_node("Mul", ["h", "factor"], ["m"]),
        helper.make_node("Sin", ["m"], ["y"]),
    ]
    weights = {"w": normal(8, 8), "factor": np.array(1e6, np.float32)}
    save_model(path, nodes, [("x", [1, 8])], ["y"], weights)
    inputs = {"x": normal(1, 8)}
    outputs = run_session(open_session(path), inputs)
    text = Rounding(path, [inputs], [outputs]).explain(0.5)
    assert "ONNX Runtime with its weights changed in their last bit differs by up to" in text


def test_outputs_as_far_apart_as_two_ways_of_the_original_are_as_right(tmp_path: Path) -> None:
    path, inputs, bounds = save_amplifier(tmp_path / "model.onnx", 50), {"x": normal(1, 8, 9, 9)}, Bounds(1e-6, 1e-7)
    expected, other = (run_session(open_session(path, optimizes=flag), inputs) for flag in (True, False))
    assert not bounds.is_met(expected["y"], other["y"])
    text = Rounding(path, [inputs], [expected]).justify([other], bounds)
    assert text is not None
    assert "ONNX Runtime's with and without its optimizations by up to" in text
    further = {"y": expected["y"] + 1.5 * (other["y"] - expected["y"])}
    assert Rounding(path, [inputs], [expected]).justify([further], bounds) is None
    chaotic = save_amplifier(tmp_path / "chaotic.onnx", 1e7)
    expected, other = (run_session(open_session(chaotic, optimizes=flag), inputs) for flag in (True, False))
    assert Rounding(chaotic, [inputs], [expected]).justify([other], bounds) is None


def test_an_output_that_is_no_number_is_never_right(tmp_path: Path) -> None:
    path, inputs, bounds = save_amplifier(tmp_path / "model.onnx", 50), {"x": normal(1, 8, 9, 9)}, Bounds(1e-6, 1e-7)
    expected, other = (run_session(open_session(path, optimizes=flag), inputs) for flag in (True, False))
    missing = {"y": np.where(np.arange(other["y"].size).reshape(other["y"].shape) == 3, np.nan, other["y"])}
    assert Rounding(path, [inputs], [expected]).justify([missing], bounds) is None


def test_outputs_of_a_computation_in_float64_are_right(tmp_path: Path) -> None:
    """The original may be the one that rounds, as ONNX Runtime's Fourier transform does."""
    path, inputs, bounds = save_amplifier(tmp_path / "model.onnx", 50), {"x": normal(1, 8, 9, 9)}, Bounds(0, 1e-6)
    expected = run_session(open_session(path), inputs)
    exact = double_precision.compute(onnx.load(path), inputs)
    assert exact is not None
    outputs = {"y": exact["y"].astype(np.float32)}
    assert not bounds.is_met(expected["y"], outputs["y"])
    text = Rounding(path, [inputs], [expected]).justify([outputs], bounds)
    assert text is not None
    assert "within the bounds of a computation in float64" in text


def test_a_model_that_runs_in_no_other_way_has_no_explanation(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Some operators fail without ONNX Runtime's optimizations, and only when they run; the verdict stays."""

    def fail(*_: object) -> NoReturn:
        raise ExportError("no such kernel")

    path, inputs = save_amplifier(tmp_path / "model.onnx", 1e7), {"x": normal(1, 8, 9, 9)}
    outputs = run_session(open_session(path), inputs)
    monkeypatch.setattr(rounding, "run_session", fail)
    assert Rounding(path, [inputs], [outputs]).explain(0.5) == ""


def test_only_weights_are_changed_in_their_last_bit(tmp_path: Path) -> None:
    """Exponents, scales of images, masks and numbers that a model compares with mean what they are."""
    weights = {
        "w": np.linspace(0.1, 0.9, 20, dtype=np.float32),
        "mask": np.full(20, -np.inf, np.float32),
        "steps": np.arange(20, dtype=np.float32),
        "scales": np.array([1.5, 2.5], np.float32),
        "zero": np.array([0]),
    }
    nodes = [
        helper.make_node("Sum", ["x", "w", "mask", "steps"], ["sum"]),
        helper.make_node("Unsqueeze", ["sum", "zero"], ["row"]),
        helper.make_node("Resize", ["row", "", "scales"], ["y"]),
    ]
    path = save_model(tmp_path / "model.onnx", nodes, [("x", [20])], ["y"], weights)
    before = path.read_bytes()
    assert change_last_bits(path, tmp_path / "changed.onnx")
    assert path.read_bytes() == before
    changed = {
        item.name: numpy_helper.to_array(item) for item in onnx.load(tmp_path / "changed.onnx").graph.initializer
    }
    for name in ("mask", "steps", "scales"):
        np.testing.assert_array_equal(changed[name], weights[name])
    np.testing.assert_array_max_ulp(changed["w"], weights["w"], maxulp=1)
    assert (changed["w"] != weights["w"]).all()
    plain = save_model(tmp_path / "plain.onnx", [helper.make_node("Sin", ["x"], ["y"])], [("x", [20])], ["y"])
    assert not change_last_bits(plain, tmp_path / "no")
    assert not (tmp_path / "no").exists()


def test_the_reference_is_exact_where_the_processor_saturates_sums_of_8_bit_products(tmp_path: Path) -> None:
    """Without VNNI, ONNX Runtime's default adds two products of 8-bit integers in 16 bits."""
    rng = np.random.default_rng(0)
    weights, x = rng.integers(-127, 128, (64, 32)).astype("int8"), rng.integers(0, 256, (8, 64)).astype("uint8")
    graph = helper.make_graph(
        [helper.make_node("MatMulInteger", ["x", "w"], ["y"])],
        "graph",
        [helper.make_tensor_value_info("x", TensorProto.UINT8, [8, 64])],
        [helper.make_tensor_value_info("y", TensorProto.INT32, [8, 32])],
        [numpy_helper.from_array(weights, "w")],
    )
    path = tmp_path / "model.onnx"
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8), path)
    session = open_session(path)
    exact = x.astype("int32") @ weights.astype("int32")
    np.testing.assert_array_equal(run_session(session, {"x": x})["y"], exact)
    # The processor of this run may have VNNI, where the default is exact, too.
    entry = "session.x64quantprecision"
    assert session.get_session_options().get_session_config_entry(entry) == "1"
    with pytest.raises(RuntimeError, match="does not have"):
        open_session(path, exact=False).get_session_options().get_session_config_entry(entry)


def test_the_reference_does_not_round_what_it_multiplies_with_weights_of_4_bits(tmp_path: Path) -> None:
    """ONNX Runtime's default makes a product after a DequantizeLinear of 4 bits one that rounds its rows to 8 bits."""
    rng = np.random.default_rng(0)
    weights, x = rng.integers(-8, 8, (64, 32)), rng.standard_normal((3, 64)).astype("float32")
    graph = helper.make_graph(
        [helper.make_node("DequantizeLinear", ["w", "scale"], ["d"]), helper.make_node("MatMul", ["x", "d"], ["y"])],
        "graph",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, [3, 64])],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, [3, 32])],
        [
            helper.make_tensor("w", TensorProto.INT4, [64, 32], weights.reshape(-1)),
            numpy_helper.from_array(np.float32(0.5), "scale"),
        ],
    )
    path = tmp_path / "model.onnx"
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 21)], ir_version=10), path)
    exact = x @ (weights * 0.5).astype("float32")
    np.testing.assert_allclose(run_session(open_session(path), {"x": x})["y"], exact, rtol=1e-5, atol=1e-4)
    assert np.abs(run_session(open_session(path, exact=False), {"x": x})["y"] - exact).max() > 1e-2


def test_the_reference_is_exact_where_layers_share_their_weights(tmp_path: Path) -> None:
    """ONNX Runtime fails when it has to make unsigned weights of the same signed ones twice."""
    rng = np.random.default_rng(0)
    weights, x = rng.integers(-127, 128, (64, 64)).astype("int8"), rng.integers(0, 256, (8, 64)).astype("uint8")
    scales = {"one": np.float32(1), "some": np.float32(0.01), "zero": np.uint8(0), "middle": np.int8(0)}
    nodes = [
        helper.make_node("DequantizeLinear", ["w", "some", "middle"], ["d"]),
        helper.make_node("DequantizeLinear", ["x", "one", "zero"], ["f"]),
        *(helper.make_node("MatMul", ["f", "d"], [f"m{place}"]) for place in range(2)),
        *(helper.make_node("QuantizeLinear", [f"m{place}", "one", "zero"], [f"y{place}"]) for place in range(2)),
        *(
            helper.make_node("QLinearMatMul", ["x", "one", "zero", "w", "some", "middle", "one", "zero"], [f"z{place}"])
            for place in range(2)
        ),
    ]
    outputs = [(name, None, TensorProto.UINT8) for name in ("y0", "y1", "z0", "z1")]
    path = save_model(
        tmp_path / "model.onnx", nodes, [("x", [8, 64], TensorProto.UINT8)], outputs, {"w": weights, **scales}
    )
    exact = np.clip(np.rint(x @ (weights.astype("float64") / 100)), 0, 255)
    for result in run_session(open_session(path), {"x": x}).values():
        np.testing.assert_allclose(result, exact, atol=1)


def test_a_model_that_onnx_runtime_cannot_make_exact_is_loaded_all_the_same(tmp_path: Path) -> None:
    """With the option for exact sums, ONNX Runtime makes a QGemm of signed integers one that it does not have."""
    numbers = {"scale": np.array(0.01, "float32"), "zero": np.array(3, "int8"), "w": np.ones((4, 2), "int8")}
    graph = helper.make_graph(
        [
            helper.make_node(
                "QGemm",
                ["x", "scale", "zero", "w", "scale", "zero", "", "scale", "zero"],
                ["y"],
                domain="com.microsoft",
            )
        ],
        "graph",
        [helper.make_tensor_value_info("x", TensorProto.INT8, [1, 4])],
        [helper.make_tensor_value_info("y", TensorProto.INT8, [1, 2])],
        [numpy_helper.from_array(value, name) for name, value in numbers.items()],
    )
    path = tmp_path / "model.onnx"
    opsets = [helper.make_opsetid("", 17), helper.make_opsetid("com.microsoft", 1)]
    onnx.save(helper.make_model(graph, opset_imports=opsets, ir_version=8), path)
    outputs = run_session(open_session(path), {"x": np.full((1, 4), 103, "int8")})
    # 4 * (100 * 0.01) * (-2 * 0.01) = -0.08
    assert outputs["y"].tolist() == [[3 - 8, 3 - 8]]
