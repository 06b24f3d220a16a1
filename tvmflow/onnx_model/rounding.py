"""Changes the weights of an ONNX file in their last bit, which shows how far the model amplifies rounding errors."""

import math
from pathlib import Path

import numpy as np

from tvmflow.onnx_model import external_data
from tvmflow.onnx_model.graph import nodes_of

# Bytes: larger weights take long to copy.
_LARGEST = 1 << 30
# Operators whose float32 operands say how large a result is.
_SIZING = {"Range", "Resize", "Upsample"}


def change_last_bits(path: Path, output: Path) -> bool:
    """Write the model at `path` with each float32 weight replaced by one of its two neighbours; the seed is fixed.

    Whole numbers and those that are not finite stay, because a model may compare with them or mask by them, and so do
    the scales of images. Returns False, and writes nothing, for a model without other weights and for one with more
    than 1 GiB of float32 weights. Raises OSError where a file cannot be read or written.
    """
    import onnx
    from onnx import numpy_helper

    model = external_data.load(path)
    sizes = {name for node in nodes_of(model.graph) if node.op_type in _SIZING for name in node.input}
    tensors = [item for item in model.graph.initializer if item.data_type == onnx.TensorProto.FLOAT]
    weights = [item for item in tensors if item.name not in sizes]
    if not weights or sum(math.prod(item.dims) for item in weights) * np.float32().itemsize > _LARGEST:
        return False
    generator = np.random.default_rng(0)
    for weight in weights:
        value = external_data.array_of(weight)
        towards = np.where(generator.random(value.shape) < 0.5, -np.inf, np.inf).astype(np.float32)
        is_fixed = ~np.isfinite(value) | (value == np.rint(value))
        weight.CopyFrom(numpy_helper.from_array(np.where(is_fixed, value, np.nextafter(value, towards)), weight.name))
    external_data.save(model, output)
    return True
