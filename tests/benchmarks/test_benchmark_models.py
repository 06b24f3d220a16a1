"""The benchmarks' models have the published architectures and seeded weights."""

import importlib
import inspect
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest
import torch

from tvmflow import runtime


@pytest.mark.parametrize(
    ("name", "arguments", "parameters"),
    [
        ("EfficientNetB0", (), 5_288_548),
        ("DenseNet121", (), 7_978_856),
        ("ShuffleNetV2", (), 2_278_604),
        ("SqueezeNet", (), 1_235_496),
        ("ConvNeXtTiny", (), 28_589_128),
        ("VisionTransformer", (192, 3), 5_717_416),
        ("VisionTransformer", (768, 12), 86_567_656),
        ("MobileNetV3Large", (), 5_483_032),
        ("ResNeXt50", (), 25_028_904),
        ("RegNetY", (), 11_202_430),
    ],
)
def test_a_network_has_the_published_number_of_parameters(
    module: Callable[[str], ModuleType], name: str, arguments: tuple[int, ...], parameters: int
) -> None:
    with torch.device("meta"):
        network = getattr(module("models"), name)(*arguments)
    assert sum(parameter.numel() for parameter in network.parameters()) == parameters


@pytest.mark.parametrize("name", ["UNet", "AtrousSegmenter"])
def test_a_segmenter_scores_every_pixel(module: Callable[[str], ModuleType], name: str) -> None:
    with torch.device("meta"):
        scores = getattr(module("models"), name)(classes=3)(torch.empty(2, 3, 256, 192))
    assert scores.shape == (2, 3, 256, 192)


def test_a_detector_has_a_box_and_scores_for_every_cell_of_three_scales(module: Callable[[str], ModuleType]) -> None:
    with torch.device("meta"):
        cells = module("models").Detector(classes=3)(torch.empty(2, 3, 64, 96))
    assert cells.shape == (2, 8 * 12 + 4 * 6 + 2 * 3, 4 + 3)


def test_activations_neither_vanish_nor_grow_and_the_same_seed_gives_the_same(
    module: Callable[[str], ModuleType],
) -> None:
    image = torch.randn(1, 3, 48, 48, generator=torch.Generator().manual_seed(1))
    with torch.inference_mode():
        first, second = (module("models").shufflenet_v2(seed=3)(image) for _ in range(2))
        other = module("models").shufflenet_v2(seed=4)(image)
    assert torch.equal(first, second)
    assert not torch.equal(first, other)
    assert 0.05 < float(first.std()) < 20


def test_every_model_of_the_catalogue_has_a_factory_that_takes_its_arguments(
    module: Callable[[str], ModuleType], monkeypatch: pytest.MonkeyPatch
) -> None:
    for model in module("catalogue").MODELS.values():
        name, _, function = model.factory.partition(":")
        monkeypatch.syspath_prepend(str(model.folder))
        monkeypatch.delitem(sys.modules, name, raising=False)
        factory = getattr(importlib.import_module(name), function)
        inspect.signature(factory).bind(**model.arguments)
        monkeypatch.delitem(sys.modules, name, raising=False)


@pytest.mark.long
def test_a_free_dimension_stays_free_in_the_file_and_in_the_bundle(
    module: Callable[[str], ModuleType], state: Path
) -> None:
    prepare, minilm = module("prepare"), module("catalogue").MODELS["minilm"]
    small = replace(
        minilm,
        name="tiny-minilm",
        arguments={"vocabulary": 2, "width": 8, "layers": 1, "heads": 2},
        inputs=tuple(replace(item, high=2) for item in minilm.inputs),
    )
    sample = prepare.sample(small, 1, state)
    bundle = prepare.build("tiny-minilm", prepare.export(small, 1, state), sample, prepare.native(1), state)
    model = runtime.load(bundle, threads=1)
    for length in (128, 7):
        mask = np.ones((1, length), "int64")
        pooled, states = model(ids=mask, mask=mask).values()
        assert pooled.shape == (1, 8)
        assert states.shape == (1, length, 8)
