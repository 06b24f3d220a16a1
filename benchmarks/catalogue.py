"""The models that the benchmarks measure, by name, with their inputs and the latency ratios that are the goals."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from difflib import get_close_matches
from pathlib import Path
from typing import Any

import numpy as np

from tvmflow.arrays import Array
from tvmflow.errors import InputError
from tvmflow.hardware.target import Precision

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

    `goals` are ratios by the precision of our build and by peer: our latency over that of the peer, at batch 1 and
    without tuning. `free` are the axes of every input that have a symbolic size in the ONNX file: by axis, the name and
    the largest size of the dimension.
    """

    name: str
    folder: Path
    factory: str
    arguments: Mapping[str, Any] = field(default_factory=dict)
    inputs: tuple[Input, ...] = (Input("image", (3, 224, 224)),)
    goals: Mapping[Precision, Mapping[str, float]] = field(default_factory=dict)
    free: Mapping[int, tuple[str, int]] = field(default_factory=dict)

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


def _goals(
    onnxruntime: float, openvino: float, bf16: float | None = None, pytorch: float | None = None
) -> dict[Precision, dict[str, float]]:
    """The goals of fp32 builds, and that of bf16 builds over OpenVINO's default."""
    fp32 = {"onnxruntime": onnxruntime, "openvino": openvino, "pytorch": pytorch}
    goals: dict[Precision, dict[str, float | None]] = {"fp32": fp32, "bf16": {"openvino_default": bf16}}
    return {
        precision: {peer: goal for peer, goal in by_peer.items() if goal is not None}
        for precision, by_peer in goals.items()
    }


_TRANSFORMER = _goals(0.85, 0.90, 0.90)
_OTHER = _goals(0.90, 0.95, 1.00)


def _own(name: str, inputs: tuple[Input, ...] = Model.inputs, goals: Mapping[Precision, Any] = _OTHER) -> Model:
    """A model of `models.py`, an architecture that no schedule rule was written for."""
    return Model(name, _HERE, f"models:{name}", inputs=inputs, goals=goals)


def _encoder(name: str, vocabulary: int, free: Mapping[int, tuple[str, int]] | None = None, **sizes: int) -> Model:
    """An encoder of 128 tokens of these sizes, which are arguments of the example's factory."""
    return Model(
        name,
        _EXAMPLES / "encoder",
        "model:create",
        {"vocabulary": vocabulary, **sizes},
        inputs=(Input("ids", (128,), "int64", vocabulary), Input("mask", (128,), "int64", 2)),
        goals=_TRANSFORMER,
        free=free or {},
    )


_IMAGE_256 = (Input("image", (3, 256, 256)),)

MODELS: dict[str, Model] = {
    model.name: model
    for model in (
        Model("resnet18", _EXAMPLES / "vision", "model:resnet18", goals=_goals(0.60, 0.60, 1.00, 0.30)),
        Model("resnet50", _EXAMPLES / "vision", "model:resnet50", goals=_goals(0.75, 0.75, 1.00, 0.40)),
        Model("mobilenet_v2", _EXAMPLES / "vision", "model:mobilenet_v2", goals=_goals(0.70, 0.70, 1.00, 0.14)),
        _encoder("encoder", 8000),
        Model(
            "digits",
            _EXAMPLES / "digits",
            "model:create",
            inputs=(Input("image", (1, 8, 8)),),
            goals=_goals(0.80, 0.80, pytorch=0.50),
        ),
        _own("efficientnet_b0"),
        _own("densenet121"),
        _own("shufflenet_v2"),
        _own("squeezenet"),
        _own("convnext_tiny"),
        _own("unet", _IMAGE_256),
        _own("vit_tiny", goals=_TRANSFORMER),
        _own("vit_b16", goals=_TRANSFORMER),
        _encoder("bert_base", 30522, width=768, layers=12, heads=12),
        # The sizes of all-MiniLM-L6, at any length of the texts.
        _encoder("minilm", 30522, {1: ("length", 512)}, heads=12),
        _own("mobilenet_v3_large"),
        _own("resnext50"),
        _own("regnet_y"),
        _own("detector", (Input("image", (3, 320, 320)),)),
        _own("atrous_segmenter", _IMAGE_256),
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
