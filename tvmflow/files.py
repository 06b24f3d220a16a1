"""Writing files that other processes read, and that a crash must not tear."""

import os
import tempfile
from pathlib import Path


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
