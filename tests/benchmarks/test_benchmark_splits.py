"""`benchmarks/splits.py`: what the split of the work allows on many threads."""

import json
import subprocess
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest
from onnx import helper
from tvm import te
from tvm.s_tir import Schedule

from support.models import save_model
from tvmflow.compiler.machine import machine
from tvmflow.hardware.target import resolve

Command = Callable[..., subprocess.CompletedProcess[str]]


def test_the_bound_is_that_of_the_longest_share(module: Callable[[str], ModuleType]) -> None:
    splits, cpu = module("splits"), machine(resolve("x86-64-v3"))
    x = te.placeholder((12, 5), "float32", name="x")
    schedule = Schedule(te.create_prim_func([x, te.compute((12, 5), lambda i, j: x[i, j] * 2.0, name="y")]))
    serial = schedule.mod["main"]
    schedule.parallel(schedule.get_loops(schedule.get_sblock("y"))[0])
    functions = [
        splits.Function(
            name="", rule="", calls=1, cycles={count: splits.cycles(func.body, count, cpu) for count in (1, 8)}
        )
        for func in (serial, schedule.mod["main"])
    ]
    assert [splits.bound([function], 8) for function in functions] == pytest.approx([1 / 8, 12 / 16])
    assert splits.bound(functions, 8) == pytest.approx(2 / 8 / (1 + 2 / 12))
    assert splits.bound([], 8) == 1


@pytest.mark.long
def test_a_file_is_judged_without_running_it(command: Command, tmp_path: Path) -> None:
    weight = np.ones((64, 32, 1, 1), "float32")
    model, figures = tmp_path / "convolution.onnx", tmp_path / "figures.json"
    save_model(model, [helper.make_node("Conv", ["x", "w"], ["y"])], [("x", [1, 32, 31, 31])], ["y"], {"w": weight})
    process = command("splits", str(model), "--target", "aarch64-cortex-a72", "--json", str(figures), "--top", "1")
    assert process.returncode == 0, process.stderr
    assert "cortex-a72" in process.stdout
    (document,) = json.loads(figures.read_text()).values()
    assert document["bounds"]["1"] == 1
    assert 0 < document["bounds"]["64"] < 1
    assert all(function["cycles"]["1"] > 0 for function in document["functions"])
