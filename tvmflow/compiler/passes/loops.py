"""Replaces a loop by one function of the library, which calls the functions of an iteration as often as it must.

TVM's virtual machine takes longer for the calls and allocations of an iteration than a small one for its arithmetic. A
loop stays with the virtual machine where an iteration does more than to call TIR functions, as with a condition in it,
where the size of a carried value changes, and where its stacks' length is not known before it begins.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import tvm
import tvm_ffi
from tvm import relax, tirx
from tvm.relax.expr_functor import PyExprMutator, mutator
from tvm.script.ir_builder import IRBuilder
from tvm.script.ir_builder import tirx as T

from tvmflow.compiler.loop import LOOP, LoopDescription
from tvmflow.compiler.operators.common import buffer
from tvmflow.compiler.passes.calls import calls_of
from tvmflow.compiler.passes.functions import relax_functions, rewrite_functions
from tvmflow.compiler.passes.plan import (
    NoDirectFormError,
    Plan,
    Step,
    Tensor,
    allocate,
    allocate_results,
    buffer_of,
    bytes_of,
    call_functions,
    check_sizes,
    direct_form,
)
from tvmflow.compiler.statements import replace_variables

# The results of an iteration: the number of the next, whether there is one, the carried values and the rows.
_AGAIN, _FIRST = 1, 2


@tvm.transform.module_pass(opt_level=0, name="RunLoopsDirectly")
class RunLoopsDirectly:
    """Gives each loop of a lowered module its direct form where it has one, and calls it in the loop's place."""

    def transform_module(self, mod: tvm.IRModule, _context: tvm.transform.PassContext) -> tvm.IRModule:
        """Return the module with direct forms of its loops; those within other loops come first."""
        loops = {
            variable: LoopDescription.of(str(function.attrs[LOOP]))
            for variable, function in relax_functions(mod).items()
            if LOOP in (function.attrs or {})
        }
        steps = set()
        for variable in sorted(loops, key=lambda item: -_number(item)):
            try:
                direct = _direct_loop(mod, variable, loops[variable])
            except NoDirectFormError:
                continue
            steps.add(mod.get_global_var(loops[variable].step))
            mod = rewrite_functions(_CallDirectly(mod, variable, direct), mod)
        return _without_unused(mod, steps) if steps else mod


def _number(variable: tvm.ir.GlobalVar) -> int:
    """The number of a loop: those within it have larger ones."""
    return int(str(variable.name_hint).rpartition("_")[2])


@dataclass(frozen=True)
class _DirectLoop:
    """The direct form of a loop, the TIR function `body`, and how to call it where the loop's function is called.

    The arguments are the `operands`, each a parameter of the loop's function or a constant, and then the `numbers`;
    `results` are the types of the results. Sizes are those of the loop's function.
    """

    body: tirx.PrimFunc
    operands: Sequence[relax.Expr]
    numbers: Sequence[tirx.Expr]
    results: Sequence[relax.TensorType]


@mutator
class _CallDirectly(PyExprMutator):  # type: ignore[misc]
    """Replaces the calls of a loop's function."""

    def __init__(self, mod: tvm.IRModule, loop: tvm.ir.GlobalVar, direct: _DirectLoop) -> None:
        super().__init__(mod)
        self._loop, self._params, self._direct = loop, mod[loop].params, direct
        self._callee = self.builder_.add_func(direct.body, str(direct.body.attrs["global_symbol"]))

    def visit_call_(self, op: relax.Call) -> relax.Expr:
        """Replace a call."""
        call = super().visit_call_(op)
        if call.op != self._loop:
            return call
        arguments = dict(zip(self._params, call.args, strict=True))
        sizes = _sizes(arguments)
        operands = [arguments.get(operand, operand) for operand in self._direct.operands]
        numbers = [replace_variables(number, sizes) for number in self._direct.numbers]
        results = [
            relax.TensorType([replace_variables(size, sizes) for size in item.shape.values], item.dtype)
            for item in self._direct.results
        ]
        result = relax.call_tir(self._callee, relax.Tuple([*operands, *numbers]), results)
        return result if len(results) > 1 else relax.Tuple([self.builder_.emit(result)])


