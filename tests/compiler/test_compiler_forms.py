"""Unusual forms of ONNX files that ONNX Runtime takes."""

import re
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import helper, numpy_helper

from support.arrays import normal
from support.models import save_text
from tvmflow.compiler import import_onnx
from tvmflow.compiler.importer import survey_onnx
from tvmflow.errors import ModelImportError


def _sparse(name: str, places: list[Any], dims: list[int]) -> onnx.SparseTensorProto:
    values = numpy_helper.from_array(np.array([1.5, -2.0], "float32"), name)
    return helper.make_sparse_tensor(values, numpy_helper.from_array(np.array(places, "int64"), f"{name}_places"), dims)


def _save(path: Path, places: list[Any]) -> Path:
    """y = x @ sparse @ other, where the file says nothing of the shape of y."""
    nodes = [helper.make_node("MatMul", ["x", "sparse"], ["a"]), helper.make_node("MatMul", ["a", "other"], ["y"])]
    x = helper.make_tensor_value_info("x", onnx.TensorProto.FLOAT, ["n", 4])
    y = helper.make_tensor_value_info("y", onnx.TensorProto.FLOAT, None)
    graph = helper.make_graph(nodes, "forms", [x], [y])
    graph.sparse_initializer.extend([_sparse("sparse", [1, 7], [4, 3]), _sparse("other", places, [3, 5])])
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=9), path)
    return path


def test_sparse_weights_and_outputs_without_a_shape_are_taken(tmp_path: Path, assert_same_as_onnxruntime: Any) -> None:
    path = _save(tmp_path / "model.onnx", [[0, 4], [1, 2]])
    assert import_onnx(path).outputs[0].shape == ("n", 5)
    assert_same_as_onnxruntime(path, {"x": normal(2, 4)})


def test_a_sparse_weight_beyond_its_dimensions_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ModelImportError, match=r"^[^\n]*model.onnx is not a valid ONNX model"):
        import_onnx(_save(tmp_path / "model.onnx", [[0, 4], [1, 9]]))


def test_an_input_without_a_shape_is_asked_for_one(tmp_path: Path) -> None:
    value = helper.make_tensor_value_info("x", onnx.TensorProto.FLOAT, None)
    output = helper.make_tensor_value_info("y", onnx.TensorProto.FLOAT, None)
    graph = helper.make_graph([helper.make_node("Relu", ["x"], ["y"])], "forms", [value], [output])
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=9), tmp_path / "m.onnx")
    with pytest.raises(ModelImportError, match="input 'x' has no shape; give one"):
        import_onnx(tmp_path / "m.onnx")
    assert import_onnx(tmp_path / "m.onnx", {"x": (2, "n")}).inputs[0].shape == (2, "n")


@pytest.mark.parametrize("block", [0, 2])
def test_weights_of_four_bits_are_dequantised(tmp_path: Path, assert_same_as_onnxruntime: Any, block: int) -> None:
    weight = helper.make_tensor("w", onnx.TensorProto.UINT4, [4, 3], list(range(12)))
    scales = np.abs(normal(2, 3) if block else normal(3)) + 0.1
    zeros = helper.make_tensor("z", onnx.TensorProto.UINT4, scales.shape, [8] * scales.size)
    form = {"axis": 0, "block_size": block} if block else {"axis": 1}
    nodes = [
        helper.make_node("DequantizeLinear", ["w", "s", "z"], ["d"], **form),
        helper.make_node("Mul", ["x", "d"], ["y"]),
    ]
    values = [
        helper.make_tensor_value_info(name, onnx.TensorProto.FLOAT, shape)
        for name, shape in (("x", [4, 3]), ("y", [4, 3]))
    ]
    graph = helper.make_graph(
        nodes, "bits", values[:1], values[1:], [weight, numpy_helper.from_array(scales, "s"), zeros]
    )
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 21)], ir_version=10), tmp_path / "m.onnx")
    assert_same_as_onnxruntime(tmp_path / "m.onnx", {"x": normal(4, 3)})


def test_blocks_of_data_are_quantised(tmp_path: Path, assert_same_as_onnxruntime: Any) -> None:
    scales, zeros = np.abs(normal(2, 2)) / 40 + 0.01, np.array([[1, -3], [5, 0]], "int8")
    nodes = [
        helper.make_node("QuantizeLinear", ["x", "s", "z"], ["q"], axis=1, block_size=3),
        helper.make_node("DequantizeLinear", ["q", "s", "z"], ["y"], axis=1, block_size=3),
    ]
    values = [helper.make_tensor_value_info(name, onnx.TensorProto.FLOAT, [2, 5]) for name in "xy"]
    weights = [numpy_helper.from_array(scales, "s"), numpy_helper.from_array(zeros, "z")]
    graph = helper.make_graph(nodes, "blocks", values[:1], values[1:], weights)
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 21)], ir_version=10), tmp_path / "m.onnx")
    assert_same_as_onnxruntime(tmp_path / "m.onnx", {"x": 2 * normal(2, 5)})


