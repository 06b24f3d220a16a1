"""Measures how much faster three convolutions are as one function: `python benchmarks/blocks.py`.

The convolutions are bottlenecks (1x1, 3x3, 1x1) and inverted residuals (1x1, depthwise, 1x1), in the sizes of
ResNet-50, of detectors on large images and of MobileNetV2. Each block is built as one function and as three, whatever
the cost model says, and the two builds take turns. `estimate` is the cost model's ratio of the two, `whole / apart` the
measured one, from the smallest time of every function; `built` is the arrangement that a build without tuning uses.
"""

import json
import math
import os
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import onnx
import prepare
from commandline import new_parser, positive, run_main, state_folder
from onnx import helper
from operators import Case
from rich import box
from rich.console import Console
from rich.table import Table

from tvmflow.errors import InputError
from tvmflow.hardware.target import Target
from tvmflow.processes import children
from tvmflow.processes.children import Emit
from tvmflow.runtime.profile import measure_functions
from tvmflow.workspace import Record

if TYPE_CHECKING:
    from tvmflow.compiler.machine import Machine

_SCRIPT = Path(__file__)
# The convolutions of a whole block.
_CONVOLUTIONS = 3


@dataclass(frozen=True)
class Block:
    """Three convolutions on images of `size` by `size` pixels, from `inputs` to `between` to `outputs` channels.

    The middle one is 3x3, has the `stride`, and is depthwise if `depthwise` is set; the others are 1x1.
    """

    name: str
    inputs: int
    between: int
    outputs: int
    size: int
    stride: int = 1
    depthwise: bool = False
    batch: int = 1

    @property
    def label(self) -> str:
        """The name of the block in the table."""
        images = f"{self.batch} images of " if self.batch > 1 else ""
        return f"{self.inputs}, {self.between}, {self.outputs} at {images}{self.size}x{self.size}" + (
            f" /{self.stride}" if self.stride > 1 else ""
        )

    def model(self) -> onnx.ModelProto:
        """Return the ONNX model, with random weights."""
        groups = self.between if self.depthwise else 1
        nodes = (
            helper.make_node("Conv", ["x", "w1", "b1"], ["c1"]),
            helper.make_node("Relu", ["c1"], ["r1"]),
            helper.make_node("Conv", ["r1", "w2", "b2"], ["c2"], pads=[1] * 4, strides=[self.stride] * 2, group=groups),
            helper.make_node("Relu", ["c2"], ["r2"]),
            helper.make_node("Conv", ["r2", "w3", "b3"], ["y"]),
        )
        weights = {
            "w1": (self.between, self.inputs, 1, 1),
            "b1": (self.between,),
            "w2": (self.between, self.between // groups, 3, 3),
            "b2": (self.between,),
            "w3": (self.outputs, self.between, 1, 1),
            "b3": (self.outputs,),
        }
        inputs = {"x": (self.batch, self.inputs, self.size, self.size)}
        return Case(self.name, self.label, nodes, inputs, weights).model()

    def plan(self, machine: "Machine") -> tuple[int, float] | None:
        """Return the image lines of a strip, and the cost model's ratio of one function's time to three functions'.

        Returns None where the compiler cannot compute the block as one function.
        """
        from tvmflow.compiler import winograd
        from tvmflow.compiler.operators.block_plans import plans
        from tvmflow.compiler.operators.blocks import Block, Convolution
        from tvmflow.compiler.operators.geometry import Geometry

        first, last = (
            Convolution(channels, Geometry((1, 1), (1, 1), (0, 0, 0, 0))) for channels in (self.between, self.outputs)
        )
        middle = Convolution(
            self.between, Geometry((3, 3), (self.stride, self.stride), (1, 1, 1, 1)), depthwise=self.depthwise
        )
        if not self.depthwise:
            high, wide = middle.geometry.result_size(self.size, self.size)
            shape = winograd.Shape(high, wide, self.between, self.between, self.stride)
            size, *_ = winograd.rank_sizes(shape, machine)
            middle = replace(middle, winograd=size)
        block = Block(self.size, self.size, self.inputs, first, middle, last)
        ranked, apart = plans(block, self.batch, machine)
        return (ranked[0].lines, ranked[0].cycles / apart) if ranked else None


BLOCKS: tuple[Block, ...] = (
    Block("bottleneck", 256, 64, 256, 56),
    Block("bottleneck", 256, 64, 256, 56, batch=8),
    Block("bottleneck", 256, 128, 512, 56, stride=2),
    Block("bottleneck", 512, 128, 512, 28),
    Block("bottleneck", 1024, 256, 1024, 14),
    Block("bottleneck", 128, 64, 128, 80),
    Block("bottleneck", 64, 32, 64, 160),
    Block("bottleneck", 32, 16, 32, 320),
    Block("inverted residual", 16, 96, 24, 112, stride=2, depthwise=True),
    Block("inverted residual", 24, 144, 24, 56, depthwise=True),
    Block("inverted residual", 32, 192, 32, 28, depthwise=True),
    Block("inverted residual", 64, 384, 64, 14, depthwise=True),
)


class BlockJob(Record):
    """The job to build a model as one function and as three, and to time both in `rounds` of `repeats` runs."""

    onnx: Path
    target: Target
    rounds: int
    repeats: int


class BlockTime(Record):
    """Microseconds of a block as three functions and as one (None where that is impossible).

    `arrangement` is the one that a build without tuning uses: `apart`, `whole` or `in part`.
    """

    apart: float
    whole: float | None
    arrangement: str


def work(job: BlockJob, emit: Emit) -> BlockTime:
    """Build and time a block in a child process."""
    os.environ["TVM_NUM_THREADS"] = str(job.target.threads)
    import tvm

    from tvmflow import compiler
    from tvmflow.compiler.choices import Choices, Site
    from tvmflow.compiler.passes import blocks

    imported = compiler.import_onnx(job.onnx)

    def sites(options: dict[str, str]) -> dict[str, Site]:
        choices = Choices(options)
        compiler.lower(imported, job.target, choices=choices)
        return {key: site for key, site in choices.sites.items() if site.kind == "block"}

    usual = [site for site in sites({}).values() if site.options[0] == "whole"]
    # From here on blocks that are too slow for a tuner count too, and those that come up only while others are apart.
    blocks.CLOSE = math.inf
    block_sites: dict[str, Site] = {}
    while (new_sites := sites(dict.fromkeys(block_sites, "apart"))).keys() - block_sites.keys():
        block_sites |= new_sites
    apart = dict.fromkeys(block_sites, "apart")
    ways = {"apart": apart}
    complete = [key for key, site in block_sites.items() if len(site.parts) == _CONVOLUTIONS]
    if complete:
        ways["whole"] = {**apart, complete[0]: "whole"}
    shape = [int(size) for size in imported.inputs[0].shape]
    data = tvm.runtime.tensor(np.random.default_rng(0).standard_normal(shape).astype("float32"))
    machines = {}
    for way, options in ways.items():
        arrangement = compiler.build(imported, job.target, choices=Choices(options))
        machines[way] = arrangement.load(), dict(arrangement.schedules)
    best = dict.fromkeys(ways, math.inf)
    for _ in range(job.rounds):
        for way, (loaded, rules) in machines.items():
            run = partial(loaded.machine["main"], data, *loaded.weights)
            times = measure_functions(loaded.machine, run, rules, job.repeats)
            own = (item for item in times if item.name in rules and not item.name.startswith("transpose"))
            best[way] = min(best[way], 1e6 * sum(item.seconds for item in own))
    arrangement = "apart" if not usual else "whole" if len(usual[0].parts) == _CONVOLUTIONS else "in part"
    return BlockTime(apart=best["apart"], whole=best.get("whole"), arrangement=arrangement)


Result = tuple[Block, tuple[int, float] | None, BlockTime]


def show(results: Sequence[Result]) -> Table:
    """Return the table of all blocks."""
    table = Table(box=box.SIMPLE_HEAD)
    for heading in ("block", "channels", "lines", "apart us", "whole us", "estimate", "whole / apart", "built"):
        table.add_column(heading, justify="left" if heading in ("block", "channels", "built") else "right")
    for block, plan, time in results:
        table.add_row(
            block.name,
            block.label,
            "" if plan is None else str(plan[0]),
            f"{time.apart:.0f}",
            "" if time.whole is None else f"{time.whole:.0f}",
            "" if plan is None else f"{plan[1]:.2f}",
            "" if time.whole is None else f"{time.whole / time.apart:.2f}",
            time.arrangement,
        )
    return table


def main() -> None:
    """Measure the blocks and print them."""
    parser = new_parser(__doc__)
    parser.add_argument("kinds", nargs="*", metavar="KIND", help="bottleneck or inverted residual, or a beginning")
    parser.add_argument("--rounds", type=positive, default=10, help="turns of each way (10)")
    parser.add_argument("--repeats", type=positive, default=10, help="runs in a turn (10)")
    arguments = parser.parse_args()
    state = state_folder(arguments)
    blocks = [
        block for block in BLOCKS if not arguments.kinds or any(block.name.startswith(kind) for kind in arguments.kinds)
    ]
    if not blocks:
        raise InputError(f"there are no blocks {arguments.kinds[0]!r}, only bottleneck and inverted residual")
    from tvmflow.compiler.machine import machine

    target = prepare.native(arguments.threads)
    results: list[Result] = []
    with Console(stderr=True).status("") as status:
        for block in blocks:
            status.update(block.label)
            path = state / "block.onnx"
            onnx.save(block.model(), path)
            job = BlockJob(onnx=path, target=target, rounds=arguments.rounds, repeats=arguments.repeats)
            log = state / "blocks.log"
            time = children.call("blocks:work", job, BlockTime, log=log, timeout=600, paths=(_SCRIPT.parent,))
            results.append((block, block.plan(machine(target)), time))
    Console(width=max(140, Console().width)).print(show(results), highlight=False)
    print(f"threads {arguments.threads}, {arguments.rounds} rounds of {arguments.repeats} runs")
    if arguments.json is not None:
        figures = [
            {"block": block.name, "channels": block.label, "plan": plan, **time.model_dump()}
            for block, plan, time in results
        ]
        arguments.json.write_text(json.dumps(figures, indent=1))


if __name__ == "__main__":
    run_main(main)
