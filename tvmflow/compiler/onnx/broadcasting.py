"""Gives dimensions of an operator's operands that must be equal the same symbolic expression."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from tvm import relax

from tvmflow.compiler.onnx.values import dims_of
from tvmflow.compiler.size_checks import cast_to

if TYPE_CHECKING:
    from tvmflow.compiler.onnx.sizes import SizeEvaluator


def agree(builder: relax.BlockBuilder, operands: Sequence[relax.Expr], evaluator: "SizeEvaluator") -> list[relax.Expr]:
    """Return the operands of a broadcasting operator, with one expression for dimensions that must be equal.

    TVM infers no shape for the result where it cannot prove that two dimensions are equal, such as those of an image
    and of the same image after it was halved and doubled. This function takes two dimensions for equal unless one of
    them is the constant 1. The model checks that when it runs. If the shape of an operand is unknown, all operands are
    returned unchanged.
    """
    shapes = [dims_of(operand) if isinstance(operand.ty, relax.TensorType) else None for operand in operands]
    if any(shape is None for shape in shapes):
        return list(operands)
    rank = max(len(shape or ()) for shape in shapes)
    aligned = [[1] * (rank - len(shape or ())) + list(shape or ()) for shape in shapes]
    aligned = [[1 if _is_at_most_one(size, evaluator) else size for size in shape] for shape in aligned]
    targets = [simplest([shape[axis] for shape in aligned], evaluator) for axis in range(rank)]
    results = []
    for operand, shape in zip(operands, aligned, strict=True):
        own = [size if _is_one(size) else target for size, target in zip(shape, targets, strict=True)]
        results.append(with_sizes(builder, operand, own[rank - operand.ty.ndim :], evaluator))
    return results


def agree_but_for(
    builder: relax.BlockBuilder, operands: Sequence[relax.Expr], axis: int, evaluator: "SizeEvaluator"
) -> list[relax.Expr]:
    """Return the operands of a concatenation along `axis`, with one expression for each of the other dimensions.

    Sizes that may differ are checked when the model runs. If the shape of an operand is unknown, or their ranks differ,
    all operands are returned unchanged.
    """
    shapes = [dims_of(operand) if isinstance(operand.ty, relax.TensorType) else None for operand in operands]
    whole = [shape for shape in shapes if shape is not None]
    if len(whole) < len(shapes) or len({len(shape) for shape in whole}) != 1:
        return list(operands)
    axis %= len(whole[0])
    targets = [min(map(evaluator.simplify, sizes), key=_complexity) for sizes in zip(*whole, strict=True)]
    return [
        with_sizes(builder, operand, [*targets[:axis], shape[axis], *targets[axis + 1 :]], evaluator)
        for operand, shape in zip(operands, whole, strict=True)
    ]


def agree_along(
    builder: relax.BlockBuilder, operands: Sequence[relax.Expr], axis: int, evaluator: "SizeEvaluator"
) -> list[relax.Expr]:
    """Return the operands with one expression for their dimension `axis`, such as the batch of a recurrent network.

    Sizes that may differ are checked when the model runs. If the shape of an operand is unknown, or has no dimension
    `axis`, all operands are returned unchanged.
    """
    shapes = [dims_of(operand) if isinstance(operand.ty, relax.TensorType) else None for operand in operands]
    if any(shape is None or len(shape) <= axis for shape in shapes):
        return list(operands)
    target = min((evaluator.simplify(shape[axis]) for shape in shapes if shape is not None), key=_complexity)
    own = [[*(shape or ())[:axis], target, *(shape or ())[axis + 1 :]] for shape in shapes]
    return [with_sizes(builder, *pair, evaluator) for pair in zip(operands, own, strict=True)]


def agree_in_channels(
    builder: relax.BlockBuilder, operands: Sequence[relax.Expr], evaluator: "SizeEvaluator"
) -> list[relax.Expr]:
    """Return data [n, c, ...] and vectors [c], the operands of a norm, with one expression for c.

    Sizes that may differ are checked when the model runs. Operands of other ranks are returned unchanged.
    """
    shapes = [dims_of(operand) if isinstance(operand.ty, relax.TensorType) else None for operand in operands]
    data, *vectors = ([] if shape is None else shape for shape in shapes)
    if len(data) < 2 or any(len(shape) != 1 for shape in vectors):
        return list(operands)
    target = min(map(evaluator.simplify, (data[1], *(shape[0] for shape in vectors))), key=_complexity)
    own = [[data[0], target, *data[2:]], *([target] for _ in vectors)]
    return [with_sizes(builder, *pair, evaluator) for pair in zip(operands, own, strict=True)]


def agree_in_product(
    builder: relax.BlockBuilder, operands: Sequence[relax.Expr], evaluator: "SizeEvaluator"
) -> list[relax.Expr]:
    """Return the two operands of a matrix product, with one expression for each pair of dimensions that must be equal.

    These are the dimension that is summed, and the batch dimensions of which neither is the constant 1. Sizes that may
    differ are checked when the model runs. Operands of unknown shape or with less than two dimensions are returned
    unchanged.
    """
    shapes = [dims_of(operand) if isinstance(operand.ty, relax.TensorType) else None for operand in operands]
    if any(shape is None or len(shape) < 2 for shape in shapes) or len(shapes) != 2:
        return list(operands)
    left, right = (list(shape or ()) for shape in shapes)
    left[-1] = right[-2] = min(map(evaluator.simplify, (left[-1], right[-2])), key=_complexity)
    for place in range(3, min(len(left), len(right)) + 1):
        pair = [left[-place], right[-place]]
        target = simplest(pair, evaluator)
        left[-place], right[-place] = (size if _is_one(size) else target for size in pair)
    return [with_sizes(builder, *pair, evaluator) for pair in zip(operands, (left, right), strict=True)]


def with_sizes(
    builder: relax.BlockBuilder, operand: relax.Expr, shape: Sequence[Any], evaluator: "SizeEvaluator"
) -> relax.Expr:
    """Return an operand with the dimensions `shape`; sizes that may differ are checked at run time."""
    dims = dims_of(operand)
    if dims is not None and len(dims) == len(shape) and all(map(evaluator.are_equal, dims, shape)):
        return operand
    return cast_to(builder, operand, shape)


def simplest(sizes: Sequence[Any], evaluator: "SizeEvaluator") -> Any:
    """Return the size to which `sizes` broadcast, in its simplest expression; sizes other than 1 must be equal."""
    others = [evaluator.simplify(size) for size in sizes if not _is_one(size)]
    return min(others, key=_complexity) if others else 1


def _is_one(size: Any) -> bool:
    return isinstance(size, int) and size == 1


def _is_at_most_one(size: Any, evaluator: "SizeEvaluator") -> bool:
    return not isinstance(size, int) and evaluator.holds(size <= 1)


def _complexity(size: Any) -> int:
    """The number of operations and symbols in the expression of a size; 0 for a number."""
    if isinstance(size, int):
        return 0
    parts = (getattr(size, name, None) for name in ("a", "b", "value"))
    return 1 + sum(_complexity(part) for part in parts if part is not None)
