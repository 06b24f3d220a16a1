"""Operators of ai.onnx.ml other than trees and support vector machines: scaling, encoding, linear models."""

import math
from typing import Any

import numpy as np
from onnx import TensorProto, numpy_helper
from tvm import relax

from tvmflow.arrays import Array
from tvmflow.compiler.onnx.attention import with_length
from tvmflow.compiler.onnx.indexing import checked_indices
from tvmflow.compiler.onnx.node import FreeSizeError, Node, UnsupportedFormError
from tvmflow.compiler.onnx.scores import class_labels, classify, transform_targets
from tvmflow.compiler.onnx.values import const, dims_of, dtype_of
from tvmflow.onnx_model.features import features_of


def _floats(node: Node, value: relax.Expr) -> relax.Expr:
    """A tensor as float32."""
    return value if dtype_of(value) == "float32" else node.emit(relax.op.astype(value, "float32"))


def rows_of(node: Node, operator: str) -> tuple[relax.Expr, int]:
    """Return the first operand of a node of `operator` as a float32 matrix, and the number of its columns.

    A vector is one row. Raises FreeSizeError for an operand of more than two dimensions. Raises it for a symbolic
    number of columns, too, unless the node's attributes tell that number.
    """
    x = _with_features(node, operator)
    if x.ty.ndim == 1:
        x = node.emit(relax.op.expand_dims(x, 0))
    dims = dims_of(x)
    if dims is None or len(dims) != 2 or not isinstance(dims[1], int):
        raise FreeSizeError("rows of an unknown number of features")
    return _floats(node, x), dims[1]


def _with_features(node: Node, operator: str) -> relax.Expr:
    """The first operand, whose last dimension, if it is symbolic, must be what the attributes ask for."""
    x = node.inputs[0]
    dims, features = dims_of(x), features_of(operator, node.attrs)
    if not dims or features is None or isinstance(dims[-1], int):
        return x
    return node.with_sizes(x, [*dims[:-1], features.count])


def _vector(node: Node, name: str, size: Any, default: float) -> Array:
    """An attribute with a number for each column, or one for all."""
    values = np.asarray(node.attrs.get(name, (default,)), "float32")
    if values.size not in (1, size):
        raise UnsupportedFormError(f"{name} of {values.size} numbers for {size} features")
    return values


def convert_scaler(node: Node) -> relax.Expr:
    """Return the Relax expression of ONNX's Scaler: (x - offset) * scale as float32.

    Rows of float64 are scaled in float64: a small difference of large numbers, such as points in time, stays exact.
    Raises UnsupportedFormError where `offset` or `scale` has neither one number nor one for each column.
    """
    x = _with_features(node, "Scaler")
    x = x if dtype_of(x) == "float64" else _floats(node, x)
    size, dtype = dims_of(x)[-1], dtype_of(x)  # type: ignore[index]
    centred = relax.op.subtract(x, const(_vector(node, "offset", size, 0.0), dtype))
    return _floats(
        node, node.emit(relax.op.multiply(node.emit(centred), const(_vector(node, "scale", size, 1.0), dtype)))
    )


def convert_normalizer(node: Node) -> relax.Expr:
    """Return the Relax expression of ONNX's Normalizer: rows divided by their norm, in float32.

    The norm MAX is the largest element. A row whose norm is zero stays as it is. Raises UnsupportedFormError for a norm
    other than L1, L2 and MAX.
    """
    x, norm = _floats(node, node.inputs[0]), node.text("norm", "MAX")
    axis = x.ty.ndim - 1
    if norm == "L1":
        size = relax.op.sum(node.emit(relax.op.abs(x)), axis, keepdims=True)
    elif norm == "L2":
        size = relax.op.sum(node.emit(relax.op.multiply(x, x)), axis, keepdims=True)
        size = relax.op.sqrt(node.emit(size))
    elif norm == "MAX":
        size = relax.op.max(x, axis, keepdims=True)
    else:
        raise UnsupportedFormError(f"norm {norm!r}")
    size = node.emit(size)
    is_zero = node.emit(relax.op.equal(size, const(0.0, "float32")))
    return relax.op.divide(x, node.emit(relax.op.where(is_zero, const(1.0, "float32"), size)))


def convert_binarizer(node: Node) -> relax.Expr:
    """Return the Relax expression of ONNX's Binarizer: one for elements above the threshold, zero for others."""
    x = node.inputs[0]
    above = node.emit(relax.op.greater(x, const(float(node.attrs.get("threshold", 0.0)), dtype_of(x))))
    return relax.op.astype(above, dtype_of(x))


