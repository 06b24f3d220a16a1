"""How many values integers of an input may have, by the tables that a model looks them up in."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper

from support.models import make_model
from tvmflow.onnx_model.index_limits import index_limits, index_ranges

_TABLE = np.zeros((30, 4), "float32")
_SMALL = np.zeros((7, 4), "float32")
_IDS = [("ids", ["batch", "length"], TensorProto.INT64)]


def _limits(nodes: Sequence[Any], weights: dict[str, Any], **options: Any) -> dict[str, int]:
    return index_limits(make_model(nodes, _IDS, [("y", None)], weights, **options))


def _gather(table: str, indices: str = "ids", result: str = "y", **attributes: Any) -> Any:
    return helper.make_node("Gather", [table, indices], [result], **attributes)


@pytest.mark.parametrize(("axis", "limit"), [(0, 30), (1, 4), (-1, 4)])
def test_indices_are_below_the_size_of_the_table_along_the_axis(axis: int, limit: int) -> None:
    assert _limits([_gather("table", axis=axis)], {"table": _TABLE}) == {"ids": limit}


def test_the_smallest_table_counts() -> None:
    nodes = [_gather("table", result="a"), _gather("small", result="b"), helper.make_node("Add", ["a", "b"], ["y"])]
    assert _limits(nodes, {"table": _TABLE, "small": _SMALL}) == {"ids": 7}


def test_indices_may_be_cast_and_moved_before() -> None:
    nodes = [
        helper.make_node("Cast", ["ids"], ["narrow"], to=TensorProto.INT32),
        helper.make_node("Transpose", ["narrow"], ["turned"], perm=[1, 0]),
        _gather("table", "turned"),
    ]
    assert _limits(nodes, {"table": _TABLE}) == {"ids": 30}


def test_a_table_may_be_stored_in_another_type_or_as_a_node() -> None:
    weights = {"eighths": np.zeros((9, 4), "int8"), "scale": np.float32(0.1)}
    nodes = [helper.make_node("DequantizeLinear", ["eighths", "scale"], ["table"]), _gather("table")]
    assert _limits(nodes, weights) == {"ids": 9}
    constant = helper.make_node("Constant", [], ["table"], value=onnx.numpy_helper.from_array(_SMALL))
    assert _limits([constant, _gather("table")], {}) == {"ids": 7}


def test_classes_of_a_one_hot_encoding_are_counted() -> None:
    encoding = helper.make_node("OneHot", ["ids", "depth", "values"], ["y"])
    assert _limits([encoding], {"depth": np.array(11), "values": np.array([0.0, 1.0], "float32")}) == {"ids": 11}
    compared = [
        helper.make_node("Unsqueeze", ["ids", "last"], ["column"]),
        helper.make_node("Equal", ["column", "classes"], ["y"]),
    ]
    assert _limits(compared, {"last": np.array([-1]), "classes": np.arange(5)}) == {"ids": 5}


@pytest.mark.parametrize(("place", "limit"), [(0, 30), (1, 7)])
def test_embeddings_of_onnx_runtime_have_a_table_for_each_operand(place: int, limit: int) -> None:
    names = ["ids" if place == 0 else "", "ids" if place == 1 else "", "words", "positions", "segments", "g", "b"]
    node = helper.make_node("EmbedLayerNormalization", names, ["y", "mask"], domain="com.microsoft")
    vector = np.zeros(4, "float32")
    tables = {"words": _TABLE, "positions": _TABLE, "segments": _SMALL, "g": vector, "b": vector}
    assert _limits([node], tables) == {"ids": limit}


def test_other_uses_have_no_limit() -> None:
    compared = helper.make_node("Equal", ["ids", "padding"], ["y"])
    assert _limits([compared], {"padding": np.array(1)}) == {}
    # As data, not as indices.
    assert _limits([_gather("ids", "first")], {"first": np.array(0)}) == {}
    # A table that the model computes.
    computed = [helper.make_node("Relu", ["table"], ["made"]), _gather("made")]
    assert _limits(computed, {"table": _TABLE}) == {}


def test_what_an_inner_graph_reads_has_no_limit() -> None:
    branch = helper.make_graph(
        [helper.make_node("Gather", ["small", "ids"], ["z"])],
        "branch",
        [],
        [helper.make_tensor_value_info("z", TensorProto.FLOAT, None)],
    )
    nodes = [
        _gather("table", result="a"),
        helper.make_node("If", ["condition"], ["b"], then_branch=branch, else_branch=branch),
        helper.make_node("Add", ["a", "b"], ["y"]),
    ]
    assert _limits(nodes, {"table": _TABLE, "small": _SMALL, "condition": np.array(True)}) == {}


def _ranges(nodes: Sequence[Any], weights: dict[str, Any], **options: Any) -> dict[str, tuple[int, int]]:
    return index_ranges(make_model(nodes, _IDS, [("y", None)], weights, **options))


def test_negative_integers_count_from_the_end_of_a_table() -> None:
    assert _ranges([_gather("table")], {"table": _TABLE}) == {"ids": (-30, 29)}


def test_integers_must_be_in_all_tables() -> None:
    nodes = [_gather("table", result="a"), _gather("small", result="b"), helper.make_node("Add", ["a", "b"], ["y"])]
    assert _ranges(nodes, {"table": _TABLE, "small": _SMALL}) == {"ids": (-7, 6)}


def test_embeddings_take_no_negative_integers() -> None:
    node = helper.make_node(
        "EmbedLayerNormalization",
        ["ids", "ids", "small", "table", "table", "gamma", "gamma"],
        ["y", "mask"],
        domain="com.microsoft",
    )
    weights = {"small": _SMALL, "table": _TABLE, "gamma": np.zeros(4, "float32")}
    assert _ranges([node], weights, domains={"com.microsoft": 1}) == {"ids": (0, 6)}


@pytest.mark.parametrize(
    "nodes",
    [
        [helper.make_node("Slice", ["ids", "zero", "one"], ["part"]), _gather("table", "part")],
        [
            helper.make_node("Cast", ["ids"], ["flags"], to=TensorProto.BOOL),
            helper.make_node("Cast", ["flags"], ["numbers"], to=TensorProto.INT64),
            _gather("table", "numbers"),
        ],
        [helper.make_node("Gather", ["ids", "zero"], ["y"])],
        [helper.make_node("OneHot", ["ids", "depth", "values"], ["y"])],
    ],
    ids=["some of them", "whether they are zero", "the data", "a one-hot encoding"],
)
def test_other_integers_may_have_any_value(nodes: Sequence[Any]) -> None:
    weights = {
        "table": _TABLE,
        "zero": np.array([0]),
        "one": np.array([1]),
        "depth": np.array(11),
        "values": np.array([0.0, 1.0], "float32"),
    }
    assert _ranges(nodes, weights) == {}
