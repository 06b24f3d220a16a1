"""Exports of PyTorch's modules with free sizes, compared with PyTorch at several sizes."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import torch
from torch import Tensor, nn

from support.torchlib import share_table
from tvmflow.onnx_model.session import open_session
from tvmflow.torch_forms import functions_of_any_size, translations

FREE = torch.export.Dim.DYNAMIC


def assert_exported(
    module: nn.Module,
    example: tuple[Tensor, ...],
    free: Sequence[dict[int, Any]],
    *others: tuple[Tensor, ...],
    path: Path,
    rtol: float = 1e-5,
) -> list[str]:
    """Export a module, compare it with PyTorch on its example and others, and return the kinds of its operators.

    `free` are the free dimensions of each input.
    """
    share_table()
    module.eval()
    options: dict[str, Any] = {"dynamic_shapes": tuple(free), "custom_translation_table": translations()}
    with functions_of_any_size():
        torch.onnx.export(module, example, str(path), dynamo=True, verbose=False, **options)
    model = onnx.load(path)
    for value, axes in zip(model.graph.input, free, strict=True):
        assert all(value.type.tensor_type.shape.dim[axis].dim_param for axis in axes), value
    session = open_session(path, threads=1)
    names = [item.name for item in session.get_inputs()]
    for tensors in (example, *others):
        with torch.no_grad():
            expected = module(*tensors)
        outputs = session.run(None, {name: tensor.numpy() for name, tensor in zip(names, tensors, strict=True)})
        for output, tensor in zip(outputs, expected, strict=True):
            np.testing.assert_allclose(output, tensor.numpy(), rtol=rtol, atol=1e-6)
    return [node.op_type for node in model.graph.node]
