"""Which of several bundles of one model a machine runs."""

from collections.abc import Iterable
from typing import Protocol, TypeVar

from tvmflow.errors import BundleError


class Offer(Protocol):
    """A bundle, by what it asks of a machine: a manifest, or a release's entry for a target."""

    @property
    def arch(self) -> str:
        """The architecture; `cuda` asks for an NVIDIA GPU."""

    @property
    def cpu_features(self) -> tuple[str, ...]:
        """CPU features that it uses."""

    def check_host(self) -> None:
        """Raise BundleError if this machine lacks something."""


T = TypeVar("T")


def best_first(offers: Iterable[tuple[Offer, T]]) -> tuple[list[T], list[str]]:
    """Of pairs the second ones whose offer this machine can run, and why it cannot run the others.

    The one that asks most of the machine comes first: CUDA before CPU, more CPU features before fewer; equals keep
    their order.
    """
    fitting: list[tuple[Offer, T]] = []
    refusals: list[str] = []
    for offer, item in offers:
        try:
            offer.check_host()
        except BundleError as error:
            refusals.append(str(error))
        else:
            fitting.append((offer, item))
    fitting.sort(key=lambda pair: (pair[0].arch == "cuda", len(pair[0].cpu_features)), reverse=True)
    return [item for _, item in fitting], refusals
