"""Models and operators of which TVM's users complained in public: what `docs/explanation/tvm-users-complaints.md` says.

Each test names the issue of apache/tvm. The models there are attachments that no copy was to be had of, or are far too
large: these have the operators in the same places.
"""

import re
from pathlib import Path

import numpy as np
import pytest
import torch
from onnx import helper

from support.arrays import normal
from support.builds import assert_all_same_as_onnxruntime, assert_same_as_onnxruntime
from support.models import save_model, save_text
from tvmflow.arrays import Array
from tvmflow.compiler import BuildOptions
from tvmflow.compiler.operator_table import list_operators
from tvmflow.hardware.target import Target

PAGE = Path(__file__).parents[2] / "docs" / "explanation" / "tvm-users-complaints.md"

# What issue 20124 lists as missing from TVM's importer, less what takes strings.
MISSING_IN_TVM = (
    *("Celu", "Swish", "LpNormalization", "LinearAttention", "Det", "Col2Im", "TensorScatter", "CastLike", "BitCast"),
    *("CenterCropPad", "ReverseSequence", "SequenceMap", "GroupNormalization", "RNN", "GRU", "LSTM", "ConvInteger"),
    *("DeformConv", "CausalConvWithState", "QLinearConv", "QLinearMatMul", "RandomNormal", "RandomNormalLike"),
    *("RandomUniform", "RandomUniformLike", "Multinomial", "Bernoulli", "DFT", "STFT", "BlackmanWindow"),
    *("HammingWindow", "HannWindow", "MelWeightMatrix", "Loop", "Scan", "SoftmaxCrossEntropyLoss"),
    "NegativeLogLikelihoodLoss",
)


def test_17767_boxes_are_suppressed_as_onnx_runtime_does(tmp_path: Path, target: Target) -> None:
    corners = np.random.default_rng(0).uniform(0, 1, (1, 12, 2)).astype("float32")
    feeds = {"boxes": np.concatenate([corners, corners + 0.3], -1), "scores": normal(1, 2, 12)}
    path = save_text(
        tmp_path / "suppression.onnx",
        """<ir_version: 9, opset_import: ["" : 18]>
        g (float[1, 12, 4] boxes, float[1, 2, 12] scores) => (int64[n, 3] chosen)
        <int64[1] limit = {5}, float[1] overlap = {0.4}, float[1] least = {0.0}> {
          chosen = NonMaxSuppression (boxes, scores, limit, overlap, least)
        }""",
    )
    assert_same_as_onnxruntime(path, [feeds], target)


def test_17835_single_integers_beside_masks_and_bytes_are_right(tmp_path: Path, target: Target) -> None:
    path = save_text(
        tmp_path / "scalars.onnx",
        """<ir_version: 9, opset_import: ["" : 18]>
        g (int64 a, int64 b, uint8[24] bytes) => (int64 quotient, bool[24] mask, int64 truth, uint8[24] least)
        <uint8 limit = {25}, int64 zero = {0}> {
          quotient = Div (a, b)
          is_large = GreaterOrEqual (bytes, limit)
          truth_of_a = Cast <to = 9> (a)
          truth = Cast <to = 7> (truth_of_a)
          mask = Or (is_large, truth_of_a)
          least = Min (bytes, limit)
        }""",
    )
    feeds: list[dict[str, Array]] = [
        {"a": np.array(a), "b": np.array(b), "bytes": np.arange(24, dtype="uint8") * 7}
        for a, b in ((-1, 518), (-519, 518), (0, -3), (7, -2))
    ]
    assert_same_as_onnxruntime(path, feeds, target)


def test_17866_a_split_by_computed_sizes(tmp_path: Path, target: Target) -> None:
    path = save_text(
        tmp_path / "split.onnx",
        """<ir_version: 9, opset_import: ["" : 18]>
        g (float[n, 6] x) => (float[n, 2] first, float[n, 4] second)
        <int64[1] two = {2}, int64[1] four = {4}> {
          width = Shape <start = 1, end = 2> (x)
          rest = Sub (width, two)
          sizes = Concat <axis = 0> (two, rest)
          first, second = Split <axis = 1> (x, sizes)
        }""",
    )
    assert_same_as_onnxruntime(path, [{"x": normal(3, 6)}], target)


def test_17866_a_split_by_sizes_that_only_the_data_tell(tmp_path: Path, target: Target) -> None:
    path = save_text(
        tmp_path / "split.onnx",
        """<ir_version: 9, opset_import: ["" : 18]>
        g (float[6] x, int64[2] sizes) => (float[n] first, float[m] second) {
          first, second = Split <axis = 0> (x, sizes)
        }""",
    )
    feeds = [{"x": normal(6), "sizes": np.array(sizes, "int64")} for sizes in ([2, 4], [6, 0])]
    assert_same_as_onnxruntime(path, feeds, target)


