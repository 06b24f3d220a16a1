"""The direct form of loops, loops that end by a counter, and products that are computed before a loop."""

import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from support.builds import has_direct_main, run_in_memory
from support.models import save_text
from tvmflow.arrays import Array
from tvmflow.compiler import BuildOptions, CompiledModel, import_onnx

_HEAD = '<ir_version: 9, opset_import: ["" : 18]>\n'


def _random(*shape: int, seed: int = 0) -> Array:
    return np.random.default_rng(seed).standard_normal(shape).astype("float32")


def _numbers(value: Array) -> str:
    return "{" + ", ".join(f"{item:.6f}" for item in value.reshape(-1)) + "}"


@pytest.fixture
def make_text(tmp_path: Path) -> Any:
    """Write the model that ONNX's textual syntax describes, of opset 18."""
    return lambda text: save_text(tmp_path / "model.onnx", _HEAD + text)


def _loops_of_machine(model: CompiledModel) -> set[str]:
    """The functions of loops that the virtual machine runs."""
    return set(re.findall(r"def (loop_\d+)\(", model.ir_text))


def _direct_loops(model: CompiledModel) -> set[str]:
    """The functions of the library that run loops."""
    return set(re.findall(r"def (loop_\d+_direct)\(", model.ir_text))


# Each iteration passes `a` on as `b` and the other way round, and stacks both, one from its end.
_SWAP = """
model (int64 trips, float[n, 3] x, float[n, 3] y) => (float[n, 3] p, float[n, 3] q, float[k, n, 3] rows)
<bool go = {1}, float half = {0.5}>
{
  p, q, rows = Loop (trips, go, x, y) <
    body = iteration (int64 i, bool c, float[n, 3] a, float[n, 3] b)
      => (bool d, float[n, 3] e, float[n, 3] f, float[n, 3] r)
    { d = Identity (c)  e = Identity (b)  f = Identity (a)  h = Mul (a, half)  r = Add (h, b) }
  >
}
"""


@pytest.mark.parametrize("weights", ["inside", "apart"])
def test_carried_values_may_change_places(make_text: Any, assert_same_as_onnxruntime: Any, weights: Any) -> None:
    feeds = [
        {"trips": np.array(trips), "x": _random(n, 3), "y": _random(n, 3, seed=1)}
        for trips, n in ((1, 2), (2, 1), (7, 5))
    ]
    model = assert_same_as_onnxruntime(make_text(_SWAP), *feeds, options=BuildOptions(weights=weights))
    assert len(_direct_loops(model)) == 1
    assert not _loops_of_machine(model)
    ((p, q, rows),) = run_in_memory(model, [[np.array(0), feeds[0]["x"], feeds[0]["y"]]])
    np.testing.assert_array_equal((p, q), (feeds[0]["x"], feeds[0]["y"]))
    assert rows.shape == (0, 2, 3)


# A value doubles until it reaches a limit. `count` is the number of iterations; the limit of iterations is an input.
_DOUBLE = """
model (int64 trips, bool start, float[2] x) => (float[2] y, int64 count)
<float limit = {{1000.0}}, float two = {{2.0}}, int64 one = {{1}}, int64 zero = {{0}}, int64[1] axis = {{0}}>
{{
  y, count = Loop ({TRIPS}, {START}, x, zero) <
    body = iteration (int64 i, bool c, float[2] a, int64 k) => (bool d, float[2] b, int64 m)
    {{ b = Mul (a, two)  largest = ReduceMax <keepdims = 0> (b, axis)  d = Less (largest, limit)  m = Add (k, one) }}
  >
}}
"""


@pytest.mark.few(2)
@pytest.mark.parametrize(("trips", "start"), [("trips", "start"), ("", "start"), ("trips", ""), ("", "")])
def test_a_condition_ends_a_loop_of_the_library(
    make_text: Any, assert_same_as_onnxruntime: Any, trips: str, start: str
) -> None:
    feeds = [
        {"trips": np.array(most), "start": np.array(is_on), "x": np.array([size, 1], "float32")}
        for most, is_on, size in (
            (100, True, 1.0),
            (3, True, 1.0),
            (100, False, 1.0),
            (1, True, 600.0),
            (5, True, 900.0),
        )
        if is_on or start
    ]
    model = assert_same_as_onnxruntime(make_text(_DOUBLE.format(TRIPS=trips, START=start)), *feeds)
    assert len(_direct_loops(model)) == 1
    assert not _loops_of_machine(model)


