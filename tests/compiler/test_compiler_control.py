"""If, Loop and Scan: imported in place where they are decided at import, else run by the virtual machine."""

import re
import resource
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from support.builds import run_in_memory
from support.models import save_text
from tvmflow.arrays import Array
from tvmflow.compiler import BuildOptions, build, import_onnx
from tvmflow.errors import UnsupportedOperatorError

_HEAD = '<ir_version: 9, opset_import: ["" : 18]>\n'


def _random(*shape: int, seed: int = 0) -> Array:
    return np.random.default_rng(seed).standard_normal(shape).astype("float32")


def _int(value: int) -> Array:
    return np.array(value, "int64")


@pytest.fixture
def make_text(tmp_path: Path) -> Any:
    """Write the model that ONNX's textual syntax describes, of opset 18."""
    return lambda text: save_text(tmp_path / "model.onnx", _HEAD + text)


_BRANCHES = """
model (bool flag, int64 count, float[n, 4] x) => (float[a, 4] y, float[n, 4] z)
<float[4, 32] w = {W}, float[32, 4] v = {V}, int64[1] zero = {{0}}, int64[1] two = {{2}}, int64 many = {{3}}>
{{
  y, h = If (flag) <
    then_branch = then_graph () => (float[b, 4] first, float[n, 4] second)
      {{ first = Slice (x, zero, two, zero)  wide = MatMul (x, w)  narrow = MatMul (wide, v)  second = Relu (narrow) }},
    else_branch = else_graph () => (float[c, 4] third, float[n, 4] fourth)
      {{
        third = Concat <axis = 0> (x, x)
        more = Greater (count, many)
        fourth = If (more) <
          then_branch = inner_then () => (float[n, 4] fifth) {{ fifth = Neg (x) }},
          else_branch = inner_else () => (float[n, 4] sixth) {{ sixth = Mul (x, x) }}
        >
      }}
  >
  z = Add (h, x)
}}
"""


def _numbers(value: Array) -> str:
    return "{" + ", ".join(f"{item:.6f}" for item in value.reshape(-1)) + "}"


@pytest.mark.few(1)
@pytest.mark.parametrize("weights", ["inside", "apart"])
def test_a_condition_of_the_inputs_is_decided_when_the_model_runs(
    make_text: Any, assert_same_as_onnxruntime: Any, weights: Any
) -> None:
    path = make_text(_BRANCHES.format(W=_numbers(_random(4, 32)), V=_numbers(_random(32, 4, seed=1))))
    feeds = [
        {"flag": np.array(flag), "count": _int(count), "x": _random(n, 4)}
        for flag, count, n in ((True, 0, 3), (False, 2, 3), (False, 5, 6))
    ]
    model = assert_same_as_onnxruntime(path, *feeds, options=BuildOptions(weights=weights))
    assert len(model.params) == (2 if weights == "apart" else 0)


def test_a_window_in_a_branch_does_not_bound_the_sizes_for_the_other(
    make_text: Any, assert_same_as_onnxruntime: Any
) -> None:
    taps = _numbers(_random(8))
    path = make_text(f"""
model (bool flag, float[1, 1, t] x) => (float[1, 1, u] y)
<float[1, 1, 8] wide = {taps}, float[1, 1, 3] narrow = {{1, 2, 3}}>
{{
  y = If (flag) <
    then_branch = then_graph () => (float[1, 1, v] first) {{ first = Conv (x, wide) }},
    else_branch = else_graph () => (float[1, 1, w] second) {{ second = Conv (x, narrow) }}
  >
}}
""")
    feeds = [{"flag": np.array(flag), "x": _random(1, 1, size)} for flag, size in ((True, 9), (False, 3), (False, 9))]
    assert_same_as_onnxruntime(path, *feeds)
    assert import_onnx(path).smallest == {"t": 3}


def test_a_dimension_that_a_branch_removes_is_one_when_the_model_runs(
    make_text: Any, assert_same_as_onnxruntime: Any
) -> None:
    path = make_text("""
model (float[n, t] x) => (float[n] y)
<int64[1] last = {1}, int64[1] one = {1}>
{
  shape = Shape (x)
  size = Gather (shape, last)
  is_one = Equal (size, one)
  z = If (is_one) <
    then_branch = then_graph () => (float[n] first) { first = Squeeze (x, last) },
    else_branch = else_graph () => (float[n, t] second) { second = Identity (x) }
  >
  y = Relu (z)
}""")
    model = assert_same_as_onnxruntime(path, {"x": _random(3, 1)})
    with pytest.raises(RuntimeError, match="match_cast"):
        run_in_memory(model, [[_random(3, 2)]])


