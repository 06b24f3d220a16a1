"""Prints the most likely classes of a picture: `python predict.py BUNDLE IMAGE [--labels FILE]`."""

import argparse
from pathlib import Path

import numpy as np
from data import preprocess
from numpy.typing import NDArray
from PIL import Image

from tvmflow.errors import TvmflowError
from tvmflow.runtime import load


def top_classes(logits: NDArray[np.float32], count: int = 5) -> list[tuple[int, float]]:
    """The `count` most likely classes of logits [classes], the likeliest first, with their probabilities."""
    weights = np.exp(logits - logits.max())
    probabilities = weights / weights.sum()
    return [(int(index), float(probabilities[index])) for index in np.argsort(-logits, kind="stable")[:count]]


def main(arguments: list[str] | None = None) -> None:
    """Run the command; a mistake of the user ends it with one sentence."""
    parser = argparse.ArgumentParser(description="Print the five most likely classes of a picture.")
    parser.add_argument("bundle", type=Path, help="a bundle of mobilenet_v2, resnet18 or resnet50")
    parser.add_argument("image", type=Path, help="a picture in any format that Pillow reads")
    parser.add_argument("--labels", type=Path, help="a text file, line i being the name of class i")
    options = parser.parse_args(arguments)
    try:
        names = options.labels.read_text(encoding="utf-8").splitlines() if options.labels else []
        with Image.open(options.image) as image:
            pixels = preprocess(image)
        with load(options.bundle) as model:
            (logits,) = model(**{model.inputs[0].name: pixels}).values()
    except (OSError, TvmflowError) as error:
        raise SystemExit(f"error: {error}") from error
    classes = logits.shape[-1]
    if names and len(names) != classes:
        raise SystemExit(f"error: {options.labels} has {len(names)} lines, but the model tells {classes} classes apart")
    for rank, (index, probability) in enumerate(top_classes(logits[0]), start=1):
        print(f"{rank}. {names[index] if names else f'class {index}'}  {probability:.1%}")


if __name__ == "__main__":
    main()
