"""Scaling, encoding, linear models and support vectors of ai.onnx.ml beside ONNX Runtime."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest
from onnx import TensorProto, helper

from support import builds, scale
from support.arrays import normal
from support.forests import DOMAIN, classifier, rows
from support.models import make_model, save_model
from tvmflow.compiler import CompiledModel, build, import_onnx
from tvmflow.errors import UnsupportedOperatorError
from tvmflow.hardware.target import Target

Check = Callable[..., CompiledModel]

_FLOAT, _INT64 = TensorProto.FLOAT, TensorProto.INT64


def _case(operator: str, *arrays: Any, outputs: Sequence[int] = (_FLOAT,), free: bool = True, **attributes: Any) -> Any:
    """A model of one operator on these inputs, whose outputs have the given types of elements."""
    names = [f"x{place}" for place in range(len(arrays))]
    results = [f"y{place}" for place in range(len(outputs))]
    node = helper.make_node(operator, names, results, domain=DOMAIN, **attributes)
    inputs = [
        (name, ["rows", *array.shape[1:]] if free else list(array.shape), helper.np_dtype_to_tensor_dtype(array.dtype))
        for name, array in zip(names, arrays, strict=True)
    ]
    declared = [(name, None, element) for name, element in zip(results, outputs, strict=True)]
    return ([node], inputs, declared), dict(zip(names, arrays, strict=True))


_X = normal(7, 4)
_INTEGERS = np.array([[1, 5, -3, 5], [2, 2, 5, 0]])


def test_scaling_and_encoding_equal_onnx_runtime(assert_all_same: Check) -> None:
    with_nan = np.where(_X > 0.5, np.float32("nan"), _X)
    assert_all_same(
        [
            _case("Scaler", _X, offset=[1.0, 2.0, 0.5, 0.0], scale=[0.5, 2.0, 1.0, 3.0]),
            _case("Scaler", _INTEGERS, offset=[1.0], scale=[0.5]),
            _case("Scaler", 2.0**31 + _INTEGERS, offset=[2.0**31], scale=[0.5]),
            *(_case("Normalizer", _X, norm=norm) for norm in ("L1", "L2", "MAX")),
            _case("Binarizer", _X, threshold=0.25),
            _case("Imputer", with_nan, imputed_value_floats=[1.0, 2.0, 3.0, 4.0], replaced_value_float=float("nan")),
            _case("Imputer", _INTEGERS, outputs=[_INT64], imputed_value_int64s=[9], replaced_value_int64=5),
            _case("OneHotEncoder", _INTEGERS[:, 0].copy(), cats_int64s=[1, 4, 2]),
            _case("OneHotEncoder", _INTEGERS[:, 1:2].copy(), cats_int64s=[2, 3, 5], zeros=0),
            _case("OneHotEncoder", _INTEGERS[:, 1:2].copy(), cats_int64s=[5, 2, 5], zeros=0),
            _case("FeatureVectorizer", _X, normal(7, 2), inputdimensions=[4, 2]),
            _case("FeatureVectorizer", _X, normal(7, 2), inputdimensions=[3, 4]),
            _case("FeatureVectorizer", normal(1, 2, 3), normal(1, 1, 4), inputdimensions=[6, 4], free=False),
            _case("ArrayFeatureExtractor", _X, np.array([2, 0]), free=False),
        ]
    )


def test_a_value_that_is_no_category_ends_the_run(tmp_path: Path, target: Target) -> None:
    (nodes, inputs, outputs), _ = _case("OneHotEncoder", _INTEGERS, cats_int64s=[1, 2, 5, -3, 0], zeros=0)
    path = save_model(tmp_path / "model.onnx", nodes, inputs, outputs, domains={DOMAIN: 2})
    model = build(import_onnx(path), target).load()
    assert model.run(_INTEGERS)[0].sum() == _INTEGERS.size
    outside = np.where(_INTEGERS == 0, 4, _INTEGERS)
    with pytest.raises(RuntimeError, match="index error"):
        model.run(outside)
    with pytest.raises(Exception, match="Unknown Category"):
        onnxruntime.InferenceSession(path).run(None, {inputs[0][0]: outside})


def test_labels_are_encoded_as_onnx_runtime_does(tmp_path: Path, assert_same_as_onnxruntime: Check) -> None:
    keys = {"keys_int64s": [5, -3, 1, 5], "values_floats": [0.5, 1.5, 2.5, 3.5], "default_float": -1.0}
    numbers = {"keys_floats": [0.5, float("nan"), -2.0], "values_int64s": [7, 8, 9], "default_int64": 3}
    floats = np.array([[0.5, -2.0], [np.nan, 1.0]], "float32")
    # A key that is NaN is found since version 4.
    for version, x, element, attributes in [
        (4, _INTEGERS, _FLOAT, keys),
        *((v, floats, _INT64, numbers) for v in (3, 4)),
    ]:
        (nodes, inputs, outputs), feeds = _case("LabelEncoder", x, outputs=[element], **attributes)
        path = save_model(tmp_path / f"model{element}{version}.onnx", nodes, inputs, outputs, domains={DOMAIN: version})
        assert_same_as_onnxruntime(path, feeds)


@pytest.mark.few(2)
@pytest.mark.parametrize("post", ["NONE", "LOGISTIC", "SOFTMAX"])
def test_linear_models_equal_onnx_runtime(post: str, assert_all_same: Check) -> None:
    def linear(kind: str, scores: int, **attributes: Any) -> Any:
        weights = normal(scores, 4, seed=scores).reshape(-1).tolist()
        outputs = [_INT64, _FLOAT] if kind == "LinearClassifier" else [_FLOAT]
        intercepts = [0.1 * place for place in range(scores)]
        return _case(
            kind, _X, outputs=outputs, coefficients=weights, intercepts=intercepts, post_transform=post, **attributes
        )

    assert_all_same(
        [
            linear("LinearClassifier", 1, classlabels_ints=[4, 6]),
            linear("LinearClassifier", 3, classlabels_ints=[4, 6, 9]),
            linear("LinearRegressor", 2, targets=2),
        ]
    )


@pytest.mark.long
def test_support_vector_regression_equals_onnx_runtime(assert_all_same: Check) -> None:
    vectors, coefficients = normal(5, 4, seed=1).reshape(-1).tolist(), normal(5, seed=2).tolist()

    def regression(kind: str, **more: Any) -> Any:
        parameters = {"kernel_type": kind, "kernel_params": [0.3, 0.5, 3.0], "rho": [0.2]}
        return _case(
            "SVMRegressor",
            _X,
            n_supports=5,
            support_vectors=vectors,
            coefficients=coefficients,
            **parameters,
            **more,
        )

    cases = [regression(kind) for kind in ("LINEAR", "POLY", "RBF", "SIGMOID")]
    assert_all_same([*cases, regression("RBF", one_class=1)])


def test_support_vector_classification_equals_onnx_runtime(assert_all_same: Check) -> None:
    def classification(classes: int, has_probabilities: bool, kind: str, post: str) -> Any:
        rng = np.random.default_rng(classes)
        counts = rng.integers(1, 4, classes).tolist()
        vectors, pairs = sum(counts), classes * (classes - 1) // 2
        probabilities = {"prob_a": (-1 - rng.random(pairs)).tolist(), "prob_b": rng.normal(size=pairs).tolist()}
        return _case(
            "SVMClassifier",
            _X,
            outputs=[_INT64, _FLOAT],
            kernel_type=kind,
            kernel_params=[0.3, 0.5, 3.0],
            support_vectors=rng.normal(size=vectors * 4).tolist(),
            vectors_per_class=counts,
            coefficients=rng.normal(size=(classes - 1) * vectors).tolist(),
            rho=rng.normal(size=pairs).tolist(),
            classlabels_ints=list(range(5, 5 + classes)),
            post_transform=post,
            **(probabilities if has_probabilities else {}),
        )

    assert_all_same(
        [
            *(
                classification(2, False, "RBF", post)
                for post in scale.choose(normal=["NONE"], long=["NONE", "LOGISTIC", "SOFTMAX"])
            ),
            classification(2, True, "LINEAR", "NONE"),
            # Every pair of classes has a sum of its own.
            classification(scale.count(normal=3, long=5), False, "POLY", "LOGISTIC"),
            classification(scale.count(normal=3, long=4), True, "SIGMOID", "SOFTMAX_ZERO"),
        ]
    )


def test_an_output_that_is_a_dictionary_becomes_its_scores(tmp_path: Path, target: Target) -> None:
    nodes = [
        classifier([4, 7, 9], [0, 1, 2], per_leaf=3),
        helper.make_node("ZipMap", ["y"], ["z"], domain=DOMAIN, classlabels_int64s=[4, 7, 9]),
    ]
    model = make_model(nodes, [("x", ["rows", 3])], [("label", ["rows"], _INT64), "z"])
    by_label = helper.make_map_type_proto(_INT64, helper.make_tensor_type_proto(_FLOAT, []))
    model.graph.output[1].type.CopyFrom(helper.make_sequence_type_proto(by_label))
    path = tmp_path / "model.onnx"
    onnx.save(model, path)
    imported = import_onnx(path)
    assert [output.name for output in imported.outputs] == ["label", "z"]
    x = rows(5)
    labels, scores = builds.run_in_memory(build(imported, target), [[x]])[0]
    expected = onnxruntime.InferenceSession(path, providers=["CPUExecutionProvider"]).run(None, {"x": x})
    assert labels.tolist() == expected[0].tolist()
    np.testing.assert_allclose(
        scores, [[row[label] for label in (4, 7, 9)] for row in expected[1]], rtol=1e-5, atol=1e-6
    )


@pytest.mark.parametrize(
    ("operator", "attributes"),
    [
        ("OneHotEncoder", {"cats_strings": ["a", "b"]}),
        ("LabelEncoder", {"keys_strings": ["a"], "values_int64s": [1]}),
    ],
)
def test_strings_that_numbers_are_compared_with_are_refused(
    operator: str, attributes: dict[str, Any], tmp_path: Path
) -> None:
    (nodes, inputs, _), _ = _case(operator, _INTEGERS, **attributes)
    path = save_model(tmp_path / "model.onnx", nodes, inputs, [(nodes[0].output[-1], None)], domains={DOMAIN: 2})
    with pytest.raises(UnsupportedOperatorError, match="strings"):
        import_onnx(path)
