"""Gives the intermediate results of a function as few and as small blocks of memory as their lives allow.

TVM shares memory between tensors of free sizes only where their sizes are the same expression: each level of a network
over images, and each number of channels, has memory of its own. Here a block is as large as the largest of its tensors
when the model runs, whichever that is. The largest tensors choose first: "greedy by size" of Pisarchyk and Lee,
"Efficient Memory Management for Deep Neural Net Inference" (2020).
"""

import bisect
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import reduce
from typing import Any

import tvm
from tvm import relax, tirx, topi

from tvmflow.compiler.operators.common import static, typical

_ALLOC_STORAGE = tvm.ir.Op.get("relax.memory.alloc_storage")
_ALLOC_TENSOR = tvm.ir.Op.get("relax.memory.alloc_tensor")


@dataclass(frozen=True)
class Life:
    """The bytes of a tensor, a number or an expression, and the `first` and the `last` step that need its memory."""

    size: Any
    first: int
    last: int


@dataclass
class Block:
    """Memory of tensors that never live at the same time: their places in a list of lives."""

    members: list[int] = field(default_factory=list)
    # The first and the last step of each member, in the order of the steps.
    _lives: list[tuple[int, int]] = field(default_factory=list)

    def pause(self, life: Life) -> int | None:
        """How many steps the memory is unused before a life; None where it is in use during that life."""
        place = bisect.bisect(self._lives, (life.first, life.last))
        if place < len(self._lives) and self._lives[place][0] <= life.last:
            return None
        before = self._lives[place - 1][1] if place else -1
        return life.first - before if before < life.first else None

    def add(self, member: int, life: Life) -> None:
        """Add a tensor, whose life is `life`."""
        self.members.append(member)
        bisect.insort(self._lives, (life.first, life.last))


