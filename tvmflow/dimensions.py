"""Sizes of free dimensions that a model can take, found by trial, where the release file gives none.

An audio network may need more than one frame, an image network a multiple of its stride, a decoder with the keys and
values of earlier tokens a mask of one more.
"""

import operator
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from itertools import combinations, product
from math import prod

from tvmflow.spec import Dimension, Input

Sizes = dict[str, int]
Runs = Callable[[Sizes], bool]

_TRIED = (2, 4, 8, 16, 24, 32, 48, 64, 80, 96, 128, 160, 192, 224, 256, 320, 384, 512, 576, 640, 768, 1024, 2048, 4096)
_TRIED_TOGETHER = (1, 8, 16, 32, 48, 64, 96, 128, 224, 256, 320, 512)
# Sizes beside which one dimension is tried that is larger by one, or twice as large.
_TRIED_BESIDE = (16, 1)
# A search ends after so many sizes or seconds.
_MOST_TRIES = 300
_MOST_SECONDS = 60.0
# If more dimensions cannot shrink alone, only groups of all that have the same size are tried: of others there are too
# many.
_MOST_GROUPED = 8
# Before a size is taken for the only one, sizes larger by these amounts are tried, and these multiples of it.
_MORE = (1, 2, 3, 4, 8, 16, 32)
_MULTIPLES = (2, 3, 4)
# If more dimensions cannot grow alone, the search does not conclude that any of them takes one size only.
_MOST_SINGLE = 4
# Sizes at which the inputs have more elements are not tried: they would take memory and time for nothing.
_MOST_ELEMENTS = 1 << 24
# Sizes to measure are enlarged up to this many pixels of a side, tokens or frames, and these elements of the inputs.
_LARGEST_MEASURED = 256
_MOST_MEASURED_ELEMENTS = 1 << 18