@pytest.mark.parametrize(
    ("nodes", "reason"),
    [
        (
            '["second"] a = Relu (b)  ["first"] b = Neg (a)  y = Neg (b)',
            "node 'second', reads 'b', which node 'first' after it computes",
        ),
        ('["first"] a = Neg (x)  ["lonely"] y = Relu (b)', "node 'lonely', reads 'b', which nothing computes"),
        ('["round"] y = Add (x, y)', "node 'round', reads 'y', which it computes itself"),
        (
            'c = Greater (x, x)  ["branch"] y = If (c) <then_branch = t () => (float u) { u = Relu (a) }, '
            "else_branch = e () => (float u) { u = Neg (x) }>  a = Neg (y)",
            "node 'branch', reads 'a', which node 'a' after it computes",
        ),
    ],
)
def test_a_node_that_reads_what_no_order_computes_is_named(tmp_path: Path, nodes: str, reason: str) -> None:
    text = f'<ir_version: 9, opset_import: ["": 18]> g (float x) => (float y) {{ {nodes} }}'
    path = save_text(tmp_path / "model.onnx", text)
    for read in (import_onnx, survey_onnx):
        with pytest.raises(ModelImportError, match=re.escape(reason)):
            read(path)


def test_nodes_in_any_order_are_taken(tmp_path: Path, assert_same_as_onnxruntime: Any) -> None:
    text = """<ir_version: 9, opset_import: ["": 18]> g (float[4] x) => (float[4] y, float[4] z)
    {
      y = Relu (a)  z = If (c) <
        then_branch = t () => (float[4] u) { v = Sub (a, x)  u = Relu (v) },
        else_branch = e () => (float[4] w) { w = Neg (x) }
      >
      a = Neg (x)  c = Greater (first, second)  first = ReduceMax <keepdims = 0> (a)
      second = ReduceMin <keepdims = 0> (y)
    }"""
    path = save_text(tmp_path / "model.onnx", text)
    assert_same_as_onnxruntime(path, {"x": normal(4)}, {"x": np.abs(normal(4))})


def test_operators_of_onnx_runtime_need_no_version(tmp_path: Path, assert_same_as_onnxruntime: Any) -> None:
    """Some of ONNX Runtime's quantisers write none."""
    text = '<ir_version: 9, opset_import: ["": 18]> g (float[4] x) => (float[4] y) { y = com.microsoft.QuickGelu (x) }'
    assert_same_as_onnxruntime(save_text(tmp_path / "model.onnx", text), {"x": normal(4)})


@pytest.mark.parametrize(
    ("operator", "reason"),
    [
        ("Gelu", "operator Gelu, node 'odd', is not in opset 18; export the model with opset 20 or later"),
        ("Erfc", "operator Erfc, node 'odd', is none of ONNX's; the exporter had no form of it"),
    ],
)
def test_an_operator_that_the_standard_lacks_is_named(tmp_path: Path, operator: str, reason: str) -> None:
    text = f'<ir_version: 9, opset_import: ["": 18]> g (float x) => (float y) {{ ["odd"] y = {operator} (x) }}'
    path = save_text(tmp_path / "model.onnx", text)
    with pytest.raises(ModelImportError, match=re.escape(reason)):
        import_onnx(path)


def test_the_number_of_the_largest_is_an_operand_since_opset_10(
    make_model: Any, assert_same_as_onnxruntime: Any
) -> None:
    node = helper.make_node("TopK", ["x", "k"], ["y", "places"], axis=1)
    outputs = [("y", [2, 3, 3]), ("places", [2, 3, 3], onnx.TensorProto.INT64)]
    path = make_model([node], [("x", [2, 4, 3])], outputs, {"k": np.array([3], "int64")}, opset=10)
    assert_same_as_onnxruntime(path, {"x": normal(2, 4, 3)})


@pytest.mark.parametrize("opset", [10, 18])
def test_the_largest_none_are_no_elements(opset: int, make_model: Any, assert_same_as_onnxruntime: Any) -> None:
    node = helper.make_node("TopK", ["x", "k"], ["y", "places"], axis=1)
    outputs = [("y", [2, 0, 3]), ("places", [2, 0, 3], onnx.TensorProto.INT64)]
    path = make_model([node], [("x", [2, 4, 3])], outputs, {"k": np.array([0], "int64")}, opset=opset)
    assert_same_as_onnxruntime(path, {"x": normal(2, 4, 3)})


