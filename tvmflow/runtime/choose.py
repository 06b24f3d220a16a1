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


Offered = TypeVar("Offered", bound=Offer)


def best_first(offers: Iterable[Offered]) -> tuple[list[Offered], list[str]]:
    """Those that this machine can run, the one that asks most of it first, and why it cannot run the others.

    CUDA comes before CPU, more CPU features before fewer; equals keep their order.
    """
    fitting: list[Offered] = []
    refusals: list[str] = []
    for offer in offers:
        try:
            offer.check_host()
        except BundleError as error:
            refusals.append(str(error))
        else:
            fitting.append(offer)
    fitting.sort(key=lambda offer: (offer.arch == "cuda", len(offer.cpu_features)), reverse=True)
    return fitting, refusals
