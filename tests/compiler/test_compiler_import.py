import re
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

from support.arrays import normal
from support.builds import assert_same_as_onnxruntime
from support.models import save_text
from tvmflow.compiler import import_onnx, load_module, load_params, save_module, save_params
from tvmflow.compiler.importer import survey_onnx
from tvmflow.errors import ModelImportError, UnsupportedOperatorError
from tvmflow.hardware.target import Target, resolve


def _relu(make_model: Any, shape: list[Any] | None = None, **more: Any) -> Path:
    node = helper.make_node("Relu", ["x"], ["y"], name="the_relu")
    return make_model([node], [("x", ["batch", 4] if shape is None else shape)], ["y"], **more)


def test_a_truncated_file_is_refused_by_name(make_model: Any) -> None:
    path = _relu(make_model)
    path.write_bytes(path.read_bytes()[:20])
    with pytest.raises(ModelImportError, match=r"model\.onnx is not a valid ONNX model"):
        import_onnx(path)


def test_a_missing_file_is_refused_by_name(tmp_path: Path) -> None:
    with pytest.raises(ModelImportError, match=r"nothing\.onnx"):
        import_onnx(tmp_path / "nothing.onnx")


def test_an_unsupported_operator_is_named_with_its_node_and_model(make_model: Any) -> None:
    node = helper.make_node("RandomNormalLike", ["x"], ["y"], name="my_noise")
    path = make_model([node], [("x", [5, 3])], ["y"])
    with pytest.raises(UnsupportedOperatorError, match=r"model\.onnx.*RandomNormalLike.*my_noise"):
        import_onnx(path)


def test_weights_that_a_model_computes_are_computed_at_import(make_model: Any, native: Target) -> None:
    nodes = [
        helper.make_node("ReduceMean", ["w", "axes"], ["mean"]),
        helper.make_node("Sub", ["w", "mean"], ["centred"]),
        helper.make_node("Mul", ["centred", "centred"], ["square"]),
        helper.make_node("ReduceMean", ["square", "axes"], ["variance"]),
        helper.make_node("Sqrt", ["variance"], ["deviation"]),
        helper.make_node("Div", ["centred", "deviation"], ["standardised"]),
        helper.make_node("Conv", ["x", "standardised"], ["y"]),
    ]
    weights = {"w": normal(16, 8, 3, 3), "axes": np.array([1, 2, 3])}
    path = make_model(nodes, [("x", [1, 8, 9, 9])], ["y"], weights)
    statuses = {record.node.op_type: record.status for record in survey_onnx(path).nodes}
    assert statuses.pop("Conv") == "converted"
    assert set(statuses.values()) == {"folded"}
    assert list(import_onnx(path).params) == ["standardised"]
    assert_same_as_onnxruntime(path, [{"x": normal(1, 8, 9, 9)}], native)


def test_a_filter_bank_of_any_size_is_a_weight(make_model: Any, native: Target) -> None:
    sizes = {"bins": 80, "length": 400, "rate": 16000, "low": 0.0, "high": 8000.0}
    weights = {name: np.array(size, "float32" if isinstance(size, float) else "int64") for name, size in sizes.items()}
    nodes = [helper.make_node("MelWeightMatrix", [*sizes], ["m"]), helper.make_node("MatMul", ["x", "m"], ["y"])]
    path = make_model(nodes, [("x", [3, 201])], ["y"], weights)
    assert_same_as_onnxruntime(path, [{"x": normal(3, 201)}], native)


def test_every_unsupported_operator_is_named_at_once(make_model: Any) -> None:
    nodes = [
        helper.make_node("RandomNormalLike", ["x"], ["h"], name="a_noise"),
        helper.make_node("Foo", ["h"], ["y"], name="a_foo", domain="org.example"),
    ]
    path = make_model(nodes, [("x", [5, 3])], ["y"])
    with pytest.raises(UnsupportedOperatorError, match=r"RandomNormalLike.*org\.example\.Foo"):
        import_onnx(path)


def test_the_import_goes_on_after_a_refused_node(make_model: Any) -> None:
    nodes = [
        helper.make_node("Foo", ["x"], ["f"], name="a_foo", domain="org.example"),
        helper.make_node("Relu", ["f"], ["r"]),
        helper.make_node("Celu", ["x"], ["a"], name="a_unit", alpha=0.0),
        helper.make_node("Relu", ["x"], ["z"]),
    ]
    path = make_model(nodes, [("x", [1, 4])], [("r", [1, 4]), "a", "z"])
    survey = survey_onnx(path)
    assert [(refusal.operator, refusal.node) for refusal in survey.refusals] == [
        ("org.example.Foo", "a_foo"),
        ("Celu", "a_unit"),
    ]
    assert [record.status for record in survey.nodes] == ["refused", "converted", "refused", "converted"]
    with pytest.raises(UnsupportedOperatorError, match=r"model\.onnx.*a_foo.*a_unit.*an alpha of zero"):
        import_onnx(path)


