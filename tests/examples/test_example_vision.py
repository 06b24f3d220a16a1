"""The vision example's networks take published weights, and its pictures are prepared as the field does."""

import hashlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest
import torch
from PIL import Image

from support import scale
from support.builds import assert_same_as_onnxruntime
from tvmflow.hardware.target import resolve

EXAMPLE = "vision"
NETWORKS = ("mobilenet_v2", "resnet18", "resnet50")

# SHA-256 over the lines "name shape dtype" of torchvision 0.29's state dicts, in their order.
STATE_DICTS = {
    "mobilenet_v2": "e295766f30dc33361ce8068c28756b98f19cfbeaf175d61a07e9b87fa0a94059",
    "resnet18": "96a672b6f666be68ad2846037d3e49dcff3e611e1463f44253c79c0302bf1d43",
    "resnet50": "537b1c87e6f187e4adb6923a34c01b5c077e82f8c4a64396d34dd2dbffe28f0d",
}


@pytest.fixture(scope="module")
def shapes(example: dict[str, ModuleType]) -> dict[str, torch.nn.Module]:
    """The networks without values, which take seconds to draw and to calibrate."""
    with _uncalibrated(example), torch.device("meta"):
        return {name: getattr(example["model"], name)() for name in NETWORKS}


@contextmanager
def _uncalibrated(example: dict[str, ModuleType]) -> Iterator[None]:
    """Let networks keep fresh statistics of batch normalisation while the body runs."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(example["model"], "_calibrate", lambda model: None)
        yield


@pytest.fixture(scope="module")
def network(example: dict[str, ModuleType]) -> Callable[[str], torch.nn.Module]:
    """Makes a network by its name, once."""
    return cache(lambda name: getattr(example["model"], name)())


@pytest.mark.parametrize(
    ("name", "parameters"), [("mobilenet_v2", 3_504_872), ("resnet18", 11_689_512), ("resnet50", 25_557_032)]
)
def test_the_network_has_the_published_number_of_parameters(
    shapes: dict[str, torch.nn.Module], name: str, parameters: int
) -> None:
    assert sum(parameter.numel() for parameter in shapes[name].parameters()) == parameters


@pytest.mark.parametrize("name", NETWORKS)
def test_the_state_dict_has_torchvisions_names_shapes_and_dtypes(shapes: dict[str, torch.nn.Module], name: str) -> None:
    state = shapes[name].state_dict()
    lines = [f"{key} {list(value.shape)} {value.dtype}" for key, value in state.items()]
    assert hashlib.sha256("\n".join(lines).encode()).hexdigest() == STATE_DICTS[name]


@pytest.mark.long
# Without calibration the activations of the first vanish and those of the third grow.
@pytest.mark.parametrize("name", scale.choose(normal=NETWORKS[:1], long=NETWORKS))
def test_the_top_class_of_an_untrained_network_depends_on_the_picture(
    example: dict[str, ModuleType], network: Callable[[str], torch.nn.Module], name: str
) -> None:
    pictures = torch.from_numpy(example["data"].sample_image((8, 3, 224, 224), seed=0))
    with torch.no_grad():
        logits = network(name)(pictures)
    assert len(set(logits.argmax(1).tolist())) >= 3
    assert 0.01 < logits.std() < 10


def test_a_seed_decides_the_weights_and_nothing_else(
    example: dict[str, ModuleType], network: Callable[[str], torch.nn.Module]
) -> None:
    state, model = torch.get_rng_state(), example["model"]
    with _uncalibrated(example):
        other = model.mobilenet_v2(num_classes=7, seed=2)
        first, same = model.mobilenet_v2().state_dict(), model.mobilenet_v2(seed=0).state_dict()
    if scale.is_long():
        # Calibration takes seconds.
        first, same = network("mobilenet_v2").state_dict(), model.mobilenet_v2(seed=0).state_dict()
    assert all(torch.equal(first[key], same[key]) for key in first)
    assert not torch.equal(first["features.0.0.weight"], other.state_dict()["features.0.0.weight"])
    assert torch.equal(torch.get_rng_state(), state)
    assert other(torch.zeros(1, 3, 224, 224)).shape == (1, 7)


@pytest.mark.parametrize("size", [(640, 480), (301, 999), (50, 40)])
def test_a_picture_of_one_colour_becomes_that_colour_normalised(
    example: dict[str, ModuleType], size: tuple[int, int]
) -> None:
    pixels = example["data"].preprocess(Image.new("RGB", size, (255, 128, 0)))
    assert pixels.shape == (1, 3, 224, 224)
    assert pixels.dtype == np.float32
    expected = [(1 - 0.485) / 0.229, (128 / 255 - 0.456) / 0.224, (0 - 0.406) / 0.225]
    for channel, value in enumerate(expected):
        np.testing.assert_allclose(pixels[0, channel], value, rtol=1e-5)


def test_the_centre_of_the_picture_is_kept(example: dict[str, ModuleType]) -> None:
    picture = Image.new("RGB", (1000, 256), "black")
    picture.paste("white", (388, 16, 612, 240))  # exactly the 224x224 in the middle
    pixels = example["data"].preprocess(picture)
    white = example["data"].preprocess(Image.new("RGB", (256, 256), "white"))
    np.testing.assert_array_equal(pixels, white)


@pytest.mark.parametrize("mode", ["L", "RGBA", "P", "CMYK", "1"])
def test_pictures_of_every_mode_are_taken(example: dict[str, ModuleType], mode: str) -> None:
    assert example["data"].preprocess(Image.new(mode, (300, 300))).shape == (1, 3, 224, 224)


def test_sample_pictures_repeat_for_a_seed_and_differ_between_seeds(example: dict[str, ModuleType]) -> None:
    sample = example["data"].sample_image
    shape = (2, 3, 224, 224)
    assert sample(shape, 3).shape == shape
    np.testing.assert_array_equal(sample(shape, 3), sample(shape, 3))
    assert not np.array_equal(sample(shape, 3), sample(shape, 4))
    assert not np.array_equal(sample(shape, 3)[0], sample(shape, 3)[1])


def test_sample_pictures_of_another_shape_are_refused(example: dict[str, ModuleType]) -> None:
    with pytest.raises(ValueError, match=r"not \[1, 3, 64, 64\]"):
        example["data"].sample_image((1, 3, 64, 64), seed=0)


def test_the_likeliest_class_comes_first(example: dict[str, ModuleType]) -> None:
    top = example["predict"].top_classes(np.log(np.array([0.1, 0.6, 0.3], dtype=np.float32)), count=2)
    assert [index for index, _ in top] == [1, 2]
    assert [probability for _, probability in top] == pytest.approx([0.6, 0.3])


def test_predicting_with_a_file_that_is_no_picture_ends_with_one_sentence(
    example: dict[str, ModuleType], tmp_path: Path
) -> None:
    (tmp_path / "cat.jpg").write_text("no picture")
    with pytest.raises(SystemExit, match=r"error: .*cat\.jpg"):
        example["predict"].main([str(tmp_path / "model.tar.gz"), str(tmp_path / "cat.jpg")])


@pytest.mark.long
@pytest.mark.parametrize("name", NETWORKS)
def test_the_compiled_network_equals_onnx_runtime(
    example: dict[str, ModuleType], network: Callable[[str], torch.nn.Module], tmp_path: Path, name: str
) -> None:
    image = example["data"].sample_image((1, 3, 224, 224), seed=0)
    path = tmp_path / f"{name}.onnx"
    torch.onnx.export(
        network(name), (torch.from_numpy(image),), path, input_names=["image"], dynamo=True, verbose=False
    )
    assert_same_as_onnxruntime(path, [{"image": image}], resolve("native"), rtol=1e-3)
