"""LSTM, GRU and RNN: the recurrence over the steps of sequences as one function.

The products of the inputs do not depend on the recurrence and are computed before, by a dense layer over all steps. The
function reads the recurrent weights once per step, from packed tiles of whole vectors of units, and keeps the sums of a
tile and a few sequences in registers. Where there are more sequences, the weights of a tile are read in parts that stay
in the first-level cache while all sequences are multiplied. Either each core computes whole sequences, or all cores
share the units of each step.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from tvm import tirx
from tvm.script.ir_builder import IRBuilder
from tvm.script.ir_builder import tirx as T

from tvmflow.compiler.annotations import KERNEL, OPERATIONS
from tvmflow.compiler.dotproduct import INT8, add_dot_int8
from tvmflow.compiler.machine import Machine
from tvmflow.compiler.operators.cell_tiles import parts_of_batch, tiles
from tvmflow.compiler.operators.cells import ACTIVATIONS, ZERO, Cell
from tvmflow.compiler.operators.common import TO_READ, buffer, prefetch, registers, run, size_parameter, static
from tvmflow.compiler.vectormath import let


def _stored(index: Any, dtype: str = "int64") -> Any:
    """An index or a number that many accesses share, read from a variable of the function; a constant stays itself.

    Passes simplify the index of every access: a large one of symbolic sizes in hundreds of accesses takes them seconds.
    They look through a binding, but not into memory; LLVM keeps the variable in a register.
    """
    if isinstance(index, int | tirx.IntImm):
        return index
    variable = registers((1,), dtype)
    T.buffer_store(variable, index, [0])
    return variable[0]


class Recurrence:
    """Builds the TIR function of a recurrence.

    The function's parameters come in this order: the products of the inputs [steps, batch, directions * gates * padded
    units] with their bias, their columns packed as by `pack_units`; the packed recurrent weights of each phase; the
    tensors called `extra`; the results. `extra` may name `split_bias`, `lengths`, `initial_h`, `initial_c` and
    `peepholes`. `steps` and `batch` are integers or symbolic sizes; `units` is the number of hidden units.

    With `integers`, a quantised cell multiplies 8-bit integers by dot-product instructions. The recurrent weights of
    its only phase are then packed by `pack_integers`; their scales `r_scale` and sums `r_sum` are among `extra`.
    """

    def __init__(
        self,
        cell: Cell,
        steps: Any,
        batch: Any,
        units: int,
        extra: Sequence[str],
        machine: Machine,
        *,
        integers: bool = False,
    ) -> None:
        self.cell = cell
        self.units = units
        self._integers = integers
        self.tiles = tiles(cell, units, static(batch), machine)
        self._machine = machine
        self._extra = extra
        self._steps = size_parameter(steps, "steps")
        self._batch = size_parameter(batch, "batch")
        tile = self.tiles
        shapes = {
            "split_bias": (cell.directions, tile.count, tile.blocks, tile.lanes),
            "lengths": (self._batch,),
            "initial_h": (cell.directions, self._batch, units),
            "initial_c": (cell.directions, self._batch, units),
            "peepholes": (cell.directions, tile.count, tile.blocks, 3, tile.lanes),
            "r_scale": (cell.directions, tile.count, tile.blocks, cell.gates, tile.lanes),
            "r_sum": (cell.directions, tile.count, tile.blocks, cell.gates, tile.lanes),
        }
        dtypes = {"lengths": "int32", "r_sum": "int32"}
        columns = cell.directions * cell.gates * tile.units
        self._x = buffer("x", (self._steps, self._batch, columns))
        if integers:
            groups = (-(-units // INT8.group), tile.blocks, cell.gates, INT8.group * tile.lanes)
            self._weights = [buffer("r0", (cell.directions, tile.count, *groups), INT8.weight)]
        else:
            self._weights = [
                buffer(f"r{place}", (cell.directions, tile.count, units, tile.blocks, len(gates), tile.lanes))
                for place, gates in enumerate(cell.phases)
            ]
        self._optional = {name: buffer(name, shapes[name], dtypes.get(name, "float32")) for name in extra}
        self._y = buffer("y", (self._steps, cell.directions, self._batch, units))
        state = (cell.directions, self._batch, units)
        self._last = [buffer(f"last_{name}", state) for name in ("h", "c")[: 2 if cell.kind == "lstm" else 1]]

    def function(self) -> tirx.PrimFunc:
        """Return the function, whose attribute `KERNEL` tells the schedules to leave it unchanged."""
        with IRBuilder() as builder, T.seq_scope():
            self._allocate()
            if not self._shares_units:
                self._by_sequence()
            elif static(self._batch) is None and not self.cell.quantised:
                many = self._batch * self.cell.directions >= self._machine.cores
                with T.If(many):
                    with T.Then():
                        self._by_sequence()
                    with T.Else():
                        self._by_units()
            else:
                self._by_units()
        parameters = [self._x, *self._weights, *self._optional.values(), self._y, *self._last]
        operations = 2 * self.cell.directions * self.cell.gates * self.units**2
        # The builder marks the sequence of statements by an attribute.
        function = tirx.PrimFunc(parameters, builder.get().body)
        return function.with_attr({KERNEL: "recurrence", OPERATIONS: operations})

    @cached_property
    def _shares_units(self) -> bool:
        """Whether the cores share the units of each step, at least for a batch smaller than the number of cores."""
        machine, batch = self._machine, static(self._batch)
        products = self.cell.gates * self.units * self.units
        cycles = self.cell.directions * (batch or 1) * products // self.tiles.lanes
        if self.cell.quantised:
            # The sequences of a direction have their levels in common, so one core computes them all.
            batch = 1
        if machine.cores == 1 or cycles < machine.parallel_cycles:
            return False
        fills_cores = self.cell.directions * (batch or 1) >= machine.cores
        # Weights that fit into a core's cache are best read by one core for all steps.
        size = products * (1 if self._integers else 4)
        return self.cell.directions < machine.cores and (not fills_cores or size > machine.own_cache)

    def _allocate(self) -> None:
        shape = (self.cell.directions, self._batch, self.tiles.units)
        self._h = T.alloc_buffer((2, *shape), "float32", scope="global", layout=None)
        names = {"lstm": ["c"], "gru": ["update", "reset"] if len(self.cell.phases) > 1 else [], "rnn": []}
        # The rounded outputs of the previous step; as integers, the distance of their levels and the place of zero.
        self._levels: Any = None
        if self.cell.quantised:
            dtype = INT8.data if self._integers else "float32"
            self._levels = T.alloc_buffer(shape, dtype, scope="global", layout=None)
        if self._integers:
            self._distance = T.alloc_buffer((self.cell.directions,), "float32", scope="global", layout=None)
            self._zero = T.alloc_buffer((self.cell.directions,), "int32", scope="global", layout=None)
        self._state = {
            name: T.alloc_buffer(shape, "float32", scope="global", layout=None) for name in names[self.cell.kind]
        }

    # -- Which core computes what --------------------------------------------------------------------------------------

    def _by_sequence(self) -> None:
        """Compute whole sequences: a task for each direction and part of the batch."""
        parts = 1 if self.cell.quantised else parts_of_batch(self.cell, self._machine)
        batch = static(self._batch)
        parts = parts if batch is None else min(parts, batch)
        rows = tirx.floordiv(self._batch + parts - 1, parts) if batch is None else -(-batch // parts)
        loop = T.parallel if self._machine.cores > 1 and parts * self.cell.directions > 1 else T.serial
        with loop(0, parts * self.cell.directions) as task:
            direction, part = task // parts, task % parts
            # The last parts are empty where the others hold the whole batch, as one sequence in three parts of one.
            begin = tirx.min(part * rows, self._batch)
            end = tirx.min(begin + rows, self._batch)
            size = end - begin if batch is None or batch % parts else rows
            if parts == 1:
                begin, end, size = tirx.const(0, "int64"), self._batch, self._batch
            self._start(direction, begin, end)
            longest = self._longest(begin, end)
            with T.serial(0, longest) as step:
                self._quantise(direction, step, begin, end)
                for phase in range(len(self.cell.phases)):
                    with T.serial(0, self.tiles.count) as tile:
                        self._tile(_Place(phase, direction, tile, step), begin, size)
            self._finish(direction, begin, end, longest)

    def _by_units(self) -> None:
        """Share the tiles of each step among the cores."""
        count, none = self.tiles.count, tirx.const(0, "int64")
        with T.serial(0, self.cell.directions) as direction:
            self._start(direction, none, self._batch)
        longest = self._longest(none, self._batch)
        with T.serial(0, longest) as step:
            if self.cell.quantised:
                with T.serial(0, self.cell.directions) as direction:
                    self._quantise(direction, step, none, self._batch)
            for phase in range(len(self.cell.phases)):
                with T.parallel(0, self.cell.directions * count) as task:
                    self._tile(_Place(phase, task // count, task % count, step), none, self._batch)
        with T.serial(0, self.cell.directions) as direction:
            self._finish(direction, none, self._batch, longest)

    def _longest(self, begin: Any, end: Any) -> Any:
        """Return the number of steps of the longest of the sequences from `begin` to `end`."""
        lengths = self._optional.get("lengths")
        if lengths is None:
            return self._steps
        longest = registers((1,), "int32")
        T.buffer_store(longest, tirx.const(0, "int32"), [0])
        with T.serial(0, end - begin) as row:
            T.buffer_store(longest, tirx.max(longest[0], lengths[begin + row]), [0])
        return _stored(tirx.min(tirx.Cast("int64", longest[0]), self._steps))

    def _start(self, direction: Any, begin: Any, end: Any) -> None:
        """Set the states before the first step, zeros in the units that padding adds."""
        targets = {"initial_h": self._h, "initial_c": self._state.get("c")}
        with T.serial(0, end - begin) as row:
            for name, target in targets.items():
                if target is None:
                    continue
                place = (direction, begin + row) if name == "initial_c" else (0, direction, begin + row)
                with T.serial(0, self.tiles.units) as unit:
                    T.buffer_store(target, ZERO, [*place, unit])
                if name in self._optional:
                    with T.serial(0, self.units) as unit:
                        value = self._optional[name][direction, begin + row, unit]
                        T.buffer_store(target, value, [*place, unit])

    def _quantise(self, direction: Any, step: Any, begin: Any, end: Any) -> None:
        """Round the previous outputs of the sequences from `begin` to `end`, if the cell is quantised.

        The range of the levels, their distance and the place of zero are those of ONNX's DynamicQuantizeLinear.
        """
        if self._levels is None:
            return
        lanes, blocks = self.tiles.lanes, self.tiles.units // self.tiles.lanes
        ends = registers((2, lanes))
        chooses = (tirx.min, tirx.max)
        for which in range(2):
            with T.vectorized(0, lanes) as lane:
                T.buffer_store(ends, ZERO, [which, lane])
        with T.serial(0, end - begin) as row, T.serial(0, blocks) as block:
            for which, choose in enumerate(chooses):
                with T.vectorized(0, lanes) as lane:
                    value = self._h[(step % 2, direction, begin + row, block * lanes + lane)]
                    T.buffer_store(ends, choose(ends[which, lane], value), [which, lane])
        totals = []
        for which, choose in enumerate(chooses):
            total = ZERO
            for lane in range(lanes):
                total = choose(total, ends[which, lane])
            totals.append(_stored(total, "float32"))
        least, greatest = totals
        span = _stored(greatest - least, "float32")
        distance = _stored(tirx.Select(span > ZERO, span / 255.0, tirx.const(1.0, "float32")), "float32")
        zero = _stored(tirx.nearbyint(ZERO - least / distance), "float32")
        if self._integers:
            T.buffer_store(self._distance, distance, [direction])
            T.buffer_store(self._zero, zero.astype("int32"), [direction])
        with T.serial(0, end - begin) as row, T.serial(0, blocks) as block, T.vectorized(0, lanes) as lane:
            value = self._h[(step % 2, direction, begin + row, block * lanes + lane)]
            number = tirx.max(tirx.min(tirx.nearbyint(value / distance) + zero, 255.0), ZERO)
            place = [direction, begin + row, block * lanes + lane]
            number = number.astype(INT8.data) if self._integers else (number - zero) * distance
            T.buffer_store(self._levels, number, place)

    def _finish(self, direction: Any, begin: Any, end: Any, longest: Any) -> None:
        """Copy the states after `longest` steps to the results, and write zeros as the outputs of the steps after."""
        if "lengths" in self._optional:
            rest = T.serial(0, self._steps - longest), T.serial(0, end - begin), T.serial(0, self.units)
            with rest[0] as step, rest[1] as row, rest[2] as unit:
                T.buffer_store(self._y, ZERO, [longest + step, direction, begin + row, unit])
        with T.serial(0, end - begin) as row:
            sources: list[tuple[Any, tuple[Any, ...]]] = [(self._h, (longest % 2, direction, begin + row))]
            if "c" in self._state:
                sources.append((self._state["c"], (direction, begin + row)))
            for target, (source, place) in zip(self._last, sources, strict=True):
                with T.serial(0, self.units) as unit:
                    T.buffer_store(target, source[(*place, unit)], [direction, begin + row, unit])

    # -- One step of a tile of units -----------------------------------------------------------------------------------

    def _tile(self, at: "_Place", begin: Any, count: Any) -> None:
        """Compute a tile's units of one step for `count` sequences from `begin` on: products, gates and states."""
        rows, known = self.tiles.rows, static(count)
        if known is not None and known <= rows:
            self._few(at, begin, known)
        elif known is not None or rows == 1:
            self._many(at, begin, count)
        else:
            with T.If(count >= rows):
                with T.Then():
                    self._many(at, begin, count)
                with T.Else(), T.serial(0, count) as row:
                    self._few(at, begin + row, 1)

    def _few(self, at: "_Place", begin: Any, count: int) -> None:
        """Compute a tile's units of one step for a few sequences, whose sums stay in registers."""
        sums = self._sums(at, count, "local")
        begin = _stored(begin)
        self._add_products(at, begin, count, (0, self._depth), sums, 0, is_first=True)
        for row in range(count):
            self._finish_units(at, begin + row, sums, row)

    def _many(self, at: "_Place", begin: Any, count: Any) -> None:
        """Compute a tile's units of one step for groups of sequences, whose weights stay in the first-level cache.

        The last group ends with the last sequence, and may compute some of the group before it once more.
        """
        rows, depth, deep = self.tiles.rows, self._depth, self._depth_of_part(at.phase)
        groups = tirx.floordiv(count + rows - 1, rows)
        slots = _stored(groups * rows)
        sums = self._sums(at, count + rows - 1, "global")
        with T.serial(0, count) as row:
            self._fetch_inputs(_Units(self, at.direction, 0, at.tile, at.step, begin + row, 0, sums))

        def multiply(part: tuple[Any, Any], *, is_first: bool) -> None:
            with T.serial(0, groups) as group:
                slot = _stored(group * rows)
                first = _stored(begin + tirx.min(slot, count - rows))
                self._add_products(at, first, rows, part, sums, slot, is_first=is_first)

        multiply((0, deep), is_first=True)
        if deep < depth:
            with T.serial(1, -(-depth // deep)) as number:
                start = number * deep
                multiply((start, deep if depth % deep == 0 else tirx.min(deep, depth - start)), is_first=False)
        with T.serial(0, count) as row:
            slot = _stored(tirx.Select(row >= slots - rows, row + slots - count, row))
            self._finish_units(at, begin + row, sums, slot)

    def _fetch_inputs(self, unit: "_Units") -> None:
        """Fetch the products of the inputs for a tile's units of one step of a sequence, while others are computed.

        They are lines far apart, which the processor does not foresee.
        """
        tile = self.tiles
        numbers = tile.blocks * self.cell.gates * tile.lanes
        column = (unit.direction * tile.count + unit.tile) * numbers
        for number in range(0, numbers, self._machine.first.line // self._machine.number):
            T.evaluate(prefetch(self._x, (unit.position, unit.sequence, column + number), TO_READ))

    def _sums(self, at: "_Place", rows: Any, scope: str) -> Any:
        """Allocate the sums of a tile's units for `rows` sequences."""
        shape = (rows, self.tiles.blocks, len(self.cell.phases[at.phase]), self.tiles.lanes)
        return T.alloc_buffer(shape, "float32", scope=scope, layout=None)

    def _finish_units(self, at: "_Place", sequence: Any, sums: Any, row: Any) -> None:
        """Compute the gates and states of a sequence from the row `row` of `sums`."""
        follow = {"lstm": self._lstm, "gru": self._gru, "rnn": self._rnn}[self.cell.kind]
        for which in self._directions(at.direction):
            with which as number:
                unit = _Units(self, at.direction, number, at.tile, at.step, sequence, row, sums)
                for block in range(self.tiles.blocks):
                    follow(unit, at.phase, block)

    @property
    def _depth(self) -> int:
        """The number of units, or of groups of them, whose weights a tile multiplies."""
        return -(-self.units // INT8.group) if self._integers else self.units

    def _depth_of_part(self, phase: int) -> int:
        """The number of units whose weights stay in the first-level cache while all sequences are multiplied."""
        if self._integers:
            return self._depth
        line = self.tiles.blocks * len(self.cell.phases[phase]) * self.tiles.lanes * self._machine.number
        most = max(1, self._machine.first.size // 2 // line)
        return -(-self.units // -(-self.units // most))

    def _add_products(
        self,
        at: "_Place",
        first: Any,
        rows: int,
        part: tuple[Any, Any],
        totals: Any,
        place: Any,
        *,
        is_first: bool,
    ) -> None:
        """Add the products with a part of a tile's weights to the rows of `totals` from `place` on.

        They are those of `rows` sequences from `first` on. `part` is the first unit of the weights and the number of
        units. The first part sets the rows.
        """
        gates, blocks, lanes = self.cell.phases[at.phase], self.tiles.blocks, self.tiles.lanes
        # A weight is used for all rows before the next: those of all gates at once would need more registers.
        places = [(row, block, gate) for block in range(blocks) for gate in range(len(gates)) for row in range(rows)]
        sums = self._sums(at, rows, "local")
        if self._integers:
            self._integer_sums(at, first, sums, places)
        else:
            for row, block, gate in places:
                with T.vectorized(0, lanes) as lane:
                    value = (
                        self._initial(gates[gate], at.direction, at.tile, block, lane)
                        if is_first
                        else totals[place + row, block, gate, lane]
                    )
                    T.buffer_store(sums, value, [row, block, gate, lane])
            self._float_sums(at, first, sums, places, part)
        for row, block, gate in places:
            with T.vectorized(0, lanes) as lane:
                T.buffer_store(totals, sums[row, block, gate, lane], [place + row, block, gate, lane])

    def _float_sums(
        self, at: "_Place", first: Any, sums: Any, places: Sequence[tuple[int, int, int]], part: tuple[Any, Any]
    ) -> None:
        """Add the products of float32 numbers with a part of a tile's weights to `places` of `sums`."""
        lanes, weights = self.tiles.lanes, self._weights[at.phase]
        place: tuple[Any, ...] = (at.direction,)
        if at.phase > 0:
            source = self._state["reset"]
        elif self._levels is not None:
            source = self._levels
        else:
            source, place = self._h, (at.step % 2, at.direction)
        start, count = part
        with T.serial(0, count) as number:
            k = start + number
            for row, block, gate in places:
                with T.vectorized(0, lanes) as lane:
                    product = source[(*place, first + row, k)] * weights[at.direction, at.tile, k, block, gate, lane]
                    index = [row, block, gate, lane]
                    T.buffer_store(sums, sums[tuple(index)] + product, index)

    def _integer_sums(self, at: "_Place", first: Any, sums: Any, places: Sequence[tuple[int, int, int]]) -> None:
        """Store the products of integers with a tile's weights, as float32, in the `places` of `sums`."""
        lanes, group, (weights,) = self.tiles.lanes, INT8.group, self._weights
        shape = tuple(int(size) for size in sums.shape)
        totals = registers(shape, INT8.accumulator)
        for place in places:
            with T.vectorized(0, lanes) as lane:
                T.buffer_store(totals, tirx.const(0, INT8.accumulator), [*place, lane])
        with T.serial(0, self._depth) as k:
            for row, block, gate in places:
                left = self._levels[at.direction, first + row, tirx.Ramp(k * group, tirx.const(1, "int64"), group)]
                right = weights[at.direction, at.tile, k, block, gate, run(group * lanes)]
                total = totals[row, block, gate, run(lanes)]
                T.buffer_store(totals, add_dot_int8(total, left, right, lanes), [row, block, gate, run(lanes)])
        scales, of_weights = self._optional["r_scale"], self._optional["r_sum"]
        for row, block, gate in places:
            with T.vectorized(0, lanes) as lane:
                column = (at.direction, at.tile, block, gate, lane)
                total = totals[row, block, gate, lane] - self._zero[at.direction] * of_weights[column]
                value = total.astype("float32") * (self._distance[at.direction] * scales[column])
                T.buffer_store(sums, value, [row, block, gate, lane])

    def _initial(self, gate: int, direction: Any, tile: Any, block: int, lane: Any) -> Any:
        if self.cell.splits_bias and gate == 2:
            bias = self._optional.get("split_bias")
            return ZERO if bias is None else bias[direction, tile, block, lane]
        return ZERO

    def _directions(self, direction: Any) -> Iterator[Any]:
        """Yield a context for each direction with other activations, which gives the direction's number."""
        count = len(self.cell.activations) // self.cell.directions
        if self.cell.directions == 1 or self.cell.activations[:count] == self.cell.activations[count:]:
            yield _always(0)
            return
        for number in range(2):
            yield _when(direction == number, number)

    # -- What follows the products -------------------------------------------------------------------------------------

    def _lstm(self, unit: "_Units", _phase: int, block: int) -> None:
        cells, forget_by_input = self._state["c"], self.cell.input_forget
        with T.vectorized(0, self.tiles.lanes) as lane:
            before = cells[tuple(unit.state(block, lane))]
            update = unit.gate(block, 0, lane, 0, unit.peephole(block, 0, before, lane))
            hidden = unit.gate(block, 3, lane, 1)
            if forget_by_input:
                value = before + update * (hidden - before)
            else:
                value = unit.gate(block, 2, lane, 0, unit.peephole(block, 2, before, lane)) * before + update * hidden
            T.buffer_store(cells, unit.unless_ended(value, before), unit.state(block, lane))
        with T.vectorized(0, self.tiles.lanes) as lane:
            cell = cells[tuple(unit.state(block, lane))]
            output = unit.gate(block, 1, lane, 0, unit.peephole(block, 1, cell, lane))
            unit.store(
                block,
                lane,
                # ONNX Runtime clips what the gates' activations get, and not the cell.
                unit.unless_ended(output * unit.activation(2, cell), unit.before(block, lane)),
            )
        unit.write(block)

    def _gru(self, unit: "_Units", phase: int, block: int) -> None:
        if self.cell.linear_before_reset:
            with T.vectorized(0, self.tiles.lanes) as lane:
                reset = unit.gate(block, 1, lane, 0)
                unit.store(block, lane, reset * unit.sums[unit.row, block, 2, lane])
            with T.vectorized(0, self.tiles.lanes) as lane:
                hidden = unit.input(block, 2, lane) + unit.after(block, lane)
                unit.store(block, lane, unit.activation(1, unit.clipped(hidden)))
            with T.vectorized(0, self.tiles.lanes) as lane:
                unit.blend(block, lane, unit.gate(block, 0, lane, 0))
            unit.write(block)
            return
        if phase == 0:
            with T.vectorized(0, self.tiles.lanes) as lane:
                place = unit.state(block, lane)
                T.buffer_store(self._state["update"], unit.gate(block, 0, lane, 0), place)
                T.buffer_store(self._state["reset"], unit.gate(block, 1, lane, 0) * unit.before(block, lane), place)
            return
        with T.vectorized(0, self.tiles.lanes) as lane:
            hidden = unit.input(block, 2, lane) + unit.sums[unit.row, block, 0, lane]
            unit.store(block, lane, unit.activation(1, unit.clipped(hidden)))
        with T.vectorized(0, self.tiles.lanes) as lane:
            unit.blend(block, lane, self._state["update"][tuple(unit.state(block, lane))])
        unit.write(block)

    def _rnn(self, unit: "_Units", _phase: int, block: int) -> None:
        with T.vectorized(0, self.tiles.lanes) as lane:
            unit.store(block, lane, unit.unless_ended(unit.gate(block, 0, lane, 0), unit.before(block, lane)))
        unit.write(block)


@dataclass(frozen=True)
class _Place:
    """The numbers of a tile of units, of its direction, and of the step and phase in which it is computed."""

    phase: int
    direction: Any
    tile: Any
    step: Any


@dataclass(frozen=True)
class _Units:
    """A tile's units of one step of the sequence `sequence`, whose sums are the row `row` of `sums`."""

    owner: Recurrence
    direction: Any
    number: int
    tile: Any
    step: Any
    sequence: Any
    row: int
    sums: Any

    @cached_property
    def length(self) -> Any:
        """The number of the sequence's steps."""
        lengths, steps = self.owner._optional.get("lengths"), self.owner._steps
        if lengths is None:
            return steps
        return tirx.max(tirx.min(tirx.Cast("int64", lengths[self.sequence]), steps), tirx.const(0, "int64"))

    @cached_property
    def is_within(self) -> Any | None:
        """Whether the sequence still has this step; None where every sequence has all steps."""
        return None if "lengths" not in self.owner._optional else self.step < self.length

    @cached_property
    def position(self) -> Any:
        """The place of the step in the sequence: the last comes first where it is read in reverse."""
        direction = self.owner.cell.direction
        if direction == "forward":
            return self.step
        mirrored = self.length - 1 - self.step
        if self.is_within is not None:
            mirrored = tirx.Select(self.is_within, mirrored, self.step)
        if direction == "bidirectional":
            mirrored = tirx.Select(self.direction == 1, mirrored, self.step)
        return mirrored

    def state(self, block: int, lane: Any) -> list[Any]:
        """Return the place of a unit in the states."""
        tile = self.owner.tiles
        return [self.direction, self.sequence, (self.tile * tile.blocks + block) * tile.lanes + lane]

    def before(self, block: int, lane: Any) -> Any:
        """Return a unit's output of the previous step."""
        return self.owner._h[(self.step % 2, *self.state(block, lane))]

    def after(self, block: int, lane: Any) -> Any:
        """Return a unit's output of this step, as stored so far."""
        return self.owner._h[((self.step + 1) % 2, *self.state(block, lane))]

    def input(self, block: int, gate: int, lane: Any) -> Any:
        """Return the product of the input with the weights of a gate."""
        tile, gates = self.owner.tiles, self.owner.cell.gates
        column = ((self.direction * tile.count + self.tile) * tile.blocks + block) * gates + gate
        return self.owner._x[self.position, self.sequence, column * tile.lanes + lane]

    def gate(self, block: int, gate: int, lane: Any, function: int, more: Any = None) -> Any:
        """Return a gate's value: the activation number `function` of the sum of its products and `more`."""
        value = self.input(block, gate, lane) + self.sums[self.row, block, gate, lane]
        return self.activation(function, self.clipped(value if more is None else value + more))

    def peephole(self, block: int, gate: int, cell: Any, lane: Any) -> Any:
        """Return what the cell state adds to a gate; None without peepholes."""
        weights = self.owner._optional.get("peepholes")
        return None if weights is None else cell * weights[self.direction, self.tile, block, gate, lane]

    def clipped(self, value: Any) -> Any:
        """Clamp the operand of an activation as `Cell.clip` says, and return it."""
        clip = self.owner.cell.clip
        if not clip:
            return value
        low, high = tirx.const(-clip, "float32"), tirx.const(clip, "float32")
        return tirx.max(low, tirx.min(high, value))

    def activation(self, function: int, value: Any) -> Any:
        """Return the direction's activation number `function` of a value."""
        count = len(self.owner.cell.activations) // self.owner.cell.directions
        name, alpha, beta = self.owner.cell.activations[self.number * count + function]
        # Bound to a variable, the value is computed once, and no condition of the activation guards its reads.
        return let(value, lambda x: ACTIVATIONS[name].function(x, alpha, beta))

    def unless_ended(self, value: Any, before: Any) -> Any:
        """Return the new state, or the previous one where the sequence has ended."""
        return value if self.is_within is None else tirx.Select(self.is_within, value, before)

    def blend(self, block: int, lane: Any, update: Any) -> None:
        """Blend the previous output with the stored candidate by the update gate of a GRU."""
        before, hidden = self.before(block, lane), self.after(block, lane)
        self.store(block, lane, self.unless_ended(hidden + update * (before - hidden), before))

    def store(self, block: int, lane: Any, value: Any) -> None:
        """Store a unit's output."""
        T.buffer_store(self.owner._h, value, [(self.step + 1) % 2, *self.state(block, lane)])

    def write(self, block: int) -> None:
        """Copy a block's outputs to the result, zeros where the sequence has ended."""
        owner, tile = self.owner, self.owner.tiles
        first = self.state(block, 0)[-1]

        def copy(lane: Any) -> None:
            value = owner._h[((self.step + 1) % 2, self.direction, self.sequence, first + lane)]
            value = value if self.is_within is None else tirx.Select(self.is_within, value, ZERO)
            T.buffer_store(owner._y, value, [self.position, self.direction, self.sequence, first + lane])

        if tile.units == owner.units:
            with T.vectorized(0, tile.lanes) as lane:
                copy(lane)
            return
        with T.If(first + tile.lanes <= owner.units):
            with T.Then(), T.vectorized(0, tile.lanes) as lane:
                copy(lane)
            with T.Else(), T.serial(0, tirx.max(0, owner.units - first)) as lane:
                copy(lane)


@contextmanager
def _always(number: int) -> Iterator[int]:
    yield number


@contextmanager
def _when(condition: Any, number: int) -> Iterator[int]:
    with T.If(condition), T.Then():
        yield number
