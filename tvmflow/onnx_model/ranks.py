"""The number of dimensions of a tensor that an ONNX file says without saying its shape."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

from tvmflow.onnx_model.external_data import without_weights

if TYPE_CHECKING:
    import onnx


def is_squeeze_without_axes(node: "onnx.NodeProto") -> bool:
    """Return whether a node removes all dimensions of size one."""
    return node.op_type == "Squeeze" and not any(node.input[1:]) and not node.attribute


def squeezed_axes(model: "onnx.ModelProto", node: "onnx.NodeProto", dims: Sequence[int | None]) -> list[int] | None:
    """Return the axes that a Squeeze without axes removes by the file; None where there is no need to ask the file.

    `dims` are the sizes of the data, None for a free one. The number of dimensions that the file gives the result
    decides:

    - As many as the data has dimensions of a known size other than one: the node removes all others. The model then
      takes only the size one for free dimensions.
    - As many as the data has dimensions that are free or of a size other than one: the node removes those of size one.
      The model then takes any size but one for free dimensions.
    - Another number, or none: None is returned, as for data without free dimensions.
    """
    least = sum(size is not None and size != 1 for size in dims)
    most = sum(size != 1 for size in dims)
    rank = None if least == most else _decide_rank(model, node.output[0], range(least, most + 1))
    if rank not in (least, most):
        return None
    return [axis for axis, size in enumerate(dims) if size == 1 or (size is None and rank == least)]


def _decide_rank(model: "onnx.ModelProto", name: str, ranks: Sequence[int]) -> int | None:
    """The rank of the value `name`: that of an output, else the only one of `ranks` that the shapes in the file allow.

    None if the file allows none of them, or several.
    """
    for output in model.graph.output:
        if output.name == name and output.type.tensor_type.HasField("shape"):
            rank = len(output.type.tensor_type.shape.dim)
            return rank if rank in ranks else None
    fitting = [rank for rank in ranks if _agrees(model, name, rank)]
    return fitting[0] if len(fitting) == 1 else None


def _agrees(model: "onnx.ModelProto", name: str, rank: int) -> bool:
    import onnx

    trial = onnx.ModelProto()
    trial.CopyFrom(without_weights(model))
    # Inference takes the type of a value from here where it finds out nothing else.
    trial.graph.value_info.add(name=name).type.tensor_type.shape.dim.extend([onnx.TensorShapeProto.Dimension()] * rank)
    try:
        onnx.shape_inference.infer_shapes(trial, strict_mode=True)
    except Exception:  # It refuses graphs that runtimes take, and files beyond 2 GB.
        return False
    return True