# The sums of the first rows of `x`, each of them again a loop.
_NESTED = """
model (float[t, 4] x) => (float[t, 4] sums)
<bool go = {1}, int64 one = {1}, float[4] nothing = {0, 0, 0, 0}, int64[1] first = {0}>
{
  shape = Shape <end = 1> (x)
  rows = Squeeze (shape, first)
  sums = Loop (rows, go) <
    body = outer (int64 i, bool c) => (bool d, float[4] s)
    {
      d = Identity (c)
      count = Add (i, one)
      s = Loop (count, go, nothing) <
        body = inner (int64 j, bool e) => (bool f, float[4] a)
        { f = Identity (e)  r = Gather (x, j)  a = Add (b, r) }
      >
    }
  >
}
"""


def test_a_loop_within_a_loop_is_called_by_it(make_text: Any, assert_same_as_onnxruntime: Any) -> None:
    text = _NESTED.replace("inner (int64 j, bool e)", "inner (int64 j, bool e, float[4] b)")
    model = assert_same_as_onnxruntime(make_text(text), {"x": _random(1, 4)}, {"x": _random(40, 4)})
    assert len(_direct_loops(model)) == 2
    assert not _loops_of_machine(model)


def test_a_loop_with_a_condition_within_stays_with_the_virtual_machine(
    make_text: Any, assert_same_as_onnxruntime: Any
) -> None:
    model = assert_same_as_onnxruntime(
        make_text("""
model (int64 trips, float[4] x) => (float[4] y)
<bool go = {1}, int64 two = {2}, int64 zero = {0}>
{
  y = Loop (trips, go, x) <
    body = iteration (int64 i, bool c, float[4] a) => (bool d, float[4] b)
    {
      d = Identity (c)  rest = Mod (i, two)  is_even = Equal (rest, zero)
      b = If (is_even) <
        then_branch = even () => (float[4] e) { e = Add (a, x) },
        else_branch = odd () => (float[4] o) { o = Mul (a, x) }
      >
    }
  >
}"""),
        {"trips": np.array(5), "x": _random(4)},
    )
    assert not _direct_loops(model)
    assert len(_loops_of_machine(model)) == 1


# An iteration of a known number of them. `{BODY}` computes b from a, which has the width 4 at first.
_KNOWN = """
model (float[n, 4] x) => (float[n, {WIDTH}] y)
<int64 trips = {{20}}, bool go = {{1}}, int64 two = {{2}}, int64 zero = {{0}}, float[1] half = {{0.5}},
 int64[1] last = {{1}}>
{{
  y = Loop (trips, go, x) <
    body = iteration (int64 i, bool c, float[n, p] a) => (bool d, float[n, q] b)
    {{ d = Identity (c)  e = Tanh (a)  f = Mul (e, half)  g = Add (f, a) {BODY} }}
  >
}}
"""
_EVEN = """
rest = Mod (i, two)  is_even = Equal (rest, zero)
b = If (is_even) <
  then_branch = even () => (float[n, 4] k) { k = Neg (g) }, else_branch = odd () => (float[n, 4] l) { l = Exp (g) }
>
"""


@pytest.mark.few(2)
@pytest.mark.parametrize(
    ("width", "body", "functions"),
    [
        (4, "b = Neg (g)", 1),
        (4, _EVEN, 0),
        (24, "h = ReduceSum <keepdims = 1> (g, last)  b = Concat <axis = 1> (g, h)", 0),
    ],
    ids=["plain", "a condition within", "a size that changes"],
)
def test_iterations_of_a_known_number_take_the_place_of_their_loop_where_the_library_cannot_run_it(
    make_text: Any, assert_same_as_onnxruntime: Any, width: int, body: str, functions: int
) -> None:
    path = make_text(_KNOWN.format(WIDTH=width, BODY=body))
    model = assert_same_as_onnxruntime(path, {"x": _random(1, 4)}, {"x": _random(3, 4)})
    assert len(_direct_loops(model)) == functions
    assert not _loops_of_machine(model)
    assert model.has_direct_main