def _without_unused(mod: tvm.IRModule, steps: Iterable[tvm.ir.GlobalVar]) -> tvm.IRModule:
    """The module without the functions that neither a public Relax function nor one of `steps` uses."""
    functions, relaxes = dict(mod.functions_items()), relax_functions(mod)
    pending = [*steps, *(item for item, body in relaxes.items() if "global_symbol" in (body.attrs or {}))]
    used = set()
    while pending:
        variable = pending.pop()
        if variable not in used and variable in relaxes:
            pending.extend(_variables_in(relaxes[variable]))
        used.add(variable)
    return tvm.IRModule({item: body for item, body in functions.items() if item in used}, attrs=mod.attrs)


def _variables_in(function: relax.Function) -> set[tvm.ir.GlobalVar]:
    """The variables of the functions that a function uses."""
    variables = set()

    def visit(expr: Any) -> None:
        if isinstance(expr, tvm.ir.GlobalVar):
            variables.add(expr)

    relax.analysis.post_order_visit(function, visit)
    return variables


class _Calls:
    """What a loop's `function` passes to its part, and that to its step.

    Raises NoDirectFormError for a module with other calls.
    """

    def __init__(self, mod: tvm.IRModule, function: relax.Function, loop: LoopDescription) -> None:
        part, step = mod.get_global_var(loop.part), mod.get_global_var(loop.step)
        self._function = function
        self._to_part, self._to_step = _arguments(mod, function, part), _arguments(mod, mod[part], step)

    def argument(self, parameter: relax.Var) -> relax.Expr:
        """Return the argument for a parameter of the step: a parameter of the loop's function, or a constant."""
        return self._checked(self._to_part.get(self._to_step[parameter], self._to_step[parameter]))

    def initial(self, name: str) -> relax.Expr | None:
        """Return the initial value of a carried value by the name of its parameter; None where nothing reads it."""
        values = [value for param, value in self._to_part.items() if str(param.name) == name]
        return self._checked(values[0]) if values else None

    def _checked(self, value: relax.Expr) -> relax.Expr:
        if value not in self._function.params and not isinstance(value, tvm.ir.GenericConst):
            raise NoDirectFormError
        return value

    def sizes(self) -> dict[tirx.Var, tirx.Expr]:
        """Return the symbolic sizes of the step in terms of those of the loop's function."""
        of_part = _sizes(self._to_part)
        return {size: replace_variables(value, of_part) for size, value in _sizes(self._to_step).items()}


def _arguments(mod: tvm.IRModule, caller: relax.Function, callee: tvm.ir.GlobalVar) -> dict[relax.Var, relax.Expr]:
    """The arguments of the only call of a function in another, by parameter."""
    calls = list(calls_of(caller, {callee: mod[callee]}))
    if len(calls) != 1:
        raise NoDirectFormError
    return dict(zip(mod[callee].params, calls[0].args, strict=True))


def _sizes(arguments: Mapping[relax.Var, relax.Expr]) -> dict[tirx.Var, tirx.Expr]:
    """The symbolic sizes of a function in terms of those of its caller."""
    pairs = [
        pair
        for parameter, value in arguments.items()
        for pair in zip(_shape(parameter.ty), _shape(value.ty), strict=False)
    ]
    return {size: value for size, value in pairs if isinstance(size, tirx.Var)}


def _shape(type_of: relax.Type) -> Sequence[tirx.Expr]:
    """The sizes in the type of a shape or of a tensor."""
    if isinstance(type_of, relax.ShapeType):
        return list(type_of.values or ())
    shape = type_of.shape if isinstance(type_of, relax.TensorType) else None
    return list(shape.values) if isinstance(shape, relax.ShapeExpr) else []


