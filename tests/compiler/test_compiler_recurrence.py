"""LSTM, GRU and RNN: every form beside ONNX Runtime, and on protected pages."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest
from onnx import TensorProto, helper
from tvm import tirx

from support import builds, scale
from support.arrays import normal
from support.guarded import assert_within_buffers
from support.machines import AVX2, AVX512, require_level, runnable_levels
from support.models import save_model
from tvmflow.arrays import Array
from tvmflow.compiler import CompiledModel, build, cost, import_onnx, lower
from tvmflow.compiler.machine import Machine, machine
from tvmflow.compiler.operators.cell_tiles import tiles
from tvmflow.compiler.operators.cells import ACTIVATIONS, Cell
from tvmflow.compiler.operators.recurrence import Recurrence
from tvmflow.compiler.schedules import complete
from tvmflow.errors import BuildError, UnsupportedOperatorError
from tvmflow.hardware.target import Target, resolve

Check = Callable[..., CompiledModel]
Case = tuple[tuple[Any, ...], dict[str, Array]]

_GATES = {"LSTM": 4, "GRU": 3, "RNN": 1}


def _recurrent(operator: str, units: int, *present: str, steps: int = 4, batch: int = 1, **attributes: Any) -> Case:
    """A model of one recurrent operator, and inputs for it.

    `present` names optional operands: `bias`, `lengths`, `h`, `c`, `peepholes`; with `free` steps and batch are
    symbolic.
    """
    gates, directions = _GATES[operator], 1 + (attributes.get("direction") == "bidirectional")
    dims: list[Any] = ["steps", "batch"] if "free" in present else [steps, batch]
    inputs: list[tuple[Any, ...]] = [("x", [*dims, 3])]
    weights = {
        "w": normal(directions, gates * units, 3, seed=1) / 2,
        "r": normal(directions, gates * units, units, seed=2) / np.float32(np.sqrt(units)),
    }
    feeds = {"x": normal(steps, batch, 3)}
    if "bias" in present:
        weights["bias"] = normal(directions, 2 * gates * units, seed=3)
    if "peepholes" in present:
        weights["peepholes"] = normal(directions, 3 * units, seed=4)
    if "lengths" in present:
        inputs.append(("lengths", dims[1:], TensorProto.INT32))
        # With an initial state, no sequence has all steps.
        longest = steps - ("h" in present)
        feeds["lengths"] = np.random.default_rng(5).integers(1, longest + 1, batch).astype("int32")
    for name in ("h", "c"):
        if name in present:
            inputs.append((name, [directions, *dims[1:], units]))
            feeds[name] = normal(directions, batch, units, seed=ord(name))
    names = ["x", "w", "r", *(name if name in present else "" for name in ("bias", "lengths", "h", "c", "peepholes"))]
    outputs = ["y", "last_h", *["last_c"] * (operator == "LSTM")]
    node = helper.make_node(operator, names[: 8 if operator == "LSTM" else 6], outputs, hidden_size=units, **attributes)
    return ([node], inputs, outputs, weights), feeds


CASES = {
    "LSTM": [
        _recurrent("LSTM", 20, "free", "bias", "lengths", "h", "c", "peepholes", batch=5, direction="bidirectional"),
        _recurrent("LSTM", 20, "bias", "lengths", "h", "c", "peepholes", batch=5, direction="bidirectional"),
        _recurrent("LSTM", 40, "free", "bias", "lengths", "h", "c", batch=3, steps=6, direction="reverse"),
        _recurrent("LSTM", 16),
        _recurrent("LSTM", 5, "bias", "peepholes", batch=4, direction="reverse", clip=0.3, input_forget=1),
    ],
    "GRU": [
        _recurrent("GRU", 21, "free", "bias", "lengths", "h", batch=5, direction="bidirectional", clip=0.5),
        _recurrent("GRU", 24, "free", "lengths", "h", batch=2, direction="reverse", linear_before_reset=1, clip=0.7),
        _recurrent("GRU", 16, "bias"),
        _recurrent("GRU", 21, "bias", "h", batch=7, direction="bidirectional", linear_before_reset=1),
    ],
    "RNN": [
        _recurrent("RNN", 20, "free", "bias", "lengths", "h", batch=9, direction="bidirectional"),
        _recurrent("RNN", 12, "free", "bias", batch=2, direction="reverse", activations=["Relu"], clip=0.8),
        _recurrent("RNN", 3),
        _recurrent("RNN", 72, "bias", "lengths", "h", batch=9, direction="bidirectional"),
    ],
}


@pytest.mark.few(2)
@pytest.mark.parametrize("operator", scale.choose(normal=["LSTM", "GRU"], long=list(CASES)))
def test_recurrent_networks_equal_onnx_runtime(operator: str, assert_all_same: Check) -> None:
    # In a normal run the LSTM has both directions, and the GRU is reversed and resets its state after a product.
    cases = scale.choose(normal=[CASES[operator][1 if operator == "GRU" else 0]], long=CASES[operator])
    model = assert_all_same(cases)
    assert builds.rule_counts(model)["recurrence"] == len(cases)


def test_every_activation_equals_onnx_runtime(assert_all_same: Check) -> None:
    names = list(ACTIVATIONS)
    pairs = list(zip(names, [*names[1:], names[0]], strict=True))[::2]
    assert {name for pair in pairs for name in pair} == set(names)
    cases = []
    for pair in pairs:
        counts = [ACTIVATIONS[name].parameters for name in pair]
        parameters = {
            f"activation_{name}": [0.3 + 0.2 * place for place in range(sum(count > least for count in counts))]
            for least, name in enumerate(("alpha", "beta"))
        }
        parameters = {name: values for name, values in parameters.items() if values}
        cases.append(
            _recurrent("RNN", 8, "bias", steps=2, direction="bidirectional", activations=list(pair), **parameters)
        )
    cases.append(_recurrent("LSTM", 8, "bias", steps=2, activations=["HardSigmoid", "Softsign", "Relu"]))
    assert_all_same(cases)


def test_cores_that_share_the_units_of_each_step_equal_onnx_runtime(assert_all_same: Check) -> None:
    cases = [_recurrent("GRU", 250, "bias", "lengths", steps=3)]
    if scale.is_long():
        arguments, feeds = _recurrent("LSTM", 200, "free", "bias", steps=3, batch=3)
        more = _recurrent("LSTM", 200, "free", "bias", steps=5, batch=1)[1]
        cases += [_recurrent("LSTM", 200, "bias", "h", "c", steps=3), (arguments, feeds, more)]
    assert_all_same(cases)


def test_batches_of_more_sequences_than_a_tile_has_rows_equal_onnx_runtime(assert_all_same: Check) -> None:
    # The weights of 150 units are read in parts, and the last group of sequences overlaps with the one before it.
    cases: list[Case] = [_recurrent("LSTM", 150, "bias", "h", steps=3, batch=16)]
    if scale.is_long():
        present = ["free", "bias", "lengths", "h", "peepholes"]
        (arguments, feeds), *more = (_recurrent("LSTM", 150, *present, steps=3, batch=count) for count in (13, 1, 2, 7))
        cases += [_recurrent("GRU", 150, "bias", steps=3, batch=11, direction="bidirectional")]
        cases += [(arguments, feeds, *(other for _, other in more))]
    assert_all_same(cases)


@pytest.mark.long
def test_operands_of_free_sizes_have_those_of_the_matrices(assert_all_same: Check) -> None:
    cases: list[Case] = []
    for operator in ("LSTM", "GRU"):
        (nodes, _, outputs, weights), feeds = _recurrent(operator, 9, "bias", "h", "free", steps=3, batch=3)
        # One symbol for steps and batch, and symbols of their own in the bias and the state.
        free = [("x", ["n", "n", "inputs"]), ("bias", [1, "columns"]), ("h", [1, "m", "units"])]
        feeds |= {"bias": weights.pop("bias")}
        cases.append(((nodes, free, outputs, weights), {name: feeds[name] for name, _ in free}))
    assert_all_same(cases)


@pytest.mark.long
def test_sequences_before_steps_equal_those_after(tmp_path: Path, target: Target) -> None:
    for place, case in enumerate(
        [
            _recurrent("LSTM", 9, "bias", "h", "c", batch=2, direction="bidirectional"),
            _recurrent("GRU", 9, "bias", "h", batch=2, direction="reverse"),
        ]
    ):
        (nodes, inputs, outputs, weights), feeds = case
        steps_first = save_model(tmp_path / f"steps{place}.onnx", nodes, inputs, outputs, weights)
        expected = onnxruntime.InferenceSession(steps_first, providers=["CPUExecutionProvider"]).run(None, feeds)
        nodes[0].attribute.append(helper.make_attribute("layout", 1))
        swapped = [(name, [shape[1], shape[0], shape[2]]) for name, shape, *_ in inputs]
        path = save_model(tmp_path / f"batch{place}.onnx", nodes, swapped, outputs, weights)
        arrays = [np.ascontiguousarray(array.swapaxes(0, 1)) for array in feeds.values()]
        actual = builds.run_in_memory(build(import_onnx(path), target), [arrays])[0]
        orders = [(2, 0, 1, 3), (1, 0, 2), (1, 0, 2)]
        for ours, theirs, order in zip(actual, expected, orders, strict=False):
            np.testing.assert_allclose(ours, theirs.transpose(order), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    ("attributes", "form"),
    [({"activations": ["Sine", "Tanh", "Tanh"]}, "'Sine'"), ({"activations": ["Affine", "Tanh", "Tanh"]}, "alpha")],
    ids=["activation", "parameter"],
)
def test_an_unknown_form_is_refused(attributes: dict[str, Any], form: str, tmp_path: Path) -> None:
    arguments, _ = _recurrent("LSTM", 4, **attributes)
    with pytest.raises(UnsupportedOperatorError, match=form):
        import_onnx(save_model(tmp_path / "model.onnx", *arguments))


def test_half_precision_computes_in_float32(tmp_path: Path, target: Target) -> None:
    (nodes, _, outputs, weights), _ = _recurrent("GRU", 4)
    weights = {name: value.astype("float16") for name, value in weights.items()}
    inputs = [("x", [4, 1, 3], onnx.TensorProto.FLOAT16)]
    path = save_model(tmp_path / "model.onnx", nodes, inputs, [(name, None, 10) for name in outputs], weights)
    x = normal(4, 1, 3).astype("float16")
    for result, expected in zip(
        build(import_onnx(path), target).load().run(x),
        onnxruntime.InferenceSession(path).run(None, {"x": x}),
        strict=True,
    ):
        assert result.dtype == np.float16
        np.testing.assert_allclose(result, expected, rtol=2e-3, atol=1e-3)


def test_a_gpu_is_refused_in_one_sentence(tmp_path: Path) -> None:
    arguments, _ = _recurrent("RNN", 4)
    imported = import_onnx(save_model(tmp_path / "model.onnx", *arguments))
    with pytest.raises(BuildError, match="CPU targets alone, not for 'cuda-sm90'"):
        lower(imported, resolve("cuda-sm90"))


@pytest.mark.parametrize("batch", [1, 2, 3, 4, 7, 16])
@pytest.mark.parametrize("kind", ["lstm", "gru", "rnn"])
def test_the_sums_of_a_tile_fit_into_the_registers(kind: str, batch: int) -> None:
    cell = Cell(kind, "forward", (), 0.0, False, True)
    for computer in (AVX2, AVX512):
        for units in (4, 20, 128, 200, 1024):
            tile = tiles(cell, units, batch, computer)
            assert tile.rows * tile.blocks * cell.gates + tile.rows + 1 <= computer.registers
            assert units <= tile.units < 1.2 * units + computer.lanes


@pytest.mark.parametrize("computer", [AVX2, AVX512])
def test_no_sequence_of_an_even_batch_is_computed_twice(computer: Machine) -> None:
    single = replace(computer, cores=1)
    for kind in ("lstm", "gru"):
        cell = Cell(kind, "forward", (), 0.0, False, True)
        for batch in (8, 16, 64):
            tile = tiles(cell, 256, batch, single)
            assert batch % tile.rows == 0
            assert tile.rows * tile.blocks * cell.gates >= cost.in_flight(single)


_TANH, _SIGMOID = ("Tanh", 0.0, 0.0), ("Sigmoid", 0.0, 0.0)


def test_the_inputs_of_many_sequences_are_fetched_while_others_are_multiplied() -> None:
    cell = Cell("lstm", "forward", [_SIGMOID, _TANH, _TANH], 0.0, False, False)
    few, many = (str(Recurrence(cell, 3, batch, 64, [], AVX2).function()) for batch in (1, 16))
    assert "prefetch" in many
    assert "prefetch" not in few


@pytest.mark.long
def test_recurrences_stay_within_their_buffers() -> None:
    target = resolve("".join(runnable_levels()[-1:]) or "native")
    functions = {}
    for shares_units in (False, True):
        computer = machine(target)
        # The weights of a tile are read in parts.
        small = replace(computer.first, size=2048)
        computer = replace(computer, cores=2, region=0 if shares_units else 1 << 62, first=small)
        forms = [("lstm", "bidirectional", False), ("gru", "reverse", True)]
        more = [("lstm", "reverse", False), ("gru", "forward", False), ("rnn", "forward", False)]
        for kind, direction, linear in scale.choose(normal=forms, long=forms + more):
            activations = (
                [_SIGMOID, _TANH, _TANH] if kind == "lstm" else [_SIGMOID, _TANH] if kind == "gru" else [_TANH]
            )
            cell = Cell(kind, direction, activations * (1 + (direction == "bidirectional")), 0.0, False, linear)
            for batch, units in scale.choose(normal=[(19, 21)], long=[(1, 21), (5, 21), (19, 16)]):
                extra = ["split_bias"] * linear + [
                    "lengths",
                    "initial_h",
                    *["initial_c", "peepholes"] * (kind == "lstm"),
                ]
                function = Recurrence(cell, 3, batch, units, extra, computer).function()
                functions[f"{kind}_{direction}_{batch}_{units}_{shares_units}"] = complete(function)
    assert_within_buffers(functions, target)


@pytest.mark.parametrize("name", ["x86-64-v4-vnni", "llvm -mcpu=x86-64-v3 -mattr=+avxvnni"])
@pytest.mark.parametrize("shares_units", [False, True])
def test_recurrences_of_integers_stay_within_their_buffers(shares_units: bool, name: str) -> None:
    require_level(name)
    target = resolve(name)
    computer = replace(machine(target), cores=2, region=0 if shares_units else 1 << 62)
    cell = Cell("lstm", "reverse", (_SIGMOID, _TANH, _TANH), 0.0, False, False, quantised=True)
    extra = ["initial_h", "initial_c", "r_scale", "r_sum"]
    function = Recurrence(cell, 3, 5, 21, extra, computer, integers=True).function()
    assert_within_buffers({"lstm": complete(function)}, target)


@pytest.mark.few(1)
@pytest.mark.parametrize(("batch", "cores"), [(1, 3), (3, 16)])
def test_the_last_parts_of_a_free_batch_may_be_empty(batch: int, cores: int) -> None:
    target = resolve("".join(runnable_levels()[-1:]) or "native")
    # No region pays for itself, so that each core computes whole sequences.
    computer = replace(machine(target), cores=cores, region=1 << 62)
    functions = {}
    for kind, direction, activations in (
        ("lstm", "forward", [_SIGMOID, _TANH, _TANH]),
        ("gru", "reverse", [_SIGMOID, _TANH]),
    ):
        cell = Cell(kind, direction, activations, 0.0, False, False)
        size = tirx.Var("batch", "int64")
        recurrence = Recurrence(cell, 3, size, 21, ["lengths", "initial_h"], computer)
        functions[kind] = complete(recurrence.function())
    assert_within_buffers(functions, target, {"batch": batch})