@pytest.mark.parametrize("level", [1, 3])
def test_17876_shapes_that_are_computed_build_at_every_level(tmp_path: Path, target: Target, level: int) -> None:
    path = save_text(
        tmp_path / "shapes.onnx",
        """<ir_version: 9, opset_import: ["" : 18]>
        g (float[2, 3, 4] x) => (float[n, m] y)
        <int64[1] zero = {0}, int64[1] one = {1}, int64[1] rest = {-1}, int64[1] axis = {0}> {
          count = Size (x)
          counts = Unsqueeze (count, axis)
          shape = Shape (x)
          batch = Slice (shape, zero, one, axis)
          width = Div (counts, batch)
          flat = Concat <axis = 0> (rest, width)
          wide = Reshape (x, flat)
          y = Relu (wide)
        }""",
    )
    assert_same_as_onnxruntime(path, [{"x": normal(2, 3, 4)}], target, BuildOptions(opt_level=level))


@pytest.mark.long
def test_18340_an_lstm_of_pytorch_in_both_directions(tmp_path: Path, target: Target) -> None:
    torch.manual_seed(0)
    model = torch.nn.LSTM(5, 8, num_layers=2, bidirectional=True, batch_first=True).eval()
    path = tmp_path / "lstm.onnx"
    torch.onnx.export(model, (torch.zeros(2, 4, 5),), path, input_names=["x"], dynamo=True, verbose=False)
    assert_same_as_onnxruntime(path, [{"x": normal(2, 4, 5)}], target)


def test_18598_prelu_with_slopes_of_every_shape(tmp_path: Path, target: Target) -> None:
    cases = []
    for place, shape in enumerate([(1,), (4,), (4, 1, 1), (1, 4, 1, 1), (3, 4), (4, 3, 4), (2, 4, 3, 4)]):
        node = helper.make_node("PRelu", ["x", "slope"], ["y"])
        weights = {"slope": normal(*shape, seed=place)}
        path = save_model(tmp_path / f"{place}.onnx", [node], [("x", [2, 4, 3, 4])], ["y"], weights)
        cases.append((path, [{"x": normal(2, 4, 3, 4)}]))
    assert_all_same_as_onnxruntime(cases, target)


def test_19965_squeeze_with_its_axes_as_an_attribute_before_a_transpose(tmp_path: Path, target: Target) -> None:
    nodes = [
        helper.make_node("Squeeze", ["x"], ["s"], axes=[2]),
        helper.make_node("Transpose", ["s"], ["y"], perm=[0, 2, 1]),
    ]
    path = save_model(tmp_path / "squeeze.onnx", nodes, [("x", ["batch", 5, 1, "width"])], ["y"], opset=11)
    assert_same_as_onnxruntime(path, [{"x": normal(2, 5, 1, 7)}], target)


def test_19965_a_size_that_is_gathered_from_a_shape_bounds_topk(tmp_path: Path, target: Target) -> None:
    path = save_text(
        tmp_path / "proposals.onnx",
        """<ir_version: 9, opset_import: ["" : 11]>
        g (float[1, 9] scores) => (float[1, k] best, int64[1, k] places)
        <int64[1] second = {1}, int64[1] most = {6}> {
          shape = Shape (scores)
          count = Gather <axis = 0> (shape, second)
          both = Concat <axis = 0> (count, most)
          k = ReduceMin <axes = [0], keepdims = 1> (both)
          best, places = TopK <axis = 1> (scores, k)
        }""",
    )
    scores = np.random.default_rng(0).permutation(9)[None].astype("float32")
    assert_same_as_onnxruntime(path, [{"scores": scores}], target)


def test_20124_most_operators_that_tvm_lacks_are_taken() -> None:
    ways = {item.name: item.kind for item in list_operators() if not item.domain}
    operators = [operator for operator in MISSING_IN_TVM if ways[operator] != "refused"]
    assert len(operators) > len(MISSING_IN_TVM) / 2


def test_20124_operators_that_tvm_lacks_compute_what_onnx_runtime_computes(tmp_path: Path, target: Target) -> None:
    path = save_text(
        tmp_path / "missing.onnx",
        """<ir_version: 9, opset_import: ["" : 21]>
        g (float[2, 4, 6] x) => (float[2, 4, 6] a, float[2, 4, 6] b, float[2, 3, 8] c, float[2, 4, 6] d, float[6] w)
        <float[4] scale = {1.5, -0.5, 1.0, 2.0}, float[4] bias = {0.25, 2.0, 0.0, -1.0}, int64[2] sizes = {3, 8},
         int64 size = {6}> {
          a = Celu <alpha = 0.7> (x)
          b = LpNormalization <axis = 1, p = 2> (x)
          c = CenterCropPad <axes = [1, 2]> (x, sizes)
          d = GroupNormalization <num_groups = 2> (x, scale, bias)
          w = HannWindow (size)
        }""",
    )
    assert_same_as_onnxruntime(path, [{"x": normal(2, 4, 6)}], target)


def test_the_page_has_a_row_for_every_issue() -> None:
    rows = re.findall(r"^\| \[(\d+)\]", PAGE.read_text(), re.MULTILINE)
    assert sorted(rows) == ["17767", "17835", "17866", "17876", "18340", "18598", "19965", "20124"]
