"""The original model: a PyTorch module or an ONNX file, loaded as the release file says."""

from collections.abc import Collection
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from tvmflow import usercode
from tvmflow.arrays import NamedArrays
from tvmflow.errors import ExportError
from tvmflow.spec import Model
from tvmflow.usercode import describe
from tvmflow.workspace import Record

if TYPE_CHECKING:
    import torch


# What stands before the names of weights that torch.compile or a wrapper for several devices saved.
_WRAPPERS = ("module.", "_orig_mod.")
# How many names a message lists, and how many letters of the reason of a library it has.
_NAMES, _REASON = 3, 120


class Source(Record):
    """The original model on this machine.

    `path` is a weights file, a .pt2, an ONNX file or the folder of an MLflow model; None for a factory without a
    weights file. `trusts_pickle` says whether a registered PyTorch model may be unpickled, which can run any code.
    """

    kind: Literal["factory", "pt2", "onnx", "mlflow-pytorch"]
    model: Model
    path: Path | None = None
    trusts_pickle: bool = False

    @property
    def framework(self) -> Literal["pytorch", "onnx"]:
        """The framework that runs the original."""
        return "onnx" if self.kind == "onnx" else "pytorch"


def load_module(source: Source) -> "torch.nn.Module":
    """Load the user's model as a PyTorch module in evaluation mode. Raises ExportError when it cannot be loaded."""
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
            from mlflow.environment_variables import MLFLOW_ALLOW_PICKLE_DESERIALIZATION

            # MLflow also refuses a traced program whose tensors are arbitrary pickles.
            MLFLOW_ALLOW_PICKLE_DESERIALIZATION.set(source.trusts_pickle)
            try:
                module = mlflow.pytorch.load_model(str(source.path), map_location="cpu")
            except Exception as error:
                raise ExportError(f"model {source.model.mlflow!r} cannot be loaded ({describe(error)})") from error
        case _:
            raise ExportError(f"model {str(source.path)!r} is no PyTorch model")
    module = _without_wrappers(module)
    _require_values(module, source.model.label)
    # MLflow's default format is a traced program, which has no evaluation mode.
    return module if isinstance(module, torch.fx.GraphModule) else module.eval()


def _without_wrappers(module: "torch.nn.Module") -> "torch.nn.Module":
    """The module within torch.compile's and those that spread a batch over devices, which take other arguments."""
    import torch

    while True:
        if isinstance(module, torch.nn.DataParallel | torch.nn.parallel.DistributedDataParallel):
            module = module.module
        elif isinstance(inner := getattr(module, "_orig_mod", None), torch.nn.Module):
            module = inner
        else:
            return module


def _require_values(module: "torch.nn.Module", label: str) -> None:
    """Raise ExportError for a module that an export does not take: scripted, or with parameters without values."""
    import torch

    if isinstance(module, torch.jit.ScriptModule) and not isinstance(module, torch.jit.TopLevelTracedModule):
        raise ExportError(f"model {label!r} is a module that torch.jit has scripted; return the module itself")
    for name, tensor in (*module.named_parameters(), *module.named_buffers()):
        if torch.nn.parameter.is_lazy(tensor):
            raise ExportError(
                f"parameter {name!r} of model {label!r} has no values yet, as those of lazy layers before their first "
                "call; call the module once in its factory"
            )
        if tensor.is_meta:
            raise ExportError(
                f"parameter {name!r} of model {label!r} is on the device meta, without values; build the module on the "
                "CPU"
            )


def _load_weights(module: "torch.nn.Module", path: Path, model: Model) -> None:
    import torch

    weights_name = str(model.weights or "trained weights")
    state: Any
    try:
        if path.suffix == ".safetensors":
            from safetensors.torch import load_file

            state = load_file(path)
        else:
            state = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:
        advice = "it must be written by torch.save(module.state_dict(), path) or by safetensors"
        raise ExportError(
            f"weights {weights_name!r} are not a readable state dict ({describe(error)[:_REASON]}); {advice}"
        ) from error
    if isinstance(state, dict) and all(isinstance(name, str) for name in state):
        state = _without_prefix(module, state)
        reason = _explain_misfit(module, state)
    else:
        reason = f"the file holds a {type(state).__name__} and no state dict; save module.state_dict()"
    if reason is None:
        try:
            module.load_state_dict(state)
        except Exception as error:
            reason = describe(error)
    if reason is not None:
        raise ExportError(f"weights {weights_name!r} do not fit the model of {model.factory!r}: {reason}")


def _without_prefix(module: "torch.nn.Module", state: dict[str, Any]) -> dict[str, Any]:
    """The weights of a module that was wrapped when they were saved, by their names without the wrapper's."""
    names = module.state_dict().keys()
    for prefix in _WRAPPERS:
        if {name.removeprefix(prefix) for name in state} == names and all(name.startswith(prefix) for name in state):
            return {name.removeprefix(prefix): value for name, value in state.items()}
    return state


def _explain_misfit(module: "torch.nn.Module", state: dict[str, Any]) -> str | None:
    """Return a clause on the first names or shapes of the weights that are not the module's; None where all fit."""
    import torch

    expected = module.state_dict()
    own = {name: value for name, value in expected.items() if isinstance(value, torch.Tensor)}
    others = [name for name, value in state.items() if not isinstance(value, torch.Tensor) and name not in own]
    if others and not own.keys() <= state.keys():
        return f"the file holds {_list(state)}; save the state dict alone"
    missing = [name for name in own if name not in state]
    unknown = [name for name in state if name not in expected]
    if missing or unknown:
        parts = [f"it lacks {_list(missing)}"] if missing else []
        parts += [f"the model has no {_list(unknown)}"] if unknown else []
        return " and ".join(parts)
    for name, value in own.items():
        if tuple(state[name].shape) != tuple(value.shape):
            return f"{name!r} has shape {list(state[name].shape)}, the model wants {list(value.shape)}"
    return None


def _list(names: Collection[str]) -> str:
    """The first names, and how many more there are."""
    text = ", ".join(repr(name) for name in list(names)[:_NAMES])
    return text if len(names) <= _NAMES else f"{text} and {len(names) - _NAMES} more"


def run_module(module: "torch.nn.Module", inputs: NamedArrays, names: tuple[str, ...] = ()) -> NamedArrays:
    """Run a PyTorch module and return its outputs by name.

    The values of `inputs` are its arguments, in order; nested outputs are flattened to the tensors in them, of which
    those of bfloat16 become float32. Without `names` the outputs are output_0, output_1, ... Raises ExportError when
    the number of outputs differs from that of `names`, and the module's own errors.
    """
    import torch
    from torch.utils._pytree import tree_leaves

    with torch.inference_mode():
        output = module(*(torch.from_numpy(np.ascontiguousarray(array)) for array in inputs.values()))
    tensors = [leaf for leaf in tree_leaves(output) if isinstance(leaf, torch.Tensor)]
    # NumPy has no bfloat16.
    leaves = [(leaf.float() if leaf.dtype == torch.bfloat16 else leaf).detach().numpy() for leaf in tensors]
    names = names or tuple(f"output_{index}" for index in range(len(leaves)))
    if len(leaves) != len(names):
        raise ExportError(f"the model returns {len(leaves)} outputs, but outputs names {len(names)}")
    return dict(zip(names, leaves, strict=True))
