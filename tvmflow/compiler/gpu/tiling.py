"""The tiles of matrix products on a GPU, and the model of their time that chooses among them."""

import math
import tomllib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from tvmflow.hardware.target import Target, compute_capability

_FILES = Path(__file__).parents[2] / "hardware" / "processors" / "gpus"
# The registers of a thread beside those for sums, and the most that it can have.
_REGISTERS, _MOST_REGISTERS = 96, 255


@dataclass(frozen=True)
class Numbers:
    """The times of a multiprocessor for a type of numbers.

    `multiply_adds` is the number of multiply-adds per cycle. `chunk` is the time for each 128 bytes of a row, of a
    warp's sums of 16 by 16 and more with larger ones, and `convert` that of preparing a number for the tensor cores.
    """

    multiply_adds: float
    chunk: float
    convert: float = 0.0


@dataclass(frozen=True)
class Gpu:
    """The numbers of a GPU by which the compiler chooses.

    `processors` is the number of multiprocessors that thread blocks can use in clusters, by the size of a cluster. All
    other numbers are of one multiprocessor, and times are in cycles. `shared` is the shared memory in bytes, and
    `shared_per_block` what one thread block can have of it; `threads` and `registers` are the most that reside there.
    `cache_bytes` and `shared_bytes` are the bytes per cycle from the second-level cache and from shared memory. `warps`
    is the number of warps that hide the latency of multiplications. `fill` is the time before the first one, and `step`
    the least time from one tile of the depth to the next, which grows with a thread's sums to the power `growth`.
    `store` is the time for each sum of a tile, and `cluster` that of adding up what the thread blocks of a cluster
    computed. `numbers` holds what depends on the type of the numbers.
    """

    shared: int
    shared_per_block: int
    threads: int
    registers: int
    cache_bytes: float
    shared_bytes: float
    warps: float
    fill: float
    step: float
    growth: float
    store: float
    cluster: float
    processors: Mapping[int, int]
    numbers: Mapping[str, Numbers]


def gpu_of(target: Target) -> Gpu:
    """Return the numbers of a target's GPU: those of the newest known compute capability that is not newer."""
    known = {compute_capability({"arch": file.stem}) or (0, 0): file for file in _FILES.glob("sm_*.toml")}
    named = compute_capability(target.tvm) or min(known)
    capability = max((item for item in known if item <= named), default=min(known))
    return _read(known[capability])


@cache
def _read(file: Path) -> Gpu:
    values = tomllib.loads(file.read_text())
    values["processors"] = {int(size): count for size, count in values["processors"].items()}
    values["numbers"] = {dtype: Numbers(**numbers) for dtype, numbers in values["numbers"].items()}
    return Gpu(**values)


@dataclass(frozen=True)
class Tile:
    """How a thread block computes a part of a product (`product.cuh` describes the fields)."""

    rows: int
    columns: int
    depth: int
    warp_rows: int
    warp_columns: int
    warp_depths: int
    stages: int
    cluster: int = 1

    @property
    def threads(self) -> int:
        """Return the number of threads of a block."""
        return 32 * self.warp_rows * self.warp_columns * self.warp_depths

    def shared_bytes(self, itemsize: int) -> int:
        """Return the bytes of shared memory for numbers of `itemsize` bytes, and for the sums after them."""
        stages = self.stages * (self.rows + self.columns) * self.depth * itemsize
        return max(stages, self.rows * (self.columns + 8) * 4)


