"""The sizes of free dimensions at which ONNX Runtime runs a model and a bundle does not."""

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from tvmflow.onnx_model.equations import letters_of
from tvmflow.onnx_model.features import DOMAIN, Features, features_of
from tvmflow.onnx_model.ranks import is_squeeze_without_axes, squeezed_axes

if TYPE_CHECKING:
    import onnx

# Operators whose operands are broadcast to one shape.
BROADCASTING = {
    *("Add", "And", "BitShift", "BitwiseAnd", "BitwiseOr", "BitwiseXor", "Div", "Equal", "Greater", "GreaterOrEqual"),
    *("Less", "LessOrEqual", "Max", "Mean", "Min", "Mod", "Mul", "Or", "PRelu", "Pow", "Sub", "Sum", "Where", "Xor"),
}
_POOLINGS = {"AveragePool", "LpPool", "MaxPool"}
# Tensors of more elements are weights; shapes and axes, which the inference of shapes reads, have fewer.
_LARGEST_SHAPE = 1024
# For each operator, the dimension of its second operand that says how many channels or features its first one has.
_INPUTS_AXIS = {
    "Conv": 1,
    "ConvTranspose": 0,
    "MatMul": -2,
    "Gemm": 0,
    "GRU": 2,
    "LSTM": 2,
    "RNN": 2,
    **dict.fromkeys(("BatchNormalization", "InstanceNormalization", "GroupNormalization", "LayerNormalization"), -1),
}
_MOST_WEIGHT_SIZES = 8
# Operators whose result has as many features as their rows; ONNX infers no shapes of ai.onnx.ml.
_FEATURES_KEPT = {"Binarizer", "Imputer", "Normalizer", "Scaler"}
# Where the free dimensions are this large or larger, no tensor has the size one because they are small.
_FAR = 4096
# The inference of shapes holds the elements of vectors of integers one by one, in a hundred bytes each.
_LONGEST_VECTOR = 1 << 18
# A vector can be that long only if the product of the free sizes is larger than this.
_MANY_ITEMS = 1 << 14

_Shapes = Mapping[str, Sequence[int]]