def convert_imputer(node: Node) -> relax.Expr:
    """Return the Relax expression of ONNX's Imputer: elements equal to the replaced value become the imputed value.

    The replaced value may be NaN. There is one imputed value for all columns, or one for each. Raises
    UnsupportedFormError for another number of imputed values.
    """
    x = _with_features(node, "Imputer")
    dtype = dtype_of(x)
    is_integer = dtype.startswith("int")
    kind = "int64" if is_integer else "float"
    values = np.asarray(node.attrs.get(f"imputed_value_{kind}s", ()))
    missing = node.attrs.get(f"replaced_value_{kind}", 0)
    size = dims_of(x)[-1]  # type: ignore[index]
    if values.size not in (1, size):
        raise UnsupportedFormError(f"{values.size} imputed values for {size} features")
    is_nan = not is_integer and math.isnan(missing)
    is_missing = relax.op.isnan(x) if is_nan else relax.op.equal(x, const(missing, dtype))
    return relax.op.where(node.emit(is_missing), const(values, dtype), x)


def convert_one_hot_encoder(node: Node) -> relax.Expr:
    """Return the Relax expression of ONNX's OneHotEncoder of numbers: a comparison with each category, as float32.

    Of a category that occurs several times the last counts, as in ONNX Runtime. With `zeros` = 0 the model stops with
    an error, when it runs, at a value that is no category. Raises UnsupportedFormError for categories that are strings.
    """
    if node.attrs.get("cats_strings"):
        raise UnsupportedFormError("categories that are strings in a model that computes others")
    x, emit = node.inputs[0], node.emit
    x = x if dtype_of(x) == "int64" else emit(relax.op.astype(x, "int64"))
    categories = np.asarray(node.attrs["cats_int64s"], "int64")
    is_hot = emit(relax.op.equal(emit(relax.op.expand_dims(x, x.ty.ndim)), const(categories)))
    is_last = np.array([category not in categories[place + 1 :] for place, category in enumerate(categories)])
    if not is_last.all():
        is_hot = emit(relax.op.logical_and(is_hot, const(is_last)))
    if not int(node.attrs.get("zeros", 1)):
        numbers = emit(relax.op.astype(is_hot, "int64"))
        place = emit(relax.op.argmax(numbers, axis=-1))
        is_category = emit(relax.op.greater(emit(relax.op.max(numbers, axis=-1)), const(0, "int64")))
        place = emit(relax.op.where(is_category, place, const(categories.size, "int64")))
        place = emit(checked_indices(node, place, [categories.size], is_signed=False))
        is_hot = emit(relax.op.equal(emit(relax.op.expand_dims(place, x.ty.ndim)), const(np.arange(categories.size))))
    return relax.op.astype(is_hot, "float32")


def convert_array_feature_extractor(node: Node) -> relax.Expr:
    """Return the Relax expression of ONNX's ArrayFeatureExtractor: the columns at the given indices.

    The model checks the indices when it runs. Raises FreeSizeError for those of unknown shape, and UnsupportedFormError
    for a constant one outside of the data.
    """
    x, places = node.inputs
    places = node.emit(relax.op.reshape(places, [-1]))
    if x.ty.ndim == 1:
        x = node.emit(relax.op.expand_dims(x, 0))
    places = checked_indices(node, places, dims_of(x)[-1:], is_signed=False)  # type: ignore[index]
    return relax.op.take(x, places, axis=x.ty.ndim - 1, mode="clip")


def convert_feature_vectorizer(node: Node) -> relax.Expr:
    """Return the Relax expression of ONNX's FeatureVectorizer: the columns of all operands side by side, as float32.

    A vector is one row; of more than two dimensions, all but the first are columns. Of each operand the result has as
    many columns as `inputdimensions` says: further ones are left out, and zeros take the place of missing ones. Raises
    UnsupportedFormError where there are not as many of these numbers as operands.
    """
    parts, widths = [], node.attrs.get("inputdimensions", ())
    if len(widths) != len(node.inputs):
        raise UnsupportedFormError(f"inputdimensions of {len(widths)} operands for {len(node.inputs)}")
    for operand, width in zip(node.inputs, widths, strict=True):
        part = _floats(node, operand)
        if part.ty.ndim < 2:
            part = node.emit(relax.op.expand_dims(part, 0))
        elif part.ty.ndim > 2:
            part = node.apply("Flatten", part, axis=1)
        parts.append(part if dims_of(part)[1] == width else with_length(node, part, width, 0))  # type: ignore[index]
    return relax.op.concat(parts, 1)


