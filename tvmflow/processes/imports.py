"""Heavy imports without the garbage collector, which finds no garbage in them and takes a quarter of their time."""

import atexit
import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def importing() -> Iterator[None]:
    """Pause the garbage collector while the body imports modules.

    Afterwards the collector ignores all objects that exist by then (`gc.freeze`).
    """
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        gc.enable()


def end_quickly() -> None:
    """Make this process end without a search for garbage, after the exit handlers that are registered from now on."""
    atexit.register(gc.freeze)