def _condition(function: relax.Function) -> relax.Expr | None:
    """The condition under which a loop runs its first iteration; None where it always does."""
    conditions: list[relax.Expr] = []

    def visit(expr: Any) -> None:
        if isinstance(expr, relax.If):
            conditions.append(expr.cond)

    relax.analysis.post_order_visit(function, visit)
    if len(conditions) > 1 or any(item not in function.params for item in conditions):
        raise NoDirectFormError
    return conditions[0] if conditions else None


def _direct_loop(mod: tvm.IRModule, variable: tvm.ir.GlobalVar, loop: LoopDescription) -> _DirectLoop:
    """The direct form of a loop. Raises NoDirectFormError where it has none."""
    function, step = mod[variable], mod[loop.step]
    results = list(function.ret_ty.fields)
    if any(loop.is_joined) or not results or any(item.shape is None for item in results):
        raise NoDirectFormError
    calls = _Calls(mod, function, loop)
    sizes = calls.sizes()
    iteration = _Iteration(Plan(mod, step, writes_outputs=False), loop, list(sizes))
    condition = _condition(function)
    initial = [calls.initial(name) for name in loop.carried]
    if condition is not None and any(value is None for value in initial):
        raise NoDirectFormError
    operands = [value for value in initial if value is not None]
    operands += [calls.argument(param) for param in iteration.captured]
    operands += [value for value, _ in iteration.constants]
    operands += [] if condition is None or iteration.stacks else [condition]
    trips = [results[len(loop.carried)].shape.values[0]] if iteration.stacks else []
    body = iteration.function(
        f"{variable.name_hint}_direct", [value is not None for value in initial], has_condition=condition is not None
    )
    return _DirectLoop(body, operands, [*trips, *sizes.values()], results)


