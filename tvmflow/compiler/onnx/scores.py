"""Labels and scores of classical models: what follows the scores of trees, linear models and support vectors."""

import math

import numpy as np
from tvm import relax

from tvmflow.arrays import Array
from tvmflow.compiler.onnx.node import Node, UnsupportedFormError
from tvmflow.compiler.onnx.values import const, dims_of, dtype_of

# Scores nearer to zero are zero for SOFTMAX_ZERO.
_LEAST = 1e-7
# The constant of Winitzki's approximation of the error function, by which ONNX Runtime inverts it.
_WINITZKI = 0.147


def class_labels(node: Node, name: str) -> Array:
    """Return the class labels in the attribute `name`, as int64.

    Raises UnsupportedFormError for labels that are strings and for a node without labels.
    """
    if node.attrs.get("classlabels_strings"):
        raise UnsupportedFormError("labels that are strings in a model that computes others")
    labels = np.asarray(node.attrs.get(name, ()), "int64")
    if not len(labels):
        raise UnsupportedFormError("no labels")
    return labels


def classify(node: Node, scores: relax.Expr, labels: Array, post_transform: str) -> relax.Expr:
    """Return a tuple of the label of each row's largest score, and the scores after ONNX's `post_transform`.

    `scores` have a row for each sample and a column for each of `labels`. Raises UnsupportedFormError for an unknown
    `post_transform`.
    """
    place = node.emit(relax.op.argmax(scores, axis=1))
    return relax.Tuple([take_labels(node, place, labels), transform(node, scores, post_transform)])


def take_labels(node: Node, place: relax.Expr, labels: Array) -> relax.Expr:
    """Return the tensor of labels whose indices in `labels` are the elements of `place`."""
    if np.array_equal(labels, np.arange(len(labels))):
        return place
    return node.emit(relax.op.take(const(labels), place, axis=0))


def transform(node: Node, scores: relax.Expr, name: str) -> relax.Expr:
    """Return scores [rows, targets] after the `post_transform` of ai.onnx.ml called `name`.

    Raises UnsupportedFormError for an unknown name.
    """
    emit, dtype = node.emit, dtype_of(scores)
    if name == "NONE":
        return scores
    if name == "LOGISTIC":
        return emit(relax.op.sigmoid(scores))
    if name == "SOFTMAX":
        return emit(relax.op.nn.softmax(scores, axis=1))
    if name == "SOFTMAX_ZERO":
        largest = emit(relax.op.max(scores, axis=1, keepdims=True))
        is_zero = emit(relax.op.less_equal(emit(relax.op.abs(scores)), const(_LEAST, dtype)))
        powers = emit(relax.op.exp(emit(relax.op.subtract(scores, largest))))
        powers = emit(relax.op.where(is_zero, const(0.0, dtype), powers))
        total = emit(relax.op.sum(powers, axis=1, keepdims=True))
        return emit(relax.op.divide(powers, total))
    if name == "PROBIT":
        return _probit(node, scores)
    raise UnsupportedFormError(f"post_transform {name!r}")


def transform_targets(node: Node, scores: relax.Expr, *, keeps_one: bool = False) -> relax.Expr:
    """Return the scores [rows, targets] of a regressor after its `post_transform`, as ONNX Runtime computes it.

    ONNX Runtime leaves the score of a single target as it is, but for PROBIT; with `keeps_one` for PROBIT as well.
    Raises UnsupportedFormError for an unknown `post_transform`.
    """
    name = node.text("post_transform", "NONE")
    targets = dims_of(scores)[1]  # type: ignore[index]
    is_kept = targets == 1 and (keeps_one or name in ("LOGISTIC", "SOFTMAX", "SOFTMAX_ZERO"))
    return scores if is_kept else transform(node, scores, name)


def _probit(node: Node, scores: relax.Expr) -> relax.Expr:
    """The quantiles of the normal distribution, by the approximation that ONNX Runtime uses."""
    emit, dtype = node.emit, dtype_of(scores)
    one, two = const(1.0, dtype), const(2.0, dtype)
    centred = emit(relax.op.subtract(emit(relax.op.multiply(two, scores)), one))
    rest = emit(relax.op.multiply(emit(relax.op.subtract(one, centred)), emit(relax.op.add(one, centred))))
    logarithm = emit(relax.op.log(rest))
    half = emit(relax.op.multiply(logarithm, const(0.5, dtype)))
    middle = emit(relax.op.add(half, const(2 / (math.pi * _WINITZKI), dtype)))
    product = emit(relax.op.multiply(logarithm, const(1 / _WINITZKI, dtype)))
    root = emit(relax.op.sqrt(emit(relax.op.subtract(emit(relax.op.multiply(middle, middle)), product))))
    size = emit(relax.op.sqrt(emit(relax.op.subtract(root, middle))))
    signed = emit(relax.op.where(emit(relax.op.less(centred, const(0.0, dtype))), emit(relax.op.negative(size)), size))
    return emit(relax.op.multiply(signed, const(math.sqrt(2), dtype)))