def bytes_of_type(ty: relax.TensorType) -> Any:
    """Return the bytes of a tensor of a type with a shape, as an expression of free sizes or a TIR constant."""
    bytes_of_element = tirx.IntImm("int64", -(-tvm.DataType(str(ty.dtype)).bits // 8))
    return topi.utils.simplify(math.prod(ty.shape.values, start=bytes_of_element))


def share(lives: Sequence[Life]) -> list[Block]:
    """Return blocks of memory, in which each tensor of `lives` has one place and shares it with none at a time."""
    sizes = [typical(life.size) for life in lives]
    blocks: list[Block] = []
    for member in sorted(range(len(lives)), key=lambda place: (-sizes[place], lives[place].first)):
        life = lives[member]
        pauses = ((block.pause(life), sizes[block.members[0]], place) for place, block in enumerate(blocks))
        # Of equally large blocks the one that was used last is the likeliest in cache.
        free = [(size, pause, place) for pause, size, place in pauses if pause is not None]
        if not free:
            blocks.append(Block())
        blocks[min(free)[2] if free else -1].add(member, life)
    return blocks


def largest(sizes: Sequence[Any]) -> Any:
    """Return the largest of some numbers of bytes as one expression, in which none is that another always exceeds."""
    # The factor of each product of free sizes.
    factors: dict[tuple[str, ...], tuple[int, Any]] = {}
    for size in map(topi.utils.simplify, sizes):
        number, key = _split(size)
        factors[key] = max(factors.get(key, (0, size)), (number, size), key=lambda item: item[0])
    return reduce(tirx.max, [size for _, size in factors.values()])


def _split(size: Any) -> tuple[int, tuple[str, ...]]:
    """Split a product into its number and its other factors."""
    number, others, pending = 1, [], [size]
    while pending:
        item = pending.pop()
        value = static(item)
        if value is not None:
            number *= value
        elif isinstance(item, tirx.Mul):
            pending += [item.a, item.b]
        else:
            others.append(str(item))
    return number, tuple(sorted(others))


@dataclass(frozen=True)
class _Allocation:
    """A tensor of a function: the binding that allocates it, that of its memory in TVM's plan, and its life."""

    binding: relax.VarBinding
    storage: relax.VarBinding
    life: Life

    @property
    def kind(self) -> str:
        """The device and the kind of memory."""
        return str(list(self.storage.value.args[1:3]))


@relax.transform.function_pass(opt_level=0, name="ShareMemory")
class ShareMemory:
    """Plans the memory of a function of the virtual machine anew, after TVM's own plan.

    Tensors whose memory the function returns keep theirs, and so do those whose sizes are known only in the midst of a
    run.
    """

    def transform_function(
        self, function: relax.Function, _mod: tvm.IRModule, _context: tvm.transform.PassContext
    ) -> relax.Function:
        """Return the function with its tensors in the new blocks."""
        if not isinstance(function.body, relax.SeqExpr):
            return function
        kinds: dict[str, list[_Allocation]] = {}
        for item in _allocations(function):
            kinds.setdefault(item.kind, []).append(item)
        builder = relax.BlockBuilder()
        # The memory of each tensor, and the allocation of memory by the tensor that needs it first.
        memory: dict[relax.Var, relax.Var] = {}
        new: dict[relax.Var, relax.VarBinding] = {}
        for items in kinds.values():
            for block in share([item.life for item in items]):
                members = [items[place] for place in block.members]
                first = min(members, key=lambda item: item.life.first)
                size = relax.ShapeExpr([largest([item.life.size for item in members])])
                value = builder.normalize(relax.op.memory.alloc_storage(size, *first.storage.value.args[1:]))
                storage = relax.Var(str(first.storage.var.name), value.ty)
                new[first.binding.var] = relax.VarBinding(storage, value)
                memory |= {item.binding.var: storage for item in members}
        return _with_memory(function, memory, new)


def _allocations(function: relax.Function) -> list[_Allocation]:
    """The tensors of a function that may have other memory."""
    defined = {size for param in function.params for size in relax.analysis.definable_tir_vars_in_type(param.ty)}
    storages: dict[relax.Var, relax.VarBinding] = {}
    # Each allocation with its step and its storage, and the last step that reads or writes it.
    tensors: dict[relax.Var, tuple[int, relax.VarBinding, relax.Var]] = {}
    last: dict[relax.Var, int] = {}
    # The tensors of which a variable may have the memory, and what cannot move.
    sources: dict[relax.Var, set[relax.Var]] = {}
    fixed: set[relax.Var] = set()
    for step, binding in enumerate(binding for block in function.body.blocks for binding in block.bindings):
        value = binding.value
        op = value.op if isinstance(value, relax.Call) else None
        if op == _ALLOC_STORAGE:
            storages[binding.var] = binding
        elif op == _ALLOC_TENSOR and value.args[0] in storages:
            tensors[binding.var] = step, binding, value.args[0]
            sources[binding.var] = {binding.var}
        else:
            read = relax.analysis.free_vars(value)
            fixed.update(storages.keys() & set(read))
            sources[binding.var] = {tensor for item in read for tensor in sources.get(item, ())}
            last |= dict.fromkeys(sources[binding.var], step)
    fixed.update(tensor for item in relax.analysis.free_vars(function.body.body) for tensor in sources.get(item, ()))
    return [
        _Allocation(binding, storages[storage], Life(size, step, last.get(tensor, step)))
        for tensor, (step, binding, storage) in tensors.items()
        if not fixed & {tensor, storage}
        and static(binding.value.args[1]) == 0
        and isinstance(tensor.ty.shape, relax.ShapeExpr)
        and defined.issuperset(tirx.analysis.undefined_vars(size := bytes_of_type(tensor.ty), []))
    ]


def _with_memory(
    function: relax.Function, memory: Mapping[relax.Var, relax.Var], new: Mapping[relax.Var, relax.VarBinding]
) -> relax.Function:
    """Return the function with the tensors of `memory` in it, and with each binding of `new` before its tensor."""
    builder = relax.BlockBuilder()
    left: set[relax.Var] = set()
    kept: set[relax.Var] = set()
    for block in function.body.blocks:
        for binding in block.bindings:
            if isinstance(binding.value, relax.Call) and binding.value.op == _ALLOC_TENSOR:
                (left if binding.var in memory else kept).add(binding.value.args[0])

    unused = left - kept

    def moved(bindings: Sequence[relax.Binding]) -> Iterator[relax.Binding]:
        for binding in bindings:
            if binding.var in new:
                yield new[binding.var]
            if binding.var in memory:
                value = relax.op.memory.alloc_tensor(memory[binding.var], *binding.value.args[1:])
                yield relax.VarBinding(binding.var, builder.normalize(value))
            elif binding.var not in unused:
                yield binding

    blocks = [relax.BindingBlock(list(moved(block.bindings))) for block in function.body.blocks]
    body = relax.SeqExpr(blocks, function.body.body)
    return relax.Function(function.params, body, function.ret_ty, function.is_pure, function.attrs)