def test_a_loop_of_few_iterations_may_end_before_them_and_change_its_sizes(
    make_text: Any, assert_same_as_onnxruntime: Any
) -> None:
    path = make_text("""
model (float[n, 4] x, float limit) => (float[n, m] y)
<int64 trips = {9}, bool go = {1}, float[1] half = {0.5}, int64[1] last = {1}, int64[2] all = {0, 1}>
{
  y = Loop (trips, go, x) <
    body = iteration (int64 i, bool c, float[n, p] a) => (bool d, float[n, q] b)
    {
      e = Tanh (a)  f = Mul (e, half)  g = Add (f, a)  k = Sub (g, half)  l = Exp (k)  o = Neg (l)
      h = ReduceSum <keepdims = 1> (o, last)  b = Concat <axis = 1> (g, h)
      s = ReduceMin <keepdims = 0> (h, all)  d = Greater (s, limit)
    }
  >
}""")
    feeds = [{"x": _random(3, 4), "limit": np.array(limit, "float32")} for limit in (-8, -100, 0)]
    model = assert_same_as_onnxruntime(path, *feeds)
    assert len(_loops_of_machine(model)) == 1


# TensorFlow's loops: a counter of 32 bits is compared with the number of steps, in floating point for older opsets.
# The first product reads a row of x in each step, the second one the state.
_STEPS = """
model (float[t, n, 5] x) => (float[n, 3] last, float[t, n, 3] states)
<float[5, 3] w = {W}, float[3, 3] u = {U}, int32 zero = {{0}}, int32 one = {{1}}, int64[1] first = {{0}},
 float[3] nothing = {{0, 0, 0}}, int64[1] three = {{3}}>
{{
  shape = Shape (x)
  steps_64 = Gather (shape, first)
  steps_1 = Cast <to = 6> (steps_64)
  steps = Squeeze (steps_1)
  batch = Slice (shape, end_1, end_2)
  size = Concat <axis = 0> (batch, three)
  state = Expand (nothing, size)
  zero_f = Cast <to = 1> (zero)
  steps_f = Cast <to = 1> (steps)
  starts = Less (zero_f, steps_f)
  counter, last, same, states = Loop ({TRIPS}, starts, zero, state, w) <
    body = step (int64 i, bool c, int32 k, float[n, 3] h, float[5, 3] v)
      => (bool again, int32 l, float[n, 3] g, float[5, 3] v2, float[n, 3] r)
    {{
      l = Add (k, one)  row = Gather (x, k)  a = MatMul (row, v)  b = MatMul (h, u)  s = Add (a, b)  g = Tanh (s)
      r = Identity (g)  v2 = Identity (v)
      {CONDITION}
    }}
  >
}}
"""
_FLOAT = "l_f = Cast <to = 1> (l)  bound = Cast <to = 1> (steps)  again = Less (l_f, bound)"
_BOTH = """
bound = Cast <to = 7> (steps)  first_c = Less (i, bound)  second_c = Greater (steps, l)  again = And (first_c, second_c)
"""


def _steps(condition: str, trips: str = "") -> str:
    weights = {"W": _numbers(_random(5, 3, seed=1)), "U": _numbers(_random(3, 3, seed=2))}
    text = _STEPS.format(CONDITION=condition, TRIPS=trips, **weights)
    return text.replace("int64[1] three", "int64[1] end_1 = {1}, int64[1] end_2 = {2}, int64[1] three")


@pytest.mark.few(3)
@pytest.mark.parametrize(
    ("condition", "trips"),
    [
        (_FLOAT, ""),
        (_BOTH, ""),
        ("again = Less (l, steps)", "steps_64"),
        ("last_step = Sub (steps, one)  again = LessOrEqual (l, last_step)", ""),
        ("bound = Cast <to = 7> (steps)  m = Cast <to = 7> (l)  again = Less (m, bound)", ""),
    ],
)
def test_a_counter_says_how_often_a_loop_runs(
    make_text: Any, assert_same_as_onnxruntime: Any, condition: str, trips: str
) -> None:
    path = make_text(_steps(condition, trips))
    feeds = [{"x": _random(steps, n, 5)} for steps, n in ((1, 1), (2, 3), (45, 2))]
    model = assert_same_as_onnxruntime(path, *feeds)
    is_counted = "Sub" not in condition
    # The length of the stack is that of x, and not a size that only a run knows.
    assert (import_onnx(path).outputs[1].shape == ("t", "n", 3)) == is_counted
    assert len(_direct_loops(model)) == int(is_counted)
    assert has_direct_main(model.load().library) == is_counted


