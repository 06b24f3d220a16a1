"""Support vector machines of ai.onnx.ml: kernels of rows and support vectors, votes of pairs of classes."""

from typing import Any

import numpy as np
from tvm import relax, te, tirx
from tvm.script.ir_builder import IRBuilder
from tvm.script.ir_builder import tirx as T

from tvmflow.arrays import Array
from tvmflow.compiler.onnx.classical import rows_of
from tvmflow.compiler.onnx.node import Node, UnsupportedFormError
from tvmflow.compiler.onnx.scores import class_labels, take_labels, transform, transform_targets
from tvmflow.compiler.onnx.values import const

# Probabilities of pairs stay so far from zero and one, as in libsvm.
_LEAST_PROBABILITY = 1e-7
# The most iterations, and the error times the number of classes at which they end, as in libsvm.
_ITERATIONS = 100
_TOLERANCE = 0.005


def convert_svm_regressor(node: Node) -> relax.Expr:
    """Return the Relax expression of ONNX's SVMRegressor: a weighted sum of a row's kernels with the support vectors.

    For a one-class model, the result is 1 where the sum is positive, else -1. Raises UnsupportedFormError for an
    unknown kernel or `post_transform`, and for a polynomial kernel whose degree is not a positive integer. Raises
    FreeSizeError for rows with an unknown number of features.
    """
    x, features = rows_of(node, "SVMRegressor")
    coefficients = np.asarray(node.attrs.get("coefficients", ()), "float32")
    rho = np.asarray(node.attrs.get("rho", (0.0,)), "float32")
    if int(node.attrs.get("n_supports", 0)):
        vectors = np.asarray(node.attrs["support_vectors"], "float32").reshape(-1, features)
        kernel = _kernel(node, x, vectors, node.text("kernel_type", "LINEAR"))
    else:
        kernel = x
    scores = node.emit(relax.op.matmul(kernel, const(np.ascontiguousarray(coefficients.reshape(-1, 1)))))
    scores = node.emit(relax.op.add(scores, const(rho[:1])))
    if int(node.attrs.get("one_class", 0)):
        is_inside = node.emit(relax.op.greater(scores, const(0.0, "float32")))
        return relax.op.where(is_inside, const(1.0, "float32"), const(-1.0, "float32"))
    return transform_targets(node, scores, keeps_one=True)


def convert_svm_classifier(node: Node) -> relax.Expr:
    """Return the Relax expression of ONNX's SVMClassifier: a tuple of the labels and the scores.

    The kernels of a row and the support vectors give a score for each pair of classes. The score is a vote for one
    class of the pair, and the label is the class with the most votes. The scores returned are those of the pairs or, if
    the node has `prob_a`, the probabilities of the classes. Raises UnsupportedFormError for labels that are strings,
    for an unknown kernel or `post_transform`, and for numbers of labels and classes that differ. Raises FreeSizeError
    for rows with an unknown number of features.
    """
    x, features = rows_of(node, "SVMClassifier")
    labels, post = class_labels(node, "classlabels_ints"), node.text("post_transform", "NONE")
    counts = [int(count) for count in node.attrs.get("vectors_per_class", ())]
    if len(counts) != len(labels) or len(labels) < 2:
        raise UnsupportedFormError(f"support vectors of {len(counts)} classes for {len(labels)} labels")
    emit, vectors = node.emit, np.asarray(node.attrs["support_vectors"], "float32").reshape(-1, features)
    kernel = _kernel(node, x, vectors, node.text("kernel_type", "LINEAR"))
    pairs = [(first, second) for first in range(len(labels)) for second in range(first + 1, len(labels))]
    weights = _pair_weights(
        np.asarray(node.attrs["coefficients"], "float32").reshape(len(labels) - 1, -1), counts, pairs
    )
    rho = np.asarray(node.attrs["rho"], "float32")
    scores = emit(relax.op.add(emit(relax.op.matmul(kernel, const(weights))), const(rho)))
    is_first = emit(relax.op.astype(emit(relax.op.greater(scores, const(0.0, "float32"))), "float32"))
    first, second = (np.eye(len(labels), dtype="float32")[[pair[place] for pair in pairs]] for place in (0, 1))
    votes = emit(relax.op.matmul(is_first, const(first - second)))
    votes = emit(relax.op.add(votes, const(second.sum(axis=0))))
    label = take_labels(node, emit(relax.op.argmax(votes, axis=1)), labels)
    if node.attrs.get("prob_a"):
        scores = transform(node, _probabilities(node, scores, pairs, len(labels)), post)
    elif len(labels) == 2:
        scores = _scores_of_two(node, scores, post)
    else:
        scores = transform(node, scores, post)
    return relax.Tuple([label, scores])


def _pair_weights(coefficients: Array, counts: list[int], pairs: list[tuple[int, int]]) -> Array:
    """The weight of each support vector in the score of each pair of classes [vectors, pairs]."""
    starts = np.cumsum([0, *counts])
    weights = np.zeros((starts[-1], len(pairs)), "float32")
    for pair, (first, second) in enumerate(pairs):
        for own, row in ((first, second - 1), (second, first)):
            vectors = slice(starts[own], starts[own + 1])
            weights[vectors, pair] = coefficients[row, vectors]
    return weights


def _scores_of_two(node: Node, score: relax.Expr, post: str) -> relax.Expr:
    """The scores of two classes [rows, 2] by the one of their pair, as ONNX Runtime computes them."""
    if post == "PROBIT":
        raise UnsupportedFormError("post_transform 'PROBIT' for two labels")
    one = const(1.0 if post.startswith("SOFTMAX") else 0.0, "float32")
    both = node.emit(relax.op.concat([node.emit(relax.op.subtract(one, score)), score], 1))
    return node.emit(relax.op.sigmoid(both)) if post == "LOGISTIC" else both


