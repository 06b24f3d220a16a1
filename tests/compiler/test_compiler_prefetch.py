"""Weights are fetched while tiles are computed with those before them, and in which order tiles are computed."""

import itertools
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import tvm
import tvm_ffi
from onnx import helper
from tvm import tirx
from tvm.tirx import For

from tvmflow.compiler import import_onnx, lower, workloads
from tvmflow.compiler.machine import Machine, machine
from tvmflow.compiler.schedules import schedule
from tvmflow.compiler.statements import replace_variables
from tvmflow.hardware.target import Target, resolve
from tvmflow.tuning.traces import normalize

DEPTH, CHANNELS = 48, 192


@pytest.fixture(params=["x86-64-v3", "x86-64-v4"])
def target(request: pytest.FixtureRequest) -> Target:
    """Targets whose vectors have different sizes."""
    return resolve(request.param)


@pytest.fixture
def make_product(make_model: Any, target: Target) -> Any:
    """Make the function of a product of rows and weights of 48 by 192 numbers."""

    def make(rows: int | str) -> Any:
        weights = (np.random.default_rng(0).standard_normal((DEPTH, CHANNELS)) / 7).astype("float32")
        node = helper.make_node("MatMul", ["x", "w"], ["y"])
        imported = import_onnx(make_model([node], [("x", [rows, DEPTH])], ["y"], {"w": weights}))
        (func,) = (normalize(item.func) for item in workloads(lower(imported, target)))
        return func

    return make


def _machine(target: Target, *, cache: int | None = None, memory: float = 4.0) -> Machine:
    """One core of a machine with a second-level cache of `cache` bytes and `memory` bytes per cycle from the memory."""
    usual = machine(target)
    second = usual.second if cache is None else replace(usual.second, size=cache, cores=1)
    return replace(usual, cores=1, second=second, memory=replace(usual.memory, read=memory, shared=memory))


def _evaluate(expr: Any, values: dict[Any, int]) -> int:
    constants = {name: tirx.const(value, str(name.ty)) for name, value in values.items()}
    return int(tvm.sym.Analyzer().simplify(replace_variables(expr, constants)))


def _fetched_numbers(func: Any) -> list[list[int]]:
    """The places of the weights that each task fetches, in the order of tasks."""
    loops: list[Any] = []
    places: list[Any] = []
    tvm_ffi.structural_walk(func.body, (For, loops.append), order="pre")

    def keep(call: Any) -> None:
        # Into the second-level cache; lines of the result are fetched into the first.
        if call.op.name == "tirx.prefetch" and int(call.args[2]) == 2:
            places.append(call.args[0].args[0].indices[-1])

    tvm_ffi.structural_walk(func.body, (tvm.ir.Call, keep))
    if not places:
        return []
    (place,) = places
    used = tirx.analysis.undefined_vars(place)
    task, *within = (loop for loop in loops if any(loop.loop_var.same_as(name) for name in used))
    names = [loop.loop_var for loop in within]
    parts = list(itertools.product(*(range(int(loop.extent)) for loop in within)))
    return [
        [_evaluate(place, {task.loop_var: index, **dict(zip(names, part, strict=True))}) for part in parts]
        for index in range(int(task.extent))
    ]


