"""Sizes of tensors while PyTorch follows a module: numbers, or symbols for free sizes."""

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch.fx.experimental.symbolic_shapes import statically_known_true


def is_free(size: Any) -> bool:
    """Whether a size is a symbol."""
    return isinstance(size, torch.SymInt)


def any_free(sizes: Iterable[Any]) -> bool:
    """Whether one of the sizes is a symbol."""
    return any(map(is_free, sizes))


def are_equal(size: Any, other: Any) -> bool:
    """Whether two sizes are equal whatever the symbols stand for."""
    return bool(statically_known_true(size == other))


def of_each(value: Any, rank: int) -> list[Any]:
    """Return the values for `rank` dimensions, which PyTorch takes as a sequence or as one number for all."""
    if not isinstance(value, Sequence):
        return [value] * rank
    return list(value) * rank if len(value) == 1 else list(value)


def as_tensor(size: Any) -> torch.Tensor:
    """Return a size as a tensor without dimensions: the exporter writes quotients of tensors, and not of symbols."""
    return torch.scalar_tensor(size, dtype=torch.int64)
