"""What `diagnose` says of models, beside what the compiler does with them."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from onnx import TensorProto, helper

from support.machines import on_two_cores
from tvmflow.compiler import diagnosis as module
from tvmflow.compiler import import_onnx, lower
from tvmflow.compiler.build import rules_of
from tvmflow.compiler.diagnosis import Diagnosis, OperatorDiagnosis, diagnose
from tvmflow.compiler.importer import Imported
from tvmflow.compiler.operators.common import tensor_of
from tvmflow.compiler.operators.packing import MatrixPacking
from tvmflow.errors import ModelImportError, UnsupportedOperatorError
from tvmflow.hardware.target import Target


def _rows(diagnosis: Diagnosis) -> dict[str, list[OperatorDiagnosis]]:
    rows: dict[str, list[OperatorDiagnosis]] = {}
    for item in diagnosis.operators:
        rows.setdefault(item.operator, []).append(item)
    return rows


@pytest.fixture(scope="module")
def picture_network(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A network of two equal convolutions, with all verdicts but "refused"."""
    from support.models import save_model

    weight = np.random.default_rng(0).normal(size=(32, 32, 3, 3)).astype("float32")
    nodes = [
        helper.make_node("Conv", ["x", "w"], ["a"], name="first", pads=[1, 1, 1, 1]),
        helper.make_node("Relu", ["a"], ["b"]),
        helper.make_node("Conv", ["b", "w"], ["c"], pads=[1, 1, 1, 1]),
        helper.make_node("Shape", ["w"], ["s"]),
        helper.make_node("SpaceToDepth", ["c"], ["d"], blocksize=2),
    ]
    path = tmp_path_factory.mktemp("diagnosis") / "model.onnx"
    return save_model(path, nodes, [("x", ["batch", 32, 28, 28])], ["d", "s"], {"w": weight})


@pytest.fixture(scope="module")
def diagnosis(picture_network: Path) -> Diagnosis:
    return diagnose(picture_network, on_two_cores("x86-64-v3"))


def test_equal_nodes_are_one_row_with_the_rule_that_takes_them(diagnosis: Diagnosis) -> None:
    (convolution,) = _rows(diagnosis)["Conv"]
    assert (convolution.verdict, convolution.nodes, convolution.node) == ("fast", 2, "first")
    assert convolution.rule in ("winograd", "conv2d")


def test_nodes_that_differ_in_what_an_exporter_notes_are_lowered_once(
    make_model: Any, target: Target, monkeypatch: pytest.MonkeyPatch
) -> None:
    weights = [np.random.default_rng(seed).normal(size=(64, 64)).astype("float32") for seed in range(4)]
    nodes = [helper.make_node("MatMul", [f"x{place}", f"w{place}"], [f"x{place + 1}"]) for place in range(len(weights))]
    for place, node in enumerate(nodes):
        node.metadata_props.add(key="pkg.torch.onnx.stack_trace", value=f"line {place}")
    path = make_model(nodes, [("x0", [8, 64])], ["x4"], {f"w{place}": weight for place, weight in enumerate(weights)})
    lowered: list[Imported] = []

    def record(imported: Imported, *arguments: Any) -> Any:
        lowered.append(imported)
        return lower(imported, *arguments)

    monkeypatch.setattr(module, "lower", record)
    (product,) = diagnose(path, target).operators
    assert product.nodes == len(nodes)
    assert {tuple(imported.params) for imported in lowered} == {("w0",)}


def test_the_rules_are_those_that_the_whole_model_gets(make_model: Any) -> None:
    generator, target = np.random.default_rng(0), on_two_cores("x86-64-v3")
    weights = {
        "w": generator.normal(size=(32, 32, 3, 3)).astype("float32"),
        "d": generator.normal(size=(32, 1, 3, 3)).astype("float32"),
        "f": generator.normal(size=(32, 10)).astype("float32"),
    }
    nodes = [
        helper.make_node("Conv", ["x", "w"], ["a"], pads=[1, 1, 1, 1]),
        helper.make_node("MaxPool", ["a"], ["b"], kernel_shape=[2, 2], strides=[2, 2]),
        helper.make_node("Conv", ["b", "d"], ["c"], group=32, strides=[2, 2]),
        helper.make_node("Sigmoid", ["c"], ["e"]),
        helper.make_node("GlobalAveragePool", ["e"], ["g"]),
        helper.make_node("Flatten", ["g"], ["h"]),
        helper.make_node("MatMul", ["h", "f"], ["y"]),
    ]
    path = make_model(nodes, [("x", ["batch", 32, 28, 28])], ["y"], weights)
    rules = set(rules_of(lower(import_onnx(path), target), target).values())
    assert {item.rule for item in diagnose(path, target).operators} - {"fused"} >= rules - {"fallback", "none"}
    assert {"pooling", "depthwise"} <= rules


