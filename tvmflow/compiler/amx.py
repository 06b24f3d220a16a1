"""AMX kernels: matrix products by a processor unit that multiplies whole tiles, 16 rows by 16 lanes, of bf16 or int8.

The unit has eight tile registers. Source: Intel's architecture manual, volume 2, the instructions LDTILECFG, TILELOADD,
TDPBF16PS and TDPBUSD. Their right operand has the layout of packed weights for dot products
(`tvmflow.compiler.dotproduct`): groups of numbers, 16 lanes.
"""

from collections.abc import Iterable
from dataclasses import astuple, dataclass
from functools import cache
from typing import Any

import tvm
import tvm_ffi
from tvm.ir import StringImm
from tvm.s_tir import Schedule
from tvm.s_tir.schedule import LoopRV

from tvmflow.compiler import cost, intrinsics, tiles
from tvmflow.compiler.dotproduct import DOTS, WIDE, Dot
from tvmflow.compiler.machine import Machine
from tvmflow.hardware.profiles import Tiles

# The rows and the 32-bit lanes of a tile.
ROWS = LANES = 16
# A product of fewer rows fills less than a quarter of a tile, steps of fewer groups less than half of one.
FEWEST_ROWS, _FEWEST_GROUPS = ROWS // 4, ROWS // 2
# The bytes of a line of the cache, on x86-64.
_LINE = 64
# The number of tile registers that hold results, then the first register of the left and of the right operand.
_RESULTS, _LEFT, _RIGHT = 4, 4, 6

_NAMES = "tvmflow.amx."
_CALL_EXTERN = tvm.ir.Op.get("tirx.call_extern")
# The beginnings of the names of functions in the library: of kernels, and of those that configure the registers.
_SYMBOL, _CONFIGURE = "tvmflow_amx_", "tvmflow_tiles"
RELEASE = "tvmflow_release_tiles"
"""The name of the function in the library that releases the tile registers."""
# In a name, before the numbers: the loops that set results to zero.
_START = "start"
# The prefix of LLVM's intrinsics. A test replaces it by the prefix of functions that do the same on any processor.
INTRINSICS = "llvm.x86."
# LLVM's intrinsic that fetches a line into a cache. A test replaces it, too.
PREFETCH = "llvm.prefetch.p0"
_MULTIPLY = {"bf16": "tdpbf16ps", "int8": "tdpbusd"}

_DESCRIPTION = """\
@T.prim_func(s_tir=True)
def main(a: T.handle, b: T.handle, c: T.handle) -> None:
    line = T.int64()
    pixel = T.int64()
    row = T.int64()
    A = T.match_buffer(a, {left}, "{data}", offset_factor=1, strides={left_strides})
    B = T.match_buffer(b, {right}, "{weight}", offset_factor=1)
    C = T.match_buffer(c, ({rows}, {channels}), "{accumulator}", offset_factor=1, strides=[row, 1])
    with T.sblock("root"):
        T.reads(C[0:{rows}, 0:{channels}], A[{left_region}], B[{right_region}])
        T.writes(C[0:{rows}, 0:{channels}])
"""
_MEANING = """\
        for i, c, {loops} in T.grid({rows}, {channels}, {extents}):
            with T.sblock("update"):
                vi, vc, {reduced} = T.axis.remap("SS{kinds}", [i, c, {loops}])
                C[vi, vc] = C[vi, vc] + {left_value} * {right_value}
"""
_NOTHING = """\
@T.prim_func(s_tir=True)
def main(c: T.handle) -> None:
    row = T.int64()
    C = T.match_buffer(c, ({rows}, {channels}), "{accumulator}", offset_factor=1, strides=[row, 1])
    with T.sblock("root"):
        T.reads()
        T.writes(C[0:{rows}, 0:{channels}])
"""
_ZERO = """\
        for i, c in T.grid({rows}, {channels}):
            with T.sblock("update"):
                vi, vc = T.axis.remap("SS", [i, c])
                C[vi, vc] = T.{accumulator}(0)
"""
_CALL = """\
        T.evaluate(T.call_extern("void", "{name}", C.access_ptr("rw"), T.Cast("int64", row) * T.int64(4),
            A.access_ptr("r"), T.Cast("int64", {pixel}) * T.int64({bytes}), T.Cast("int64", {line}) * T.int64({bytes}),
            B.access_ptr("r"), T.int64(0), T.int64(0)))
"""


