"""`benchmarks/blocks.py`: blocks of convolutions as one function and as several."""

import json
import subprocess
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest

from support.machines import on_two_cores
from support.processes import refusal
from tvmflow.compiler.machine import machine

Command = Callable[..., subprocess.CompletedProcess[str]]


def test_every_block_is_a_valid_model(module: Callable[[str], ModuleType]) -> None:
    for block in module("blocks").BLOCKS:
        output = [dim.dim_value for dim in block.model().graph.output[0].type.tensor_type.shape.dim]
        size = block.size // block.stride
        assert output == [block.batch, block.outputs, size, size], block.label


def test_every_block_has_a_plan_and_an_estimate(module: Callable[[str], ModuleType]) -> None:
    cpu = machine(on_two_cores("x86-64-v4"))
    for block in module("blocks").BLOCKS:
        lines, ratio = block.plan(cpu)
        assert 0 < lines <= block.size, block.label
        assert 0 < ratio < 10, block.label


@pytest.mark.long
def test_blocks_are_built_and_measured_in_both_ways(command: Command, tmp_path: Path) -> None:
    figures = tmp_path / "figures.json"
    process = command("blocks", "inverted", "--threads", "1", "--rounds", "1", "--repeats", "2", "--json", str(figures))
    assert process.returncode == 0, process.stderr
    rows = json.loads(figures.read_text())
    assert {item["block"] for item in rows} == {"inverted residual"}
    assert all(item["apart"] > 0 and item["whole"] > 0 and item["plan"][1] > 0 for item in rows)
    assert "whole" in {item["arrangement"] for item in rows} <= {"whole", "in part", "apart"}
    assert all(item["plan"][1] < 1 for item in rows if item["arrangement"] == "whole")


def test_a_kind_that_does_not_exist_is_one_sentence(call: Command) -> None:
    process = call("blocks", "residue")
    sentence = refusal(process)
    assert all(kind in sentence for kind in ("'residue'", "bottleneck", "inverted residual"))
