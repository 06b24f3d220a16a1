"""Rows of a free number of features: the weights of an operator of ai.onnx.ml say how many they are."""

from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import NodeProto, TensorProto, helper

from support import builds
from support.arrays import normal
from support.forests import DOMAIN, classifier, regressor
from support.models import make_model
from tvmflow.compiler import LoadedModel, build, import_onnx
from tvmflow.errors import UnsupportedOperatorError
from tvmflow.hardware.target import Target
from tvmflow.onnx_model.size_limits import SizeLimits

_FEATURES = 5
_VECTORS = {
    "support_vectors": normal(3, _FEATURES).reshape(-1).tolist(),
    "kernel_type": "RBF",
    "kernel_params": [0.3, 0.0, 3.0],
}


def _node(operator: str, outputs: str = "y", **attributes: Any) -> NodeProto:
    return helper.make_node(operator, ["x"], outputs.split(), domain=DOMAIN, **attributes)


def _numbers(count: int) -> list[float]:
    return normal(count, seed=count).tolist()


# Nodes with weights for rows of five features. Trees take rows of more features, too, and do not read these.
_NODES = {
    "scaler": _node("Scaler", offset=_numbers(_FEATURES), scale=[0.5] * _FEATURES),
    "imputer": _node("Imputer", imputed_value_floats=_numbers(_FEATURES), replaced_value_float=0.0),
    "regressor": _node("LinearRegressor", coefficients=_numbers(2 * _FEATURES), intercepts=[0.5, 1.0], targets=2),
    "classifier": _node(
        "LinearClassifier",
        "label y",
        coefficients=_numbers(3 * _FEATURES),
        intercepts=[0.0] * 3,
        classlabels_ints=[3, 5, 8],
    ),
    "classifier of two": _node(
        "LinearClassifier", "label y", coefficients=_numbers(_FEATURES), intercepts=[0.1], classlabels_ints=[3, 5]
    ),
    "vectors": _node("SVMRegressor", n_supports=3, coefficients=_numbers(3), rho=[0.2], **_VECTORS),
    "no vectors": _node("SVMRegressor", coefficients=_numbers(_FEATURES), rho=[0.2], kernel_params=[0.3, 0.0, 3.0]),
    "vectors of classes": _node(
        *("SVMClassifier", "label y"),
        coefficients=_numbers(3),
        rho=[0.1],
        vectors_per_class=[1, 2],
        classlabels_ints=[0, 1],
        **_VECTORS,
    ),
    "trees": regressor(features=_FEATURES),
    "trees of classes": classifier([1, 2, 3], [0, 1, 2], per_leaf=3, features=_FEATURES),
}
_TREES = ("trees", "trees of classes")


def _model(node: NodeProto) -> onnx.ModelProto:
    outputs = [(name, None, TensorProto.INT64 if name == "label" else TensorProto.FLOAT) for name in node.output]
    return make_model([node], [("x", ["rows", "features"])], outputs, {})


@pytest.fixture(scope="module")
def joined(
    tmp_path_factory: pytest.TempPathFactory, target: Target
) -> tuple[LoadedModel, dict[str, np.ndarray[Any, Any]]]:
    """All nodes as one model, which gives the scores of ONNX Runtime, and the inputs by their places in it."""
    folder, x = tmp_path_factory.mktemp("features"), normal(4, _FEATURES, seed=1)
    cases = []
    for place, (name, node) in enumerate(_NODES.items()):
        onnx.save(_model(node), folder / f"{place}.onnx")
        more = [np.pad(x, ((0, 0), (0, 2)))] if name in _TREES else []
        cases.append((folder / f"{place}.onnx", [{"x": rows} for rows in (x, *more)]))
    built = builds.assert_all_same_as_onnxruntime(cases, target)
    return built.load(), dict.fromkeys(_NODES, x)


@pytest.mark.few(5)
@pytest.mark.parametrize("name", _NODES)
def test_rows_have_the_features_that_an_operator_has_weights_for(
    name: str, joined: tuple[LoadedModel, dict[str, np.ndarray[Any, Any]]]
) -> None:
    limits, (loaded, rows) = SizeLimits(_model(_NODES[name])), joined
    assert limits.weight_sizes == [_FEATURES]
    assert limits.explain({"rows": 4, "features": _FEATURES}) is None
    # ONNX Runtime reads behind the rows, or refuses them with a sentence of its own.
    for features in (_FEATURES - 1, *([] if name in _TREES else [_FEATURES + 1])):
        reason = limits.explain({"rows": 4, "features": features})
        assert reason == "rows have other features than the model has weights for"
        with pytest.raises(RuntimeError, match="match_cast"):
            loaded.run(*(rows | {name: normal(4, features)}).values())


def test_features_pass_through_scaling() -> None:
    nodes = [
        helper.make_node("Normalizer", ["x"], ["n"], domain=DOMAIN, norm="L2"),
        helper.make_node("Binarizer", ["n"], ["b"], domain=DOMAIN),
        helper.make_node("LinearRegressor", ["b"], ["y"], domain=DOMAIN, coefficients=[1.0, 2.0, 3.0]),
    ]
    limits = SizeLimits(make_model(nodes, [("x", ["rows", "features"])], ["y"], {}))
    assert limits.explain({"rows": 2, "features": 3}) is None
    assert limits.explain({"rows": 2, "features": 4}) is not None


def test_rows_without_a_known_number_are_refused(tmp_path: Path, target: Target) -> None:
    # One score or two: without intercepts nothing tells.
    node = _node("LinearClassifier", "label y", coefficients=_numbers(_FEATURES), classlabels_ints=[3, 5])
    onnx.save(_model(node), tmp_path / "model.onnx")
    with pytest.raises(UnsupportedOperatorError, match="rows of an unknown number of features"):
        build(import_onnx(tmp_path / "model.onnx"), target)
