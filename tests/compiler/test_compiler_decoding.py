"""A step of a decoder: attention of one new token, or of a few, to all tokens before it, whose keys a cache holds."""

from collections.abc import Callable
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper

from support import scale
from support.arrays import normal
from support.builds import rule_counts
from support.machines import runnable_levels
from tvmflow.arrays import Array
from tvmflow.compiler import BuildOptions, CompiledModel, build, import_onnx, lower, workloads
from tvmflow.compiler.machine import machine
from tvmflow.compiler.schedules import schedule
from tvmflow.hardware.target import Precision, Target, resolve
from tvmflow.onnx_model.session import open_session

Check = Callable[..., CompiledModel]


def _decoder_nodes(group: int, mask: bool) -> list[onnx.NodeProto]:
    """Attention to a cache to which new keys and values are joined, as exporters write it; `group` heads share keys."""
    nodes = [helper.make_node("Transpose", ["q"], ["query"], perm=[0, 2, 1, 3])]
    for name in "kv":
        nodes += [
            helper.make_node("Transpose", [name], [f"{name}1"], perm=[0, 2, 1, 3]),
            helper.make_node("Concat", [f"past_{name}", f"{name}1"], [f"all_{name}"], axis=2),
        ]
        if group > 1:
            nodes += [
                helper.make_node("Unsqueeze", [f"all_{name}", "two"], [f"{name}2"]),
                helper.make_node("Shape", [f"all_{name}"], [f"{name}3"], start=0, end=2),
                helper.make_node("Shape", [f"all_{name}"], [f"{name}4"], start=2, end=4),
                helper.make_node("Concat", [f"{name}3", "group", f"{name}4"], [f"{name}5"], axis=0),
                helper.make_node("Expand", [f"{name}2", f"{name}5"], [f"{name}6"]),
                helper.make_node("Reshape", [f"{name}6", "heads"], [f"each_{name}"]),
            ]
        else:
            nodes.append(helper.make_node("Identity", [f"all_{name}"], [f"each_{name}"]))
    return [
        *nodes,
        helper.make_node("Transpose", ["each_k"], ["keys"], perm=[0, 1, 3, 2]),
        helper.make_node("MatMul", ["query", "keys"], ["scores"]),
        helper.make_node("Add" if mask else "Identity", ["scores", "mask"][: 1 + mask], ["masked"]),
        helper.make_node("Softmax", ["masked"], ["weights"], axis=-1),
        helper.make_node("MatMul", ["weights", "each_v"], ["mixed"]),
        helper.make_node("Transpose", ["mixed"], ["y"], perm=[0, 2, 1, 3]),
    ]


