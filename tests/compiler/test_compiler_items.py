"""One item of a batch never changes another's answer: a server joins the inputs of several clients into one batch."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from onnx import helper

from support.arrays import normal
from support.builds import rule_counts
from support.items import POISON, Parts, images, tokens
from support.models import save_model
from tvmflow.compiler import BuildOptions, CompiledModel, build, import_onnx, lower
from tvmflow.compiler.annotations import AMX
from tvmflow.compiler.choices import Choices
from tvmflow.hardware.target import Precision, Target

_ITEMS = 4


def _features() -> Parts:
    """A dense layer each of whose rows is an item."""
    return [helper.make_node("MatMul", ["x", "w"], ["y"])], (256,), {"w": normal(256, 128) / 16}


def _integers() -> Parts:
    """A convolution and a dense layer with quantised operands."""
    nodes = [
        helper.make_node("QuantizeLinear", ["x", "s", "z"], ["a"]),
        helper.make_node("DequantizeLinear", ["a", "s", "z"], ["b"]),
        helper.make_node("DequantizeLinear", ["w", "s", "w_zero"], ["c"]),
        helper.make_node("Conv", ["b", "c"], ["d"], pads=[1] * 4),
        helper.make_node("QuantizeLinear", ["d", "one", "z"], ["e"]),
        helper.make_node("DequantizeLinear", ["e", "one", "z"], ["f"]),
        helper.make_node("Flatten", ["f"], ["g"]),
        helper.make_node("DequantizeLinear", ["v", "s", "w_zero"], ["h"]),
        helper.make_node("MatMul", ["g", "h"], ["y"]),
    ]
    rng = np.random.default_rng(0)
    weights = {
        "w": rng.integers(-127, 128, (32, 16, 3, 3)).astype("int8"),
        "v": rng.integers(-127, 128, (32 * 25, 24)).astype("int8"),
        "s": np.array(0.02, "float32"),
        "one": np.array(1, "float32"),
        "z": np.array(121, "uint8"),
        "w_zero": np.array(0, "int8"),
    }
    return nodes, (16, 5, 5), weights


def _import(parts: Parts, batch: int | str, folder: Path) -> Any:
    nodes, shape, weights = parts
    return import_onnx(save_model(folder / "model.onnx", nodes, [("x", [batch, *shape])], ["y"], weights, opset=20))


def _assert_items_apart(model: CompiledModel, function: str, shape: Sequence[int], items: int = _ITEMS) -> None:
    """Run a batch with each kind of poison in one of its items, and compare the others bit by bit."""
    loaded = model.load()
    x = normal(items, *shape)
    (expected,) = loaded.run(x, function=function)
    for place, poison in enumerate(POISON):
        poisoned = x.copy()
        poisoned[place] = poison
        (actual,) = loaded.run(poisoned, function=function)
        other_items = [item for item in range(items) if item != place]
        changed = [item for item in other_items if actual[item].tobytes() != expected[item].tobytes()]
        assert not changed, f"{poison} in item {place} changes items {changed} of {function}"


MODELS: dict[str, Callable[[], Parts]] = {"images": images, "tokens": tokens}


@pytest.mark.few(1)
@pytest.mark.parametrize("model", MODELS)
def test_items_of_any_batch_and_of_a_variant_are_apart(model: str, tmp_path: Path, target: Target) -> None:
    parts = MODELS[model]()
    compiled_model = build(_import(parts, "batch", tmp_path), target, BuildOptions(variants=({"batch": _ITEMS},)))
    for function in ("main", f"main_batch{_ITEMS}"):
        _assert_items_apart(compiled_model, function, parts[1])


@pytest.mark.long  # The variant above has a fixed batch.
@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("seed", range(12))
def test_items_of_a_fixed_batch_are_apart_whatever_is_decided(
    seed: int, model: str, tmp_path: Path, target: Target
) -> None:
    parts, choices = MODELS[model](), Choices()
    imported, rng = _import(parts, _ITEMS, tmp_path), np.random.default_rng(seed)
    usual = build(imported, target, choices=choices)
    overrides = {site.key: site.options[int(rng.integers(len(site.options)))] for site in choices.sites.values()}
    for compiled_model in (usual, *([build(imported, target, choices=Choices(overrides))] if seed else [])):
        _assert_items_apart(compiled_model, "main", parts[1])


@pytest.mark.parametrize("items", [56, 128])
def test_each_row_of_a_dense_layer_is_an_item(items: int, tmp_path: Path, target: Target) -> None:
    parts = _features()
    model = build(_import(parts, items, tmp_path), target)
    assert rule_counts(model) == {"rows": 1}
    _assert_items_apart(model, "main", parts[1], items)


@pytest.mark.parametrize(
    ("precision", "parts"), [("bf16", images), ("bf16", tokens), ("int8", _integers)], ids=["bf16", "tokens", "int8"]
)
def test_items_are_apart_in_other_precisions(
    precision: Precision, parts: Callable[[], Parts], tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    target: Target = request.getfixturevalue(precision)
    _assert_apart_in(precision, parts(), target, tmp_path)


@pytest.mark.usefixtures("emulated_amx", "cheap_tiles")
@pytest.mark.parametrize(
    ("precision", "parts"), [("bf16", images), ("bf16", tokens), ("int8", _integers)], ids=["bf16", "tokens", "int8"]
)
def test_items_are_apart_where_amx_computes(
    precision: Precision,
    parts: Callable[[], Parts],
    tmp_path: Path,
    amx_target: Target,
) -> None:
    assert AMX in _assert_apart_in(precision, parts(), amx_target, tmp_path).ir_text


def _assert_apart_in(precision: Precision, model: Parts, target: Target, tmp_path: Path) -> CompiledModel:
    """Build a model in a reduced precision, with all its blocks, and assert that its items are apart."""
    imported, options, choices = _import(model, _ITEMS, tmp_path), BuildOptions(precision=precision), Choices()
    lower(imported, target, options, choices)
    whole = {site.key: "whole" for site in choices.sites.values() if site.kind == "block"}
    compiled_model = build(imported, target, options, choices=Choices(whole))
    assert rule_counts(compiled_model).keys() & {"dot_conv2d", "dot_rows", "dot_winograd"}
    assert rule_counts(compiled_model)["block"] == len(whole)
    _assert_items_apart(compiled_model, "main", model[1])
    return compiled_model
