"""The sizes of free dimensions at which no pooling of an ONNX model is larger than its data."""

from collections.abc import Mapping
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import onnx

# Tensors of more elements are weights; shapes and axes, which the inference of shapes reads, have fewer.
_LARGEST_SHAPE = 1024


class Poolings:
    """The poolings of a model, which ONNX Runtime computes even where the window is larger than the data."""

    def __init__(self, model: "onnx.ModelProto") -> None:
        import onnx

        self._nodes = [node for node in model.graph.node if node.op_type in ("AveragePool", "LpPool", "MaxPool")]
        self._model = onnx.ModelProto(ir_version=model.ir_version, opset_import=model.opset_import)
        if not self._nodes:
            return
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

    def fit(self, sizes: Mapping[str, int]) -> bool:
        """Return whether no pooling is known to be larger than its data at these sizes of the free dimensions."""
        import onnx

        if not self._nodes:
            return True
        model = onnx.ModelProto()
        model.CopyFrom(self._model)
        for value in model.graph.input:
            for dim in value.type.tensor_type.shape.dim:
                if dim.dim_param in sizes:
                    dim.dim_value = sizes[dim.dim_param]
        try:
            graph = onnx.shape_inference.infer_shapes(model, data_prop=True).graph
        except Exception:  # The inference refuses graphs that runtimes take.
            return True
        shapes = {value.name: value.type.tensor_type.shape.dim for value in (*graph.value_info, *graph.input)}
        return all(_fits(node, [dim.dim_value for dim in shapes.get(node.input[0], ())[2:]]) for node in self._nodes)


def _fits(node: "onnx.NodeProto", sizes: list[int]) -> bool:
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
