"""Heavy imports without the garbage collector, which finds nothing in them and takes a quarter of their time."""

import atexit
import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def importing() -> Iterator[None]:
    """Import modules in the body; the collector leaves alone what they made, also later."""
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        gc.enable()


def end_quickly() -> None:
    """Have this process end without a search for garbage, after all exit handlers that are registered from now on."""
    atexit.register(gc.freeze)
