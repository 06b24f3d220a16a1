"""Sizes of free dimensions at which a bundle would not run: `tvmflow.size_limits`."""

from typing import Any

import onnx
import pytest
from onnx import helper

from support.models import make_model
from tvmflow.size_limits import SizeLimits


@pytest.fixture
def model() -> onnx.ModelProto:
    """The sum of an image of strides of two, of which one line may be left, and of the image's own lines."""
    nodes = [
        helper.make_node("MaxPool", ["x"], ["small"], kernel_shape=[1, 1], strides=[2, 1]),
        helper.make_node("Add", ["small", "y"], ["z"]),
    ]
    return make_model(nodes, [("x", ["n", 3, "h", 4]), ("y", ["n", 3, "m", 4])], ["z"], {})


@pytest.mark.parametrize(("lines", "is_chance"), [(1, True), (2, True), (6, False)])
def test_a_size_that_is_one_because_the_input_is_small_is_named(
    model: onnx.ModelProto, lines: int, is_chance: bool
) -> None:
    reason = SizeLimits(model).explain({"n": 1, "h": lines, "m": 3})
    assert (reason == "a size that is one by chance stands beside a larger one") == is_chance


def test_shapes_are_inferred_once_for_each_sizes_and_for_none_that_take_long(
    model: onnx.ModelProto, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = []
    infer_shapes = onnx.shape_inference.infer_shapes

    def recording(proto: onnx.ModelProto, **options: Any) -> onnx.ModelProto:
        asked.append([dim.dim_value for value in proto.graph.input for dim in value.type.tensor_type.shape.dim])
        return infer_shapes(proto, **options)

    monkeypatch.setattr(onnx.shape_inference, "infer_shapes", recording)
    limits = SizeLimits(model)
    for batch in (1, 17, 5000, 17):
        assert limits.explain({"n": batch, "h": 2, "m": 3}) is not None
    assert len(asked) == len({*map(tuple, asked)})
    # Inference computes the elements of shapes, and of what is computed from them: the time grows with the sizes.
    assert max(map(max, asked)) < 10_000
