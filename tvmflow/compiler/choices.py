"""What the compiler may decide either way: the cost model's choice, unless measuring found another one faster.

A decision is about a *subject*, such as a convolution's shape, and of a *kind*, such as the rows of its tile. It has
options, the cost model's first. Tuning makes the same decisions differently, measures what comes of it, and keeps what
is faster; a build is then given those. Choices within the schedule of one function need no subject: they are known
from its trace.
"""

import contextlib
from collections.abc import Iterable, Iterator, Mapping
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import TypeVar

T = TypeVar("T")


def shape_text(shape: Iterable[object]) -> str:
    """A shape as part of a subject: `1x56x56x64`; symbolic dimensions by their names."""
    return "x".join(str(getattr(size, "value", size)) for size in shape)


@dataclass(frozen=True)
class Site:
    """A decision that was met: its options in the cost model's order.

    `parts` are the subjects that an option may leave without a function of their own, or give one.
    """

    kind: str
    subject: str
    options: tuple[str, ...]
    parts: tuple[str, ...] = ()

    @property
    def key(self) -> str:
        """What identifies the decision, in every model and process."""
        return f"{self.kind}: {self.subject}"


@dataclass
class Choices:
    """The decisions to make, by their keys, and those that were met while this was in use."""

    made: Mapping[str, str] = field(default_factory=dict)
    met: dict[str, Site] = field(default_factory=dict)

    def otherwise(self, key: str) -> bool:
        """Whether a decision was met and made otherwise than the cost model takes it."""
        site, wanted = self.met.get(key), self.made.get(key)
        return site is not None and wanted in site.options[1:]


_active: ContextVar[Choices | None] = ContextVar("choices", default=None)


@contextlib.contextmanager
def using(choices: Choices) -> Iterator[Choices]:
    """Decide as `choices` says while the body runs, and note every decision that is met."""
    token = _active.set(choices)
    try:
        yield choices
    finally:
        _active.reset(token)


def choose(kind: str, subject: str, options: Mapping[str, T], parts: tuple[str, ...] = ()) -> T:
    """One of `options`: the first, unless the choices in use name another.

    One that they name and that is none of these, as of an earlier compiler, does not count.
    """
    name = next(iter(options))
    choices = _active.get()
    if choices is not None:
        site = Site(kind, subject, tuple(options), parts)
        choices.met[site.key] = site
        wanted = choices.made.get(site.key)
        if wanted is not None and wanted in options:
            name = wanted
    return options[name]