class _Iteration:
    """What an iteration of a loop does: its `plan`, and which of its tensors matter.

    `captured` are the parameters for values of the graphs around the loop, `constants` pairs of a constant and its
    tensor, and `stacks` the rows that an iteration adds to the stacks. `sizes` are the symbolic sizes that the
    iteration takes. Raises NoDirectFormError for a loop that has no direct form.
    """

    def __init__(self, plan: Plan, loop: LoopDescription, sizes: Sequence[tirx.Var]) -> None:
        self._plan, self._loop, self._sizes = plan, loop, sizes
        count = _FIRST + len(loop.carried)
        self._results, self.stacks = plan.outputs[_FIRST:count], plan.outputs[count:]
        if self.stacks and not loop.is_counted:
            raise NoDirectFormError
        by_name = {str(param.name): tensor for param, tensor in plan.parameters.items()}
        self._index = by_name.get(loop.index) or Tensor(loop.index, relax.TensorType([], "int64"))
        self._carried = [
            by_name.get(name) or Tensor(name, result.type)
            for name, result in zip(loop.carried, self._results, strict=True)
        ]
        pairs = zip(self._carried, self._results, strict=True)
        if any(not tvm_ffi.structural_equal(one.type, other.type) for one, other in pairs):
            raise NoDirectFormError
        self._again = plan.outputs[_AGAIN]
        outputs = [*self._results, *self.stacks, *([] if self.stacks else [self._again])]
        self._steps, used = _needed(plan.steps, outputs)
        own = {self._index, *self._carried}
        self.captured = [param for param, tensor in plan.parameters.items() if tensor in used - own]
        self.constants = [(value, tensor) for value, tensor in plan.constants.values() if tensor in used]
        # The carried values that an iteration changes, and what each becomes.
        self._changes = [
            (tensor, result.root)
            for tensor, result in zip(self._carried, self._results, strict=True)
            if result.root is not tensor
        ]

    def function(self, name: str, are_initial: Sequence[bool], *, has_condition: bool) -> tirx.PrimFunc:
        """Return the TIR function of the loop.

        Its parameters are those initial values that there are, the captured values, the constants, the condition for a
        first iteration if it has one and no stacks, the number of iterations if it has stacks, the sizes, and the
        results.
        """
        initial = [tensor for tensor, is_read in zip(self._carried, are_initial, strict=True) if is_read]
        others = [self._plan.parameters[param] for param in self.captured]
        others += [tensor for _, tensor in self.constants]
        inputs = [buffer_of(tensor) for tensor in (*initial, *others)]
        trips = tirx.Var("trips", "int64")
        states = [buffer_of(tensor) for tensor in self._results]
        stacks = [buffer(row.name, (trips, *row.type.shape.values[1:]), str(row.type.dtype)) for row in self.stacks]
        starts = [buffer("starts", (), "bool")] if has_condition and not stacks else []
        memory = {tensor: item.data for tensor, item in zip(others, inputs[len(initial) :], strict=True)}
        memory |= {tensor: state.data for tensor, state in zip(self._carried, states, strict=True)}
        with IRBuilder() as builder, T.seq_scope():
            index = T.alloc_buffer((1,), "int64", scope="global", layout=None)
            memory[self._index] = index.data
            allocate_results(self._steps, memory, self._plan.outputs)
            # A carried value that becomes another one is read before that is written.
            moved = {source: allocate(bytes_of(source)) for _, source in self._changes if source in self._carried}
            for tensor, item in zip(initial, inputs, strict=False):
                _copy(memory[tensor], item.data, bytes_of(tensor))
            if stacks:
                with T.serial(0, trips) as place:
                    T.buffer_store(index, place, [0])
                    self._iterate(memory, moved)
                    for stack, row, is_reversed in zip(stacks, self.stacks, self._loop.is_reversed, strict=True):
                        offset = (trips - 1 - place if is_reversed else place) * bytes_of(row)
                        _copy(T.handle_add_byte_offset(stack.data, offset), memory[row.root], bytes_of(row))
                    self._carry(memory, moved)
            else:
                again = T.alloc_buffer((1,), "bool", scope="global", layout=None)
                T.buffer_store(again, tirx.BufferLoad(starts[0], []) if starts else tirx.const(True, "bool"), [0])
                T.buffer_store(index, tirx.const(0, "int64"), [0])
                with T.While(again[0]):
                    self._iterate(memory, moved)
                    _copy(again.data, memory[self._again.root], 1)
                    self._carry(memory, moved)
                    T.buffer_store(index, index[0] + 1, [0])
        numbers = [*([trips] if stacks else []), *self._sizes]
        return direct_form([*inputs, *starts, *numbers, *states, *stacks], builder.get().body, name)

    def _iterate(self, memory: Mapping[Tensor, Any], moved: Mapping[Tensor, Any]) -> None:
        """Compute the results of an iteration."""
        check_sizes(self._plan)
        call_functions(self._steps, memory)
        for tensor, place in moved.items():
            _copy(place, memory[tensor], bytes_of(tensor))

    def _carry(self, memory: Mapping[Tensor, Any], moved: Mapping[Tensor, Any]) -> None:
        """Copy the results of an iteration to the carried values."""
        for tensor, source in self._changes:
            _copy(memory[tensor], moved.get(source, memory[source]), bytes_of(tensor))


def _needed(steps: Sequence[Step], outputs: Iterable[Tensor]) -> tuple[list[Step], set[Tensor]]:
    """The steps that compute `outputs`, in order, and the tensors whose memory these and the outputs use."""
    used = {tensor.root for tensor in outputs}
    needed = []
    for step in reversed(steps):
        if any(result in used for result in step.results):
            used.update(tensor.root for tensor in step.tensors)
            needed.append(step)
    return needed[::-1], used


def _copy(target: Any, source: Any, size: Any) -> None:
    T.evaluate(T.call_extern("handle", "memcpy", target, source, tirx.Cast("int64", size)))
