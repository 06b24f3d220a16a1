"""The scale of a run: how many cases a test tries by default, with `--long` and with `--quick`."""

from collections.abc import Sequence
from typing import Literal, TypeVar

Mode = Literal["quick", "normal", "long"]
T = TypeVar("T")

_mode: Mode = "normal"


def set_mode(mode: Mode) -> None:
    """Set the scale of this process; tests/conftest.py does so before any test file is imported."""
    global _mode
    _mode = mode


def is_long() -> bool:
    """Whether the run has the option `--long`."""
    return _mode == "long"


def is_quick() -> bool:
    """Whether the run has the option `--quick`."""
    return _mode == "quick"


def count(normal: int, long: int, quick: int | None = None) -> int:
    """A number of cases by the scale of the run; `quick` is `normal` unless it is given.

    It may be called while a test file is imported: `@settings(max_examples=count(normal=20, long=2000))`.
    """
    return choose(normal, long, quick)


def choose(normal: T, long: T, quick: T | None = None) -> T:
    """A value by the scale of the run, e.g. a list of shapes; `quick` is `normal` unless it is given."""
    if _mode == "long":
        return long
    return quick if _mode == "quick" and quick is not None else normal


def spread(items: Sequence[T], count: int) -> list[T]:
    """Return `count` of the items at even distances, from the first to the last; the last alone for a count of one."""
    last = len(items) - 1
    places = {round(step * last / (count - 1)) for step in range(count)} if count > 1 else {last}
    return [items[place] for place in sorted(places)]
