"""Rendered text for the two models, with what stands where: `python data.py IMAGE` draws a page to try."""

import sys
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[Any]
Dataset = tuple[dict[str, Array], Array]

_READER = Path(__file__).parent / "models" / "read.onnx"
# ImageNet's, per channel.
MEAN, DEVIATION = np.float32([0.485, 0.456, 0.406]), np.float32([0.229, 0.224, 0.225])

_WORDS = (
    *("harbour", "seventeen", "quarter", "machine", "window", "Tuesday", "invoice", "pencil", "river", "garden"),
    *("total", "number", "street", "market", "orange", "table", "winter", "paper", "ticket", "bridge"),
)


def text_of(index: int) -> str:
    """A line of two words, or of a word and a number; the same for the same index."""
    generator = np.random.default_rng([7, index])
    words = generator.choice(_WORDS, 2, replace=False)
    return f"{words[0]} {words[1]}" if index % 2 else f"{words[0]} {generator.integers(10, 10000)}"


def prepare_page(pixels: Array) -> Array:
    """An image `[height, width, 3]` in 0..255 as the detector's input `[1, 3, height, width]`."""
    scaled = (pixels.astype("float32") / 255 - MEAN) / DEVIATION
    return np.ascontiguousarray(scaled.transpose(2, 0, 1)[None])


def prepare_line(image: Any, width: int | None = None, height: int = 48) -> Array:
    """A picture of one line as the reader's input `[1, 3, height, width]` in -1..1; as wide as it is without `width`.

    A narrower picture is filled up with grey, a wider one pressed together.
    """
    from PIL import Image

    natural = max(1, round(image.width * height / image.height))
    wide = natural if width is None else min(width, natural)
    pixels = np.asarray(image.convert("RGB").resize((wide, height), Image.Resampling.BILINEAR), "float32")
    canvas = np.zeros((1, 3, height, width or wide), "float32")
    canvas[0, :, :, :wide] = pixels.transpose(2, 0, 1) / 127.5 - 1
    return canvas


def draw_line(index: int) -> Any:
    """The picture of a line, dark on light."""
    from PIL import Image, ImageDraw

    generator = np.random.default_rng([8, index])
    paper, ink = int(generator.integers(200, 256)), int(generator.integers(0, 80))
    text, font = text_of(index), _font(32, bold=index % 3 == 0)
    left, top, right, bottom = font.getbbox(text)
    image = Image.new("L", (int(right - left) + 16, int(bottom - top) + 12), paper)
    ImageDraw.Draw(image).text((8 - left, 6 - top), text, fill=ink, font=font)
    return image


def draw_page(page: int) -> tuple[Any, Array]:
    """A page of 480x320 with four lines, `text_of` 10 `page` and the next, and the mask `[320, 480]` of their boxes."""
    from PIL import Image, ImageDraw

    generator = np.random.default_rng([9, page])
    image, mask = Image.new("RGB", (480, 320), (240, 240, 240)), np.zeros((320, 480), bool)
    draw = ImageDraw.Draw(image)
    for row in range(4):
        place = (int(generator.integers(10, 120)), 20 + 75 * row)
        font = _font(int(generator.integers(22, 34)))
        ink = int(generator.integers(0, 60))
        draw.text(place, text_of(10 * page + row), fill=(ink, ink, ink), font=font)
        left, top, right, bottom = map(int, draw.textbbox(place, text_of(10 * page + row), font=font))
        mask[top:bottom, left:right] = True
    return image, mask


def _font(size: int, bold: bool = False) -> Any:
    import matplotlib
    from PIL import ImageFont

    name = "DejaVuSans-Bold.ttf" if bold else "DejaVuSans.ttf"
    return ImageFont.truetype(str(Path(matplotlib.get_data_path()) / "fonts" / "ttf" / name), size)


# Held-out data and metrics of the release files.


def pages(count: int = 4) -> Dataset:
    """Pages `[count, 3, 320, 480]` and the masks `[count, 320, 480]` of their lines."""
    drawings = [draw_page(page) for page in range(count)]
    return {"x": np.concatenate([prepare_page(np.asarray(image)) for image, _ in drawings])}, np.stack(
        [mask for _, mask in drawings]
    )


def boxes_overlap(outputs: dict[str, Array], labels: Array) -> float:
    """The F1 score of the pixels with a text score `[page, 1, height, width]` above 0.3 against the lines' boxes."""
    (scores,) = outputs.values()
    is_text = scores[:, 0] > 0.3
    return float(2 * (is_text & labels).sum() / (is_text.sum() + labels.sum()))


def letters_of(model: Path) -> list[str]:
    """The letters that the reader's classes stand for, as its ONNX file lists them; class 0 is none."""
    import onnx

    properties = {item.key: item.value for item in onnx.load(model, load_external_data=False).metadata_props}
    return ["", *properties["character"].splitlines(), " "]


def lines(model: str = str(_READER), count: int = 24) -> Dataset:
    """Lines `[count, 3, 48, 320]`, and the classes of their letters in the ONNX file `model`, filled up with -1."""
    letters = letters_of(Path(model))
    texts = [text_of(index) for index in range(count)]
    labels = np.full((count, max(map(len, texts))), -1, "int64")
    for row, text in zip(labels, texts, strict=True):
        row[: len(text)] = [letters.index(letter) for letter in text]
    return {"x": np.concatenate([prepare_line(draw_line(index), 320) for index in range(count)])}, labels


def read(scores: Array) -> list[int]:
    """The letters' classes of scores `[place, letter]`: repetitions are one letter, class 0 is none."""
    best = scores.argmax(-1)
    return [int(item) for item in best[np.insert(best[1:] != best[:-1], 0, True)] if item]


def letters_right(outputs: dict[str, Array], labels: Array) -> float:
    """One minus the edit distance to the text per letter, of scores `[line, place, letter]`."""
    (scores,) = outputs.values()
    expected = [[int(item) for item in label if item >= 0] for label in labels]
    distance = sum(_edit_distance(read(line), text) for line, text in zip(scores, expected, strict=True))
    return 1 - distance / sum(map(len, expected))


def _edit_distance(left: list[int], right: list[int]) -> int:
    row = list(range(len(right) + 1))
    for position, item in enumerate(left, 1):
        before, row[0] = row[0], position
        for place, other in enumerate(right, 1):
            before, row[place] = row[place], min(row[place] + 1, row[place - 1] + 1, before + (item != other))
    return row[-1]


if __name__ == "__main__":
    draw_page(0)[0].save(sys.argv[1])
