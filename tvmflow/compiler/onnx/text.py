"""TfIdfVectorizer: counts of n-grams, sequences of words that are numbers."""

from itertools import pairwise
from typing import Any

import numpy as np
from tvm import relax, te, tirx

from tvmflow.compiler.onnx.node import FreeSizeError, Node, UnsupportedFormError
from tvmflow.compiler.onnx.values import const, dims_of


def convert_tf_idf_vectorizer(node: Node) -> relax.Expr:
    """Return the Relax expression of ONNX's TfIdfVectorizer: by its `mode`, counts of n-grams, their weights, or both.

    Each n-gram is compared with the words at each position. Raises UnsupportedFormError for words that are strings and
    for n-grams that share a column of the result, and FreeSizeError for words of unknown shape.
    """
    attrs, words, dims = node.attrs, node.inputs[0], dims_of(node.inputs[0])
    if attrs.get("pool_strings"):
        raise UnsupportedFormError("words that are strings: only numbers are supported")
    if dims is None:
        raise FreeSizeError("words of unknown shape")
    columns = np.asarray(attrs["ngram_indexes"])
    if len(set(columns.tolist())) < len(columns):
        raise UnsupportedFormError("sequences that share a column of the result")
    table = words if len(dims) == 2 else node.emit(relax.op.expand_dims(words, 0))
    rows = 1 if len(dims) == 1 else dims[0]
    pool, starts = np.asarray(attrs["pool_int64s"], "int64"), [*attrs["ngram_counts"], len(attrs["pool_int64s"])]
    counts, order = [], []
    done = 0
    for length, (start, end) in enumerate(pairwise(starts), 1):
        grams = pool[start:end].reshape(-1, length)
        if len(grams) and attrs["min_gram_length"] <= length <= attrs["max_gram_length"]:
            counts.append(_count(node, table, grams))
            order += columns[done : done + len(grams)].tolist()
        done += len(grams)
    width = int(columns.max()) + 1
    # A column of which no sequence is counted is zero.
    counts.append(node.emit(relax.op.zeros(relax.ShapeExpr([rows, 1]), "float32")))
    place_of = {column: place for place, column in reversed(list(enumerate(order)))}
    places = [place_of.get(column, len(order)) for column in range(width)]
    result = node.emit(
        relax.op.take(node.emit(relax.op.concat(counts, 1)), const(places, "int64"), axis=1, mode="clip")
    )
    mode, weights = node.text("mode", "TF"), np.zeros(width, "float32")
    weights[columns] = attrs.get("weights", 1)
    if mode == "IDF":
        occurs = node.emit(relax.op.greater(result, const(0, "float32")))
        result = node.emit(relax.op.where(occurs, const(weights), const(0, "float32")))
    elif mode == "TFIDF":
        result = node.emit(relax.op.multiply(result, const(weights)))
    return result if len(dims) == 2 else relax.op.squeeze(result, [0])


def _count(node: Node, words: relax.Expr, grams: Any) -> relax.Expr:
    """Count each of `grams` [sequences, length] in each row of words, with steps of one and more words."""
    count, length = grams.shape
    steps = 1 + (int(node.attrs["max_skip_count"]) if length > 1 else 0)

    def tally(words: te.Tensor, grams: te.Tensor) -> te.Tensor:
        first, step = te.reduce_axis((0, words.shape[1]), "first"), te.reduce_axis((0, steps), "step")

        def element(row: Any, gram: Any) -> Any:
            places = [first + place * (step + 1) for place in range(length)]
            last = words.shape[1] - 1
            same = [words[row, te.min(at, last)].astype("int64") == grams[gram, i] for i, at in enumerate(places)]
            is_there = tirx.all(places[-1] <= last, *same)
            return te.sum(tirx.Cast("float32", is_there), axis=[first, step])

        return te.compute((words.shape[0], count), element, name="tally")

    return node.emit(node.builder.call_te(tally, words, const(grams), primfunc_name_hint="tally"))