# A row of a tile is so many bytes deep.
_SHALLOW, _USUAL, _DEEP = 64, 128, 256
# Tiles by the bytes of their rows: rows, columns; warps along rows, columns and depth; stages.
_TILES = (
    (_SHALLOW, (128, 128, 2, 4, 1, 4)),
    (_USUAL, (128, 128, 2, 2, 1, 3)),
    (_USUAL, (128, 64, 4, 2, 1, 3)),
    (_USUAL, (64, 128, 2, 4, 1, 3)),
    (_USUAL, (64, 64, 2, 2, 1, 4)),
    (_DEEP, (64, 64, 2, 2, 2, 3)),
    (_USUAL, (64, 32, 4, 1, 2, 4)),
    (_DEEP, (64, 32, 4, 1, 2, 3)),
    (_USUAL, (32, 64, 2, 2, 2, 4)),
    (_DEEP, (32, 64, 2, 2, 2, 3)),
    (_DEEP, (32, 128, 1, 4, 2, 3)),
    (_DEEP, (32, 32, 2, 1, 4, 3)),
    (_DEEP, (16, 64, 1, 4, 2, 3)),
    (_DEEP, (16, 128, 1, 4, 2, 3)),
    (_DEEP, (16, 32, 1, 2, 4, 3)),
)
_BYTES = {"float16": 2, "float32": 4}
# The most sums of a thread: the operands of float32 take twice the registers.
_MOST_SUMS = {"float16": 128, "float32": 64}


def choose_tile(gpu: Gpu, rows: int, columns: int, depth: int, batch: int, dtype: str) -> Tile:
    """Return the tile that the model takes for the fastest one for `batch` products of these sizes."""
    candidates = [
        tile for tile in _tiles(gpu, depth, dtype) if tile.shared_bytes(_BYTES[dtype]) <= gpu.shared_per_block
    ]
    return min(candidates, key=lambda tile: estimate(gpu, tile, rows, columns, depth, batch, dtype))


def _tiles(gpu: Gpu, depth: int, dtype: str) -> Iterator[Tile]:
    for line, (rows, columns, warp_rows, warp_columns, warp_depths, stages) in _TILES:
        numbers = line // _BYTES[dtype]
        for cluster in gpu.processors:
            steps = math.ceil(math.ceil(depth / numbers) / cluster)
            if rows % cluster or (cluster - 1) * steps >= math.ceil(depth / numbers):
                continue
            if rows * columns > _MOST_SUMS[dtype] * 32 * warp_rows * warp_columns * warp_depths:
                continue
            # A stage for each step, and one more, are enough; they leave shared memory to other thread blocks.
            used = max(2, min(stages, steps + 1))
            yield Tile(rows, columns, numbers, warp_rows, warp_columns, warp_depths, used, cluster)


def estimate(gpu: Gpu, tile: Tile, rows: int, columns: int, depth: int, batch: int, dtype: str) -> float:
    """Return the estimated cycles of `batch` products with a tile, beyond those of starting a kernel."""
    size, numbers = _BYTES[dtype], gpu.numbers[dtype]
    sums = tile.rows * tile.columns
    blocks = batch * tile.cluster * math.ceil(rows / tile.rows) * math.ceil(columns / tile.columns)
    steps = math.ceil(math.ceil(depth / tile.depth) / tile.cluster)
    # A thread block takes a kilobyte of shared memory beside its own, and a thread registers beside its sums.
    registers = min(_MOST_REGISTERS, sums // tile.threads + _REGISTERS)
    resident = min(
        gpu.shared // (tile.shared_bytes(size) + 1024),
        gpu.threads // tile.threads,
        gpu.registers // (registers * tile.threads),
    )
    processors = gpu.processors[tile.cluster]
    side_by_side = max(1, min(resident, math.ceil(blocks / processors)))
    waves = math.ceil(blocks / (processors * side_by_side))
    # Few warps do not hide the latency of the instructions.
    busy = min(1.0, tile.threads / 32 * side_by_side / gpu.warps)
    fragments = (tile.rows * tile.warp_columns + tile.columns * tile.warp_rows) * tile.depth
    compute = sums * tile.depth / numbers.multiply_adds / busy + fragments * numbers.convert
    move = (tile.rows + tile.columns) * tile.depth * size / gpu.cache_bytes
    rows_in_chunks = tile.depth * size / _USUAL / tile.warp_depths
    least = gpu.step + numbers.chunk * rows_in_chunks * (sums / tile.threads / 16) ** gpu.growth
    step = max(side_by_side * max(compute, move, fragments * size / gpu.shared_bytes), least)
    store = sums * gpu.store / tile.cluster * side_by_side
    together = gpu.cluster if tile.cluster > 1 else 0.0
    return float(waves * (gpu.fill + steps * step + store + together))
