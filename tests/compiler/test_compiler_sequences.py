"""Sequences of tensors whose lengths and positions are known at import."""

from pathlib import Path
from typing import Any

import pytest

from support.arrays import normal
from support.models import save_text
from tvmflow.compiler import import_onnx
from tvmflow.errors import UnsupportedOperatorError

_HEAD = '<ir_version: 9, opset_import: ["" : 18]>\n'


@pytest.fixture
def path_of(tmp_path: Path) -> Any:
    """Write the model that ONNX's textual syntax describes, of opset 18."""
    return lambda text: save_text(tmp_path / "model.onnx", _HEAD + text)


def test_the_last_part_of_a_dimension_that_is_no_multiple_is_shorter(
    path_of: Any, assert_same_as_onnxruntime: Any
) -> None:
    path = path_of("""
g (float[2, 9] x) => (float[2, 4] first, float[2, 1] rest, int64 count)
<int64 four = {4}, int64 last = {-1}, int64 zero = {0}>
{
  parts = SplitToSequence <axis = -1> (x, four)
  first = SequenceAt (parts, zero)  rest = SequenceAt (parts, last)  count = SequenceLength (parts)
}""")
    assert_same_as_onnxruntime(path, {"x": normal(2, 9)})


def test_parts_of_given_lengths_and_without_their_axis_are_taken(path_of: Any, assert_same_as_onnxruntime: Any) -> None:
    path = path_of("""
g (float[3, 9] x) => (float[3, 2] middle, float[9, 3] turned)
<int64[3] lengths = {4, 2, 3}, int64 one = {1}>
{
  parts = SplitToSequence <axis = 1> (x, lengths)  middle = SequenceAt (parts, one)
  rows = SplitToSequence <axis = 0, keepdims = 0> (x)
  turned = ConcatFromSequence <axis = 1, new_axis = 1> (rows)
}""")
    assert_same_as_onnxruntime(path, {"x": normal(3, 9)})


def test_tensors_are_put_into_a_split_sequence_and_taken_out(path_of: Any, assert_same_as_onnxruntime: Any) -> None:
    path = path_of("""
g (float[6, 4] x) => (float[k, 4] y, float[m, 4] z)
<int64 two = {2}, int64 one = {1}, int64 first = {-3}>
{
  parts = SplitToSequence <axis = 0> (x, two)
  shorter = SequenceErase (parts)  changed = Neg (x)
  middle = SequenceInsert (shorter, changed, one)  longer = SequenceInsert (middle, x, first)
  y = ConcatFromSequence <axis = 0> (longer)
  powers = SequenceMap <body = each (float[a, 4] u) => (float[a, 4] v) { v = Exp (u) }> (parts)
  z = ConcatFromSequence <axis = 0> (powers)
}""")
    assert_same_as_onnxruntime(path, {"x": normal(6, 4)})


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("(float[6, 4] x, int64 i) => (float[2, 4] y) { s = SplitToSequence (x, two)  y = SequenceAt (s, i) }",
         "SequenceAt, node 'y': not supported in this form (a position that the model computes)"),
        ("(float[6, 4] x, int64 i) => (float[2, 4] y) { s = SplitToSequence (x, i)  y = SequenceAt (s, two) }",
         "SplitToSequence, node 's': not supported in this form (lengths that the model computes)"),
        ("(float[n, 4] x) => (float[2, 4] y) { s = SplitToSequence (x, two)  y = SequenceAt (s, two) }",
         "SplitToSequence, node 's': not supported in this form (parts of a free dimension)"),
        ("(float[4, 4] x) => (float[2, 4] y) { s = SplitToSequence (x, two)  y = SequenceAt (s, two) }",
         "SequenceAt, node 'y': not supported in this form (position 2 of a sequence of 2)"),
    ],
)  # fmt: skip
def test_positions_and_lengths_that_are_unknown_are_refused_in_words(path_of: Any, text: str, reason: str) -> None:
    signature, body = text.split("{", 1)
    with pytest.raises(UnsupportedOperatorError) as caught:
        import_onnx(path_of(f"g {signature} <int64 two = {{2}}> {{{body}"))
    assert reason in str(caught.value)
