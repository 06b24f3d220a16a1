"""How much memory this process may take."""

import resource
from collections.abc import Iterator
from contextlib import contextmanager

import psutil

LIGHT_BYTES = 1 << 31
"""The most bytes that a light run takes beside a model's weights."""


def safe_bytes() -> int:
    """Return a quarter of the bytes of memory that processes can still take on this machine: others may run beside."""
    return int(psutil.virtual_memory().available) // 4


def light_bytes() -> int:
    """Return the bytes that a run may take beside a model's weights where a smaller size would do as well."""
    return min(LIGHT_BYTES, safe_bytes())


@contextmanager
def limit(count: int) -> Iterator[None]:
    """Let this process take `count` bytes more than it has; what would take more fails, and the process goes on.

    The limit is one of addresses: memory that is reserved and never written counts too.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    limit = psutil.Process().memory_info().vms + count
    present = [limit, *(bound for bound in (soft, hard) if bound != resource.RLIM_INFINITY)]
    resource.setrlimit(resource.RLIMIT_AS, (min(present), hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, (soft, hard))