def test_equal_refusals_of_many_nodes_are_named_once(make_model: Any) -> None:
    nodes = [helper.make_node("Foo", ["x"], [f"y{i}"], name=f"foo{i}", domain="org.example") for i in range(9)]
    path = make_model(nodes, [("x", [1])], [(f"y{i}", [1]) for i in range(9)])
    with pytest.raises(UnsupportedOperatorError, match="node 'foo0' and 8 more") as refusal:
        import_onnx(path)
    assert "foo1" not in str(refusal.value)


def test_an_unknown_input_name_is_answered_with_the_known_ones(make_model: Any) -> None:
    with pytest.raises(ModelImportError, match=r"no input 'picture'.*'x'"):
        import_onnx(_relu(make_model), {"picture": (1, 4)})


@pytest.mark.parametrize(
    ("shape", "message"),
    [((1, 4, 4), "2 dimensions"), ((1, 5), "fixed to 4"), ((0, 4), "must be positive")],
    ids=["rank", "fixed", "empty"],
)
def test_a_shape_that_contradicts_the_model_is_refused(make_model: Any, shape: tuple[int, ...], message: str) -> None:
    with pytest.raises(ModelImportError, match=message):
        import_onnx(_relu(make_model), {"x": shape})


def test_a_symbol_fixed_at_one_input_is_fixed_at_all(make_model: Any) -> None:
    node = helper.make_node("Add", ["a", "b"], ["y"])
    path = make_model([node], [("a", ["batch", 4]), ("b", ["batch", 4])], ["y"])
    imported = import_onnx(path, {"a": (3, 4)})
    assert [spec.shape for spec in (*imported.inputs, *imported.outputs)] == [(3, 4)] * 3


def test_a_symbol_can_be_renamed(make_model: Any) -> None:
    imported = import_onnx(_relu(make_model), {"x": ("n", 4)})
    assert imported.inputs[0].shape == ("n", 4)
    assert imported.outputs[0].shape == ("n", 4)


def test_symbolic_dimensions_keep_their_names_and_types(make_model: Any) -> None:
    node = helper.make_node("Cast", ["x"], ["y"], to=TensorProto.FLOAT)
    path = make_model([node], [("x", ["batch", "time"], TensorProto.INT64)], ["y"])
    imported = import_onnx(path)
    assert (imported.inputs[0].name, imported.inputs[0].shape) == ("x", ("batch", "time"))
    assert (imported.inputs[0].dtype, imported.outputs[0].dtype) == ("int64", "float32")


@pytest.mark.parametrize("size", [-1, None, "?"])
def test_a_free_dimension_without_a_name_is_called_after_its_input_and_axis(make_model: Any, size: Any) -> None:
    imported = import_onnx(make_model([helper.make_node("Relu", ["x"], ["y"])], [("x", [size, 4])], ["y"]))
    assert imported.inputs[0].shape == ("x_0", 4)
    assert imported.outputs[0].shape == ("x_0", 4)


def test_messages_call_the_model_by_its_label(make_model: Any) -> None:
    path = make_model([helper.make_node("RandomUniformLike", ["x"], ["y"])], [("x", [3])], ["y"])
    with pytest.raises(UnsupportedOperatorError, match=r"^the/users\.onnx: ") as refusal:
        import_onnx(path, label="the/users.onnx")
    assert str(path) not in str(refusal.value)


def test_a_refusal_of_a_model_with_free_dimensions_names_them(make_model: Any) -> None:
    resize = helper.make_node("Resize", ["x", "", "", "sizes"], ["y"], keep_aspect_ratio_policy="not_larger")
    path = make_model([resize], [("x", [-1, 4])], ["y"], {"sizes": np.array([3, 3])})
    with pytest.raises(ModelImportError, match="x_0"):
        import_onnx(path)


def test_weights_are_parameters_in_the_order_of_main(make_model: Any) -> None:
    rng = np.random.default_rng(0)
    weights = {"w": rng.random((8, 3, 3, 3), "float32"), "b": rng.random(40, "float32")[:20].copy()}
    weights["b"] = rng.random(8, "float32")
    node = helper.make_node("Conv", ["x", "w", "b"], ["y"])
    imported = import_onnx(make_model([node], [("x", [1, 3, 8, 8])], ["y"], weights))
    main = imported.mod["main"]
    assert [variable.name for variable in main.params] == ["x", *imported.params]
    np.testing.assert_array_equal(imported.params["w"], weights["w"])