@pytest.mark.parametrize("rows", [4, 31, 64])
def test_each_line_of_weights_is_fetched_by_the_tasks_before_those_that_read_it(
    rows: int, make_product: Any, target: Target
) -> None:
    numbers = _machine(target, cache=4 * DEPTH * CHANNELS, memory=1000.0)
    fetched = _fetched_numbers(schedule(make_product(rows), numbers)[0])
    size, line = DEPTH * CHANNELS, numbers.first.line // 4
    # The first task fetches the begin of the second part.
    part = fetched[0][0]
    parts, readers = size // part, len(fetched) * part // size
    assert parts * part == size
    assert parts * readers == len(fetched)
    for index in range(parts - 1):
        places = {place for places in fetched[index * readers : (index + 1) * readers] for place in places}
        following = range((index + 1) * part, (index + 2) * part)
        assert places <= set(following)
        assert {place // line for place in places} == {place // line for place in following}
    # Nothing follows the last part.
    assert {place for places in fetched[-readers:] for place in places} == {size - 1}


@pytest.mark.parametrize(("rows", "is_spread"), [(4, True), (64, False)])
def test_many_lines_are_fetched_in_several_parts_of_a_tile(
    rows: int, is_spread: bool, make_product: Any, target: Target
) -> None:
    numbers = _machine(target, cache=4 * DEPTH * CHANNELS, memory=1000.0)
    scheduled, _ = schedule(make_product(rows), numbers)
    loops: list[Any] = []
    tvm_ffi.structural_walk(scheduled.body, (For, loops.append))
    (line,) = (loop for loop in loops if loop.loop_var.name == "line")
    fetched = {len(places) for places in _fetched_numbers(scheduled)}
    assert (fetched != {int(line.extent)}) is is_spread
    assert int(line.extent) <= 32


def test_tasks_that_take_less_time_than_the_memory_fetch_nothing(make_product: Any, target: Target) -> None:
    func, small = make_product(31), 4 * DEPTH * CHANNELS
    assert _fetched_numbers(schedule(func, _machine(target, cache=small, memory=1000.0))[0])
    assert not _fetched_numbers(schedule(func, _machine(target, cache=small, memory=0.1))[0])


def test_of_free_rows_it_is_decided_when_they_are_known(make_product: Any, target: Target) -> None:
    numbers = _machine(target, cache=4 * DEPTH * CHANNELS)
    scheduled, _ = schedule(make_product("n"), numbers)
    loops: list[Any] = []
    tvm_ffi.structural_walk(scheduled.body, (For, loops.append))
    (line,) = (loop for loop in loops if loop.loop_var.name == "line")
    (name,) = tirx.analysis.undefined_vars(line.extent)
    lines = [_evaluate(line.extent, {name: rows}) for rows in range(1, 2000)]
    assert lines[0] == 0
    # The more tasks read a part, the fewer lines each of them fetches.
    fetched = lines[next(index for index, count in enumerate(lines) if count) :]
    assert fetched[-1] == 1
    assert fetched == sorted(fetched, reverse=True)


@pytest.mark.parametrize("rows", [CHANNELS - 1, CHANNELS + 1])
def test_of_rows_and_weights_the_larger_are_read_once(rows: int, make_product: Any, target: Target) -> None:
    fetched = _fetched_numbers(schedule(make_product(rows), _machine(target, memory=1000.0))[0])
    # Weights that are read again for each tile of rows are not fetched.
    assert bool(fetched) == (rows < CHANNELS)


def _fetched_rows(func: Any, task: int) -> dict[bool, dict[int, set[int]]]:
    """What iteration `task` of the outermost loop fetches, to write it or not: columns by row."""
    loops: list[Any] = []
    fetches: list[Any] = []
    tvm_ffi.structural_walk(func.body, (For, loops.append), order="pre")
    tvm_ffi.structural_walk(
        func.body, (tvm.ir.Call, lambda call: fetches.append(call) if call.op.name == "tirx.prefetch" else None)
    )
    rows: dict[bool, dict[int, set[int]]] = {}
    for fetch in fetches:
        place = fetch.args[0].args[0].indices
        used = {name for item in place for name in tirx.analysis.undefined_vars(item)}
        inner = [loop for loop in loops[1:] if any(loop.loop_var.same_as(name) for name in used)]
        for steps in itertools.product(*(range(int(loop.extent)) for loop in inner)):
            values = {loop.loop_var: step for loop, step in zip(inner, steps, strict=True)}
            row, column = (_evaluate(item, {**values, loops[0].loop_var: task}) for item in place)
            rows.setdefault(bool(int(fetch.args[1])), {}).setdefault(row, set()).add(column)
    return rows


@pytest.mark.parametrize("operator", ["Softmax", "LayerNormalization"])
def test_rows_that_do_not_fit_the_cache_are_fetched_before_they_are_computed(
    operator: str, make_model: Any, target: Target
) -> None:
    count, size = 40, 64
    node = helper.make_node(operator, ["x", "w"] if operator == "LayerNormalization" else ["x"], ["y"])
    weights = {"w": np.ones(size, "float32")} if operator == "LayerNormalization" else {}
    imported = import_onnx(make_model([node], [("x", [count, size])], ["y"], weights))
    (func,) = (normalize(item.func) for item in workloads(lower(imported, target)))
    assert not _fetched_rows(schedule(func, _machine(target))[0], 0)
    small = _machine(target, cache=count * size)
    scheduled, lanes = schedule(func, small)[0], small.lanes
    columns = set(range(0, size, lanes))
    # A page ahead of what is read.
    ahead = 4096 // (4 * size)
    for task in (0, 5, count - ahead, count - 1):
        fetched = _fetched_rows(scheduled, task)
        assert fetched == {True: {task: columns}, False: {min(task + ahead, count - 1): columns}}
    wide = replace(small, first=replace(small.first, size=15 * size))
    assert not _fetched_rows(schedule(func, wide)[0], 0)
