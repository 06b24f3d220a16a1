"""What the compiler may decide either way: the cost model's choice, unless measuring found another one faster.

A decision is about a *subject*, such as a convolution's shape, and of a *kind*, such as the rows of its tile. It has
options, the cost model's first. Tuning decides otherwise, measures the result, and keeps what is faster; a build is
then given the decisions that were kept. Choices within the schedule of one function need no subject: its trace records
them.
"""

from collections.abc import Iterable, Mapping
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
        """The name of the decision, the same in every model and process."""
        return f"{self.kind}: {self.subject}"


@dataclass
class Choices:
    """The decisions of a build: the options to take (`made`), and the decisions that the build met (`met`), by key."""

    made: Mapping[str, str] = field(default_factory=dict)
    met: dict[str, Site] = field(default_factory=dict)

    def choose(self, kind: str, subject: str, options: Mapping[str, T], parts: tuple[str, ...] = ()) -> T:
        """The value of one of `options`: the first, unless `made` names another one.

        The decision is noted in `met`. A name in `made` that is none of the options, as of an earlier compiler, does
        not count.
        """
        site = Site(kind, subject, tuple(options), parts)
        self.met[site.key] = site
        name = self.made.get(site.key)
        return options[site.options[0] if name is None or name not in options else name]

    def about(self, subject: str) -> "Decisions":
        """The decisions about one subject."""
        return Decisions(self, subject)

    def overrides_cost_model(self, key: str) -> bool:
        """Whether the build met the decision `key` and took another option than the cost model's."""
        site, name = self.met.get(key), self.made.get(key)
        return site is not None and name in site.options[1:]


@dataclass(frozen=True)
class Decisions:
    """The decisions about one subject, which are handed to the code that makes them."""

    choices: Choices
    subject: str

    def choose(self, kind: str, options: Mapping[str, T], parts: tuple[str, ...] = ()) -> T:
        """As `Choices.choose`, about this subject."""
        return self.choices.choose(kind, self.subject, options, parts)