def convert_label_encoder(node: Node) -> relax.Expr:
    """Return the Relax expression of ONNX's LabelEncoder: a search for each number among the sorted keys.

    A number that is no key becomes the default. Raises UnsupportedFormError for strings, and for keys and values of
    different lengths.
    """
    attrs = node.attrs
    if any("string" in name and value for name, value in attrs.items()):
        raise UnsupportedFormError("strings in a model that computes others")
    keys, values = (_table(attrs, name) for name in ("keys", "values"))
    if keys is None or values is None or len(keys) != len(values):
        raise UnsupportedFormError("keys and values of different numbers, or strings among them")
    default = _default(attrs, values.dtype)
    x = node.inputs[0]
    _, places = np.unique(keys, return_index=True)  # of keys that occur twice the first counts
    keys, values = keys[places].astype(dtype_of(x)), values[places]
    flat = node.emit(relax.op.reshape(x, [-1]))
    is_nan = np.isnan(keys) if keys.dtype.kind == "f" else np.zeros(len(keys), bool)
    number = None
    if is_nan.any():
        number = values[is_nan][-1]
        keys, values = keys[~is_nan], values[~is_nan]
    result: relax.Expr = const(np.full(1, default))
    if len(keys):
        place = node.emit(relax.op.bucketize(flat, const(keys)))
        place = node.emit(relax.op.minimum(place, const(len(keys) - 1, dtype_of(place))))
        is_key = node.emit(relax.op.equal(node.emit(relax.op.take(const(keys), place, axis=0, mode="clip")), flat))
        chosen = node.emit(relax.op.take(const(values), place, axis=0, mode="clip"))
        result = node.emit(relax.op.where(is_key, chosen, result))
    if number is not None:
        is_missing = node.emit(relax.op.isnan(flat))
        result = node.emit(relax.op.where(is_missing, const(np.full(1, number, values.dtype)), result))
    return relax.op.reshape(result, x.ty.shape)


def _table(attrs: dict[str, Any], name: str) -> Array | None:
    tensor = attrs.get(f"{name}_tensor")
    if isinstance(tensor, TensorProto) and tensor.data_type:
        array = np.asarray(numpy_helper.to_array(tensor))
        return None if array.dtype.kind not in "iuf" else array.reshape(-1)
    for kind, dtype in (("int64s", "int64"), ("floats", "float32")):
        if attrs.get(f"{name}_{kind}"):
            return np.asarray(attrs[f"{name}_{kind}"], dtype)
    return None


def _default(attrs: dict[str, Any], dtype: Any) -> Any:
    tensor = attrs.get("default_tensor")
    if isinstance(tensor, TensorProto) and tensor.data_type != TensorProto.UNDEFINED:
        return numpy_helper.to_array(tensor).reshape(-1)[0]
    if np.dtype(dtype).kind == "f":
        return np.asarray(attrs.get("default_float", -0.0), dtype)[()]
    return np.asarray(attrs.get("default_int64", -1), dtype)[()]


def convert_linear_regressor(node: Node) -> relax.Expr:
    """Return the Relax expression of ONNX's LinearRegressor: a dense layer, then the `post_transform`.

    Raises UnsupportedFormError for a wrong number of coefficients and for an unknown `post_transform`. Raises
    FreeSizeError for rows with an unknown number of features.
    """
    scores = _linear(node, rows_of(node, "LinearRegressor"), int(node.attrs.get("targets", 1)))
    return transform_targets(node, scores)


def convert_linear_classifier(node: Node) -> relax.Expr:
    """Return the Relax expression of ONNX's LinearClassifier: a tuple of the labels and of the scores of a dense layer.

    Raises UnsupportedFormError for labels that are strings, for a wrong number of coefficients, for an unknown
    `post_transform`, and for a single score with PROBIT or other than two labels. Raises FreeSizeError for rows with an
    unknown number of features.
    """
    labels, post = class_labels(node, "classlabels_ints"), node.text("post_transform", "NONE")
    x, features = rows_of(node, "LinearClassifier")
    count = len(node.attrs.get("intercepts", ())) or len(node.attrs["coefficients"]) // features
    scores = _linear(node, (x, features), count)
    if count > 1:
        return classify(node, scores, labels, post)
    if len(labels) != 2 or post == "PROBIT":
        raise UnsupportedFormError(f"one score for {len(labels)} labels and post_transform {post!r}")
    positive = node.emit(relax.op.squeeze(node.emit(relax.op.greater(scores, const(0.0, "float32"))), [1]))
    chosen = relax.op.where(positive, const(int(labels[1]), "int64"), const(int(labels[0]), "int64"))
    if post == "LOGISTIC":
        scores = node.emit(relax.op.sigmoid(scores))
    opposite = node.emit(relax.op.subtract(const(1.0, "float32"), scores))
    return relax.Tuple([node.emit(chosen), node.emit(relax.op.concat([opposite, scores], 1))])


def _linear(node: Node, rows: tuple[relax.Expr, int], targets: int) -> relax.Expr:
    x, features = rows
    coefficients = np.asarray(node.attrs.get("coefficients", ()), "float32")
    if coefficients.size != targets * features:
        raise UnsupportedFormError(f"{coefficients.size} coefficients for {targets} targets of {features} features")
    weights = np.ascontiguousarray(coefficients.reshape(targets, features).T)
    scores = node.emit(relax.op.matmul(x, const(weights)))
    intercepts = np.asarray(node.attrs.get("intercepts", ()), "float32")
    return node.emit(relax.op.add(scores, const(intercepts))) if intercepts.size else scores