# `x` is multiplied by the weights and added to `y` in every iteration; `rows` are the sums of its rows.
_LOOP = """
model (int64 trips, bool start, float[n, 4] x, float[n, 4] y) => (float[n, 4] last, float[k, n] rows, float[p] places)
<float[4, 4] w = {W}, int64[1] one = {{1}}, bool go = {{1}}>
{{
  last, rows, places = Loop ({TRIPS}, {START}, x) <
    body = iteration (int64 i, bool c, float[n, 4] a) => (bool d, float[n, 4] b, float[n] sums, float place)
    {{
      d = Identity (c)  m = MatMul (a, w)  b = Add (m, y)
      sums = ReduceSum <keepdims = 0> (b, one)  place = Cast <to = 1> (i)
    }}
  >
}}
"""


def _loop(trips: str, start: str) -> str:
    return _LOOP.format(W=_numbers(_random(4, 4, seed=2) / 4), TRIPS=trips, START=start)


@pytest.mark.few(1)
@pytest.mark.parametrize("start", ["start", "go", ""])
def test_a_loop_runs_as_often_as_its_inputs_say(make_text: Any, assert_same_as_onnxruntime: Any, start: str) -> None:
    feeds = [
        {"trips": _int(trips), "start": np.array(is_on), "x": _random(n, 4), "y": _random(n, 4, seed=1)}
        for trips, is_on, n in ((1, True, 2), (2, True, 3), (37, True, 3))
    ]
    model = assert_same_as_onnxruntime(make_text(_loop("trips", start)), *feeds)
    assert "loop" in model.ir_text
    for trips, is_on in ((0, True), (4, False))[: 2 if start == "start" else 1]:
        feed = [_int(trips), np.array(is_on), _random(3, 4), _random(3, 4)]
        ((last, rows, places),) = run_in_memory(model, [feed])
        np.testing.assert_array_equal(last, feed[2])
        assert (rows.shape, places.shape) == ((0, 3), (0,))


def test_a_short_loop_of_a_certain_length_is_imported_in_place(make_text: Any, assert_same_as_onnxruntime: Any) -> None:
    feed = {"trips": _int(0), "start": np.array(True), "x": _random(2, 4), "y": _random(2, 4, seed=1)}
    path = make_text(_loop("five", "go").replace("bool go", "int64 five = {5}, bool go"))
    model = assert_same_as_onnxruntime(path, feed)
    assert "loop" not in model.ir_text
    assert import_onnx(path).outputs[1].shape == (5, "n")


def test_a_long_loop_of_a_certain_length_stacks_as_many_rows(make_text: Any, assert_same_as_onnxruntime: Any) -> None:
    feed = {"trips": _int(0), "start": np.array(True), "x": _random(2, 4), "y": _random(2, 4, seed=1)}
    path = make_text(_loop("many", "go").replace("bool go", "int64 many = {300}, bool go"))
    model = assert_same_as_onnxruntime(path, feed)
    assert "loop" in model.ir_text
    assert import_onnx(path).outputs[1].shape == (300, "n")


def test_weights_that_a_loop_passes_on_are_packed_once(make_text: Any, assert_same_as_onnxruntime: Any) -> None:
    weights = _numbers(_random(24, 24, seed=2) / 24)
    path = make_text(f"""
model (int64 trips, float[n, 24] x) => (float[n, 24] last, float[24, 24] same)
<float[24, 24] w = {weights}, bool go = {{1}}>
{{
  last, same = Loop (trips, go, x, w) <
    body = iteration (int64 i, bool c, float[n, 24] a, float[24, 24] v) => (bool d, float[n, 24] b, float[24, 24] u)
    {{ d = Identity (c)  b = MatMul (a, v)  t = Identity (v)  u = Identity (t) }}
  >
}}""")
    feeds = [{"trips": _int(trips), "x": _random(3, 24)} for trips in (1, 5)]
    model = assert_same_as_onnxruntime(path, *feeds)
    assert "loop" in model.ir_text
    assert "pack" not in re.findall(r"cls\.(\w+)", model.ir_text)
    ((last, same),) = run_in_memory(model, [[_int(0), feeds[0]["x"]]])
    np.testing.assert_array_equal(last, feeds[0]["x"])
    np.testing.assert_allclose(same, _random(24, 24, seed=2) / 24, atol=1e-5)