def test_an_elementwise_operator_is_fused(diagnosis: Diagnosis) -> None:
    (relu,) = _rows(diagnosis)["Relu"]
    assert (relu.verdict, relu.rule) == ("fast", "fused")


def test_an_operator_without_a_rule_is_a_fallback_with_a_reason(diagnosis: Diagnosis) -> None:
    (moved,) = _rows(diagnosis)["SpaceToDepth"]
    assert moved.verdict == "fallback"
    assert moved.reason


def test_what_is_known_at_import_is_folded(diagnosis: Diagnosis) -> None:
    (shape,) = _rows(diagnosis)["Shape"]
    assert (shape.verdict, shape.share) == ("folded", None)


def test_shares_sum_to_one_and_convolutions_take_most(diagnosis: Diagnosis) -> None:
    shares = {item.operator: item.share for item in diagnosis.operators if item.share is not None}
    assert sum(shares.values()) == pytest.approx(1)
    assert max(shares, key=lambda name: shares[name]) == "Conv"


def test_free_dimensions_are_named_with_their_places(diagnosis: Diagnosis) -> None:
    assert diagnosis.free == {"batch": (("x", 0),)}


def test_a_diagnosis_takes_sizes_for_free_dimensions(picture_network: Path) -> None:
    target = on_two_cores("x86-64-v3")
    small, large = (diagnose(picture_network, target, sizes={"batch": size}) for size in (1, 64))
    assert small.sizes == {"batch": 1}
    assert large.sizes == {"batch": 64}
    shares = [_rows(item)["Conv"][0].share for item in (small, large)]
    assert shares[0] is not None
    assert shares[1] is not None
    # The weights are read once, however large the batch.
    assert shares[0] != shares[1]


def test_bf16_covers_attention(make_model: Any) -> None:
    node = helper.make_node("Attention", ["q", "k", "v"], ["y"])
    path = make_model([node], [(name, [1, 4, 64, 32]) for name in "qkv"], ["y"], opset=23)
    coverage = {item.precision: item.share for item in diagnose(path, on_two_cores("x86-64-v4-bf16")).coverage}
    assert coverage["bf16"] == pytest.approx(1)


def test_bf16_covers_products_where_the_processor_has_the_instructions(make_model: Any) -> None:
    nodes = [helper.make_node("MatMul", ["x", "w"], ["y"]), helper.make_node("Softmax", ["y"], ["z"])]
    path = make_model(nodes, [("x", [64, 256])], ["z"], {"w": np.ones((256, 256), "float32")})
    coverage = {item.precision: item for item in diagnose(path, on_two_cores("x86-64-v4-bf16")).coverage}
    assert coverage["bf16"].share is not None
    assert 0.5 < coverage["bf16"].share < 1


def test_a_processor_without_the_instructions_covers_nothing(diagnosis: Diagnosis) -> None:
    coverage = {item.precision: item for item in diagnosis.coverage}
    assert coverage["bf16"].share is None
    assert "bf16" in coverage["bf16"].reason


def test_a_picture_of_bytes_makes_no_quantised_model_and_the_reason_says_it(make_model: Any) -> None:
    nodes = [
        helper.make_node("Cast", ["x"], ["f"], to=TensorProto.FLOAT),
        helper.make_node("MatMul", ["f", "w"], ["y"]),
    ]
    path = make_model(nodes, [("x", [64, 256], TensorProto.UINT8)], ["y"], {"w": np.ones((256, 256), "float32")})
    coverage = {item.precision: item for item in diagnose(path, on_two_cores("x86-64-v4-vnni")).coverage}
    assert coverage["int8"].share is None
    assert "needs a quantised model" in coverage["int8"].reason