class SizeLimits:
    """Limits of a model's free dimensions, found by the shapes that ONNX infers for its tensors.

    A bundle does not run in five cases that ONNX Runtime accepts:

    - The window of a pooling is larger than its data.
    - An axis has size 1 only because an input is small, and is then broadcast to a larger size; the compiler assumes
      that the two sizes are equal.
    - An operator of ai.onnx.ml has weights for another number of features; ONNX Runtime reads beyond their end.
    - A result has more dimensions than the file says, as a Squeeze does not remove a batch of several items.
    - A result has fewer, as a Squeeze removes a batch of one item.

    `weight_sizes` are the sizes that the first weights of the model fix, such as the channels of its image.
    """

    def __init__(self, model: "onnx.ModelProto") -> None:
        import onnx

        self._known_shapes: dict[frozenset[tuple[str, int]], _Shapes] = {}
        nodes = [node for node in model.graph.node if node.domain in ("", "ai.onnx")]
        self._poolings = [node for node in nodes if node.op_type in _POOLINGS]
        self._features = _Features(model)
        self.weight_sizes = _weight_sizes(model, nodes, self._features.counts)
        self._broadcasts = [node for node in nodes if node.op_type in BROADCASTING or node.op_type == "Einsum"]
        self._model = onnx.ModelProto(ir_version=model.ir_version, opset_import=model.opset_import)
        graph = self._model.graph
        graph.name = model.graph.name
        graph.node.extend(model.graph.node)
        graph.input.extend(model.graph.input)
        inputs = {value.name for value in model.graph.input}
        for tensor in model.graph.initializer:
            if sum(tensor.dims) <= _LARGEST_SHAPE and len(tensor.dims) < 2:
                graph.initializer.append(tensor)
            elif tensor.name not in inputs:
                graph.input.append(onnx.helper.make_tensor_value_info(tensor.name, tensor.data_type, tensor.dims))
        squeezes = [node for node in nodes if is_squeeze_without_axes(node)]
        shapes = self._infer({}) if squeezes else {}
        # The axes that a Squeeze removes or keeps, whatever their size.
        self._removed_axes: list[tuple[str, int]] = []
        self._kept_axes: list[tuple[str, int]] = []
        for node in squeezes:
            dims = [size or None for size in shapes.get(node.input[0], ())]
            axes = squeezed_axes(model, node, dims)
            if axes is None:
                continue
            for axis, size in enumerate(dims):
                if axis in axes:
                    self._removed_axes.append((node.input[0], axis))
                elif size is None:
                    self._kept_axes.append((node.input[0], axis))

    def explain(self, sizes: Mapping[str, int]) -> str | None:
        """Return why a bundle would not run at these sizes of the free dimensions; None if no reason is found."""
        shapes = self._shapes(sizes)
        if not all(_fits(node, shapes.get(node.input[0], ())[2:]) for node in self._poolings):
            return "a pooling is larger than its data"
        if not self._features.fit(shapes):
            return "rows have other features than the model has weights for"
        if any(_size(shapes, name, axis) > 1 for name, axis in self._removed_axes):
            return "the file says that a dimension is one and leaves it out, which here is larger"
        if any(_size(shapes, name, axis) == 1 for name, axis in self._kept_axes):
            return "the file keeps a dimension that a Squeeze removes here, because it is one"
        repeated = {pair for node in self._broadcasts for pair in _find_repeats(node, shapes)}
        if repeated:
            # One factor for all: a size that is the sum of two others stays that.
            factor = self._far_factor(sizes, shapes)
            larger = self._shapes({name: size * factor for name, size in sizes.items()})
            if any(_size(larger, name, axis) > 1 for name, axis in repeated):
                return "a size that is one by chance stands beside a larger one"
        return None

    def _far_factor(self, sizes: Mapping[str, int], shapes: _Shapes) -> int:
        """Return the factor for all sizes that makes the smallest one at least 4096.

        It is a smaller one, at least 2, if vectors would become too long. `shapes` are those at `sizes`. The length of
        a vector may grow with a power of the factor, as that of all tokens of a batch, which is a product of two sizes.
        """
        factor = -(-_FAR // min(sizes.values(), default=1))
        lengths = {name: shape[0] for name, shape in shapes.items() if len(shape) == 1 and shape[0] > 0}
        doubled = self._shapes({name: size * 2 for name, size in sizes.items()}) if lengths else {}
        for name, length in lengths.items():
            growth = _size(doubled, name, 0) / length
            if growth > 1:
                largest = (_LONGEST_VECTOR / length) ** (1 / math.log2(growth))
                factor = min(factor, max(int(largest), 2))
        return factor

    def _shapes(self, sizes: Mapping[str, int]) -> _Shapes:
        """The shapes of tensors at sizes of the free dimensions, 0 for an unknown size, none for an unknown rank."""
        key = frozenset(sizes.items())
        if key not in self._known_shapes:
            self._known_shapes[key] = self._infer(sizes)
        return self._known_shapes[key]

    def _infer(self, sizes: Mapping[str, int]) -> _Shapes:
        """Infer the shapes; nothing where ONNX cannot."""
        import onnx

        model = onnx.ModelProto()
        model.CopyFrom(self._model)
        for value in model.graph.input:
            for dim in value.type.tensor_type.shape.dim:
                if dim.dim_param in sizes:
                    dim.dim_value = sizes[dim.dim_param]
        try:
            # Where vectors may be long, they are looked at before their elements are computed.
            graph = onnx.shape_inference.infer_shapes(model).graph if math.prod(sizes.values()) > _MANY_ITEMS else None
            if graph is None or _longest_vector(graph) <= _LONGEST_VECTOR:
                graph = onnx.shape_inference.infer_shapes(model, data_prop=True).graph
        except Exception:  # The inference refuses graphs that runtimes take.
            return {}
        return {
            value.name: [dim.dim_value for dim in value.type.tensor_type.shape.dim]
            for value in (*graph.value_info, *graph.input)
            if value.type.tensor_type.HasField("shape")
        }


class _Features:
    """The operators of ai.onnx.ml that have weights for a number of features, and the tensors that hold their rows."""

    def __init__(self, model: "onnx.ModelProto") -> None:
        from onnx import helper

        sources: dict[str, str] = {}
        self._rows: list[tuple[str, Features]] = []
        for node in model.graph.node:
            if node.domain != DOMAIN or not node.input:
                continue
            source = sources.get(node.input[0], node.input[0])
            if node.op_type in _FEATURES_KEPT:
                sources[node.output[0]] = source
            attributes = {attribute.name: helper.get_attribute_value(attribute) for attribute in node.attribute}
            features = features_of(node.op_type, attributes)
            if features is not None:
                self._rows.append((source, features))
        self.counts = [features.count for _, features in self._rows]

    def fit(self, shapes: _Shapes) -> bool:
        """Whether all rows whose sizes are known have the features that operators have weights for."""
        sizes = [([*shapes.get(name, ())] or [0])[-1] for name, _ in self._rows]
        return all(not size or features.fit(size) for size, (_, features) in zip(sizes, self._rows, strict=True))


def _weight_sizes(model: "onnx.ModelProto", nodes: Sequence["onnx.NodeProto"], features: Sequence[int]) -> list[int]:
    """The sizes that weights ask of what they are multiplied with, each once: `features`, then in the nodes' order."""
    from onnx import helper

    weights = {tensor.name: list(tensor.dims) for tensor in model.graph.initializer}
    sizes: dict[int, None] = dict.fromkeys(features)
    for node in nodes:
        attributes = {attribute.name: attribute for attribute in node.attribute}
        dims = weights.get(node.input[1], []) if len(node.input) > 1 else []
        axis = _INPUTS_AXIS.get(node.op_type)
        if axis is None or len(dims) <= max(axis, -1 - axis):
            continue
        if node.op_type == "Gemm" and "transB" in attributes and helper.get_attribute_value(attributes["transB"]):
            axis = 1
        groups = helper.get_attribute_value(attributes["group"]) if "group" in attributes else 1
        sizes[dims[axis] * (groups if node.op_type == "Conv" else 1)] = None
    return [size for size in sizes if size > 1][:_MOST_WEIGHT_SIZES]


def _longest_vector(graph: "onnx.GraphProto") -> int:
    """The length of the longest tensor of one dimension among those of known shape; 0 if there is none."""
    shapes = (value.type.tensor_type.shape.dim for value in (*graph.value_info, *graph.input))
    return max((shape[0].dim_value for shape in shapes if len(shape) == 1), default=0)


def _size(shapes: _Shapes, name: str, axis: int) -> int:
    """The size of a tensor along an axis; 0 if it is unknown."""
    shape = shapes.get(name, ())
    return shape[axis] if -len(shape) <= axis < len(shape) else 0


def _find_repeats(node: "onnx.NodeProto", shapes: _Shapes) -> list[tuple[str, int]]:
    """The tensors and axes, counted from the last one, of size one that a broadcast repeats."""
    ranks = [len(shapes.get(name, ())) for name in node.input]
    # What the dimensions of operands that become one dimension have in common.
    keys: list[Sequence[int | str]] = [range(-rank, 0) for rank in ranks]
    if node.op_type == "Einsum":
        try:
            keys = list(letters_of(node.attribute[0].s.decode(), ranks)[0])
        except ValueError:
            # The shape of an operand is unknown.
            return []
    sizes = [
        (key, name, axis, shapes[name][axis])
        for name, own in zip(node.input, keys, strict=True)
        for axis, key in zip(range(-len(own), 0), own, strict=True)
    ]
    larger = {key for key, _, _, size in sizes if size > 1}
    return [(name, axis) for key, name, axis, size in sizes if size == 1 and key in larger]


def _fits(node: "onnx.NodeProto", sizes: Sequence[int]) -> bool:
    """Whether the window of a pooling is within its data of these sizes, 0 for an unknown one."""
    from onnx import helper

    attributes = {attribute.name: helper.get_attribute_value(attribute) for attribute in node.attribute}
    if attributes.get("auto_pad", b"NOTSET").startswith(b"SAME"):
        return True
    kernel = attributes["kernel_shape"]
    dilations, pads = attributes.get("dilations", [1] * len(kernel)), attributes.get("pads", [0] * 2 * len(kernel))
    return all(
        not size or (taps - 1) * dilation < size + before + after
        for size, taps, dilation, before, after in zip(
            sizes, kernel, dilations, pads[: len(kernel)], pads[len(kernel) :], strict=False
        )
    )