def find_dimensions(
    inputs: Sequence[Input],
    stated: Mapping[str, Dimension],
    runs: Runs,
    hints: Sequence[int] = (),
    runs_lightly: Runs | None = None,
) -> dict[str, Dimension] | None:
    """Return the ranges of the dimensions that `stated` lacks; None where the model runs at no size that is tried.

    `runs` says whether the model runs at these sizes of all symbolic dimensions, `runs_lightly` whether it also takes
    little memory there. `hints` are sizes that one dimension may need, such as the channels that weights take. The
    search first looks for sizes at which the model runs. It then reduces one dimension at a time while the others
    stay: a range begins with the smallest size at which the model still runs. Dimensions that must be equal, such as
    the batch of two inputs, are reduced together, and so are those that differ by a constant or a factor. The size to
    measure is the first one that was found; for batches that were reduced together it is the smallest one. Of
    dimensions other than batches, that size is doubled while it stays at 256 or less and the model runs lightly: a
    single frame or token says little about a model. The range of a dimension that takes one size alone, whatever the
    others are, ends with it. The search ends after 300 runs or 60 seconds.
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

    def runs_beside(sizes: Sizes) -> bool:
        return runs(fixed | sizes)

    candidates = (
        sizes for sizes in _candidates(others, batches, hints) if _elements(inputs, fixed | sizes) <= _MOST_ELEMENTS
    )
    for count, sizes in enumerate(candidates):
        if count >= _MOST_TRIES or time.monotonic() > end:
            return None
        if runs_beside(sizes):
            least = {name: _smallest((name,), sizes, runs_beside, end) for name in names}
            together = _smallest_together(sizes, least, runs_beside, end)
            least |= together
            least |= _smallest_apart(sizes, least, runs_beside, end)
            of_batches = {name: size for name, size in together.items() if name in batches}
            typical = sizes | (of_batches if runs_beside(sizes | of_batches) else together)
            # A dimension that got smaller with the batches must equal them.
            apart = [name for name in others if typical[name] == sizes[name]]
            typical = _enlarge(inputs, fixed, typical, apart, runs_lightly or runs, end)

            def may_run(larger: Sizes) -> bool:
                is_large = _elements(inputs, fixed | larger) > _MOST_ELEMENTS
                return is_large or time.monotonic() > end or runs_beside(larger)

            rigid = [
                name
                for name in names
                if least[name] == typical[name] and not runs_beside(least | {name: least[name] + 1})
            ]
            fixed_names = _of_one_size(rigid, typical, may_run)
            return {
                name: Dimension(
                    min=least[name], max=least[name] if name in fixed_names else None, measure=(typical[name],)
                )
                for name in names
            }
    return None


def _elements(inputs: Sequence[Input], sizes: Mapping[str, int]) -> int:
    return sum(prod(sizes[size] if isinstance(size, str) else size for size in item.shape) for item in inputs)


def _enlarge(
    inputs: Sequence[Input], fixed: Sizes, sizes: Sizes, names: Sequence[str], runs: Runs, end: float
) -> Sizes:
    """Return `sizes` with those of `names` doubled together, as often as the limits allow and the model runs.

    The largest of these sizes is tried first: most models run there, and a large one takes long for each size.
    """
    doubled = [sizes]
    while names and max(doubled[-1][name] for name in names) * 2 <= _LARGEST_MEASURED:
        larger = sizes | {name: 2 * doubled[-1][name] for name in names}
        if _elements(inputs, fixed | larger) > _MOST_MEASURED_ELEMENTS:
            break
        doubled.append(larger)
    if len(doubled) > 1 and time.monotonic() < end and runs(fixed | doubled[-1]):
        return doubled[-1]
    for larger in doubled[1:-1]:
        if time.monotonic() >= end or not runs(fixed | larger):
            break
        sizes = larger
    return sizes


def _of_one_size(names: Sequence[str], sizes: Sizes, may_run: Runs) -> list[str]:
    """Return those of `names` that cannot grow, neither alone nor with other dimensions by one factor or amount."""

    def grows(group: Sequence[str], *changes: Callable[[int], int]) -> bool:
        return any(may_run(sizes | {name: change(sizes[name]) for name in group}) for change in changes)

    amounts = [partial(operator.add, more) for more in _MORE]
    factors = [partial(operator.mul, factor) for factor in _MULTIPLES]
    rigid: list[str] = []
    for name in names:
        if not grows([name], *amounts, *factors):
            rigid.append(name)
        if len(rigid) > _MOST_SINGLE:
            return []
    free: set[str] = set()
    for name in rigid:
        groups = _groups_with(name, rigid, sizes)
        group = () if name in free else next((item for item in groups if grows(item, amounts[0], factors[0])), ())
        free.update(group)
    return [name for name in rigid if name not in free]


def _groups_with(name: str, rigid: Sequence[str], sizes: Sizes) -> list[tuple[str, ...]]:
    """Return groups in which a dimension of `rigid` may grow, each once.

    The first are: with all dimensions of its size, and with each other dimension. The batches of several inputs can
    have a name each, of which some grow alone, as that of a mask that is broadcast.
    """
    others = [other for other in sorted(sizes) if other != name]
    alike = [other for other in others if sizes[other] == sizes[name]]
    companions = [tuple(alike), *((other,) for other in others)]
    for candidates in (alike if len(alike) <= _MOST_SINGLE else [], [other for other in others if other in rigid]):
        for count in range(2, len(candidates) + 1):
            companions += combinations(candidates, count)
    return [(name, *group) for group in dict.fromkeys(companions) if group]


def _smallest_together(sizes: Sizes, least: Sizes, runs: Runs, end: float) -> Sizes:
    """Return smaller sizes of those dimensions that cannot shrink alone but in pairs or larger groups of one size."""
    smaller: Sizes = {}
    rigid = [name for name, size in sizes.items() if least[name] == size > 1]
    if len(rigid) > _MOST_GROUPED:
        of_size = {sizes[name] for name in rigid}
        groups = [tuple(name for name in rigid if sizes[name] == size) for size in sorted(of_size)]
    else:
        groups = [group for count in range(2, len(rigid) + 1) for group in combinations(rigid, count)]
    for group in groups:
        if smaller.keys().isdisjoint(group) and len({sizes[name] for name in group}) == 1:
            size = _smallest(group, sizes | smaller, runs, end)
            if size < sizes[group[0]]:
                smaller |= dict.fromkeys(group, size)
    return smaller


def _smallest_apart(sizes: Sizes, least: Sizes, runs: Runs, end: float) -> Sizes:
    """Return smaller sizes of dimensions that cannot shrink alone.

    First all of them are reduced together by the same amount, or else by the same factor. Then each is reduced alone,
    at the smallest sizes of the others. In a decoder, the numbers of new and of earlier tokens and the length of a
    mask, which is their sum, shrink by one factor.
    """
    smaller: Sizes = {}
    rigid = [name for name, size in sizes.items() if least[name] == size > 1]
    if len({sizes[name] for name in rigid}) > 1:
        first = min(rigid, key=lambda name: sizes[name])

        def lower(size: int) -> Sizes:
            return {name: sizes[name] - sizes[first] + size for name in rigid}

        def divide(size: int) -> Sizes:
            return {name: sizes[name] * size // sizes[first] for name in rigid}

        for change in (lower, divide):
            size = _smallest((first,), {first: sizes[first]}, _at(change, first, sizes, runs), end)
            if size < sizes[first]:
                smaller = change(size)
                break
    for name in rigid:
        small = least | smaller
        if small[name] == sizes[name] and time.monotonic() < end and runs(small):
            smaller[name] = _smallest((name,), small, runs, end)
    return smaller


def _at(change: Callable[[int], Sizes], first: str, sizes: Sizes, runs: Runs) -> Runs:
    """Return what says whether the model runs where the size of one dimension changes those of others with it."""
    return lambda small: runs(sizes | change(small[first]))


def _candidates(others: Sequence[str], batches: Sequence[str], hints: Sequence[int]) -> Iterator[Sizes]:
    """Yield sizes to try.

    All ones; one size for all dimensions but batches; one for all; one for all but batches and another dimension that
    is larger by one, or twice as large, or as large as a hint says; then one for each.
    """
    names = [*others, *batches]
    yield dict.fromkeys(names, 1)
    if others:
        for size in _TRIED:
            yield dict.fromkeys(others, size) | dict.fromkeys(batches, 1)
    if batches:
        for size in _TRIED:
            yield dict.fromkeys(names, size)
    for size in _TRIED_BESIDE:
        for larger in dict.fromkeys((size + 1, 2 * size)):
            for name in others:
                yield dict.fromkeys(names, 1) | dict.fromkeys(others, size) | {name: larger}
    for size, hint, name in product(_TRIED_BESIDE, hints, others):
        yield dict.fromkeys(names, 1) | dict.fromkeys(others, size) | {name: hint}
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
    """Yield `sizes`, then other sizes that a model may accept where it refuses these.

    The others are: all sizes rounded up to a multiple of 2, 4, ..., 64, where a dimension whose range this exceeds gets
    its typical size; `sizes` with one dimension at its typical size; `typical` with one dimension from `sizes`;
    `typical`; and, because a model may refuse the numbers of some samples alone, as too many ones of a mask, the
    smallest sizes.
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
    yield {name: dimensions.get(name, Dimension()).min for name in sizes}
