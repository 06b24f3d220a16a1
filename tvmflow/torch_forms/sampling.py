"""PyTorch's functions of positions: `linspace`, `affine_grid`, `take_along_dim`, `roll` and `interpolate`.

The exporter takes the sizes, or the distance of `roll`, only as known numbers. Here the positions are computed from a
range of integers, whose length may be a free size.
"""

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from tvmflow.torch_forms.sizes import any_free, are_equal, as_tensor, is_free, of_each


def replacements() -> Iterator[tuple[Any, str, Callable[..., Any]]]:
    """Yield the functions that are replaced: the module or class, the name, and what replaces them."""
    yield torch, "linspace", _linspace(torch.linspace)
    yield functional, "affine_grid", _affine_grid(functional.affine_grid)
    yield functional, "interpolate", _interpolate(functional.interpolate)
    yield torch, "take_along_dim", _take_along_dim(torch.take_along_dim)
    yield torch.Tensor, "take_along_dim", _take_along_dim(torch.Tensor.take_along_dim)
    yield torch, "roll", _roll(torch.roll)
    yield torch.Tensor, "roll", _roll(torch.Tensor.roll)


def _linspace(original: Callable[..., Tensor]) -> Callable[..., Tensor]:
    def function(start: Any, end: Any, steps: Any, **named: Any) -> Tensor:
        if not is_free(steps) or "out" in named:
            return original(start, end, steps, **named)
        dtype = named.get("dtype") or torch.get_default_dtype()
        places, last = torch.arange(steps), as_tensor(steps) - 1
        distance = (end - start) / last.clamp(min=1)
        # PyTorch counts the second half from the end.
        values = torch.where(places < steps // 2, start + distance * places, end - distance * (last - places))
        return values.to(dtype)

    return function


def _affine_grid(original: Callable[..., Tensor]) -> Callable[..., Tensor]:
    def function(theta: Tensor, size: Sequence[Any], align_corners: bool | None = None) -> Tensor:
        batch, _, *lengths = size
        if not any_free(lengths):
            return original(theta, size, align_corners)
        rank = len(lengths)
        lines = []
        for axis, length in enumerate(lengths):
            line = torch.linspace(-1, 1, length, dtype=theta.dtype)
            if not align_corners:
                count = as_tensor(length)
                line = line * ((count - 1) / count)
            lines.append(line.reshape([-1 if other == axis else 1 for other in range(rank)]).expand(lengths))
        # The places of the last dimension come first, and a constant comes last.
        places = torch.stack([*reversed(lines), torch.ones_like(lines[0])], dim=-1)
        return (places.flatten(0, -2) @ theta.mT).reshape([batch, *lengths, rank])

    return function


def _interpolate(original: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Return `interpolate` as a function that takes the nearest elements by their places, where sizes are given.

    ONNX divides a place by the quotient of the sizes, and PyTorch multiplies it by the inverse: at some sizes they
    round to different elements.
    """

    def function(
        input: Tensor, size: Any = None, scale_factor: Any = None, mode: str = "nearest", *others: Any, **named: Any
    ) -> Tensor:
        arguments = (input, size, scale_factor, mode, *others)
        if mode != "nearest" or size is None or scale_factor is not None:
            return original(*arguments, **named)
        counts = of_each(size, input.dim() - 2)
        sizes = list(zip(input.shape[2:], counts, strict=True))
        if not any(is_free(length) or is_free(count) or _differ(length, count) for length, count in sizes):
            return original(*arguments, **named)
        for axis, (length, count) in enumerate(sizes, 2):
            if not are_equal(length, count):
                share = as_tensor(length).to(torch.float32) / as_tensor(count).to(torch.float32)
                places = (torch.arange(count) * share).to(torch.int64)
                input = input.index_select(axis, places.clamp(max=as_tensor(length) - 1))
        return input

    return function


def _differ(length: int, count: int) -> bool:
    """Whether ONNX takes other elements of `length` for `count` than PyTorch."""
    places = np.arange(count, dtype=np.float32)
    of_torch = places * (np.float32(length) / np.float32(count))
    of_onnx = places / (np.float32(count) / np.float32(length))
    return not np.array_equal(of_torch.astype(np.int64), of_onnx.astype(np.int64))


def _take_along_dim(original: Callable[..., Tensor]) -> Callable[..., Tensor]:
    def function(input: Tensor, indices: Tensor, dim: int | None = None) -> Tensor:
        if dim is None or not any_free([*input.shape, *indices.shape]):
            return original(input, indices, dim)
        axis = dim % input.dim()
        shape = torch.broadcast_shapes(*([*item.shape[:axis], 1, *item.shape[axis + 1 :]] for item in (input, indices)))
        data, places = (item.expand([*shape[:axis], item.shape[axis], *shape[axis + 1 :]]) for item in (input, indices))
        return data.gather(axis, places)

    return function


def _roll(original: Callable[..., Tensor]) -> Callable[..., Tensor]:
    def function(input: Tensor, shifts: Any, dims: Any = ()) -> Tensor:
        axes = of_each(dims, 1)
        distances = of_each(shifts, 1)
        if not axes or not any_free(distances):
            return original(input, shifts, dims)
        for distance, axis in zip(distances, axes, strict=True):
            size = input.shape[axis]
            input = input.index_select(axis, (torch.arange(size) - as_tensor(distance)) % as_tensor(size))
        return input

    return function