def _decoder(make: Any, heads: int, group: int, channels: int, *, is_free: bool = True, mask: bool = True) -> Path:
    """A file of such attention, of free sizes or for one new token and 36 others."""
    batch, new, past, total = ("n", "new", "past", "total") if is_free else (2, 1, 36, 37)
    cache, own = [batch, heads // group, past, channels], [batch, new, heads // group, channels]
    inputs: list[tuple[str, list[Any]]] = [("q", [batch, new, heads, channels])]
    inputs += [(name, own) for name in "kv"] + [(f"past_{name}", cache) for name in "kv"]
    inputs += [("mask", [batch, 1, new, total])] if mask else []
    sizes = {"two": np.array([2]), "group": np.array([group]), "heads": np.array([0, heads, -1, channels])}
    return Path(
        make(_decoder_nodes(group, mask), inputs, ["y", "all_k", "all_v"], sizes if group > 1 else {}, opset=17)
    )


def _feed(
    batch: int, new: int, past: int, heads: int, group: int, channels: int, mask: bool = True
) -> dict[str, Array]:
    own, cache = (batch, new, heads // group, channels), (batch, heads // group, past, channels)
    feed = {"q": normal(batch, new, heads, channels, seed=1)}
    feed |= {name: normal(*own, seed=seed) for seed, name in enumerate("kv", 2)}
    feed |= {f"past_{name}": normal(*cache, seed=seed) for seed, name in enumerate("kv", 4)}
    hidden = np.random.default_rng(6).random((batch, 1, new, past + new)) < 0.3
    return feed | ({"mask": np.where(hidden, -np.inf, 0).astype("float32")} if mask else {})


# Attention without heads to transpose and without a cache, of operands `[batch, heads, positions, channels]`.
_PLAIN = [
    helper.make_node("Transpose", ["k"], ["keys"], perm=[0, 1, 3, 2]),
    helper.make_node("MatMul", ["q", "keys"], ["scores"]),
    helper.make_node("Softmax", ["scores"], ["weights"], axis=-1),
    helper.make_node("MatMul", ["weights", "v"], ["y"]),
]
_HEADS = [(4, 1, 24), (6, 3, 32), (8, 2, 64)]


@pytest.mark.few(2)
@pytest.mark.parametrize(("heads", "group", "channels"), _HEADS + scale.choose(normal=[], long=[(5, 5, 80), (2, 1, 7)]))
@pytest.mark.parametrize("mask", [True, False])
def test_attention_to_a_cache_of_free_size_equals_onnx_runtime(
    heads: int, group: int, channels: int, mask: bool, make_model: Any, assert_same_as_onnxruntime: Check
) -> None:
    sizes = [(2, 1, 36), (1, 1, 1), (1, 7, 12), (3, 2, 16)]
    feeds = [_feed(*size, heads, group, channels, mask) for size in sizes]
    model = assert_same_as_onnxruntime(_decoder(make_model, heads, group, channels, mask=mask), *feeds)
    assert rule_counts(model)["attention"] == 1
    # Neither are heads repeated, nor is a cache brought into another order.
    names = [name for name, _ in model.schedules]
    assert not [name for name in names if any(word in name for word in ("broadcast", "softmax", "matmul"))]
    assert sum("transpose" in name for name in names) <= 1  # of the new keys and values, and of the result


def test_heads_whose_products_share_one_head_of_keys_copy_nothing(
    make_model: Any, assert_same_as_onnxruntime: Check
) -> None:
    inputs = [("q", ["n", 6, "new", 32]), ("k", ["n", 1, "all", 32]), ("v", ["n", 1, "all", 32])]
    feeds = [
        {
            "q": normal(batch, 6, new, 32),
            **{name: normal(batch, 1, 19, 32, seed=place) for place, name in enumerate("kv")},
        }
        for batch, new in ((2, 1), (1, 5))
    ]
    model = assert_same_as_onnxruntime(make_model(_PLAIN, inputs, ["y"]), *feeds)
    assert rule_counts(model)["attention"] == 1
    assert not [name for name, _ in model.schedules if "broadcast" in name]


@pytest.mark.few(1)
@pytest.mark.parametrize(("heads", "group", "channels"), _HEADS)
def test_attention_of_one_known_query_packs_no_keys(
    heads: int, group: int, channels: int, make_model: Any, assert_same_as_onnxruntime: Check
) -> None:
    path = _decoder(make_model, heads, group, channels, is_free=False)
    model = assert_same_as_onnxruntime(path, _feed(2, 1, 36, heads, group, channels))
    assert rule_counts(model)["attention"] == 1
    assert "single" in model.ir_text


def _scheduled_attention(new: int, precision: Precision, make: Any, target: Target) -> str:
    """The schedule of attention of a number of new queries to 37 keys."""
    inputs = [("q", [1, 2, new, 32]), ("k", [1, 2, 37, 32]), ("v", [1, 2, 37, 32])]
    lowered = lower(import_onnx(make(_PLAIN, inputs, ["y"])), target, BuildOptions(precision=precision))
    (func,) = (item.func for item in workloads(lowered) if "attention" in item.name)
    scheduled, rule = schedule(func, machine(target))
    assert rule == "attention"
    return str(scheduled.script())


@pytest.mark.few(1)
@pytest.mark.parametrize(("new", "is_used"), [(1, "T.prefetch"), (20, "tvmflow_transpose")])
def test_keys_of_one_query_are_fetched_ahead_and_those_of_many_packed_by_shuffles(
    new: int, is_used: str, make_model: Any, target: Target
) -> None:
    script = _scheduled_attention(new, "fp32", make_model, target)
    assert [name for name in ("T.prefetch", "tvmflow_transpose") if name in script] == [is_used]


def test_pairs_of_keys_in_bfloat16_are_packed_by_shuffles(make_model: Any) -> None:
    assert "tvmflow_transpose_16x16_32" in _scheduled_attention(20, "bf16", make_model, resolve("x86-64-v4-bf16"))


@pytest.mark.long
@pytest.mark.few(2)
@pytest.mark.parametrize("name", runnable_levels()[:-1])
def test_other_levels_decode(name: str, make_model: Any, run_built: Any) -> None:
    path = _decoder(make_model, 6, 3, 32)
    feeds = [_feed(2, new, 20, 6, 3, 32) for new in (1, 4)]
    imported = import_onnx(path)
    model, session = build(imported, resolve(name)), open_session(path, threads=1)
    for feed in feeds:
        actual = run_built(model, *(feed[item.name] for item in imported.inputs))
        for ours, theirs in zip(actual, session.run(None, feed), strict=True):
            np.testing.assert_allclose(ours, theirs, atol=1e-5)


def test_attention_of_a_cache_in_bfloat16_rounds_what_it_multiplies(make_model: Any) -> None:
    target = resolve("x86-64-v4-bf16")
    imported = import_onnx(_decoder(make_model, 4, 2, 32))
    lowered = lower(imported, target, BuildOptions(precision="bf16"))
    # The cache is not rounded by a function of its own: a single query reads it as it is.
    assert not [name.name_hint for name in lowered.get_global_vars() if "round" in name.name_hint]
    assert "uint16" in lowered.script()


def test_a_query_has_the_result_that_it_has_among_others(make_model: Any, run_built: Any) -> None:
    imported = import_onnx(_decoder(make_model, 4, 2, 32, mask=False))
    model = build(imported, resolve("native"))
    feed = _feed(2, 3, 30, 4, 2, 32, mask=False)
    together = run_built(model, *(feed[item.name] for item in imported.inputs))[0]
    # The keys of the first two tokens are those of the cache for the last one.
    joined = {
        f"past_{name}": np.concatenate([feed[f"past_{name}"], feed[name].transpose(0, 2, 1, 3)], 2) for name in "kv"
    }
    alone = {"q": feed["q"][:, 2:], **{name: feed[name][:, 2:] for name in "kv"}}
    alone |= {name: cache[:, :, :-1] for name, cache in joined.items()}
    result = run_built(model, *(np.ascontiguousarray(alone[item.name]) for item in imported.inputs))[0]
    np.testing.assert_allclose(result, together[:, 2:], rtol=1e-5, atol=1e-5)


_ATTENTION = ["q", "k", "v", "mask", "past_k", "past_v"]


@pytest.mark.few(2)
@pytest.mark.parametrize(("is_causal", "mask"), [(1, ""), (0, "float"), (1, "bool"), (0, "")])
def test_the_operator_attention_with_a_cache_equals_onnx_runtime(
    is_causal: int, mask: str, make_model: Any, assert_same_as_onnxruntime: Check
) -> None:
    operands = [name if mask or name != "mask" else "" for name in _ATTENTION]
    node = helper.make_node("Attention", operands, ["y", "all_k", "all_v"], is_causal=is_causal)
    heads, shared, channels = 6, 2, 16
    inputs: list[Any] = [("q", ["n", heads, "new", channels])]
    inputs += [(name, ["n", shared, "new", channels]) for name in "kv"]
    inputs += [(f"past_{name}", ["n", shared, "past", channels]) for name in "kv"]
    kinds = {"float": TensorProto.FLOAT, "bool": TensorProto.BOOL}
    inputs += [("mask", ["new", "total"], kinds[mask])] if mask else []
    feeds = []
    for batch, new, past in ((2, 1, 20), (1, 5, 3)):
        feed = {"q": normal(batch, heads, new, channels, seed=1)}
        feed |= {name: normal(batch, shared, new, channels, seed=seed) for seed, name in enumerate("kv", 2)}
        feed |= {f"past_{name}": normal(batch, shared, past, channels, seed=seed) for seed, name in enumerate("kv", 4)}
        seen = np.random.default_rng(7).random((new, new + past)) < 0.7
        seen[:, 0] = True
        values = {"float": normal(new, new + past, seed=8), "bool": seen}
        feeds.append({**feed, **({"mask": values[mask]} if mask else {})})
    path = make_model([node], inputs, ["y", "all_k", "all_v"], opset=23)
    model = assert_same_as_onnxruntime(path, *feeds)
    assert rule_counts(model)["attention"] == 1


def test_a_query_of_the_operator_attention_without_keys_has_zeros(make_model: Any, run_built: Any) -> None:
    node = helper.make_node("Attention", ["q", "k", "v", "mask"], ["y"])
    inputs = [(name, [1, 2, 5, 16]) for name in "qkv"] + [("mask", [5, 5], TensorProto.BOOL)]
    model = build(import_onnx(make_model([node], inputs, ["y"], opset=23)), resolve("native"))
    feed = [normal(1, 2, 5, 16, seed=seed) for seed in range(3)]
    seen = np.ones((5, 5), bool)
    seen[[0, 3]] = False
    feed[0][0, 1, 2, 4] = np.nan
    (result,) = run_built(model, *feed, seen)
    assert rule_counts(model)["attention"] == 1
    assert not result[0, :, [0, 3]].any()
    # A number that is none stays visible.
    assert [np.isnan(result[0, head, row]).all() for head, row in product(range(2), (1, 2))] == [
        False,
        False,
        False,
        True,
    ]


@pytest.mark.parametrize("keys", [37, "keys"])
def test_a_single_row_is_multiplied_by_a_transpose_without_transposing(
    keys: int | str, make_model: Any, assert_same_as_onnxruntime: Any
) -> None:
    """The scores of one query, which a network returns, are no attention that is composed."""
    nodes = [
        helper.make_node("Transpose", ["k"], ["t"], perm=[0, 1, 3, 2]),
        helper.make_node("MatMul", ["q", "t"], ["y"]),
    ]
    path = make_model(nodes, [("q", [2, 3, 1, 64]), ("k", [2, 1, keys, 64])], ["y"])
    feeds = [{"q": normal(2, 3, 1, 64), "k": normal(2, 1, size, 64)} for size in ((37,) if keys == 37 else (1, 37))]
    rules = rule_counts(assert_same_as_onnxruntime(path, *feeds))
    assert (rules["reduction"], rules["rows"]) == (1, 0)


@pytest.mark.parametrize(("batch", "rows", "channels"), [(2, 2, 64), (3, 2, 70), ("b", 1, "c"), ("b", 3, "c")], ids=str)
def test_a_few_rows_are_multiplied_by_a_transpose_without_transposing(
    batch: int | str, rows: int, channels: int | str, make_model: Any, assert_same_as_onnxruntime: Any
) -> None:
    nodes = [
        helper.make_node("Transpose", ["k"], ["t"], perm=[0, 2, 1]),
        helper.make_node("MatMul", ["q", "t"], ["y"]),
    ]
    path = make_model(nodes, [("q", [batch, rows, channels]), ("k", [batch, "keys", channels])], ["y"])
    numbers = (batch, channels) if batch != "b" else (3, 70)
    feeds = [
        {"q": normal(numbers[0], rows, numbers[1]), "k": normal(numbers[0], size, numbers[1])} for size in (1, 2, 301)
    ]
    rules = rule_counts(assert_same_as_onnxruntime(path, *feeds))
    assert (rules["free_reduction" if channels == "c" else "reduction"], rules["rows"]) == (1, 0)


@pytest.mark.parametrize(
    ("order", "batch", "rows", "keys", "channels"),
    [
        ([0, 2, 1], 3, 4, 33, 64),
        ([0, 1, 3, 2], 3, "rows", "keys", 24),
        ([0, 2, 3, 1], 3, "rows", "keys", 20),
        ([0, 2, 3, 1], "b", "rows", 40, 7),
        ([0, 1, 3, 2], "b", "rows", "keys", "c"),
    ],
    ids=["known", "heads", "transposed heads", "narrow", "free"],
)
def test_products_pack_the_columns_of_a_transpose_that_they_multiply(
    order: list[int],
    batch: int | str,
    rows: int | str,
    keys: int | str,
    channels: int | str,
    make_model: Any,
    assert_same_as_onnxruntime: Any,
) -> None:
    nodes = [
        helper.make_node("Transpose", ["k"], ["t"], perm=order),
        helper.make_node("MatMul", ["q", "t"], ["product"]),
        helper.make_node("Relu", ["product"], ["y"]),
    ]
    heads = [] if len(order) == 3 else [2]

    def shapes(batch: Any, rows: Any, keys: Any, channels: Any) -> list[tuple[str, list[Any]]]:
        transposed = [batch, *heads, channels, keys]
        key = [transposed[order.index(place)] for place in range(len(order))]
        return [("q", [batch, *heads, rows, channels]), ("k", key)]

    path = make_model(nodes, shapes(batch, rows, keys, channels), ["y"])
    numbers = {"b": (3, 1, 2), "rows": (1, 3, 21), "keys": (50, 1, 32), "c": (3, 70, 32)}
    feeds = []
    for place in range(3):
        own = (numbers[size][place] if isinstance(size, str) else size for size in (batch, rows, keys, channels))
        feeds.append({name: normal(*shape) for name, shape in shapes(*own)})
    assert rule_counts(assert_same_as_onnxruntime(path, *feeds)) == {"rows": 1}


@pytest.mark.parametrize(
    ("row", "matrix", "is_summed"),
    [
        ([1, 64], [64, 72], True),
        ([2, 3, 1, 64], [3, 64, 70], False),
        ([1, 3, 1, 64], [3, 64, 70], True),
        ([3, 1, 64], [3, 64, 128], True),
        (["b", 1, "k"], ["b", "k", "n"], True),
    ],
    ids=["one", "shared", "batch", "vectors", "free"],
)
def test_a_computed_matrix_that_multiplies_a_single_row_is_read_once(
    row: list[Any], matrix: list[Any], is_summed: bool, make_model: Any, assert_same_as_onnxruntime: Any
) -> None:
    node = helper.make_node("MatMul", ["x", "m"], ["y"])
    path = make_model([node], [("x", row), ("m", matrix)], ["y"])
    sizes = {"b": 3, "k": 150, "n": 70}
    feed = {name: normal(*(sizes.get(size, size) for size in shape)) for name, shape in (("x", row), ("m", matrix))}
    rules = rule_counts(assert_same_as_onnxruntime(path, feed))
    assert (rules["reduction"], rules["rows"]) == ((1, 0) if is_summed else (0, 1))


@pytest.mark.parametrize(("rows", "functions"), [(2, 1), ("n", 1), (200, 2)], ids=str)
def test_a_computed_matrix_is_packed_where_many_rows_read_it(
    rows: int | str, functions: int, make_model: Any, assert_same_as_onnxruntime: Any
) -> None:
    node = helper.make_node("MatMul", ["x", "m"], ["y"])
    path = make_model([node], [("x", [rows, 64]), ("m", [64, 64])], ["y"])
    feeds = [{"x": normal(size, 64), "m": normal(64, 64)} for size in ((1, 9, 40) if rows == "n" else (rows,))]
    assert rule_counts(assert_same_as_onnxruntime(path, *feeds)).total() == functions