def test_importing_leaves_the_frontend_of_tvm_as_it_was(make_model: Any) -> None:
    from tvm.relax.frontend.onnx import onnx_frontend

    before = dict(vars(onnx_frontend.Clip)), onnx_frontend._get_convert_map().keys()
    import_onnx(_relu(make_model))
    assert (dict(vars(onnx_frontend.Clip)), onnx_frontend._get_convert_map().keys()) == before


def test_modules_and_weights_survive_saving(make_model: Any, tmp_path: Path) -> None:
    import tvm_ffi

    node = helper.make_node("MatMul", ["x", "w"], ["y"])
    weights = {"w": np.random.default_rng(0).random((4, 30), "float32")}
    imported = import_onnx(make_model([node], [("x", ["n", 4])], ["y"], weights))
    save_module(imported.mod, tmp_path / "mod.json")
    save_params(imported.params, tmp_path / "a.params")
    save_params(imported.params, tmp_path / "b.params")
    assert tvm_ffi.structural_equal(load_module(tmp_path / "mod.json"), imported.mod)
    np.testing.assert_array_equal(load_params(tmp_path / "a.params")["w"], weights["w"])
    assert (tmp_path / "a.params").read_bytes() == (tmp_path / "b.params").read_bytes()


def test_weights_that_the_importer_computes_are_apart(tmp_path: Path) -> None:
    """Also those of a branch, and where a weight of the file has the name that another one would get."""
    product = "com.microsoft.MatMulNBits <K = 32, N = 8, bits = 4, block_size = 32>"
    text = f"""<ir_version: 9, opset_import: ["": 18, "com.microsoft": 1]>
    g (float[3,32] x) => (float[3,8] y) {{
      a = {product} (x, first, scales)  b = Add (a, weight_0)  c = ReduceMax <keepdims = 0> (b)
      zero = Constant <value = float {{0}}> ()
      d = Greater (c, zero)  y = If (d) <
        then_branch = t () => (float[3,8] u) {{ v = {product} (x, second, scales)  u = Add (v, b) }},
        else_branch = e () => (float[3,8] w) {{ w = Neg (b) }}
      >
    }}"""
    path = save_text(tmp_path / "model.onnx", text)
    model, generator = onnx.load(path), np.random.default_rng(0)
    arrays = {name: generator.integers(0, 256, (8, 1, 16), "uint8") for name in ("first", "second")}
    arrays |= {"scales": np.full(8, 0.1, "float32"), "weight_0": -np.abs(normal(3, 8))}
    model.graph.initializer.extend(numpy_helper.from_array(array, name) for name, array in arrays.items())
    onnx.save(model, path)
    imported = import_onnx(path)
    assert sum(value.dtype == np.uint8 for value in imported.params.values()) == 2
    assert len({value.tobytes() for value in imported.params.values()}) == len(imported.params)
    np.testing.assert_array_equal(imported.params["weight_0"], arrays["weight_0"])
    save_module(imported.mod, tmp_path / "mod.json")
    assert not re.search(r"[A-Za-z0-9+/]{200}", (tmp_path / "mod.json").read_text())
    feeds = [{"x": x} for x in (normal(3, 32), np.zeros((3, 32), "float32"))]
    assert_same_as_onnxruntime(path, feeds, resolve("native"))


def test_weights_of_bfloat16_survive_saving(tmp_path: Path) -> None:
    weights = np.array([1.5, -2.0], ml_dtypes.bfloat16)
    save_params({"w": weights}, tmp_path / "w.params")
    loaded = load_params(tmp_path / "w.params")["w"]
    assert loaded.dtype == ml_dtypes.bfloat16
    np.testing.assert_array_equal(loaded, weights)


def test_damaged_weights_are_refused(tmp_path: Path) -> None:
    (tmp_path / "w.params").write_bytes(b"PK nonsense")
    with pytest.raises(ModelImportError, match=r"w\.params"):
        load_params(tmp_path / "w.params")