@dataclass(frozen=True)
class Kernel:
    """The geometry of a kernel that computes `rows` rows of `vectors` vectors of 16 results each.

    A group is the 2 bf16 or 4 int8 numbers that one lane multiplies at a time (`Dot.group`). For each row of results, a
    convolution reads `taps_h` lines that are `dilation` lines apart, and `taps_w` pixels of each line. The kernel reads
    `groups` groups of a pixel, and the pixels of neighbouring rows are `stride` apart. The taps are `spread` pixels
    apart; where it is 0, they are neighbours of which the kernel reads all channels, and which it multiplies as one
    row. A matrix product reads one row of `groups` groups for each row of results; its `taps_h` and `taps_w` are 0.
    Where `adds` is 1, the kernel adds to the results, which are those of a part of the depth; where it is 0, it writes
    them. Where `fetches` is 1, it also fetches other parts of the right operand, as `with_fetch` says.
    """

    rows: int
    vectors: int
    groups: int
    taps_h: int = 0
    taps_w: int = 0
    stride: int = 1
    dilation: int = 1
    spread: int = 0
    adds: int = 0
    fetches: int = 0

    @property
    def depth(self) -> int:
        """The number of neighbouring groups that a row of results reads at a time: those of a pixel, or of `taps_w`."""
        return self.groups * (1 if self.spread else max(1, self.taps_w))

    @property
    def pieces(self) -> int:
        """The number of times that a row of results reads so many groups: of each line, or of each pixel of each."""
        return max(1, self.taps_h) * (self.taps_w if self.spread else 1)

    @property
    def heights(self) -> list[int]:
        """The number of rows in each of the one or two tiles that hold the kernel's rows, from the top."""
        count = -(-self.rows // ROWS)
        return [self.rows // count + (place < self.rows % count) for place in range(count)]

    @property
    def configuration(self) -> "Configuration":
        """The configuration of the tile registers that the kernel needs."""
        return Configuration(tuple(self.heights), _step(self.depth))

    @property
    def widths(self) -> list[int]:
        """How many of the vectors the tiles hold the results of at a time, as even as possible, in descending order."""
        return _widths(self.rows, self.vectors)


@dataclass(frozen=True)
class Configuration:
    """A configuration of the tile registers, for kernels whose rows have these `heights` and whose depth this `step`.

    The first four registers hold results: of one tile of rows those of four vectors, of two tiles those of two each.
    `step` is the number of groups of a tile of the depth.
    """

    heights: tuple[int, ...]
    step: int

    @property
    def symbol(self) -> str:
        """The name of the function in the library that configures the registers so."""
        return "_".join([_CONFIGURE, *map(str, self.heights), str(self.step)])

    @property
    def tiles(self) -> bytes:
        """The 64 bytes that LDTILECFG reads: palette 1, at 16 the bytes per row of each register, at 48 its rows."""
        wide, high = [0] * 8, [0] * 8
        for place, height in enumerate(self.heights):
            for tile in range(place * self.most_vectors, (place + 1) * self.most_vectors):
                wide[tile], high[tile] = 4 * LANES, height
            wide[_LEFT + place], high[_LEFT + place] = 4 * self.step, height
        for tile in (_RIGHT, _RIGHT + 1):
            wide[tile], high[tile] = 4 * LANES, self.step
        columns = b"".join(size.to_bytes(2, "little") for size in wide)
        return bytes([1, *[0] * 15]) + columns.ljust(32, b"\0") + bytes(high).ljust(16, b"\0")

    @property
    def most_vectors(self) -> int:
        """The most vectors of which the registers hold the results at a time."""
        return _RESULTS // len(self.heights)


def with_fetch(body: Any, ahead: Any, lines: Any) -> Any:
    """Return scheduled code whose kernels that fetch do so: `lines` lines of the cache, evenly while they multiply.

    The first one is `ahead` bytes after the right operand. Both numbers are expressions of int64.
    """

    def change(call: Any) -> Any:
        kernel = _kernel_of(call)
        if kernel is None or not kernel.fetches:
            return call
        return tvm.ir.Call(call.op, [*call.args[:-2], ahead, lines], call.attrs, ret_ty=call.ty)

    return tvm_ffi.structural_map(body, (tvm.ir.Call, change))


def kernels_in(statement: Any) -> set[Kernel]:
    """Return the kernels that scheduled or lowered code calls."""
    kernels: set[Kernel | None] = set()
    tvm_ffi.structural_walk(statement, (tvm.ir.Call, lambda call: kernels.add(_kernel_of(call))))
    return {kernel for kernel in kernels if kernel is not None}


def _kernel_of(call: Any) -> Kernel | None:
    """The kernel that a call of lowered or scheduled code calls; None for other calls."""
    if not call.op.same_as(_CALL_EXTERN) or not isinstance(call.args[0], StringImm):
        return None
    symbol = str(call.args[0].value)
    if not symbol.startswith(_SYMBOL):
        return None
    _, *numbers = symbol.removeprefix(_SYMBOL).split("_")
    return Kernel(*map(int, numbers))


def choose_rows(
    rows: int | None, depth: int, vectors: int, machine: Machine, *, pieces: int = 1, is_copied: bool = False
) -> int:
    """Choose the rows of a kernel, 1 to 32, for a product of `rows` rows; return 0 where AMX is not to be used.

    `rows` is None where it is symbolic: the kernel has the rows of one tile then. `depth` is `Kernel.depth`, `pieces`
    is `Kernel.pieces`, and `vectors` is the number of vectors of results. `is_copied` is
    true where the left operand is copied in any case. Returns 0 without AMX, for fewer than 4 rows, for a depth that no
    number from 8 to 16 divides, and where dot-product instructions take less time.
    """
    if machine.tiles is None or (rows is not None and rows < FEWEST_ROWS) or _step(depth) < _FEWEST_GROUPS:
        return 0

    def estimate(height: int) -> float:
        return cycles(rows, height, depth, vectors, machine, pieces=pieces, is_copied=is_copied)

    best = min(range(min(rows, 2 * ROWS), 0, -1), key=estimate) if rows is not None else ROWS
    return best if estimate(best) <= tiles.cycles(rows, pieces * depth, vectors, machine) else 0


def cycles(
    rows: int | None,
    height: int,
    depth: int,
    vectors: int,
    machine: Machine,
    *,
    pieces: int = 1,
    is_copied: bool = False,
) -> float:
    """Return the cycles for one vector of results of a product by kernels of `height` rows, on a machine with AMX.

    The product has `rows` rows; None means a symbolic number, for which the cycles are those of one kernel. `depth` is
    `Kernel.depth`, `pieces` is `Kernel.pieces`, and `vectors` is the number of vectors of results. The estimate takes
    the left operand from the first-level cache and the right one from the second-level cache. Rows that do not fill
    whole kernels are copied first, once for all vectors; others are where `is_copied`.
    """
    parts = [
        _multiplying(height, depth, width, machine, pieces) + _costs(machine).start
        for width in _widths(height, vectors)
    ]
    total = (_costs(machine).configure + -(-(rows or height) // height) * sum(parts)) / vectors
    if rows is not None and not rows % height and not is_copied:
        return total
    size = 4 * (rows or height) * depth
    return total + cost.move_cycles(size, size, size, machine) / vectors


def _costs(machine: Machine) -> Tiles:
    if machine.tiles is None:
        raise ValueError("a machine without AMX has no cycles of its kernels")
    return machine.tiles


def cycles_of_call(rows: int, depth: int, vectors: int, machine: Machine, *, pieces: int = 1) -> float:
    """Return the cycles of a call of a kernel for `rows` rows, 32 at most, and `vectors` vectors of results.

    The registers are configured before. `depth` is `Kernel.depth`, and `pieces` is `Kernel.pieces`. `machine` has AMX.
    """
    widths = _widths(rows, vectors)
    return sum(_multiplying(rows, depth, width, machine, pieces) + _costs(machine).start for width in widths)


def cycles_between(depth: int, other: int, machine: Machine) -> float:
    """Return the cycles to configure the registers for calls of two kernels of equal rows that take turns.

    `depth` and `other` are the depths of the two kernels (`Kernel.depth`). Where both need the same configuration, it
    stays. `machine` has AMX.
    """
    return 0 if _step(depth) == _step(other) else 2 * _costs(machine).configure


def _multiplying(height: int, depth: int, width: int, machine: Machine, pieces: int) -> float:
    """The cycles to load the operands of `height` rows by `width` vectors of results, and to multiply them."""
    costs = _costs(machine)
    loading = costs.load_first * -(-height // ROWS) + costs.load_second * width
    return max(height * width * costs.multiply / ROWS, loading) * (pieces * depth // _step(depth))


def fill_depth(rows: int | None, groups: int, vectors: int, machine: Machine, *, pieces: int = 1) -> int:
    """Choose the groups of a pixel, or of a row of a matrix product, that reads `groups` groups: as many or a few more.

    Zeros fill the others. That takes less time where no good number of groups for a tile divides `groups`. The product
    has `rows` rows (None: symbolic) and `vectors` vectors of results, and a row of results reads `pieces` pixels.
    """
    filled = fill(groups)
    if filled == groups:
        return groups
    height = choose_rows(rows, filled, vectors, machine, pieces=pieces, is_copied=True)
    if not height:
        return groups
    by_tiles = cycles(rows, height, filled, vectors, machine, pieces=pieces, is_copied=True)
    return filled if by_tiles <= tiles.cycles(rows, pieces * groups, vectors, machine) else groups


def _widths(rows: int, vectors: int) -> list[int]:
    """The numbers of vectors of a kernel's results that tiles hold at a time, of `vectors` in all.

    Each is at most 4 if the `rows` fit one tile, at most 2 if they need two. They differ by one at most.
    """
    count = -(-vectors // (_RESULTS // -(-rows // ROWS)))
    return [vectors // count + (place < vectors % count) for place in range(count)]


def fill(groups: int) -> int:
    """Return the number of groups, `groups` or a few more, that a number of 8 to 16 divides: the groups of a tile."""
    candidates = [count for count in range(groups, groups + ROWS) if _step(count) >= _FEWEST_GROUPS]
    return min(candidates, key=lambda count: (count > groups, count // _step(count), count))


def choose_vectors(kernel: Kernel, vectors: int, tasks: int, machine: Machine) -> int:
    """Choose how many of a result's `vectors` one call of a kernel computes; those of the kernel itself do not count.

    The number divides `vectors`, and the results of a call fill at most half of the first-level cache. It is the
    smallest of those that take the least time and are even shares for all cores: while the unit multiplies for the next
    call, the core works on the results of the last one. `tasks` is the number of calls where each computes all vectors,
    or one where it is unknown.
    """
    most = max(_RESULTS, machine.first.size // (2 * 4 * LANES * kernel.rows))

    def estimate(count: int) -> float:
        each = cycles_of_call(kernel.rows, kernel.depth, count, machine, pieces=kernel.pieces) / count
        return each / cost.evenness(tasks * vectors // count, machine)

    return min((count for count in range(1, min(vectors, most) + 1) if vectors % count == 0), key=estimate)


def _step(depth: int) -> int:
    """The groups of one tile of the depth: the largest divisor that fits a tile, so that all tiles have one size."""
    return max(count for count in range(1, ROWS + 1) if depth % count == 0)


def attach(sch: Schedule, dot: Dot, kernels: Iterable[Kernel], task: LoopRV) -> None:
    """Attach the code of kernels to `task`, a loop around all calls of them."""
    sch.annotate(task, "pragma_import_llvm", write_code(dot, kernels))


def tensorize(sch: Schedule, dot: Dot, kernel: Kernel, row: LoopRV, start: LoopRV | None = None) -> None:
    """Replace a product's loop `row`, and the loops over channels and depth inside it, by a call of a kernel.

    `attach` attaches the kernel's code. `start` is the loop over rows that sets the results to zero, with a loop over
    channels inside it; it is removed, as the kernel does that. None leaves it, for a kernel that adds. Raises TVM's
    ScheduleError if the loops do not compute the product that `dot` and `kernel` describe.
    """
    name = _NAMES + ".".join([dot.name, *map(str, astuple(kernel))])
    if start is not None:
        nothing = _NAMES + ".".join([_START, dot.name, str(kernel.rows), str(kernel.vectors * LANES)])
        register(nothing)
        sch.tensorize(start, nothing)
    register(name)
    sch.tensorize(row, name)


@cache
def register(name: str) -> None:
    """Register the tensor intrinsic of the kernel `name` with TVM, which needs it to replay a schedule's trace.

    Ignores a name that is not one of an AMX kernel.
    """
    if not name.startswith(_NAMES):
        return
    kind, *numbers = name.removeprefix(_NAMES).split(".")
    if kind == _START:
        dot, rows, channels = numbers
        sizes = {"rows": rows, "channels": channels, "accumulator": DOTS[dot].accumulator}
        intrinsics.define(name, _NOTHING.format(**sizes), _ZERO.format(**sizes), "        T.evaluate(0)\n")
        return
    words = _words(DOTS[kind], Kernel(*map(int, numbers)))
    intrinsics.define(name, _DESCRIPTION.format(**words), _MEANING.format(**words), _CALL.format(**words))


def _symbol(dot: Dot, kernel: Kernel) -> str:
    """The name of the kernel's function in the library."""
    return _SYMBOL + "_".join([dot.name, *map(str, astuple(kernel))])


def _words(dot: Dot, kernel: Kernel) -> dict[str, object]:
    """The words that fill the templates of a kernel's description."""
    size, groups = dot.group, kernel.groups
    reduced: dict[str, int] = {"vk": kernel.depth, "vg": size}
    left: tuple[int, ...]
    right: tuple[int, ...]
    if kernel.taps_h:
        y, x, k, apart = "0", "0", "vk", kernel.spread or 1
        if kernel.taps_w > 1 and kernel.spread:
            x, reduced = "vx", {"vx": kernel.taps_w, **reduced}
        elif kernel.taps_w > 1:
            x, k = f"vk // {groups}", f"vk % {groups}"
        if kernel.taps_h > 1:
            y, reduced = "vy", {"vy": kernel.taps_h, **reduced}
        high = (kernel.taps_h - 1) * kernel.dilation + 1
        wide = (kernel.rows - 1) * kernel.stride + (kernel.taps_w - 1) * apart + 1
        pixel = "pixel" if kernel.spread else str(groups * size)
        left, left_strides = (high, wide, groups * size), f"[line, {pixel}, 1]"
        left_index = f"{y} * {kernel.dilation}, vi * {kernel.stride} + {x} * {apart}, {k} * {size} + vg"
        right = (kernel.vectors, kernel.taps_h, kernel.taps_w, groups, LANES, size)
        right_index = f"vc // {LANES}, {y}, {x}, {k}, vc % {LANES}, vg"
    else:
        pixel = "pixel"
        left, left_strides, left_index = (kernel.rows, groups * size), "[pixel, 1]", f"vi, vk * {size} + vg"
        right = (kernel.vectors, groups, LANES, size)
        right_index = f"vc // {LANES}, vk, vc % {LANES}, vg"
    widened = WIDE[dot.name]
    return {
        "name": _symbol(dot, kernel),
        "data": dot.data,
        "weight": dot.weight,
        "accumulator": dot.accumulator,
        "rows": kernel.rows,
        "channels": kernel.vectors * LANES,
        "left": left,
        "left_strides": left_strides,
        "left_region": ", ".join(f"0:{extent}" for extent in left),
        "right": right,
        "right_region": ", ".join(f"0:{extent}" for extent in right),
        "loops": ", ".join(name[1:] for name in reduced),
        "extents": ", ".join(map(str, reduced.values())),
        "reduced": ", ".join(reduced),
        "kinds": "R" * len(reduced),
        "left_value": widened.format(value=f"A[{left_index}]"),
        "right_value": widened.format(value=f"B[{right_index}]"),
        # From one row of the left operand to the next, and from one line of taps to the next.
        "pixel": f"{pixel} * T.int64({kernel.stride})" if kernel.taps_h else pixel,
        "line": "line" if kernel.taps_h else 0,
        "bytes": 4 // size,
    }


def write_code(dot: Dot, kernels: Iterable[Kernel]) -> str:
    """Return LLVM IR for the functions of kernels, each once.

    A function's parameters, in order: the results, the bytes from one row of results to the next, the left operand,
    the bytes from one row of it to the next, the bytes from one of its lines to the next, and the right operand. The
    tiles are configured once. They hold the results of a few vectors over the whole depth, then those of the next ones.
    """
    declarations = "\n".join(
        f"declare void @{INTRINSICS}{name}({arguments})"
        for name, arguments in (
            ("ldtilecfg", "ptr"),
            ("tilezero", "i8"),
            ("tileloadd64", "i8, ptr, i64"),
            ("tilestored64", "i8, ptr, i64"),
            (_MULTIPLY[dot.name], "i8, i8, i8"),
            ("tilerelease", ""),
        )
    )
    declarations += f"\ndeclare void @{PREFETCH}(ptr, i32, i32, i32)"
    declarations += "".join(f"\ndeclare i64 @llvm.{name}.i64(i64, i64)" for name in ("umin", "umax"))
    kernels = list(dict.fromkeys(kernels))
    configurations = dict.fromkeys(kernel.configuration for kernel in kernels)
    release = _setting(RELEASE, f"call void @{INTRINSICS}tilerelease()")
    functions = [*map(_configuring, configurations), release, *(_function(dot, kernel) for kernel in kernels)]
    return "\n".join([declarations, *functions])


def _configuring(configuration: Configuration) -> str:
    """The function that configures the tile registers, and the bytes that it reads."""
    name = configuration.symbol
    content = "".join(f"\\{byte:02X}" for byte in configuration.tiles)
    sizes = f'@{name}_sizes = linkonce_odr constant [64 x i8] c"{content}", align 64\n'
    return sizes + _setting(name, f"call void @{INTRINSICS}ldtilecfg(ptr @{name}_sizes)")


def _setting(name: str, call: str) -> str:
    """A function `name` without parameters that does one call."""
    return f"define linkonce_odr void @{name}() noinline {{\n  {call}\n  ret void\n}}\n"


def _function(dot: Dot, kernel: Kernel) -> str:
    multiply, symbol = _MULTIPLY[dot.name], _symbol(dot, kernel)
    heights, step, widths = kernel.heights, _step(kernel.depth), kernel.widths
    most = kernel.configuration.most_vectors
    steps = kernel.depth // step
    size = 4 * LANES * kernel.depth * kernel.pieces
    taps = kernel.taps_w if kernel.spread else 1
    starts = [sum(heights[:place]) for place in range(len(heights))]
    lines: list[str] = []

    def value(text: str) -> str:
        lines.append(f"  %v{len(lines)} = {text}")
        return f"%v{len(lines) - 1}"

    def move_pointer(base: str, offset: str) -> str:
        return value(f"getelementptr i8, ptr {base}, i64 {offset}")

    def intrinsic(name: str, arguments: str) -> None:
        lines.append(f"  call void @{INTRINSICS}{name}({arguments})")

    def move_results(name: str, width: int) -> None:
        for place, start in enumerate(starts):
            row = move_pointer(f"%results_{width}", value(f"mul i64 %c_row, {start}"))
            for vector in range(width):
                target = move_pointer(row, str(4 * LANES * vector))
                intrinsic(name, f"i8 {place * most + vector}, ptr {target}, i64 %c_row")

    def fetch_lines(width: int) -> None:
        """Fetch the lines of one step of the depth of `width` vectors."""
        begin = value(f"mul i64 %first_{width}, {steps * kernel.pieces}")
        number = value(f"add i64 {begin}, {value(f'mul i64 %t_{width}, {width}')}")
        own, count = value(f"mul i64 {number}, %fetches"), value(f"mul i64 {width}, %fetches")
        lines.extend([f"  br label %fetch_{width}", f"fetch_{width}:"])
        lines.append(f"  %line_{width} = phi i64 [0, %loop_{width}], [%next_line_{width}, %fetch_{width}]")
        line = value(f"add i64 {own}, %line_{width}")
        within = value(f"call i64 @llvm.umin.i64(i64 {line}, i64 %last_line)")
        address = move_pointer("%fetch", value(f"mul i64 {within}, {_LINE}"))
        lines.extend(
            [
                f"  call void @{PREFETCH}(ptr {address}, i32 0, i32 2, i32 1)",
                f"  %next_line_{width} = add i64 %line_{width}, 1",
                f"  %more_lines_{width} = icmp ult i64 %next_line_{width}, {count}",
                f"  br i1 %more_lines_{width}, label %fetch_{width}, label %tiles_{width}",
                f"tiles_{width}:",
            ]
        )

    below = [value(f"mul i64 %a_row, {start}") for start in starts]
    tap = value(f"mul i64 {value(f'udiv i64 %a_row, {kernel.stride}')}, {kernel.spread}")
    if kernel.fetches:
        # So many lines for each step of each vector, in order, and for the last steps the last line again.
        calls = steps * kernel.pieces * kernel.vectors
        lines.append(f"  %fetches = udiv i64 {value(f'add i64 %lines, {calls - 1}')}, {calls}")
        lines.append("  %fetch = getelementptr i8, ptr %b, i64 %ahead")
        lines.append(f"  %last_line = sub i64 {value('call i64 @llvm.umax.i64(i64 %lines, i64 1)')}, 1")
    before, first = "entry", 0
    for width in sorted(set(widths), reverse=True):
        end = first + width * widths.count(width)
        lines += [f"  br label %vectors_{width}", f"vectors_{width}:"]
        lines.append(f"  %first_{width} = phi i64 [{first}, %{before}], [%next_{width}, %end_{width}]")
        beside = value(f"mul i64 %first_{width}, {4 * LANES}")
        lines.append(f"  %results_{width} = getelementptr i8, ptr %c, i64 {beside}")
        weights = move_pointer("%b", value(f"mul i64 %first_{width}, {size}"))
        if kernel.adds:
            move_results("tileloadd64", width)
        else:
            for place in range(len(heights)):
                for vector in range(width):
                    intrinsic("tilezero", f"i8 {place * most + vector}")
        lines += [f"  br label %loop_{width}", f"loop_{width}:"]
        end_of_step = f"tiles_{width}" if kernel.fetches else f"loop_{width}"
        lines.append(f"  %t_{width} = phi i64 [0, %vectors_{width}], [%next_t_{width}, %{end_of_step}]")
        if kernel.fetches:
            fetch_lines(width)
        line = value(f"mul i64 {value(f'udiv i64 %t_{width}, {steps * taps}')}, {kernel.dilation}")
        within = value(f"mul i64 {value(f'urem i64 %t_{width}, {steps}')}, {4 * step}")
        left = move_pointer(move_pointer("%a", value(f"mul i64 {line}, %a_line")), within)
        if kernel.spread:
            number = value(f"urem i64 {value(f'udiv i64 %t_{width}, {steps}')}, {taps}")
            left = move_pointer(left, value(f"mul i64 {number}, {tap}"))
        right = move_pointer(weights, value(f"mul i64 %t_{width}, {4 * LANES * step}"))
        for place, offset in enumerate(below):
            intrinsic("tileloadd64", f"i8 {_LEFT + place}, ptr {move_pointer(left, offset)}, i64 %a_row")
        for vector in range(width):
            tile = _RIGHT + vector % 2
            intrinsic("tileloadd64", f"i8 {tile}, ptr {move_pointer(right, str(size * vector))}, i64 {4 * LANES}")
            for place in range(len(heights)):
                intrinsic(multiply, f"i8 {place * most + vector}, i8 {_LEFT + place}, i8 {tile}")
        lines += [
            f"  %next_t_{width} = add i64 %t_{width}, 1",
            f"  %more_t_{width} = icmp ult i64 %next_t_{width}, {steps * kernel.pieces}",
            f"  br i1 %more_t_{width}, label %loop_{width}, label %end_{width}",
            f"end_{width}:",
        ]
        move_results("tilestored64", width)
        lines += [
            f"  %next_{width} = add i64 %first_{width}, {width}",
            f"  %more_{width} = icmp ult i64 %next_{width}, {end}",
            f"  br i1 %more_{width}, label %vectors_{width}, label %done_{width}",
            f"done_{width}:",
        ]
        before, first = f"done_{width}", end
    head = (
        f"define linkonce_odr void @{symbol}(ptr %c, i64 %c_row, ptr %a, i64 %a_row, i64 %a_line, ptr %b, "
        "i64 %ahead, i64 %lines) noinline {"
    )
    return "\n".join([head, "entry:", *lines, "  ret void", "}", ""])
