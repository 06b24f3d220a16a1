"""The original model: a PyTorch module or an ONNX file, loaded as the release file says."""

from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from tvmflow import usercode
from tvmflow.errors import ExportError
from tvmflow.samples import Named
from tvmflow.spec import Model
from tvmflow.usercode import describe
from tvmflow.workspace import Record

if TYPE_CHECKING:
    import onnxruntime
    import torch


class Source(Record):
    """Where the original is on this machine: `path` is a weights file, a .pt2, an ONNX file or a flavor's folder."""

    kind: Literal["factory", "pt2", "onnx", "mlflow-pytorch"]
    model: Model
    path: Path | None = None

    @property
    def framework(self) -> Literal["pytorch", "onnx"]:
        """What runs the original."""
        return "onnx" if self.kind == "onnx" else "pytorch"


def load_module(source: Source) -> "torch.nn.Module":
    """The original as a PyTorch module in evaluation mode. Raises ExportError in one sentence."""
    import torch

    module: Any
    match source.kind:
        case "factory":
            name = source.model.factory or ""
            module = usercode.call(name, "model factory", ExportError, **source.model.arguments)
            if not isinstance(module, torch.nn.Module):
                raise ExportError(f"model factory {name!r} returned a {type(module).__name__}, not a torch.nn.Module")
            if source.path is not None:
                _load_weights(module, source.path, source.model)
        case "pt2":
            try:
                return torch.export.load(str(source.path)).module()
            except Exception as error:
                raise ExportError(
                    f"model {str(source.path)!r} is not a readable .pt2 ExportedProgram ({describe(error)})"
                ) from error
        case "mlflow-pytorch":
            import mlflow.pytorch

            try:
                module = mlflow.pytorch.load_model(str(source.path), map_location="cpu")
            except Exception as error:
                raise ExportError(f"model {source.model.mlflow!r} cannot be loaded ({describe(error)})") from error
        case _:
            raise ExportError(f"model {str(source.path)!r} is no PyTorch model")
    # MLflow's default format holds a traced program, which has no modes to switch between.
    return module if isinstance(module, torch.fx.GraphModule) else module.eval()


def _load_weights(module: "torch.nn.Module", path: Path, model: Model) -> None:
    import torch

    shown = str(model.weights or "trained weights")
    try:
        state = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:
        raise ExportError(f"weights {shown!r} are not a readable state dict ({describe(error)})") from error
    try:
        module.load_state_dict(state)
    except Exception as error:
        raise ExportError(f"weights {shown!r} do not fit the model of {model.factory!r} ({describe(error)})") from error


def run_module(module: "torch.nn.Module", inputs: Named, names: tuple[str, ...] = ()) -> Named:
    """The module's outputs on arrays given in order, flattened, by name."""
    import torch
    from torch.utils._pytree import tree_leaves

    with torch.inference_mode():
        returned = module(*(torch.from_numpy(np.ascontiguousarray(array)) for array in inputs.values()))
    leaves = [leaf.numpy() for leaf in tree_leaves(returned) if isinstance(leaf, torch.Tensor)]
    names = names or tuple(f"output_{index}" for index in range(len(leaves)))
    if len(leaves) != len(names):
        raise ExportError(f"the model returns {len(leaves)} outputs, but outputs names {len(names)}")
    return dict(zip(names, leaves, strict=True))


def open_session(path: Path, threads: int | None = None) -> "onnxruntime.InferenceSession":
    """ONNX Runtime on an ONNX file, on the CPU. Raises ExportError when it cannot read it."""
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.log_severity_level = 3
    if threads is not None:
        options.intra_op_num_threads = threads
    try:
        return onnxruntime.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])
    except Exception as error:
        # The file may be a copy, whose place says nothing to a user.
        cause = describe(error).replace(f"Load model from {path} failed:", "").replace(str(path), path.name)
        raise ExportError(f"ONNX Runtime cannot load the model ({cause})") from error


def run_session(session: "onnxruntime.InferenceSession", inputs: Named) -> Named:
    """ONNX Runtime's outputs by name."""
    names = [output.name for output in session.get_outputs()]
    try:
        return dict(zip(names, session.run(names, inputs), strict=True))
    except Exception as error:
        raise ExportError(f"ONNX Runtime cannot run the model on the samples ({describe(error)})") from error