def test_only_the_branch_that_a_known_condition_takes_is_imported(
    make_model: Any, assert_same_as_onnxruntime: Any
) -> None:
    result = [helper.make_tensor_value_info("r", TensorProto.FLOAT, [1, 4])]
    then_branch = helper.make_graph([helper.make_node("Relu", ["x"], ["r"])], "taken", [], result)
    else_branch = helper.make_graph([helper.make_node("Neg", ["x"], ["r"])], "other", [], result)
    node = helper.make_node("If", ["known"], ["y"], then_branch=then_branch, else_branch=else_branch)
    path = make_model([node], [("x", [1, 4])], ["y"], {"known": np.array(True)})
    model = assert_same_as_onnxruntime(path, {"x": np.array([[-1, 0, 1, 2]], "float32")})
    assert "negative" not in model.ir_text


def test_the_models_own_functions_are_inlined(tmp_path: Path) -> None:
    function = helper.make_function(
        "org.example",
        "Twice",
        ["a"],
        ["b"],
        [helper.make_node("Add", ["a", "a"], ["b"])],
        [helper.make_opsetid("", 18)],
    )
    graph = helper.make_graph(
        [helper.make_node("Twice", ["x"], ["y"], domain="org.example")],
        "model",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, [3])],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, [3])],
    )
    opsets = [helper.make_opsetid("", 18), helper.make_opsetid("org.example", 1)]
    path = tmp_path / "model.onnx"
    onnx.save(helper.make_model(graph, functions=[function], opset_imports=opsets, ir_version=9), path)
    assert "R.add" in import_onnx(path).mod["main"].script()


@pytest.mark.parametrize(("opset", "is_taken"), [(17, True), (12, False)])
def test_functions_may_have_another_opset_with_the_same_operators(opset: int, is_taken: bool, tmp_path: Path) -> None:
    """Clip is the same in opsets 13 to 18 of the model, and another one in opset 12."""
    function = helper.make_function(
        "org.example", "Low", ["a"], ["b"], [helper.make_node("Clip", ["a"], ["b"])], [helper.make_opsetid("", opset)]
    )
    node = helper.make_node("Low", ["x"], ["y"], domain="org.example")
    ends = [helper.make_tensor_value_info(name, TensorProto.FLOAT, [2]) for name in "xy"]
    graph = helper.make_graph([node], "main", ends[:1], ends[1:])
    opsets = [helper.make_opsetid("", 18), helper.make_opsetid("org.example", 1)]
    path = tmp_path / "model.onnx"
    onnx.save(helper.make_model(graph, functions=[function], opset_imports=opsets, ir_version=9), path)
    if is_taken:
        assert import_onnx(path).outputs[0].shape == (2,)
    else:
        with pytest.raises(ModelImportError, match="is not a valid ONNX model"):
            import_onnx(path)


def test_a_form_that_would_be_wrong_is_refused_with_the_reason(make_model: Any) -> None:
    node = helper.make_node("Celu", ["x"], ["y"], name="the_unit", alpha=0.0)
    path = make_model([node], [("x", [4])], ["y"])
    with pytest.raises(UnsupportedOperatorError, match=r"Celu.*the_unit.*an alpha of zero"):
        import_onnx(path)


@pytest.mark.parametrize(
    ("node", "advice"),
    [
        (helper.make_node("RandomUniformLike", ["x"], ["y"], "noise"), "make the random numbers an input of the model"),
        (helper.make_node("Bernoulli", ["x"], ["y"], "noise"), "or export it in evaluation mode"),
        (helper.make_node("Dropout", ["x", "", "yes"], ["y"], "noise"), "export the model in evaluation mode"),
    ],
)
def test_random_results_are_refused_with_what_to_do(node: onnx.NodeProto, advice: str, make_model: Any) -> None:
    path = make_model([node], [("x", [5, 3])], ["y"], {"yes": np.array(True)})
    with pytest.raises(UnsupportedOperatorError, match=f"operator {node.op_type}, node 'noise'.* random.*{advice}"):
        import_onnx(path)


def test_types_that_tvm_computes_wrongly_are_refused_by_name(make_model: Any) -> None:
    node = helper.make_node("Cast", ["x"], ["y"], to=TensorProto.FLOAT8E5M2)
    with pytest.raises(ModelImportError, match=r"FLOAT8E5M2"):
        import_onnx(make_model([node], [("x", [3])], ["y"]))


def test_tvms_converters_read_weights(make_model: Any, assert_same_as_onnxruntime: Any) -> None:
    """As that of Concat does, here of the first token of an image."""
    nodes = [helper.make_node("Concat", ["token", "x"], ["y"], axis=1)]
    path = make_model(nodes, [("x", [1, 4, 32])], ["y"], {"token": np.ones((1, 1, 32), "float32")})
    assert_same_as_onnxruntime(path, {"x": np.zeros((1, 4, 32), "float32")})
