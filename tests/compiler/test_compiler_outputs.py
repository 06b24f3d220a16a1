"""Which outputs are memory that the caller of a call alone has."""

from pathlib import Path

import numpy as np
import pytest
from onnx import NodeProto, helper

from support.models import save_model
from tvmflow.compiler import import_onnx, lower
from tvmflow.compiler.outputs import are_fresh
from tvmflow.hardware.target import Target

_WEIGHTS = {
    "w": np.arange(16, dtype=np.float32).reshape(4, 4),
    "flat": np.array([-1], np.int64),
    "c": np.ones((8,), np.float32),
}


def _node(operator: str, *names: str) -> NodeProto:
    *inputs, output = names
    return helper.make_node(operator, inputs, [output])


@pytest.mark.parametrize(
    ("nodes", "outputs", "expected"),
    [
        ([_node("Relu", "x", "y"), _node("Tanh", "x", "z")], {"y": [2, 4], "z": [2, 4]}, True),
        ([_node("MatMul", "x", "w", "p"), _node("Reshape", "p", "flat", "y")], {"y": [8]}, True),
        ([_node("Identity", "x", "y")], {"y": [2, 4]}, False),
        ([_node("Reshape", "x", "flat", "y")], {"y": [8]}, False),
        ([_node("Relu", "x", "y"), _node("Identity", "c", "z")], {"y": [2, 4], "z": [8]}, False),
        ([_node("Relu", "x", "y"), _node("Identity", "y", "z")], {"y": [2, 4], "z": [2, 4]}, False),
        ([_node("MatMul", "x", "w", "y"), _node("Reshape", "y", "flat", "z")], {"y": [2, 4], "z": [8]}, False),
    ],
    ids=["written", "view of written", "input", "view of input", "constant", "equal", "view of an output"],
)
def test_outputs_are_fresh_where_each_is_written_by_the_call(
    tmp_path: Path, target: Target, nodes: list[NodeProto], outputs: dict[str, list[int]], expected: bool
) -> None:
    path = save_model(tmp_path / "model.onnx", nodes, [("x", [2, 4])], list(outputs.items()), _WEIGHTS)
    assert are_fresh(lower(import_onnx(path), target)) is expected
