"""Sizes of free dimensions that a model can take, found by trial, where the release file gives none.

An audio network may need more than one frame, an image network a multiple of its stride.
"""

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import combinations, product

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

    `runs` says whether the model runs at these sizes of all symbolic dimensions. The search first looks for sizes at
    which the model runs. It then reduces one dimension at a time while the others stay: a range begins with the
    smallest size at which the model still runs. Dimensions that must be equal, such as the batch of two inputs, are
    reduced together. The size to measure is the first one that was found; for dimensions that were reduced together it
    is the smallest one. The search ends after 300 runs or 60 seconds.
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
            least = {name: _smallest((name,), fixed | sizes, runs, end) for name in names}
            together = _smallest_together(sizes, least, lambda tried: runs(fixed | tried), end)
            sizes, least = sizes | together, least | together
            return {name: Dimension(min=least[name], measure=(sizes[name],)) for name in names}
    return None


def _smallest_together(sizes: Sizes, least: Sizes, runs: Runs, end: float) -> Sizes:
    """Return smaller sizes of those dimensions that cannot shrink alone but in pairs or larger groups of one size."""
    smaller: Sizes = {}
    held = [name for name, size in sizes.items() if least[name] == size > 1]
    for count in range(2, len(held) + 1):
        for group in combinations(held, count):
            if smaller.keys().isdisjoint(group) and len({sizes[name] for name in group}) == 1:
                size = _smallest(group, sizes | smaller, runs, end)
                if size < sizes[group[0]]:
                    smaller |= dict.fromkeys(group, size)
    return smaller


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


def _smallest(names: Sequence[str], sizes: Sizes, runs: Runs, end: float) -> int:
    """Return the smallest common size of dimensions at which the model runs, by bisection."""
    low, high = 0, sizes[names[0]]
    while high - low > 1 and time.monotonic() < end:
        middle = (low + high) // 2
        if runs(sizes | dict.fromkeys(names, middle)):
            high = middle
        else:
            low = middle
    return high


def alternatives(sizes: Sizes, dimensions: Mapping[str, Dimension], typical: Sizes) -> Iterator[Sizes]:
    """Yield `sizes`, then other sizes that a model may accept where it refuses these, and `typical` last.

    The others are: all sizes rounded up to a multiple of 2, 4, ..., 64, where a dimension whose range this exceeds gets
    its typical size; `sizes` with one dimension at its typical size; and `typical` with one dimension from `sizes`.
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
