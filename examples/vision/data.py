"""The preprocessing of ImageNet classifiers, and synthetic pictures to sample with."""

import numpy as np
from numpy.typing import NDArray
from PIL import Image, ImageDraw

RESIZE, CROP = 256, 224
MEAN = np.array([0.485, 0.456, 0.406], dtype=np.float32)
STD = np.array([0.229, 0.224, 0.225], dtype=np.float32)


def preprocess(image: Image.Image) -> NDArray[np.float32]:
    """A picture of any size and mode as the networks expect it: [1, 3, 224, 224] float32.

    Shorter side to 256 (bilinear, antialiased), centre crop of 224, 0..1, ImageNet's mean and standard deviation: the
    steps by which the accuracies of torchvision's published weights are stated.
    """
    image = image.convert("RGB")
    shorter = min(image.size)
    width, height = (int(RESIZE * side / shorter) for side in image.size)
    image = image.resize((width, height), Image.Resampling.BILINEAR)
    left, top = round((width - CROP) / 2), round((height - CROP) / 2)
    pixels = np.asarray(image.crop((left, top, left + CROP, top + CROP)), dtype=np.float32) / np.float32(255)
    return np.ascontiguousarray(((pixels - MEAN) / STD).transpose(2, 0, 1)[None])


def sample_image(shape: tuple[int, ...], seed: int) -> NDArray[np.float32]:
    """Preprocessed synthetic pictures (a colour gradient, shapes and grain) of shape [batch, 3, 224, 224].

    Raises ValueError for any other shape.
    """
    if len(shape) != 4 or shape[1:] != (3, CROP, CROP):
        raise ValueError(f"sample_image makes pictures of shape [batch, 3, {CROP}, {CROP}], not {list(shape)}")
    generator = np.random.default_rng(seed)
    return np.concatenate([preprocess(_picture(generator)) for _ in range(shape[0])])


def _picture(generator: np.random.Generator, width: int = 400, height: int = 300) -> Image.Image:
    corners = Image.fromarray(generator.integers(0, 256, (2, 2, 3), dtype=np.uint8))
    picture = corners.resize((width, height), Image.Resampling.BICUBIC)
    draw = ImageDraw.Draw(picture)
    for shape in (draw.ellipse, draw.rectangle) * 4:
        left, top = int(generator.integers(0, width)), int(generator.integers(0, height))
        right, bottom = left + int(generator.integers(20, 160)), top + int(generator.integers(20, 160))
        red, green, blue = (int(value) for value in generator.integers(0, 256, 3))
        shape((left, top, right, bottom), fill=(red, green, blue))
    grain = generator.normal(0, 8, (height, width, 3))
    return Image.fromarray(np.clip(np.asarray(picture) + grain, 0, 255).astype(np.uint8))
