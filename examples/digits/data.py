"""Scikit-learn's handwritten digits, split into training and held-out data."""

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split


@dataclass(frozen=True)
class Split:
    """Images [N, 1, 8, 8] float32 in 0..1 with their labels [N] int64."""

    images: NDArray[np.float32]
    labels: NDArray[np.int64]


def splits(seed: int = 0) -> tuple[Split, Split]:
    """The training split (80 %) and the held-out split (20 %), each with the classes in equal shares."""
    digits: Any = load_digits()
    images = (digits.images / 16.0).astype(np.float32)[:, None]
    labels = digits.target.astype(np.int64)
    train, held_out = train_test_split(np.arange(len(labels)), test_size=0.2, random_state=seed, stratify=labels)
    return Split(images[train], labels[train]), Split(images[held_out], labels[held_out])


def with_noise(split: Split, share: float, seed: int) -> Split:
    """The split with a share of its labels, 0 to 1, drawn anew at random."""
    generator = np.random.default_rng(seed)
    labels = generator.integers(0, 10, len(split.labels))
    return Split(split.images, np.where(generator.random(len(split.labels)) < share, labels, split.labels))


def held_out() -> tuple[dict[str, NDArray[np.float32]], NDArray[np.int64]]:
    """The held-out images by input name, and their labels: what training never saw."""
    _, split = splits()
    return {"image": split.images}, split.labels
