"""Reads the text in a picture: `python predict.py DETECT_BUNDLE READ_BUNDLE IMAGE`."""

import argparse
from pathlib import Path
from typing import NamedTuple

import numpy as np
from data import Array, letters_of, prepare_line, prepare_page, read
from PIL import Image

from tvmflow.errors import TvmflowError
from tvmflow.runtime import CompiledModel, load

_LARGEST_SIDE = 960
_GRID = 32  # the detector halves the image five times
_THRESHOLD, _BOX_THRESHOLD = 0.3, 0.5
_GROWTH = 1.6  # a box grows by so many times its area over its outline: the detector marks the lines' cores


class Box(NamedTuple):
    """A line's place in pixels."""

    left: int
    top: int
    right: int
    bottom: int


def find_boxes(scores: Array) -> list[Box]:
    """The boxes of the lines in a detector's scores `[height, width]`, from top to bottom and left to right."""
    from scipy import ndimage

    height, width = scores.shape
    regions, _ = ndimage.label(scores > _THRESHOLD)
    boxes = []
    for place, (rows, columns) in enumerate(ndimage.find_objects(regions), 1):
        tall, wide = rows.stop - rows.start, columns.stop - columns.start
        if min(tall, wide) < 3 or scores[rows, columns][regions[rows, columns] == place].mean() < _BOX_THRESHOLD:
            continue
        margin = round(tall * wide * _GROWTH / (2 * (tall + wide)))
        left, top = max(0, columns.start - margin), max(0, rows.start - margin)
        boxes.append(Box(left, top, min(width, columns.stop + margin), min(height, rows.stop + margin)))
    return sorted(boxes, key=lambda box: (box.top, box.left))


def read_image(
    detect: CompiledModel, reader: CompiledModel, letters: list[str], image: Image.Image
) -> list[tuple[Box, str]]:
    """The lines of text in a picture with their places in it."""
    scale = min(1.0, _LARGEST_SIDE / max(image.size))
    size = tuple(max(_GRID, round(side * scale / _GRID) * _GRID) for side in image.size)
    page = image.convert("RGB").resize((size[0], size[1]))
    (scores,) = detect(x=prepare_page(np.asarray(page))).values()
    lines = []
    for box in find_boxes(scores[0, 0]):
        (classes,) = reader(x=prepare_line(page.crop(box))).values()
        in_image = (round(side * image.size[axis % 2] / size[axis % 2]) for axis, side in enumerate(box))
        lines.append((Box(*in_image), "".join(letters[item] for item in read(classes[0]))))
    return lines


def main(arguments: list[str] | None = None) -> None:
    """Run the command; a mistake of the user ends it with one sentence."""
    parser = argparse.ArgumentParser(description="Print the lines of text in a picture, each with its place.")
    parser.add_argument("detect", type=Path, help="a bundle of detect.yaml")
    parser.add_argument("read", type=Path, help="a bundle of read.yaml")
    parser.add_argument("image", type=Path, help="a picture in any format that Pillow reads")
    parser.add_argument("--model", type=Path, default=Path(__file__).parent / "models" / "read.onnx")
    options = parser.parse_args(arguments)
    try:
        letters = letters_of(options.model)
        with Image.open(options.image) as image, load(options.detect) as detect, load(options.read) as reader:
            lines = read_image(detect, reader, letters, image)
    except (OSError, TvmflowError) as error:
        raise SystemExit(f"error: {error}") from error
    for box, text in lines:
        print(f"{box.left:5} {box.top:5} {box.right:5} {box.bottom:5}  {text}")


if __name__ == "__main__":
    main()
