"""Sizes of free dimensions that a model can take, found by trial, where the release file gives none.

An audio network may need more than one frame, an image network a multiple of its stride.
"""

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import product

from tvmflow.spec import Dimension, Input

Sizes = dict[str, int]
Runs = Callable[[Sizes], bool]

_TRIED = (2, 4, 8, 16, 24, 32, 48, 64, 80, 96, 128, 160, 192, 224, 256, 320, 384, 512, 576, 640, 768, 1024, 2048, 4096)
_TRIED_TOGETHER = (1, 8, 16, 32, 48, 64, 96, 128, 224, 256, 320, 512)
# A search ends after so many sizes or seconds.
_MOST_TRIES = 300
_MOST_SECONDS = 60.0


def find_dimensions(
    inputs: Sequence[Input], stated: Mapping[str, Dimension], runs: Runs
) -> dict[str, Dimension] | None:
    """Return the ranges of the dimensions that `stated` lacks; None where the model runs at no size that is tried.

    `runs` says whether the model runs at these sizes of all symbolic dimensions. A range begins with the smallest size
    at which the model runs while the other dimensions stay; the size of the first run that succeeded is the one to
    measure. The search ends after 300 runs or 60 seconds.
    """
    symbols = {size for item in inputs for size in item.shape if isinstance(size, str)}
    names = sorted(symbols - stated.keys())
    fixed = {name: stated[name].typical_size for name in symbols & stated.keys()}
    if not names:
        return {}
    # The first dimension usually is the batch, which runs with size one.
    batches = sorted({size for item in inputs for size in item.shape[:1] if isinstance(size, str) and size in names})
    others = [name for name in names if name not in batches]
    end = time.monotonic() + _MOST_SECONDS
    for count, sizes in enumerate(_candidates(others, batches)):
        if count >= _MOST_TRIES or time.monotonic() > end:
            return None
        if runs(fixed | sizes):
            return {
                name: Dimension(min=_smallest(name, fixed | sizes, runs, end), measure=(sizes[name],)) for name in names
            }
    return None


def _candidates(others: Sequence[str], batches: Sequence[str]) -> Iterator[Sizes]:
    """Yield sizes to try: all ones; one size for all dimensions but batches; one for all; then one for each."""
    names = [*others, *batches]
    yield dict.fromkeys(names, 1)
    if others:
        for size in _TRIED:
            yield dict.fromkeys(others, size) | dict.fromkeys(batches, 1)
    if batches:
        for size in _TRIED:
            yield dict.fromkeys(names, size)
    if 1 < len(others) < 4:
        for sizes in sorted(product(_TRIED_TOGETHER, repeat=len(others)), key=sum):
            yield dict(zip(others, sizes, strict=True)) | dict.fromkeys(batches, 1)


def _smallest(name: str, sizes: Sizes, runs: Runs, end: float) -> int:
    """Return the smallest size of one dimension at which the model runs, by bisection."""
    low, high = 0, sizes[name]
    while high - low > 1 and time.monotonic() < end:
        middle = (low + high) // 2
        if runs(sizes | {name: middle}):
            high = middle
        else:
            low = middle
    return high


def alternatives(sizes: Sizes, dimensions: Mapping[str, Dimension], typical: Sizes) -> Iterator[Sizes]:
    """Yield the sizes themselves, then others within the ranges that a model may accept, and the typical ones last.

    The others are multiples of powers of two; then each dimension in turn gets its typical size, or all others do.
    """
    yield sizes
    for step in (2, 4, 8, 16, 32, 64):
        larger = {}
        for name, size in sizes.items():
            upper = dimensions.get(name, Dimension()).max
            multiple = -(-size // step) * step
            larger[name] = multiple if upper is None or multiple <= upper else typical[name]
        yield larger
    for name in sizes:
        yield {**sizes, name: typical[name]}
    for name, size in sizes.items():
        yield {**typical, name: size}
    yield typical