_TRUE = "again = Constant <value = bool {1}> ()"


@pytest.mark.parametrize(
    ("condition", "trips"),
    [(_FLOAT, ""), ("again = Identity (c)", "steps_64"), (_TRUE, "steps_64")],
    ids=["a counter", "passed on", "constant"],
)
def test_the_product_of_all_rows_is_computed_before_the_loop(make_text: Any, condition: str, trips: str) -> None:
    imported = import_onnx(make_text(_steps(condition, trips)))
    main, step = (
        next(str(body) for item, body in imported.mod.functions_items() if str(item.name_hint).endswith(name))
        for name in ("main", "_step")
    )
    assert len(re.findall(r"R\.matmul", main)) == 1
    assert len(re.findall(r"R\.matmul", step)) == 1


def test_a_loop_multiplies_elements_that_it_gathers(make_text: Any, assert_same_as_onnxruntime: Any) -> None:
    path = make_text(f"""
model (float[3] x) => (float[3] y)
<int64 trips = {{3}}, bool go = {{1}}, int64[3] order = {{2, 0, 1}}, float[3, 3] w = {_numbers(_random(3, 3))}>
{{
  y = Loop (trips, go, x) <
    body = iteration (int64 i, bool c, float[3] a) => (bool d, float[3] b)
    {{ d = Identity (c)  turned = Gather (x, order)  product = MatMul (turned, w)  b = Add (a, product) }}
  >
}}""")
    assert_same_as_onnxruntime(path, {"x": _random(3)})


def test_a_scan_multiplies_all_rows_before_it_begins(make_text: Any, assert_same_as_onnxruntime: Any) -> None:
    weights = {"w": _numbers(_random(5, 3, seed=1)), "u": _numbers(_random(3, 3, seed=2))}
    path = make_text(f"""
model (float[n, 3] state, float[t, n, 5] x) => (float[n, 3] last, float[t, n, 3] rows)
<float[5, 3] w = {weights["w"]}, float[3, 3] u = {weights["u"]}>
{{
  last, rows = Scan <num_scan_inputs = 1, scan_input_directions = [1], scan_output_directions = [1],
    body = iteration (float[n, 3] h, float[n, 5] row) => (float[n, 3] g, float[n, 3] r)
    {{ a = MatMul (row, w)  b = MatMul (h, u)  s = Add (a, b)  g = Tanh (s)  r = Identity (g) }}
  > (state, x)
}}""")
    feeds = [{"state": _random(n, 3), "x": _random(steps, n, 5)} for steps, n in ((1, 2), (30, 1))]
    model = assert_same_as_onnxruntime(path, *feeds)
    assert len(_direct_loops(model)) == 1
    step = next(str(body) for item, body in import_onnx(path).mod.functions_items() if "_step" in str(item.name_hint))
    assert len(re.findall(r"R\.matmul", step)) == 1


def test_what_a_loop_reads_is_computed_once(make_text: Any, assert_same_as_onnxruntime: Any) -> None:
    path = make_text("""
model (int64 trips, float[4, 6] x) => (float[6, 4] y)
<bool go = {1}>
{
  turned = Transpose <perm = [1, 0]> (x)
  y = Loop (trips, go, turned) <
    body = iteration (int64 i, bool c, float[6, 4] a) => (bool d, float[6, 4] b)
    { d = Identity (c)  b = Add (a, turned) }
  >
}""")
    assert_same_as_onnxruntime(path, {"trips": np.array(3), "x": _random(4, 6)})
    functions = {str(item.name_hint): str(body) for item, body in import_onnx(path).mod.functions_items()}
    assert [name for name, text in functions.items() if "permute_dims" in text] == ["main"]
