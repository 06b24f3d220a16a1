"""Samples for the encoder: attention masks of padded batches."""

import numpy as np
from numpy.typing import NDArray


def mask(shape: tuple[int, ...], seed: int) -> NDArray[np.int64]:
    """A mask [batch, sequence] as a tokenizer pads it: ones, then zeros.

    Every row keeps its first token, and loses its last where there are two or more.
    """
    batch, sequence = shape
    lengths = np.random.default_rng(seed).integers(1, max(sequence, 2), batch)
    return (np.arange(sequence) < lengths[:, None]).astype(np.int64)