def test_a_loop_may_run_until_a_condition_of_its_values(make_text: Any, assert_same_as_onnxruntime: Any) -> None:
    path = make_text("""
model (float x, float[n] grows) => (float y, float[k] steps, float[m] longer)
<bool go = {1}, float limit = {1000.0}, float two = {2.0}, int64[1] zero = {0}>
{
  y, longer, steps = Loop (, go, x, grows) <
    body = iteration (int64 i, bool c, float a, float[p] g) => (bool d, float b, float[q] h, float s)
    { b = Mul (a, two)  d = Less (b, limit)  s = Identity (b)  e = Unsqueeze (b, zero)  h = Concat <axis = 0> (g, e) }
  >
}""")
    feeds = [{"x": np.array(x, "float32"), "grows": _random(3)} for x in (1.0, 600.0, 0.001)]
    assert_same_as_onnxruntime(path, *feeds)


def test_a_loop_of_many_iterations_needs_little_memory(make_text: Any, target: Any) -> None:
    path = make_text("""
model (int64 trips, float[100000] x) => (float[100000] y)
<bool go = {1}, float one = {1.0}>
{
  y = Loop (trips, go, x) <
    body = iteration (int64 i, bool c, float[100000] a) => (bool d, float[100000] b)
    { d = Identity (c)  b = Add (a, one) }
  >
}""")
    model = build(import_onnx(path), target)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    ((result,),) = run_in_memory(model, [[_int(20_000), np.zeros(100_000, "float32")]])
    assert (result == 20_000).all()
    # A set of the carried values is 0.4 MB; all iterations' would be 8 GB.
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 200_000


_SCAN = """
model (float[2] state, float[{T}, 2] x, float[2, {T}] u) => (float[2] last, float[2, k] rows, float[m, 2] back)
{{
  last, rows, back = Scan <num_scan_inputs = 2, scan_input_axes = [0, 1], scan_input_directions = [0, 1],
    scan_output_axes = [1, 0], scan_output_directions = [0, 1],
    body = iteration (float[2] a, float[2] b, float[2] c) => (float[2] d, float[2] e, float[2] f)
    {{ t = Tanh (a)  s = Add (t, b)  d = Add (s, c)  e = Mul (d, b)  f = Sub (d, c) }}
  > (state, x, u)
}}
"""


@pytest.mark.few(1)
@pytest.mark.parametrize(("length", "lengths"), [("t", (1, 2, 9)), ("3", (3,)), ("300", (300,))])
def test_a_scan_takes_and_stacks_along_axes_in_both_directions(
    make_text: Any, assert_same_as_onnxruntime: Any, length: str, lengths: tuple[int, ...]
) -> None:
    path = make_text(_SCAN.format(T=length))
    feeds = [{"state": _random(2), "x": _random(n, 2, seed=1), "u": _random(2, n, seed=2)} for n in lengths]
    model = assert_same_as_onnxruntime(path, *feeds)
    assert ("loop" in model.ir_text) == (length != "3")


_SEQUENCE = """
model (int64 trips, float[4] x) => (float[k, 4] y)
<int64 three = {{3}}, bool go = {{1}}>
{{
  nothing = SequenceEmpty ()
  rows, last = Loop ({TRIPS}, go, nothing, x) <
    body = iteration (int64 i, bool c, seq(float[4]) s, float[4] a) => (bool d, seq(float[4]) t, float[4] b)
    {{ d = Identity (c)  b = Add (a, a)  t = SequenceInsert (s, b) }}
  >
  y = {USE} (rows)
}}
"""
_STACKED = "ConcatFromSequence <axis = 0, new_axis = 1>"


def test_a_short_loop_may_gather_a_sequence(make_text: Any, assert_same_as_onnxruntime: Any) -> None:
    path = make_text(_SEQUENCE.format(TRIPS="three", USE=_STACKED))
    assert_same_as_onnxruntime(path, {"trips": _int(0), "x": _random(4)})


