"""The choice between several bundles of one model: which of them this machine can run, and which one is best."""

from collections.abc import Iterable
from typing import Protocol, TypeVar

from tvmflow.errors import BundleError


class Offer(Protocol):
    """A bundle's requirements: a manifest, or a release's entry for a target."""

    @property
    def arch(self) -> str:
        """The architecture; `cuda` means an NVIDIA GPU."""

    @property
    def cpu_features(self) -> tuple[str, ...]:
        """The CPU features that the bundle uses, in the words of /proc/cpuinfo."""

    def check_host(self) -> None:
        """Raise BundleError if this machine cannot run the bundle."""


T = TypeVar("T")


def select_runnable(offers: Iterable[tuple[Offer, T]]) -> tuple[list[T], list[str]]:
    """Return the items whose offer this machine can run, best first, and for each other item the reason against it.

    An offer that uses more of the machine is better: CUDA before CPU, then more CPU features before fewer. Equal offers
    keep their order.
    """
    runnable: list[tuple[Offer, T]] = []
    refusals: list[str] = []
    for offer, item in offers:
        try:
            offer.check_host()
        except BundleError as error:
            refusals.append(str(error))
        else:
            runnable.append((offer, item))
    runnable.sort(key=lambda pair: (pair[0].arch == "cuda", len(pair[0].cpu_features)), reverse=True)
    return [item for _, item in runnable], refusals
