"""Loops over bags of rows, as PyTorch's two exporters write EmbeddingBag: one kernel in the place of each."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from support.models import save_text
from support.torchlib import share_table

torch = pytest.importorskip("torch")

_ROWS = 30


class _Recommender(torch.nn.Module):  # type: ignore[misc]
    """Bags of all modes, whose rows fill no vector, some vectors, or more than the registers hold."""

    def __init__(self) -> None:
        super().__init__()
        self.largest = torch.nn.EmbeddingBag(_ROWS, 3, mode="max")
        self.total = torch.nn.EmbeddingBag(_ROWS, 300, mode="sum")
        self.mean = torch.nn.EmbeddingBag(_ROWS, 16, mode="mean")

    def forward(self, words: Any, begins: Any, weights: Any) -> Any:
        """Return the results of all bags side by side."""
        total = self.total(words, begins, per_sample_weights=weights)
        return torch.cat([self.largest(words, begins), total, self.mean(words, begins)], 1)


def _feeds(*lengths: int) -> dict[str, Any]:
    """Bags of these numbers of words."""
    generator = np.random.default_rng(len(lengths))
    count = sum(lengths)
    return {
        "words": generator.integers(0, _ROWS, count),
        "begins": np.cumsum([0, *lengths[:-1]]),
        "weights": generator.random(count, "float32"),
    }


@pytest.mark.parametrize("is_torchscript", [True, False], ids=["TorchScript", "torch.export"])
def test_bags_of_free_sizes_are_one_kernel(
    tmp_path: Path, assert_same_as_onnxruntime: Callable[..., Any], is_torchscript: bool
) -> None:
    path, names = tmp_path / "bags.onnx", ["words", "begins", "weights"]
    example = tuple(torch.from_numpy(item) for item in _feeds(2, 1, 3).values())
    model = _Recommender().eval()
    if is_torchscript:
        axes = {"words": {0: "n"}, "begins": {0: "b"}, "weights": {0: "n"}}
        torch.onnx.export(model, example, path, input_names=names, dynamic_axes=axes, dynamo=False)
    else:
        share_table()
        words, bags = torch.export.Dim("n"), torch.export.Dim("b")
        shapes = ({0: words}, {0: bags}, {0: words})
        torch.onnx.export(model, example, path, input_names=names, dynamo=True, dynamic_shapes=shapes, verbose=False)
    # The largest element of no rows is an error in ONNX Runtime where the exporter does not handle that.
    feeds = [_feeds(2, 1, 3), _feeds(4), _feeds(1, 0, 5, 2, 0) if not is_torchscript else _feeds(7, 1)]
    built = assert_same_as_onnxruntime(path, *feeds)
    rules = [rule for _, rule in built.schedules]
    assert rules.count("bags") == 3
    assert not any("loop" in name for name, _ in built.schedules)


_LOOP = """<ir_version: 9, opset_import: ["" : 18]>
model (int64[n] words, int64[b] begins, int64[b] ends, float[30, 5] table) => ({TYPE} y)
<int64[1] axis = {{0}}, bool go = {{1}}, int64 one = {{1}}>
{{
  size = Shape (begins)
  trips = Squeeze (size)
  y = Loop (trips, go) <
    body = iteration (int64 i, bool c) => (bool d, {ROW} row)
    {{
      d = Identity (c)
      from = Gather (begins, i)
      to = Gather (ends, i)
      first = Unsqueeze (from, axis)
      end = Unsqueeze (to, axis)
      bag = Slice (words, first, end, axis)
      rows = Gather (table, bag)
      last = Sub (trips, one)
      is_last = Equal (i, last)
      row = {REDUCE}
    }}
  >
}}
"""


def _loop(path: Path, **changes: str) -> Path:
    """Write a model whose only node is a loop over bags, with changes to it."""
    usual = {"TYPE": "float[b, 5]", "ROW": "float[5]", "REDUCE": "ReduceSum <keepdims = 0> (rows, axis)"}
    return save_text(path, _LOOP.format(**{**usual, **changes}))


def _bounds(begins: list[int], ends: list[int]) -> dict[str, Any]:
    generator = np.random.default_rng(0)
    return {
        "words": generator.integers(-_ROWS, _ROWS, 9),
        "begins": np.array(begins),
        "ends": np.array(ends),
        "table": generator.random((_ROWS, 5), "float32"),
    }


def test_the_bounds_of_bags_are_those_of_a_slice(
    tmp_path: Path, assert_same_as_onnxruntime: Callable[..., Any]
) -> None:
    """They may overlap, lie beyond the words, or count from their end."""
    feeds = [_bounds([0, 2, -3, 7, 5], [4, 9, -1, 100, 2]), _bounds([3], [3])]
    built = assert_same_as_onnxruntime(_loop(tmp_path / "loop.onnx"), *feeds)
    assert "bags" in {rule for _, rule in built.schedules}


# Branches that use one name for what each of them computes.
_BRANCHES = """If (is_last) <
        then_branch = first () => (float[5] r) { r = ReduceMax <keepdims = 0> (rows, axis) },
        else_branch = second () => (float[5] r) { r = ReduceSum <keepdims = 0> (rows, axis) }
      >"""


@pytest.mark.parametrize(
    "changes",
    [
        {"REDUCE": _BRANCHES},
        {"REDUCE": "ReduceProd <keepdims = 0> (rows, axis)"},
        {"REDUCE": "ReduceSum <keepdims = 1> (rows, axis)", "TYPE": "float[b, 1, 5]", "ROW": "float[1, 5]"},
    ],
    ids=["another last bag", "another reduction", "another shape"],
)
def test_loops_like_those_over_bags_stay_loops(
    tmp_path: Path, assert_same_as_onnxruntime: Callable[..., Any], changes: dict[str, str]
) -> None:
    built = assert_same_as_onnxruntime(_loop(tmp_path / "loop.onnx", **changes), _bounds([0, 2, 4], [2, 5, 9]))
    assert "bags" not in {rule for _, rule in built.schedules}


def test_a_word_outside_of_the_table_is_an_error(tmp_path: Path, target: Any, run_built: Any) -> None:
    from tvmflow.compiler import build, import_onnx

    feeds = _bounds([0, 2], [2, 9])
    feeds["words"][3] = _ROWS
    model = build(import_onnx(_loop(tmp_path / "loop.onnx")), target)
    with pytest.raises(Exception, match="an index is not from -30 to 29"):
        run_built(model, *feeds.values())