def _probabilities(node: Node, scores: relax.Expr, pairs: list[tuple[int, int]], classes: int) -> relax.Expr:
    """The probabilities of classes [rows, classes] by the scores of their pairs.

    The method is the second one of Wu, Lin and Weng, "Probability estimates for multi-class classification by pairwise
    coupling" (2004), with the constants of libsvm.
    """
    emit = node.emit
    slope, shift = (const(np.asarray(node.attrs[name], "float32")) for name in ("prob_a", "prob_b"))
    logits = emit(relax.op.add(emit(relax.op.multiply(scores, slope)), shift))
    shares = emit(relax.op.sigmoid(emit(relax.op.negative(logits))))
    least, most = (const(bound, "float32") for bound in (_LEAST_PROBABILITY, 1 - _LEAST_PROBABILITY))
    shares = emit(relax.op.minimum(emit(relax.op.maximum(shares, least)), most))
    places = {pair: place for place, pair in enumerate(pairs)}

    def couple(shares: te.Tensor) -> list[te.Tensor]:
        rows = shares.shape[0]
        shapes = [(rows, classes), (rows, classes), (rows, classes, classes), (rows, 3)]
        buffers = [tirx.decl_buffer(shape, "float32", "work") for shape in shapes]
        return te.extern(  # type: ignore[no-any-return]
            shapes,
            [shares],
            lambda inputs, outputs: _couple(places, inputs[0], *outputs),
            out_buffers=buffers,
            dtype=["float32"] * len(shapes),
            name="couple",
        )

    results = node.builder.call_te(couple, shares, primfunc_name_hint="couple")
    return emit(relax.TupleGetItem(emit(results), 0))


def _couple(
    places: dict[tuple[int, int], int], shares: Any, estimates: Any, products: Any, matrix: Any, state: Any
) -> Any:
    """Statements that find the probabilities `estimates` of each row; `state` is a total, an error and a step."""
    classes = int(estimates.shape[1])
    each = range(classes)
    total, error, step = range(3)

    def share(first: int, second: int, row: Any) -> Any:
        """The probability of the first class where it is one of the two."""
        if first < second:
            return shares[row, places[first, second]]
        return 1.0 - shares[row, places[second, first]]

    with IRBuilder() as builder:
        estimates, products, matrix, state, shares = map(T.buffer_proxy, (estimates, products, matrix, state, shares))
        with T.parallel(0, estimates.shape[0]) as row:
            for i in each:
                estimates[row, i] = tirx.const(1 / classes, "float32")
                for j in each:
                    if i == j:
                        squares = [share(other, i, row) * share(other, i, row) for other in each if other != i]
                        matrix[row, i, i] = sum(squares[1:], squares[0])
                    else:
                        matrix[row, i, j] = 0.0 - share(j, i, row) * share(i, j, row)
            state[row, error] = tirx.const(1.0, "float32")
            is_apart = state[row, error] >= tirx.const(_TOLERANCE / classes, "float32")
            with T.serial(0, max(_ITERATIONS, classes)), T.If(is_apart), T.Then():
                state[row, total] = tirx.const(0.0, "float32")
                for i in each:
                    terms = [matrix[row, i, j] * estimates[row, j] for j in each]
                    products[row, i] = sum(terms[1:], terms[0])
                    state[row, total] = state[row, total] + estimates[row, i] * products[row, i]
                state[row, error] = tirx.const(0.0, "float32")
                for i in each:
                    distance = tirx.abs(products[row, i] - state[row, total])
                    state[row, error] = tirx.max(state[row, error], distance)
                with T.If(is_apart), T.Then():
                    for i in each:
                        state[row, step] = (state[row, total] - products[row, i]) / matrix[row, i, i]
                        move, whole = state[row, step], 1.0 + state[row, step]
                        estimates[row, i] = estimates[row, i] + move
                        gain = move * (move * matrix[row, i, i] + 2.0 * products[row, i])
                        state[row, total] = (state[row, total] + gain) / whole / whole
                        for j in each:
                            products[row, j] = (products[row, j] + move * matrix[row, i, j]) / whole
                            estimates[row, j] = estimates[row, j] / whole
        return builder.get()


def _kernel(node: Node, x: relax.Expr, vectors: Array, kind: str) -> relax.Expr:
    """The kernel function of each row and each vector [vectors, features]."""
    emit = node.emit
    gamma, shift, degree = (*(float(value) for value in node.attrs.get("kernel_params", ())), 0.0, 0.0, 0.0)[:3]
    if kind == "RBF":
        # Differences are squared one by one: squares apart would cancel each other.
        count, features = vectors.shape
        apart = emit(relax.op.subtract(emit(relax.op.expand_dims(x, 1)), const(vectors.reshape(1, count, features))))
        square = emit(relax.op.sum(emit(relax.op.multiply(apart, apart)), 2))
        return emit(relax.op.exp(emit(relax.op.multiply(square, const(-gamma, "float32")))))
    product = emit(relax.op.matmul(x, const(np.ascontiguousarray(vectors.T))))
    if kind == "LINEAR":
        return product
    product = emit(relax.op.add(emit(relax.op.multiply(product, const(gamma, "float32"))), const(shift, "float32")))
    if kind == "POLY":
        if degree != int(degree) or degree < 1:
            raise UnsupportedFormError(f"a polynomial kernel of degree {degree}")
        power = product
        for _ in range(int(degree) - 1):
            power = emit(relax.op.multiply(power, product))
        return power
    if kind == "SIGMOID":
        return emit(relax.op.tanh(product))
    raise UnsupportedFormError(f"kernel {kind!r}")
