"""The models that the benchmarks measure, by name, with their inputs and the latency ratios that are the goals."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from difflib import get_close_matches
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from tvmflow.errors import InputError

Array = npt.NDArray[Any]

_HERE = Path(__file__).parent
_EXAMPLES = _HERE.parent / "examples"


@dataclass(frozen=True)
class Input:
    """An input of a model: its shape without the batch; integers lie from 0 to `high` - 1."""

    name: str
    shape: tuple[int, ...]
    dtype: str = "float32"
    high: int | None = None


@dataclass(frozen=True)
class Model:
    """A model to measure; `factory` is `module:function` in `folder`.

    `goals` are ratios by peer: our latency over that of the peer, at batch 1.
    """

    name: str
    folder: Path
    factory: str
    arguments: Mapping[str, Any] = field(default_factory=dict)
    inputs: tuple[Input, ...] = (Input("image", (3, 224, 224)),)
    goals: Mapping[str, float] = field(default_factory=dict)

    def sample(self, batch: int, seed: int = 0) -> dict[str, Array]:
        """Return inputs by name: standard normal numbers, or integers below the input's `high`."""
        generator = np.random.default_rng(seed)
        return {
            item.name: (
                generator.standard_normal((batch, *item.shape)) if item.high is None else
                generator.integers(0, item.high, (batch, *item.shape))
            ).astype(item.dtype)
            for item in self.inputs
        }  # fmt: skip


def _goals(onnxruntime: float, openvino: float | None = None, pytorch: float | None = None) -> dict[str, float]:
    goals = {"onnxruntime": onnxruntime, "openvino": openvino, "pytorch": pytorch}
    return {peer: goal for peer, goal in goals.items() if goal is not None}


def _own(name: str, factory: str, inputs: tuple[Input, ...] | None = None) -> Model:
    """A model of `models.py`, an architecture that no schedule rule was written for."""
    return Model(name, _HERE, f"models:{factory}", inputs=inputs or Model.inputs, goals=_goals(1.0))


_TOKENS = (Input("ids", (128,), "int64", 8000), Input("mask", (128,), "int64", 2))

MODELS: dict[str, Model] = {
    model.name: model
    for model in (
        Model("resnet18", _EXAMPLES / "vision", "model:resnet18", goals=_goals(0.60, 0.60, 0.30)),
        Model("resnet50", _EXAMPLES / "vision", "model:resnet50", goals=_goals(0.80, 0.75, 0.40)),
        Model("mobilenet_v2", _EXAMPLES / "vision", "model:mobilenet_v2", goals=_goals(0.70, 0.70, 0.14)),
        Model("encoder", _EXAMPLES / "encoder", "model:create", inputs=_TOKENS, goals=_goals(0.90, 0.90, 0.60)),
        Model(
            "digits",
            _EXAMPLES / "digits",
            "model:create",
            inputs=(Input("image", (1, 8, 8)),),
            goals=_goals(0.80, 0.80, 0.50),
        ),
        _own("efficientnet_b0", "efficientnet_b0"),
        _own("densenet121", "densenet121"),
        _own("shufflenet_v2", "shufflenet_v2"),
        _own("squeezenet", "squeezenet"),
        _own("convnext_tiny", "convnext_tiny"),
        _own("unet", "unet", (Input("image", (3, 256, 256)),)),
        _own("vit_tiny", "vit_tiny"),
        _own("vit_b16", "vit_b16"),
        Model(
            "bert_base",
            _EXAMPLES / "encoder",
            "model:create",
            {"vocabulary": 30522, "width": 768, "layers": 12, "heads": 12},
            inputs=(Input("ids", (128,), "int64", 30522), Input("mask", (128,), "int64", 2)),
            goals=_goals(0.85, 0.90),
        ),
        _own("mobilenet_v3_large", "mobilenet_v3_large"),
        _own("resnext50", "resnext50"),
        _own("atrous_segmenter", "atrous_segmenter", (Input("image", (3, 256, 256)),)),
    )
}


def find(names: Sequence[str]) -> list[Model]:
    """Return the models with these names, all models without names. Raises InputError for an unknown name."""
    for name in names:
        if name not in MODELS:
            close = get_close_matches(name, MODELS, n=1)
            hint = f"did you mean {close[0]!r}?" if close else f"the models are {', '.join(MODELS)}"
            raise InputError(f"there is no model {name!r}; {hint}")
    return [MODELS[name] for name in names or MODELS]
