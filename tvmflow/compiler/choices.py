"""Decisions of the compiler between equivalent options, which the cost model takes and tuning may override.

A decision is about a *subject*, such as a convolution's shape, and of a *kind*, such as the rows of its tile. Its
options stand in the cost model's order, the best first. Tuning builds with other options, measures the result and
records the faster ones; later builds take the recorded options. Decisions within the schedule of one function need no
subject, because the schedule's trace records them.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import TypeVar

T = TypeVar("T")


def shape_text(shape: Iterable[object]) -> str:
    """Return a shape as part of a subject, such as `1x56x56x64`; a symbolic dimension appears by its name."""
    return "x".join(str(getattr(size, "value", size)) for size in shape)


@dataclass(frozen=True)
class Site:
    """A decision that a build met, with its options in the cost model's order.

    `parts` are the subjects of the operators that one option joins in a function and another leaves in separate
    functions. `cycles` are the cost model's estimates of the options, empty where it has none.
    """

    kind: str
    subject: str
    options: tuple[str, ...]
    parts: tuple[str, ...] = ()
    cycles: tuple[float, ...] = ()

    @property
    def key(self) -> str:
        """The name of the decision, which is the same in every model and process."""
        return f"{self.kind}: {self.subject}"


@dataclass
class Choices:
    """The decisions of a build by key: options that override the cost model's, and the sites that the build met."""

    overrides: Mapping[str, str] = field(default_factory=dict)
    sites: dict[str, Site] = field(default_factory=dict)

    def choose(
        self,
        kind: str,
        subject: str,
        options: Mapping[str, T],
        parts: tuple[str, ...] = (),
        cycles: Mapping[str, float] = MappingProxyType({}),
    ) -> T:
        """Return the value of one of `options`: the first, unless `overrides` names another one.

        `kind` is the sort of decision, such as "order", and `subject` the function that it is about. Both make the
        site's key, by which `overrides` names an option. Adds the decision to `sites`. `parts` are the subjects of the
        operators that one of the options joins into one function, empty if none joins any; `cycles` are estimates by
        the options' names. Both are kept with the decision and do not influence it. Ignores a name in `overrides` that
        is not among the options, such as one of an earlier compiler.
        """
        site = Site(kind, subject, tuple(options), parts, tuple(cycles[name] for name in options if name in cycles))
        self.sites[site.key] = site
        return options[self.option_of(site)]

    def option_of(self, site: Site) -> str:
        """Return the option that a build takes at a site: the one in `overrides` if the site has it, else its first."""
        name = self.overrides.get(site.key)
        return site.options[0] if name is None or name not in site.options else name

    def about(self, subject: str) -> "Decisions":
        """Return the decisions about one subject, which read and extend these choices."""
        return Decisions(self, subject)

    def overrides_cost_model(self, key: str) -> bool:
        """Whether the build met the decision `key` and took another option than the cost model's."""
        site, name = self.sites.get(key), self.overrides.get(key)
        return site is not None and name in site.options[1:]


@dataclass(frozen=True)
class Decisions:
    """The decisions about one subject, for the code that takes them."""

    choices: Choices
    subject: str

    def choose(
        self,
        kind: str,
        options: Mapping[str, T],
        parts: tuple[str, ...] = (),
        cycles: Mapping[str, float] = MappingProxyType({}),
    ) -> T:
        """Return the value of one of `options`: the first, unless `choices.overrides` names another for this subject.

        Adds the decision, with its `parts` and the estimated `cycles` of each option, to `choices.sites`.
        """
        return self.choices.choose(kind, self.subject, options, parts, cycles)