@pytest.mark.parametrize("use", [_STACKED, "ConcatFromSequence <axis = -1, new_axis = 1>"])
def test_a_loop_of_any_length_may_gather_a_sequence(make_text: Any, assert_same_as_onnxruntime: Any, use: str) -> None:
    text = _SEQUENCE.replace("float[k, 4] y", "float[k, m] y").format(TRIPS="trips", USE=use)
    feeds = [{"trips": _int(trips), "x": _random(4)} for trips in (1, 6)]
    assert_same_as_onnxruntime(make_text(text), *feeds)


# The rows of a window, of which each iteration takes one more: what EmbeddingBag is exported to, and more.
_BAGS = """
model (int64[bags] sizes, float[n, 4] x) => ({TYPE} y, float[b, 4] sums)
<int64 one = {{1}}, int64[1] first = {{0}}, int64[1] next = {{1}}, int64[1] axis = {{0}}, bool go = {{1}}>
{{
  nothing = SequenceEmpty ()
  none = SequenceEmpty ()
  bags = Size (sizes)
  parts, last, totals = Loop ("", go, nothing, first, none) <
    body = iteration (int64 i, bool c, seq(float[k, 4]) s, int64[1] from, seq(float[1, 4]) r)
      => (bool d, seq(float[k, 4]) t, int64[1] to, seq(float[1, 4]) q)
    {{
      size = Gather (sizes, i)
      length = Reshape (size, next)
      to = Add (from, length)
      rows = Slice (x, from, to, axis)
      part = {PART} (rows)
      t = SequenceInsert (s, part)
      sum = ReduceSum (rows, axis)
      q = SequenceInsert (r, sum)
      j = Add (i, one)
      d = Less (j, bags)
    }}
  >
  y = ConcatFromSequence <axis = {AXIS}> (parts)
  sums = ConcatFromSequence <axis = 0> (totals)
}}
"""


@pytest.mark.few(1)
@pytest.mark.parametrize(
    ("kind", "part", "axis"),
    [("float[m, 4]", "Neg", 0), ("float[4, m]", "Transpose", 1), ("float[4, m]", "Transpose", -1)],
)
def test_a_loop_may_gather_sequences_of_tensors_of_different_sizes(
    make_text: Any, assert_same_as_onnxruntime: Any, kind: str, part: str, axis: int
) -> None:
    path = make_text(_BAGS.format(TYPE=kind, PART=part, AXIS=axis))
    feeds = [{"sizes": np.array(sizes), "x": _random(sum(sizes), 4)} for sizes in ([3], [2, 1, 4], [1, 5])]
    assert_same_as_onnxruntime(path, *feeds)


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        (
            """
model (bool flag, float[2, 2] x) => (float[a, b] y)
{
  y = If (flag) <
    then_branch = then_graph () => (float[4] first) { s = Constant <value = int64[1] {4}> ()  first = Reshape (x, s) },
    else_branch = else_graph () => (float[2, 2] second) { second = Neg (x) }
  >
}""",
            "branches whose results have different numbers of dimensions",
        ),
        (
            """
model (bool flag, float[2, 2] x) => (float[2, 2] y)
{
  y = If (flag) <
    then_branch = then_graph () => (float[2, 2] first) { first = Neg (x) },
    else_branch = else_graph () => (float[2, 2] second) { second = RandomUniformLike (x) }
  >
}""",
            "RandomUniformLike",
        ),
        (
            _SEQUENCE.replace("float[k, 4] y", "float[4] y").format(
                TRIPS="trips", USE="SequenceAt (rows, three)  z = Neg"
            ),
            "a sequence or an optional value that is decided when the model runs",
        ),
        (
            """
model (int64 trips, float[2, 2] x) => (float[4] y)
<bool go = {1}, int64[1] four = {4}>
{
  y = Loop (trips, go, x) <
    body = iteration (int64 i, bool c, float[2, 2] a) => (bool d, float[4] b)
    { d = Identity (c)  b = Reshape (a, four) }
  >
}""",
            "a carried value whose type or number of dimensions changes",
        ),
    ],
)
def test_what_cannot_run_is_refused_in_a_sentence(make_text: Any, text: str, reason: str) -> None:
    path = make_text(text)
    with pytest.raises(UnsupportedOperatorError, match=reason) as refusal:
        import_onnx(path)
    assert str(refusal.value).count("operator ") == 1