def test_weights_need_not_be_inputs_in_old_files(tmp_path: Path, assert_same_as_onnxruntime: Any) -> None:
    """ONNX's checker refuses such files, and ONNX Runtime takes them."""
    text = (
        '<ir_version: 3, opset_import: ["": 8]> g (float[4] x) => (float[4] y) <float[1] w = {2.0}> { y = Mul (x, w) }'
    )
    assert_same_as_onnxruntime(save_text(tmp_path / "model.onnx", text), {"x": normal(4)})


def test_norms_of_groups_with_a_scale_for_each_group(tmp_path: Path, assert_same_as_onnxruntime: Any) -> None:
    text = """<ir_version: 8, opset_import: ["": 18]> g (float[n, 6, 5] x) => (float[n, 6, 5] y)
    <float[3] scale = {1.0, 2.0, -0.5}, float[3] bias = {0.25, 0.5, 1.0}> {
      y = GroupNormalization <num_groups = 3, epsilon = 0.001> (x, scale, bias)
    }"""
    path = save_text(tmp_path / "model.onnx", text)
    assert_same_as_onnxruntime(path, {"x": normal(2, 6, 5)}, {"x": normal(1, 6, 5)})


def test_norms_of_groups_within_loops(tmp_path: Path, assert_same_as_onnxruntime: Any) -> None:
    text = """<ir_version: 8, opset_import: ["": 18]> g (float[2, 6, 5] x) => (float[2, 6, 5] y)
    <int64 trips = {2}, bool more = {1}, float[3] scale = {1.0, 2.0, -0.5}, float[3] bias = {0.25, 0.5, 1.0}> {
      y = Loop (trips, more, x) <body = one (int64 i, bool c, float[2, 6, 5] a) => (bool d, float[2, 6, 5] b) {
        d = Identity (c)
        b = GroupNormalization <num_groups = 3> (a, scale, bias)
      }>
    }"""
    assert_same_as_onnxruntime(save_text(tmp_path / "model.onnx", text), {"x": normal(2, 6, 5)})


def test_lists_without_elements_are_as_absent(tmp_path: Path, assert_same_as_onnxruntime: Any) -> None:
    x, y = (
        helper.make_tensor_value_info(name, onnx.TensorProto.FLOAT, shape) for name, shape in (("x", [2, 3]), ("y", []))
    )
    node = helper.make_node("ReduceMax", ["x"], ["y"], keepdims=0)
    node.attribute.add(name="axes", type=onnx.AttributeProto.INTS)
    graph = helper.make_graph([node], "forms", [x], [y])
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 13)], ir_version=9), tmp_path / "m.onnx")
    assert_same_as_onnxruntime(tmp_path / "m.onnx", {"x": normal(2, 3)})


def test_empty_scales_stand_beside_sizes(tmp_path: Path, assert_same_as_onnxruntime: Any) -> None:
    text = """<ir_version: 9, opset_import: ["": 19]> g (float[1, 1, 2, 2] x) => (float[1, 1, 4, 4] y)
    <float[0] none = {}, int64[4] sizes = {1, 1, 4, 4}> { y = Resize <mode = "nearest"> (x, none, none, sizes) }"""
    assert_same_as_onnxruntime(save_text(tmp_path / "model.onnx", text), {"x": normal(1, 1, 2, 2)})


def test_a_slice_by_data_without_axes_has_a_bound_for_each_of_the_first(
    tmp_path: Path, assert_same_as_onnxruntime: Any
) -> None:
    text = """<ir_version: 9, opset_import: ["": 18]>
    g (float[4, 5, 6] x, int64[2] a, int64[2] b) => (float[i, j, 6] y) { y = Slice (x, a, b) }"""
    bounds = {"a": np.array([1, 0]), "b": np.array([3, 4])}
    assert_same_as_onnxruntime(save_text(tmp_path / "model.onnx", text), {"x": normal(4, 5, 6), **bounds})


@pytest.mark.parametrize("dtype", ["int32", "bool"])
def test_a_mask_of_attention_may_be_integers_and_scores_that_it_hides_are_finite(
    dtype: str, tmp_path: Path, assert_same_as_onnxruntime: Any
) -> None:
    text = f"""<ir_version: 10, opset_import: ["": 23]>
    g (float[1, 1, 3, 4] q, float[1, 1, 5, 4] k, {dtype}[3, 5] m) => (float[1, 1, 3, 4] y, float[1, 1, 3, 5] s) {{
      y, , , s = Attention <qk_matmul_output_mode = 2> (q, k, k, m)
    }}"""
    mask = np.arange(15).reshape(3, 5) % 4 > 1
    feed = {"q": normal(1, 1, 3, 4), "k": normal(1, 1, 5, 4), "m": mask.astype(dtype)}
    assert_same_as_onnxruntime(save_text(tmp_path / "model.onnx", text), feed)
