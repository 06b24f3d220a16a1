"""The cost model: cycles of computing and of moving bytes, by which the compiler ranks its options.

All numbers of a machine come from `Machine`. A core computes multiply-adds while it moves bytes of its own caches, so
the larger of the two counts. It waits for bytes of a cache that cores share and of the memory, so these are added.
Tiles follow Low et al., "Analytical Modeling Is Enough for High-Performance BLIS" (2016): as many independent results
as hide the latency of a multiply-add, rows that fit the lines of one set of the first-level cache, and weights that fit
the second-level cache.
"""

import math

from tvmflow.compiler.machine import Machine
from tvmflow.hardware.profiles import Cache, Memory

# The share of a cache that data may fill so that it stays there beside what else is read: a part of the model, of every
# cache with several ways.
_FILL = 0.75
# Shares of the work are even enough, and need no split in a second dimension, where the mean share takes so much of the
# time of the longest one.
EVEN = 0.8


def in_flight(machine: Machine) -> int:
    """Return the number of independent multiply-adds of vectors that keep a core busy: with fewer it waits."""
    return math.ceil(machine.vectors.latency * machine.vectors.multiply_adds)


def evenness(tasks: int, machine: Machine) -> float:
    """Return the mean number of tasks per core over the largest, for `tasks` equal tasks; 1 means an even share."""
    return tasks / (-(-tasks // machine.cores) * machine.cores)


def side_by_side(count: int, machine: Machine) -> int:
    """Return how many of `count` vectors of sums a core accumulates at a time: a divisor of `count`.

    It is the smallest divisor of at least `in_flight`, which keeps the core busy, if the vectors fit half of the
    registers; else the largest divisor that fits.
    """
    divisors = [size for size in range(1, min(count, machine.registers // 2) + 1) if count % size == 0]
    return next((size for size in divisors if size >= in_flight(machine)), divisors[-1])


def rows_in_set(machine: Machine) -> int:
    """Return how many rows may share a set of the first-level cache: all of its lines but one, for the weights."""
    return machine.first.ways - 1


def lines_in_set(count: int, distance: int, cache: Cache) -> int:
    """Return how many of `count` lines, each `distance` bytes after the one before, share a set of a cache."""
    span = cache.span
    return math.ceil(count / (span // math.gcd(distance, span)))


def step(rows: float, vectors: float, machine: Machine) -> float:
    """Return the cycles of one step of a product's reduction for a register tile of `rows` by `vectors` vectors."""
    numbers = machine.vectors
    return max(rows * vectors / numbers.multiply_adds, (rows + vectors) / numbers.loads, numbers.latency)


def results(count: float, depth: float, accumulators: float, machine: Machine) -> float:
    """Return the cycles of a core to compute `count` vectors of results, each a sum of `depth` products.

    A tile of `accumulators` vectors is summed at a time. Each tile fills and drains the pipeline once, and each vector
    is stored once.
    """
    numbers = machine.vectors
    stalls = max(1.0, in_flight(machine) / accumulators)
    start = 2 * numbers.latency / accumulators + 1 / numbers.stores
    return count * (depth * stalls / numbers.multiply_adds + start)


def level_of(size: float, machine: Machine) -> Memory:
    """Return the fastest cache that holds `size` bytes of data for each core, or the memory if no cache does.

    A cache holds them if they fill at most three quarters of one core's share of it.
    """
    levels = [machine.first, machine.second, *([] if machine.third is None else [machine.third])]
    return next((level for level in levels if size <= _FILL * level.share(machine.cores)), machine.memory)


def fits(size: float, machine: Machine) -> bool:
    """Whether `size` bytes stay in a core's share of the second-level cache: they fill at most three quarters of it."""
    return size <= _FILL * machine.own_cache


def compute_and_move_cycles(computing: float, written: float, read: float, size: float, machine: Machine) -> float:
    """Return the cycles of a core that computes for `computing` cycles and also moves bytes.

    `written` and `read` are the bytes that it writes and reads. `size` is the bytes of all its data, which decides the
    level of memory. The larger of both costs counts if the data stays in caches of the core alone, else their sum.
    """
    moves = move_cycles(written, read, size, machine)
    own = machine.second.cores == 1 and fits(size, machine)
    return max(computing, moves) if own else computing + moves


def move_cycles(written: float, read: float, size: float, machine: Machine) -> float:
    """Return the cycles in which a core writes `written` bytes and reads `read` bytes while all cores do so.

    `size` is the size in bytes of the core's data. It decides in which cache the data stays (`level_of`).
    """
    level = level_of(size, machine)
    return written / level.write_rate(machine.cores) + read / level.read_rate(machine.cores)


def result_and_input_cycles(written: float, read: float, machine: Machine) -> float:
    """Return the cycles in which a core writes `written` bytes of a function's result and reads `read` of its input."""
    return move_cycles(written, read, read + written, machine)


def exchange_cycles(size: float, machine: Machine) -> float:
    """Return the cycles in which each core writes `size` bytes and then reads `size` bytes that other cores wrote.

    With several cores, the bytes pass through a level of the memory beyond the second-level cache.
    """
    return move_cycles(size, size, size if machine.cores == 1 else max(size, machine.own_cache), machine)


def tasks_to_fetch(size: float, computing: float, machine: Machine) -> float:
    """Return the least number of tasks that hide a fetch of `size` bytes from the memory; infinity if none hide it.

    A task computes for `computing` cycles with as many bytes that were fetched before. If these exceed the first-level
    cache, it reads them from the second one, which then has less time for the fetch. All tasks take twice as long as
    the fetch: else the core waits for the memory anyway, and more requests delay those that it waits for.
    """
    reading = 0.0 if level_of(size, machine) is machine.first else size / machine.second.read_rate(machine.cores)
    if computing <= reading:
        return math.inf
    return math.ceil(2 * size / machine.memory.read_rate(machine.cores) / (computing - reading))


def weight_read_cycles(size: float, machine: Machine) -> float:
    """Return the cycles of a core to read `size` bytes of weights in a call.

    On a `cold` machine all weights come from memory, however small the function's own are: by the next run the others
    have replaced them in the caches. Else weights that fit `machine.own_cache` cost nothing, and larger ones come from
    the third-level cache, or from memory if there is none.
    """
    if size <= machine.own_cache and not machine.cold:
        return 0.0
    level = machine.memory if machine.cold or machine.third is None else machine.third
    return size / level.read_rate(machine.cores)


def widening_pays(numbers: int, stored: int, operations: float, machine: Machine) -> bool:
    """Whether a product is faster with a weight of `numbers` numbers that is stored in `stored` bytes than in float32.

    A core waits for fewer bytes then, but each vector of numbers takes as long as `operations` multiply-adds more.
    """
    saved = weight_read_cycles(numbers * machine.number, machine) - weight_read_cycles(stored, machine)
    return saved > operations * numbers / machine.lanes / machine.vectors.multiply_adds
