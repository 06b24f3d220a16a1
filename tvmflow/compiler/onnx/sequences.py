"""Operators on sequences of tensors. A sequence is a tuple at import: its length and all positions must be known."""

from typing import Any

from tvm import relax

from tvmflow.compiler.onnx.node import FreeSizeError, Node, UnsupportedFormError
from tvmflow.compiler.onnx.values import const, dims_of


def convert_split_to_sequence(node: Node) -> relax.Expr:
    """Return the tuple of ONNX's SplitToSequence: parts of one length but for a shorter last one, or of given lengths.

    Raises FreeSizeError for a free dimension, and UnsupportedFormError for lengths that are not constant.
    """
    data, dims, lengths = node.inputs[0], dims_of(node.inputs[0]), node.constant(1)
    if lengths is None and node.input(1) is not None:
        raise UnsupportedFormError("lengths that the model computes")
    axis = node.attrs.get("axis", 0) % max(int(data.ty.ndim), 1)
    if dims is None or not isinstance(dims[axis], int):
        raise FreeSizeError("parts of a free dimension")
    if lengths is None or lengths.ndim == 0:
        length = 1 if lengths is None else int(lengths)
        begins = [*range(0, dims[axis], length)]
    else:
        begins = [int(lengths[:place].sum()) for place in range(lengths.size)]
    ends = [*begins[1:], dims[axis]]
    parts = [
        node.emit(relax.op.strided_slice(data, [axis], [begin], [end], assume_inbound=True))
        for begin, end in zip(begins, ends, strict=True)
    ]
    if lengths is None and not node.attrs.get("keepdims", 1):
        parts = [node.emit(relax.op.squeeze(part, [axis])) for part in parts]
    return relax.Tuple(parts)


def convert_sequence_at(node: Node) -> relax.Expr:
    """Return the tensor of a sequence at a constant position. Raises UnsupportedFormError for other positions."""
    items = _items(node)
    return items[_position(node, 1, len(items))]


def convert_sequence_erase(node: Node) -> relax.Expr:
    """Return a sequence without the tensor at a constant position, by default the last one.

    Raises UnsupportedFormError for other positions.
    """
    items = _items(node)
    del items[_position(node, 1, len(items))]
    return relax.Tuple(items)


def convert_sequence_insert(node: Node) -> relax.Expr:
    """Return a sequence with another tensor at a constant position, by default at its end.

    Raises UnsupportedFormError for other positions.
    """
    items = _items(node)
    place = len(items) if node.input(2) is None else _position(node, 2, len(items), len(items) + 1)
    return relax.Tuple([*items[:place], node.inputs[1], *items[place:]])


def convert_sequence_length(node: Node) -> relax.Expr:
    """Return the number of a sequence's tensors."""
    return const(len(_items(node)), "int64")


def convert_concat_from_sequence(node: Node) -> relax.Expr:
    """Return the concatenation of a sequence's tensors along an axis of theirs, or along a new one."""
    items, axis = _items(node), node.attrs.get("axis", 0)
    if node.attrs.get("new_axis", 0):
        items = [node.emit(relax.op.expand_dims(item, axis)) for item in items]
    return node.apply("Concat", *items, axis=axis)


def _items(node: Node) -> list[Any]:
    """The tensors of a node's sequence. Raises UnsupportedFormError where their number is unknown at import.

    TVM's converters would iterate over the rows of a tensor endlessly.
    """
    sequence = node.inputs[0]
    if isinstance(sequence, relax.Tuple):
        return list(sequence.fields)
    if not isinstance(sequence.ty, relax.TupleType):
        raise UnsupportedFormError("a sequence that is made when the model runs")
    return [node.emit(relax.TupleGetItem(sequence, place)) for place in range(len(sequence.ty.fields))]


def _position(node: Node, operand: int, length: int, places: int | None = None) -> int:
    """The position that an operand names among `places`, by default `length`; one below 0 counts from `length`."""
    value = node.constant(operand)
    if value is None and node.input(operand) is not None:
        raise UnsupportedFormError("a position that the model computes")
    position = -1 if value is None else int(value.reshape(()))
    place = position + length if position < 0 else position
    if not 0 <= place < (length if places is None else places):
        raise UnsupportedFormError(f"position {position} of a sequence of {length}")
    return place
