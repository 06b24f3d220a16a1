"""The direct form of `main`: one function of the library that calls the functions of `main` in order.

TVM's virtual machine allocates each result of a call and interprets bytecode, which takes longer than the arithmetic of
a small model. The direct form writes the outputs to memory of its caller, and has its own for the results in between.
Its parameters are the inputs, the packed weights, the constants of `main` and the outputs. The function
`main_constants` of the virtual machine returns the constants as a tuple.
"""

from collections.abc import Sequence

import tvm
from tvm import relax, tirx
from tvm.script.ir_builder import IRBuilder
from tvm.script.ir_builder import tirx as T

from tvmflow.bundle import DIRECT_MAIN, LARGEST_DIRECT_OUTPUT, MAIN_CONSTANTS
from tvmflow.compiler.annotations import CHECKED
from tvmflow.compiler.operators.common import static
from tvmflow.compiler.passes.plan import (
    NoDirectFormError,
    Plan,
    allocate_results,
    buffer_of,
    bytes_of,
    call_functions,
    check_sizes,
    direct_form,
)

# The most dimensions of all tensors of all calls together. The time of LLVM grows with their square: it is a second or
# two for these, and nine for the 3800 of a RegNet, which takes milliseconds to run and gains nothing.
_MOST_SIZES = 1200


def add_direct_main(scheduled: tvm.IRModule, inputs: int) -> tvm.IRModule:
    """Return the module with the direct form of its `main` and with `main_constants`, or as it is where there is none.

    The first `inputs` parameters of `main` are the model's inputs. The direct form checks them, and the outputs.

    There is none for a `main` that does more than to call TIR functions and to return results of theirs, as control
    flow does, and none where the size of a result follows from more than the sizes of the inputs. A `main` with an
    output that is always too large for the direct form gets none either, nor does one of very many calls.
    """
    try:
        plan = Plan(scheduled, scheduled["main"], writes_outputs=True)
    except NoDirectFormError:
        return scheduled
    written = {result for step in plan.steps for result in step.results}
    roots = [tensor.root for tensor in plan.outputs]
    if len(set(roots)) < len(roots) or not written.issuperset(roots):
        return scheduled
    if any((static(bytes_of(tensor)) or 0) > LARGEST_DIRECT_OUTPUT for tensor in plan.outputs):
        return scheduled
    if sum(len(tensor.type.shape.values) for step in plan.steps for tensor in step.tensors) > _MOST_SIZES:
        return scheduled
    mod = tvm.IRModule(dict(scheduled.functions_items()), attrs=scheduled.attrs)
    function = _function_of(plan)
    count = len(function.params)
    checked = [*range(inputs), *range(count - len(plan.outputs), count)]
    mod[DIRECT_MAIN] = function.with_attr(CHECKED, checked)
    mod[MAIN_CONSTANTS] = _constants_function([constant for constant, _ in plan.constants.values()])
    return mod


def _function_of(plan: Plan) -> tirx.PrimFunc:
    """The TIR function that runs the steps of a plan."""
    tensors = [*plan.parameters.values(), *(tensor for _, tensor in plan.constants.values()), *plan.outputs]
    parameters = [buffer_of(tensor) for tensor in tensors]
    memory = {tensor.root: item.data for tensor, item in zip(tensors, parameters, strict=True)}
    with IRBuilder() as builder, T.seq_scope():
        check_sizes(plan)
        allocate_results(plan.steps, memory)
        call_functions(plan.steps, memory)
    return direct_form(parameters, builder.get().body, DIRECT_MAIN)


def _constants_function(constants: Sequence[relax.Expr]) -> relax.Function:
    """The Relax function that returns the constants as a tuple."""
    builder = relax.BlockBuilder()
    with builder.function(MAIN_CONSTANTS, []):
        builder.emit_func_output(builder.normalize(relax.Tuple(constants)))
    return builder.get()[MAIN_CONSTANTS]
