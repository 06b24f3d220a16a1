"""Files that several processes use: writes that a crash must not tear, and locks."""

import contextlib
import fcntl
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path


@contextlib.contextmanager
def exclusive(place: Path, refusal: Exception) -> Iterator[None]:
    """Hold the only lock on a file or folder, which exists, while the body runs.

    Raises `refusal` if another process holds a lock on it.
    """
    descriptor = os.open(place, os.O_RDONLY)
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise refusal from error
        yield
    finally:
        os.close(descriptor)


def write_whole(path: Path, text: str) -> None:
    """Write a file in one step, in a folder that exists: whenever it stops, the file has the old text or the new one.

    Only its owner may read it (mode 0600). Raises OSError when it cannot be written.
    """
    descriptor, partial = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with os.fdopen(descriptor, "w") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        Path(partial).replace(path)
    except BaseException:
        Path(partial).unlink(missing_ok=True)
        raise
