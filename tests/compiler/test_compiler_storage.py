"""The memory of intermediate results, which those of free sizes share."""

import re
from collections.abc import Callable
from functools import partial
from itertools import combinations
from typing import Any

import numpy as np
import pytest
import tvm
from onnx import helper
from tvm import relax, te, tirx

from support.arrays import normal
from tvmflow.compiler import CompiledModel
from tvmflow.compiler.inspection import Inspection
from tvmflow.compiler.passes.storage import Life, ShareMemory, largest, share

Check = Callable[..., CompiledModel]


@pytest.mark.parametrize("seed", range(5))
def test_tensors_of_one_block_never_live_together(seed: int) -> None:
    random = np.random.default_rng(seed)
    starts, lengths, sizes = (random.integers(0, most, 60) for most in (40, 12, 1000))
    lives = [Life(int(s), int(a), int(a + n)) for s, a, n in zip(sizes, starts, lengths, strict=True)]
    blocks = share(lives)
    assert sorted(member for block in blocks for member in block.members) == list(range(60))
    for block in blocks:
        for one, other in combinations([lives[member] for member in block.members], 2):
            assert one.last < other.first or other.last < one.first
    # Equally large tensors need as many blocks as live at the same step.
    equal = [Life(64, life.first, life.last) for life in lives]
    assert len(share(equal)) == max(sum(a.first <= step <= a.last for a in lives) for step in range(52))


def test_a_small_tensor_takes_the_smallest_block_that_holds_it() -> None:
    lives = [Life(1000, 0, 1), Life(100, 0, 1), Life(90, 2, 3)]
    assert [block.members for block in share(lives)] == [[0], [1, 2]]


def test_of_equal_blocks_the_one_used_last_is_taken() -> None:
    lives = [Life(8, 0, 1), Life(8, 1, 2), Life(8, 3, 4)]
    assert [block.members for block in share(lives)] == [[0], [1, 2]]


def test_products_of_the_same_sizes_are_compared_and_others_are_when_the_model_runs() -> None:
    n, h = tirx.Var("n", "int64"), tirx.Var("h", "int64")
    assert str(largest([n * h * 4, 12 * (h * n), n * 100 * h])) == str(n * h * 100)
    assert isinstance(largest([n * 64, n * h]), tirx.Max)
    assert largest([5, 7]) == 7
    assert str(largest([512, n * 4, 700])) == str(tirx.max(700, n * 4))


def _repeat(data: te.Tensor, *, size: Any) -> te.Tensor:
    """The elements of `data` plus one, over and over, up to this size."""
    return te.compute((size,), lambda i: data[i % data.shape[0]] + 1)


def _chain(*widths: Callable[[Any], Any]) -> tvm.IRModule:
    """A function whose tensors have the sizes of these functions of the size `n` of its argument, one after the other.

    Each tensor reads the one before it.
    """
    n = tirx.Var("n", "int64")
    x = relax.Var("x", relax.TensorType([n], "float32"))
    builder = relax.BlockBuilder()
    with builder.function("main", [x]):
        with builder.dataflow():
            value: Any = x
            for place, width in enumerate(widths):
                value = builder.emit_te(partial(_repeat, size=width(n)), value, primfunc_name_hint=f"step{place}")
            result = builder.emit_output(value)
        builder.emit_func_output(result)
    return builder.get()


def _planned(mod: tvm.IRModule) -> tvm.IRModule:
    """The module with TVM's plan of memory, then with ours."""
    transform = relax.transform
    passes = [transform.ToNonDataflow(), transform.RemovePurityChecking(), transform.CallTIRRewrite()]
    plan = [transform.StaticPlanBlockMemory(), transform.LowerAllocTensor(), ShareMemory()]
    return tvm.transform.Sequential([*passes, *plan])(mod)


def test_tensors_of_different_free_sizes_share_memory() -> None:
    mod = _planned(_chain(*(lambda n, k=k: n * k + k // 9 for k in range(1, 12))))
    text = mod.script()
    # Two in turn, and the result of the function, which has memory of its own.
    assert text.count("alloc_storage") == 3
    finished = tvm.transform.Sequential([ShareMemory(), relax.transform.KillAfterLastUse()])(mod)
    machine = relax.VirtualMachine(tvm.compile(finished, target="llvm"), tvm.cpu())
    x = np.arange(7, dtype="float32")
    expected = x
    for k in range(1, 12):
        expected = np.resize(expected, 7 * k + k // 9) + 1
    np.testing.assert_array_equal(machine["main"](tvm.runtime.tensor(x)).numpy(), expected)


@pytest.mark.long
def test_the_parts_of_a_network_over_images_share_memory(make_model: Any, assert_same_as_onnxruntime: Check) -> None:
    nodes, weights, last = [], {}, "x"
    for level, channels in enumerate((16, 24, 40)):
        before = 3 if level == 0 else weights[f"w{level - 1}"].shape[0]
        weights[f"w{level}"] = normal(channels, before, 3, 3)
        nodes += [
            helper.make_node("Conv", [last, f"w{level}"], [f"a{level}"], pads=[1] * 4),
            helper.make_node("MaxPool", [f"a{level}"], [f"b{level}"], kernel_shape=[2, 2], strides=[2, 2]),
            helper.make_node("Softmax", [f"b{level}"], [f"c{level}"], axis=1),
        ]
        last = f"c{level}"
    path = make_model(nodes, [("x", ["batch", 3, "high", "wide"])], [last], weights)
    inspection = Inspection(before=("ShareMemory",), after=("ShareMemory",))
    feeds = [{"x": normal(*shape)} for shape in ((1, 3, 16, 24), (3, 3, 40, 8))]
    built = assert_same_as_onnxruntime(path, *feeds, inspect=inspection)
    before, after = (re.findall("alloc_storage.*max|alloc_storage", item.text) for item in built.inspected.passes[:2])
    assert len(after) < len(before) - 3


def test_a_size_that_a_run_finds_out_keeps_memory_of_its_own(
    make_model: Any, assert_same_as_onnxruntime: Check
) -> None:
    nodes = [
        helper.make_node("Softmax", ["x"], ["a"], axis=0),
        helper.make_node("NonZero", ["a"], ["b"]),
        helper.make_node("Cast", ["b"], ["c"], to=1),
        helper.make_node("Softmax", ["c"], ["d"], axis=1),
        helper.make_node("CumSum", ["d", "axis"], ["y"]),
    ]
    path = make_model(nodes, [("x", ["n"])], ["y"], {"axis": np.array(1)})
    assert_same_as_onnxruntime(path, *({"x": normal(size)} for size in (5, 12)))
