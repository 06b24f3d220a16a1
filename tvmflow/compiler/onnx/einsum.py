"""Einsum as sums, products and transposes: a matrix product has a fast kernel, a loop over all letters has none."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import reduce
from typing import Any

from tvm import relax, te

from tvmflow.compiler.onnx.broadcasting import simplest
from tvmflow.compiler.onnx.node import FreeSizeError, Node, UnsupportedFormError
from tvmflow.compiler.onnx.values import dims_of
from tvmflow.onnx_model.equations import letters_of


@dataclass(frozen=True)
class _Term:
    """A tensor and the letters of its dimensions, none of them twice; `is_constant`: it is known at build time."""

    value: relax.Expr
    letters: str
    is_constant: bool = False


def convert_einsum(node: Node) -> relax.Expr:
    """Return the Relax expression of ONNX's Einsum: its operands are multiplied pair by pair, from the left.

    Sizes that a letter has in several operands may have several expressions; the model checks them when it runs.
    Raises FreeSizeError for operands of unknown shape, and UnsupportedFormError for an equation that does not fit them.
    """
    shapes = [dims_of(operand) for operand in node.inputs]
    if any(shape is None for shape in shapes):
        raise FreeSizeError("operands of unknown shape")
    ranks = [len(shape or ()) for shape in shapes]
    try:
        operands, result = letters_of(node.text("equation", ""), ranks)
    except ValueError as error:
        raise UnsupportedFormError(str(error), "check the equation") from error
    sizes: dict[str, Any] = {}
    for letter in dict.fromkeys("".join(operands)):
        pairs = zip(operands, shapes, strict=True)
        sizes[letter] = simplest(
            [size for own, shape in pairs for name, size in zip(own, shape or (), strict=True) if name == letter],
            node.evaluator,
        )
    terms = [_term(node, place, letters, sizes) for place, letters in enumerate(operands)]
    while len(terms) > 1:
        needed = result + "".join(term.letters for term in terms[2:])
        terms[:2] = [_multiply(node, terms[0], terms[1], needed, sizes)]
    return _arranged(node, _summed(node, terms[0], result), result)


def _term(node: Node, place: int, letters: str, sizes: dict[str, Any]) -> _Term:
    """The operand at a place: the diagonal for a letter that occurs twice, without dimensions that are repeated."""
    dims = dims_of(node.inputs[place]) or []
    repeated = [
        axis
        for axis, (letter, size) in enumerate(zip(letters, dims, strict=True))
        if isinstance(size, int) and size == 1 and not node.evaluator.are_equal(sizes[letter], 1)
    ]
    own = [1 if axis in repeated else sizes[letter] for axis, letter in enumerate(letters)]
    value = node.with_sizes(node.inputs[place], own)
    if repeated:
        value = node.emit(relax.op.squeeze(value, repeated))
        letters = "".join(letter for axis, letter in enumerate(letters) if axis not in repeated)
    single = "".join(dict.fromkeys(letters))
    if single != letters:

        def diagonal(data: te.Tensor) -> te.Tensor:
            shape = [data.shape[letters.index(letter)] for letter in single]
            return te.compute(
                shape, lambda *index: data[tuple(index[single.index(letter)] for letter in letters)], name="diagonal"
            )

        value = node.emit(node.builder.call_te(diagonal, value, primfunc_name_hint="diagonal"))
    return _Term(value, single, node.constant(place) is not None)


def _multiply(node: Node, left: _Term, right: _Term, needed: str, sizes: dict[str, Any]) -> _Term:
    """Multiply two terms, and sum over the letters that are not `needed` any more."""
    left, right = (_summed(node, one, needed + other.letters) for one, other in ((left, right), (right, left)))
    shared = [letter for letter in left.letters if letter in right.letters]
    # In the order of the result, so that it need not be transposed.
    batch = sorted((letter for letter in shared if letter in needed), key=needed.index)
    depth = [letter for letter in shared if letter not in needed]
    if _begins_later(left, right, needed):
        left, right = right, left
    rows, columns = ([letter for letter in term.letters if letter not in shared] for term in (left, right))
    is_product = rows or (right.is_constant and not batch)
    if not depth or not columns or not is_product:
        # One factor for each element, or sums that read each element of a tensor once.
        return _multiply_elements(node, left, right, needed)
    elements = [_size_of(node, letters, sizes) for letters in (rows, depth, columns)]
    # With a batch, all rows are one dimension; without one, they need not be.
    lines = [sizes[letter] for letter in rows] if rows and not batch else [elements[0]]
    outer = [sizes[letter] for letter in batch]
    factors = [
        _reshaped(node, _arranged(node, left, [*batch, *rows, *depth]), [*outer, *lines, elements[1]]),
        _reshaped(node, _arranged(node, right, [*batch, *depth, *columns]), [*outer, elements[1], elements[2]]),
    ]
    product = node.emit(relax.op.matmul(*factors))
    letters = [*batch, *rows, *columns]
    return _Term(_reshaped(node, product, [sizes[letter] for letter in letters]), "".join(letters))


def _begins_later(left: _Term, right: _Term, needed: str) -> bool:
    """Whether the product of two terms becomes simpler where the right one comes first.

    A constant comes last: it is packed at build time. Else the order of the letters in the result decides.
    """
    if left.is_constant != right.is_constant:
        return left.is_constant
    places = [
        [needed.index(letter) for letter in one.letters if letter in needed and letter not in other.letters]
        for one, other in ((left, right), (right, left))
    ]
    return all(places) and min(places[1]) < min(places[0])


def _multiply_elements(node: Node, left: _Term, right: _Term, needed: str) -> _Term:
    """Multiply two terms element by element, and sum over the letters that are not `needed` any more."""
    letters = sorted({*left.letters, *right.letters}, key=lambda letter: (letter not in needed, needed.find(letter)))
    factors = [_spread(node, term, letters) for term in (left, right)]
    return _summed(node, _Term(node.emit(relax.op.multiply(*factors)), "".join(letters)), needed)


def _spread(node: Node, term: _Term, letters: Sequence[str]) -> relax.Expr:
    """The value of a term with a dimension for each of the letters, of size 1 for those that it does not have."""
    value = _arranged(node, term, [letter for letter in letters if letter in term.letters])
    missing = [axis for axis, letter in enumerate(letters) if letter not in term.letters]
    return node.emit(relax.op.expand_dims(value, missing)) if missing else value


def _summed(node: Node, term: _Term, needed: str) -> _Term:
    """The sum of a term over the letters that are not `needed`."""
    axes = [axis for axis, letter in enumerate(term.letters) if letter not in needed]
    if not axes:
        return term
    kept = "".join(letter for letter in term.letters if letter in needed)
    return _Term(node.emit(relax.op.sum(term.value, axes)), kept, term.is_constant)


def _arranged(node: Node, term: _Term, letters: Iterable[str]) -> relax.Expr:
    """The value of a term with its dimensions in the order of the letters."""
    order = [term.letters.index(letter) for letter in letters]
    if order == list(range(len(term.letters))):
        return term.value
    return node.emit(relax.op.permute_dims(term.value, order))


def _size_of(node: Node, letters: Iterable[str], sizes: dict[str, Any]) -> Any:
    return reduce(node.evaluator.multiply, (sizes[letter] for letter in letters), 1)


def _reshaped(node: Node, value: relax.Expr, shape: Sequence[Any]) -> relax.Expr:
    dims = dims_of(value) or []
    if len(dims) == len(shape) and all(map(node.evaluator.are_equal, dims, shape)):
        return value
    return node.emit(relax.op.reshape(value, relax.ShapeExpr(list(shape))))
