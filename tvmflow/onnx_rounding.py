"""Changes the weights of an ONNX file in their last bit, which shows how far the model amplifies rounding errors."""

from pathlib import Path

import numpy as np

# Larger models take long to copy.
_LARGEST = 1 << 30


def change_last_bits(path: Path, output: Path) -> bool:
    """Write the model at `path` with each float32 weight replaced by one of its two neighbours; the seed is fixed.

    Returns False, and writes nothing, for a model without such weights and for one of more than 1 GiB. Raises OSError
    where a file cannot be read or written.
    """
    import onnx
    from onnx import numpy_helper

    model = onnx.load(path)
    weights = [item for item in model.graph.initializer if item.data_type == onnx.TensorProto.FLOAT]
    if not weights or model.ByteSize() > _LARGEST:
        return False
    generator = np.random.default_rng(0)
    for weight in weights:
        value = numpy_helper.to_array(weight)
        towards = np.where(generator.random(value.shape) < 0.5, -np.inf, np.inf).astype(np.float32)
        weight.CopyFrom(numpy_helper.from_array(np.nextafter(value, towards), weight.name))
    onnx.save(model, output)
    return True
