"""Labels that are strings in a model, and numbers in what is compiled of it."""

from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest
from onnx import TensorProto, helper

from support import builds
from support.arrays import normal
from support.forests import DOMAIN
from support.models import make_model
from tvmflow.compiler import build, import_onnx
from tvmflow.hardware.target import Target
from tvmflow.onnx_model.labels import replace_labels

_STRING, _FLOAT = TensorProto.STRING, TensorProto.FLOAT
_ROWS = 5
_CATEGORIES = {"sex": ["female", "male"], "port": ["C", "Q", "S"]}


def _ml(operator: str, inputs: list[str], outputs: list[str], **attributes: Any) -> onnx.NodeProto:
    return helper.make_node(operator, inputs, outputs, domain=DOMAIN, **attributes)


def _encoded(*, zeros: int = 1) -> list[onnx.NodeProto]:
    """`features` [rows, 7]: two numbers, and each category of `sex` and `port`."""
    nodes = [
        _ml("OneHotEncoder", [name], [f"{name}_hot"], cats_strings=labels, zeros=zeros)
        for name, labels in _CATEGORIES.items()
    ]
    nodes += [helper.make_node("Flatten", [f"{name}_hot"], [f"{name}_flat"]) for name in _CATEGORIES]
    return [*nodes, helper.make_node("Concat", ["x", "sex_flat", "port_flat"], ["features"], axis=1)]


def _passengers() -> onnx.ModelProto:
    """The pipeline that is written most often for a table: categories, a linear model, labels and a dictionary."""
    coefficients = np.outer([1, -1], [1.0, -1.0, 2.0, -2.0, 0.5, -0.5, 0.25])
    nodes = [
        *_encoded(),
        _ml(
            "LinearClassifier",
            ["features"],
            ["class", "scores"],
            classlabels_strings=["died", "lived"],
            coefficients=coefficients.ravel().tolist(),
            intercepts=[0.25, 0.5],
            post_transform="SOFTMAX",
        ),
        helper.make_node("Identity", ["class"], ["label"]),
        _ml("ZipMap", ["scores"], ["probability"], classlabels_strings=["died", "lived"]),
    ]
    inputs = [("x", ["rows", 2]), *((name, ["rows", 1], _STRING) for name in _CATEGORIES)]
    model = make_model(nodes, inputs, [("label", ["rows"], _STRING), "probability"])
    by_label = helper.make_map_type_proto(_STRING, helper.make_tensor_type_proto(_FLOAT, []))
    model.graph.output[1].type.CopyFrom(helper.make_sequence_type_proto(by_label))
    return model


def _strings(*columns: list[str]) -> np.ndarray[Any, Any]:
    return np.array(columns, object).T


def _run_both(path: Path, target: Target, feed: dict[str, Any], labels: dict[str, tuple[str, ...]]) -> tuple[Any, Any]:
    """The outputs of ONNX Runtime, which takes strings, and of the compiled model, which takes their places."""
    places = {
        name: np.array([labels[name].index(item) if item in labels[name] else -1 for item in array.ravel()]).reshape(
            array.shape
        )
        if array.dtype == object
        else array
        for name, array in feed.items()
    }
    compiled = build(import_onnx(path), target)
    session = onnxruntime.InferenceSession(path, providers=["CPUExecutionProvider"])
    return session.run(None, feed), builds.run_in_memory(compiled, [tuple(places.values())])[0]


def test_strings_of_a_table_become_their_places(tmp_path: Path, target: Target) -> None:
    path, model = tmp_path / "model.onnx", _passengers()
    onnx.save(model, path)
    labels = replace_labels(model)
    classes = ("died", "lived")
    assert labels == {"sex": ("female", "male"), "port": ("C", "Q", "S"), "label": classes, "probability": classes}
    feed = {
        "x": normal(_ROWS, 2),
        "sex": _strings(["male", "female", "female", "male", "unknown"]),
        "port": _strings(["S", "C", "Q", "elsewhere", "S"]),
    }
    (expected, dictionaries), (places, scores) = _run_both(path, target, feed, labels)
    assert [classes[place] for place in places] == list(expected)
    assert len(set(expected)) == 2
    np.testing.assert_allclose(scores, [[row[name] for name in classes] for row in dictionaries], rtol=1e-5)


def test_strings_are_looked_up_moved_and_compared_within_a_model(tmp_path: Path, target: Target) -> None:
    nodes = [
        # Two columns share their labels, because one tensor holds both.
        helper.make_node("Concat", ["first", "second"], ["both"], axis=1),
        _ml(
            "LabelEncoder", ["both"], ["names"], keys_strings=["a", "b"], values_strings=["x", "y"], default_string="z"
        ),
        _ml(
            "LabelEncoder",
            ["names"],
            ["numbers"],
            keys_strings=["y", "z"],
            values_floats=[1.5, 2.5],
            default_float=0.5,
            default_string="unused",
        ),
        helper.make_node("Equal", ["names", "one"], ["is_x"]),
        helper.make_node("ArgMax", ["numbers"], ["place"], axis=1, keepdims=0),
        _ml("ArrayFeatureExtractor", ["classes", "place"], ["chosen"]),
    ]
    inputs = [(name, ["rows", 1], _STRING) for name in ("first", "second")]
    outputs = [
        ("names", ["rows", 2], _STRING),
        ("numbers", ["rows", 2]),
        ("is_x", ["rows", 2], TensorProto.BOOL),
        ("chosen", [1, "rows"], _STRING),
    ]
    weights = {"one": np.array(["x"], object), "classes": np.array(["left", "right"], object)}
    model = make_model(nodes, inputs, outputs, weights, domains={DOMAIN: 2}, opset=19)
    path = tmp_path / "model.onnx"
    onnx.save(model, path)
    labels = replace_labels(model)
    assert labels["first"] == labels["second"] == ("a", "b")
    assert set(labels["names"]) == {"x", "y", "z"}
    assert labels["chosen"] == ("left", "right")
    feed = {"first": _strings(["a", "b", "c"]), "second": _strings(["b", "a", "a"])}
    expected, results = _run_both(path, target, feed, labels)
    assert [[labels["names"][place] for place in row] for row in results[0]] == expected[0].tolist()
    np.testing.assert_array_equal(results[1], expected[1])
    np.testing.assert_array_equal(results[2], expected[2])
    assert [[labels["chosen"][place] for place in row] for row in results[3]] == expected[3].tolist()


@pytest.mark.parametrize(
    "nodes",
    [
        [helper.make_node("StringNormalizer", ["first"], ["y"], case_change_action="LOWER")],
        [helper.make_node("Identity", ["first"], ["y"])],
        [helper.make_node("Equal", ["first", "second"], ["y"])],
        [
            helper.make_node("Cast", ["x"], ["text"], to=_STRING),
            _ml("LabelEncoder", ["text"], ["y"], keys_strings=["1", "2"], values_int64s=[3, 4]),
        ],
    ],
    ids=["computed", "without labels", "compared with each other", "made of numbers"],
)
def test_strings_that_no_numbers_stand_for_stay(nodes: list[onnx.NodeProto]) -> None:
    inputs = [("x", ["n"]), *((name, ["n"], _STRING) for name in ("first", "second"))]
    model = make_model(nodes, inputs, [("y", ["n"], _STRING)], domains={DOMAIN: 2})
    before = model.SerializeToString()
    assert replace_labels(model) == {}
    assert model.SerializeToString() == before
