"""PyTorch's pooling of free sizes.

PyTorch's exporter writes adaptive pooling to more than one element of a dimension as pooling with a window of one size,
which it computes as a number, so that it fixes the size of the dimension. Of three dimensions it writes only the mean
of all elements. Windows of adaptive pooling begin and end where the size says, and their lengths differ. Here a mean is
a product with a matrix of the windows' shares, and a maximum takes what each window holds, with operations of any size.

A window that is as large as its dimension is a number to the exporter as well, and here the mean or the maximum of all
elements. It fixes the length of what `max_pool1d` gets, too, and not that of `max_pool2d`, which stands in its place.
"""

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from tvmflow.torch_forms.sizes import any_free, are_equal, is_free, of_each


def replacements() -> Iterator[tuple[Any, str, Callable[..., Any]]]:
    """Yield the functions that are replaced: the module, the name, and what replaces them."""
    pools: dict[str, tuple[Callable[..., Tensor], Callable[..., Tensor]]] = {
        "avg": (_mean, torch.mean),
        "max": (_maximum, torch.amax),
    }
    for kind, (pool, reduce) in pools.items():
        for rank in (1, 2, 3):
            name = f"adaptive_{kind}_pool{rank}d"
            yield functional, name, _adaptive(getattr(functional, name), pool, rank)
            name = f"{kind}_pool{rank}d"
            original = getattr(functional, name)
            yield functional, name, _whole(_of_lines(original) if name == "max_pool1d" else original, reduce, rank)


def _adaptive(
    original: Callable[..., Any], pool: Callable[[Tensor, int, int], Tensor], rank: int
) -> Callable[..., Any]:
    """Return a function of PyTorch that pools by `pool`, one dimension after another, what the exporter cannot."""

    def function(input: Tensor, output_size: Any, return_indices: bool = False) -> Any:
        counts = of_each(output_size, rank)
        sizes = input.shape[-rank:]
        is_exported = all(count == 1 for count in counts) or (rank < 3 and not any_free(sizes))
        if is_exported or return_indices:
            return original(input, output_size, *([return_indices] if return_indices else []))
        for axis, (size, count) in enumerate(zip(sizes, counts, strict=True), -rank):
            # None keeps the size.
            if count is not None and not are_equal(size, count):
                input = pool(input, axis, count)
        return input

    return function


def _windows(input: Tensor, axis: int, count: int) -> Tensor:
    """Return which elements of a dimension each of `count` windows holds, in the shape (windows, elements)."""
    size = input.shape[axis]
    windows, elements = torch.arange(count).unsqueeze(1), torch.arange(size).unsqueeze(0)
    # Window i begins at floor(i * size / count) and ends before ceil((i + 1) * size / count).
    begins = elements >= windows * size // count
    return begins & (elements < ((windows + 1) * size + count - 1) // count)


def _mean(input: Tensor, axis: int, count: int) -> Tensor:
    if count == 1:
        return input.mean(dim=axis, keepdim=True)
    windows = _windows(input, axis, count).to(input.dtype)
    shares = windows / windows.sum(dim=1, keepdim=True)
    return (input.transpose(axis, -1) @ shares.mT).transpose(axis, -1)


def _maximum(input: Tensor, axis: int, count: int) -> Tensor:
    if count == 1:
        return input.amax(dim=axis, keepdim=True)
    windows = _windows(input, axis, count)
    elements = input.transpose(axis, -1).unsqueeze(-2)
    return torch.where(windows, elements, -torch.inf).amax(dim=-1).transpose(axis, -1)


def _whole(original: Callable[..., Any], reduce: Callable[..., Tensor], rank: int) -> Callable[..., Any]:
    """Return a function of PyTorch that reduces a dimension of a free size if one window holds all of it."""

    def function(
        input: Tensor, kernel_size: Any, stride: Any = None, padding: Any = 0, *others: Any, **named: Any
    ) -> Any:
        windows, borders = of_each(kernel_size, rank), of_each(padding, rank)
        axes = [
            axis
            for axis, (window, border) in enumerate(zip(windows, borders, strict=True), -rank)
            if is_free(window) and border == 0 and are_equal(window, input.shape[axis])
        ]
        if not axes or named.get("return_indices"):
            return original(input, kernel_size, stride, padding, *others, **named)
        result = reduce(input, dim=axes, keepdim=True)
        if len(axes) == rank:
            return result
        windows, steps = (
            [1 if axis in axes else size for axis, size in enumerate(sizes, -rank)]
            for sizes in (windows, windows if stride is None else of_each(stride, rank))
        )
        return original(result, windows, steps, padding, *others, **named)

    return function


def _of_lines(original: Callable[..., Any]) -> Callable[..., Any]:
    """Return `max_pool1d` as a function that pools lines of a free length as images of one row."""

    def function(
        input: Tensor,
        kernel_size: Any,
        stride: Any = None,
        padding: Any = 0,
        dilation: Any = 1,
        ceil_mode: bool = False,
        return_indices: bool = False,
    ) -> Any:
        if return_indices or not is_free(input.shape[-1]):
            return original(input, kernel_size, stride, padding, dilation, ceil_mode, return_indices)
        # PyTorch takes a stride that is not given for the size of the window.
        sizes = (kernel_size, kernel_size if stride in (None, []) else stride, padding, dilation)
        window, step, border, distance = (
            (row, *of_each(size, 1)) for row, size in zip((1, 1, 0, 1), sizes, strict=True)
        )
        return functional.max_pool2d(input.unsqueeze(-2), window, step, border, distance, ceil_mode).squeeze(-2)

    return function
