"""What cannot be imported, in words: which node is in the way, why, and what to do."""

import contextlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import onnx
import tvm

from tvmflow.compiler.onnx import RANDOM
from tvmflow.onnx_model.graph import node_name, nodes_of, operator_name, standard_opset
from tvmflow.onnx_model.number_types import weights_as_inputs

# Floats of 8 bits or fewer and integers of fewer than 8, with which TVM computes wrongly or not at all.
_SMALL_TYPES = {
    number
    for name, number in onnx.TensorProto.DataType.items()
    if name.startswith(("FLOAT8", "FLOAT4", "FLOAT6")) or name in ("INT4", "UINT4", "INT2", "UINT2")
}
# The operators of ONNX Runtime on tensors in blocks of channels.
_LAYOUT_DOMAIN = "com.microsoft.nchwc"
# The most kinds of refusals that one sentence lists.
_MOST_LISTED = 6


@dataclass(frozen=True)
class Refusal:
    """Why a model cannot be imported.

    `operator` and `node` name the node in the way, and are empty where the file as a whole is. `reason` and `advice`
    are clauses without a full stop.
    """

    operator: str
    node: str
    reason: str
    advice: str

    @property
    def where(self) -> str:
        """The operator and the node, in words; empty where the file as a whole is in the way."""
        return f"operator {self.operator}, node {self.node!r}" if self.operator else ""


def describe_refusals(refusals: Sequence[Refusal]) -> str:
    """Return a sentence that says what is refused, where, why, and what to do.

    Refusals of several nodes that are otherwise equal are named once. `refusals` must not be empty.
    """
    groups: dict[tuple[str, str, str], list[Refusal]] = {}
    for refusal in refusals:
        groups.setdefault((refusal.operator, refusal.reason, refusal.advice), []).append(refusal)
    if len(groups) == 1:
        (group,) = groups.values()
        return f"{_describe_group(group)}; {group[0].advice}"
    listed = [_describe_group(group) for group in groups.values()]
    more = f", and {len(listed) - _MOST_LISTED} more kinds" if len(listed) > _MOST_LISTED else ""
    return f"{', '.join(listed[:_MOST_LISTED])}{more}; `tvmflow doctor` says for each what to do"


def _describe_group(group: Sequence[Refusal]) -> str:
    first = group[0]
    more = f" and {len(group) - 1} more" if len(group) > 1 else ""
    return f"{first.where}{more}: {first.reason}" if first.operator else first.reason


def advise(inputs: Sequence[onnx.ValueInfoProto]) -> str:
    """Return the advice for a node that TVM cannot import: to fix the free dimensions of `inputs`, if any."""
    dims = [dim for value in inputs for dim in value.type.tensor_type.shape.dim]
    symbols = list(dict.fromkeys(dim.dim_param for dim in dims if dim.dim_param))
    if not symbols:
        return "export the model anew with another opset, or let it end before this node"
    return f"give the inputs fixed sizes for the free dimensions {', '.join(symbols)}, or export it anew"


# The advice for a node that cannot be imported because of a size that no size of an input decides.
COMPUTED_SIZES = (
    "the model computes sizes from its data there, as the number of boxes that a threshold leaves: "
    "export it with a fixed number in their place, or let it end before this node"
)


def advise_on_error(error: Exception, advice: str) -> str:
    """Return the advice for an exception of TVM's importer: `advice`, unless TVM lacks the type of the elements."""
    if "unknown dtype" in str(error):
        return "export the model with numbers of a type that TVM has, such as float32 or int64"
    return advice


def missing_converter(node: onnx.NodeProto) -> Refusal:
    """Return the refusal of a node whose operator has no converter."""
    advice = "export the model without it"
    if node.domain == _LAYOUT_DOMAIN:
        # All of its operators have the same remedy.
        reason = "ONNX Runtime's layout optimization wrote it for one kind of processor"
        advice = "save the model from ONNX Runtime at the level ORT_ENABLE_EXTENDED, or use the one it was made of"
        return Refusal(f"{_LAYOUT_DOMAIN}.*", node_name(node), reason, advice)
    if node.domain.startswith("com.microsoft"):
        advice = "export the model anew, without ONNX Runtime's optimizer or model builder, which write this operator"
    elif node.domain and not node.domain.startswith("ai.onnx"):
        advice = "export the model without it, or give a converter of your own"
    reason = f"cannot be imported by TVM {tvm.__version__}"
    if node.domain in ("", "ai.onnx") and node.op_type in RANDOM:
        reason = "its results are random, so that none can be proven equal to the original's"
        advice = "make the random numbers an input of the model, or export it in evaluation mode"
    return Refusal(operator_name(node), node_name(node), reason, advice)