def test_a_model_in_which_nothing_takes_time_has_a_reason_as_well(make_model: Any) -> None:
    path = make_model([helper.make_node("Identity", ["x"], ["y"])], [("x", [4, 6])], ["y"])
    for item in diagnose(path, on_two_cores("x86-64-v4-bf16")).coverage:
        assert item.share is not None or item.reason


def test_all_refusals_come_at_once_and_the_import_says_the_same(make_model: Any, target: Target) -> None:
    nodes = [
        helper.make_node("Foo", ["x"], ["f"], name="a_foo", domain="org.example"),
        helper.make_node("RandomNormalLike", ["x"], ["a"], name="a_draw"),
        helper.make_node("Relu", ["x"], ["z"]),
    ]
    path = make_model(nodes, [("x", [1, 1, 4, 4])], [("f", [1]), "a", "z"])
    diagnosis = diagnose(path, target)
    rows = _rows(diagnosis)
    verdicts = [rows[name][0].verdict for name in ("org.example.Foo", "RandomNormalLike", "Relu")]
    assert verdicts == ["refused", "refused", "fast"]
    with pytest.raises(UnsupportedOperatorError) as refused:
        import_onnx(path)
    for refusal in diagnosis.refusals:
        assert refusal.node in str(refused.value)
        assert refusal.reason in str(refused.value)


def test_nodes_after_a_refused_one_are_judged_where_their_shapes_are_known(make_model: Any, target: Target) -> None:
    nodes = [
        helper.make_node("RandomNormalLike", ["x"], ["a"]),
        helper.make_node("Softmax", ["a"], ["z"]),
    ]
    rows = _rows(diagnose(make_model(nodes, [("x", [1, 1, 4, 4])], ["z"]), target))
    assert rows["RandomNormalLike"][0].verdict == "refused"
    assert rows["Softmax"][0].verdict == "fast"


def test_nodes_inside_of_a_branch_are_judged(make_model: Any, target: Target) -> None:
    branches = {
        f"{name}_branch": helper.make_graph(
            [helper.make_node(operator, ["x"], [name])],
            name,
            [],
            [helper.make_tensor_value_info(name, TensorProto.FLOAT, [4])],
        )
        for name, operator in (("then", "Relu"), ("else", "Neg"))
    }
    node = helper.make_node("If", ["c"], ["y"], **branches)
    path = make_model([node], [("c", [], TensorProto.BOOL), ("x", [4])], [("y", [4])])
    rows = _rows(diagnose(path, target))
    assert [rows[name][0].verdict for name in ("If", "Relu", "Neg")] == ["fallback", "fast", "fast"]


def test_a_damaged_file_is_an_error_rather_than_a_diagnosis(tmp_path: Path, target: Target) -> None:
    path = tmp_path / "model.onnx"
    path.write_bytes(b"no model")
    with pytest.raises(ModelImportError, match=r"model\.onnx"):
        diagnose(path, target)


def test_no_weight_is_packed_and_none_is_copied_for_each_lowering(
    make_model: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    weight = np.random.default_rng(0).normal(size=(256, 512)).astype("float32")
    nodes = [helper.make_node("Transpose", ["w"], ["v"]), helper.make_node("MatMul", ["x", "v"], ["y"])]
    path = make_model(nodes, [("x", ["n", 512])], ["y"], {"w": weight})
    places: set[int] = set()

    def record(imported: Imported, *arguments: Any) -> Any:
        places.update(value.ctypes.data for value in imported.params.values())
        assert all(tensor_of(value).data_ptr() in places for value in imported.params.values())
        return lower(imported, *arguments)

    monkeypatch.setattr(module, "lower", record)
    monkeypatch.delattr(MatrixPacking, "pack")
    diagnosis = diagnose(path, on_two_cores("x86-64-v4-bf16"))
    assert [coverage.share for coverage in diagnosis.coverage] == [pytest.approx(1.0), 0.0]
    assert len(places) == 1