# What to do about operands of several types.
ONE_TYPE = "cast them to one type; ONNX Runtime refuses the model too"


def type_refusals(graph: onnx.GraphProto) -> list[Refusal]:
    """Return refusals for outputs that are no tensors, for strings, and for small types that TVM computes wrongly.

    Small types are floats of at most 8 bits and integers of fewer than 8.
    """
    refusals = [
        Refusal("", "", f"output {output.name!r} is no tensor", "only tensor outputs are supported")
        for output in graph.output
        if not output.type.HasField("tensor_type")
    ]
    refusals += [
        Refusal("", "", f"{value.name!r} holds strings", "only tensors of numbers are supported")
        for value in (*graph.input, *graph.output)
        if value.type.tensor_type.elem_type == onnx.TensorProto.STRING
    ]
    types = {value.type.tensor_type.elem_type for value in (*graph.input, *graph.output)}
    types |= {tensor.data_type for tensor in graph.initializer}
    for node in nodes_of(graph):
        types |= {attribute.i for attribute in node.attribute if attribute.name in ("to", "output_dtype")}
    small = sorted(onnx.TensorProto.DataType.Name(item) for item in types & _SMALL_TYPES)
    if small:
        reason = f"tensors of {' and '.join(small)} are not supported"
        refusals.append(Refusal("", "", reason, "export the model with wider types"))
    return refusals


class NoConverterError(Exception):
    """A node's operator has no converter."""


class MixedTypesError(Exception):
    """Operands of a node that must have one type of elements have several; the message is a clause that names them."""


def check_types(node: onnx.NodeProto, types: Mapping[str, str], opset: int) -> None:
    """Raise MixedTypesError if operands have several types though ONNX's standard demands one type of them.

    `types` has the types of the operands' elements by name, as "float32". Ignores operands that it lacks, and nodes of
    other domains.
    """
    if node.domain not in ("", "ai.onnx") or not onnx.defs.has(node.op_type):
        return
    formal = onnx.defs.get_schema(node.op_type, opset).inputs
    first: dict[str, str] = {}
    for place, name in enumerate(node.input[: len(formal) if formal and not _is_variadic(formal[-1]) else None]):
        item = formal[min(place, len(formal) - 1)]
        if name not in types or (_is_variadic(item) and not item.is_homogeneous):
            continue
        other = first.setdefault(item.type_str, name)
        if types[other] != types[name]:
            raise MixedTypesError(
                f"its operands must have one type, and {other!r} is {types[other]}, {name!r} {types[name]}"
            )


def mixed_type_refusals(model: onnx.ModelProto) -> list[Refusal]:
    """Return refusals of nodes of the main graph whose operands must have one type and have several.

    Types are those that ONNX infers; operands without one are not looked at.
    """
    graph, opset = model.graph, standard_opset(model) or 1
    # Types need no numbers, and the inference copies the model.
    declared = onnx.ModelProto(ir_version=model.ir_version, opset_import=model.opset_import)
    declared.graph.node.extend(graph.node)
    declared.graph.input.extend(graph.input)
    declared.graph.input.extend(weights_as_inputs(graph))
    declared.graph.output.extend(graph.output)
    inferred = declared.graph
    with contextlib.suppress(Exception):  # The inference refuses graphs that runtimes take.
        inferred = onnx.shape_inference.infer_shapes(declared).graph
    types = {
        value.name: str(onnx.helper.tensor_dtype_to_np_dtype(value.type.tensor_type.elem_type))
        for value in (*inferred.input, *inferred.value_info)
        if value.type.tensor_type.elem_type
    }
    refusals = []
    for node in graph.node:
        try:
            check_types(node, types, opset)
        except MixedTypesError as error:
            refusals.append(Refusal(operator_name(node), node_name(node), str(error), ONE_TYPE))
    return refusals


def _is_variadic(item: onnx.defs.OpSchema.FormalParameter) -> bool:
    return bool(item.option == onnx.defs.OpSchema.FormalParameterOption.Variadic)
