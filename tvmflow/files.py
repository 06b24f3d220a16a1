"""Files that several processes use, writes that a crash must not tear, locks, and whether a file can be written."""

import contextlib
import fcntl
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import IO


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


def check_writable(path: Path, *, replaces: bool = False) -> None:
    """Find out, without a trace, whether a file can be written: before the work whose result it will hold.

    `replaces` says that a new file takes the place of an old one, which is then not opened; a device or a pipe is
    written itself (see `replaceable`). Raises OSError when the file, or its folder, cannot be written.
    """
    if path.is_fifo():
        return  # Its reader would see the end of the pipe after this open.
    if path.exists() and not (replaces and replaceable(path)):
        os.close(os.open(path, os.O_WRONLY))
        return
    with tempfile.TemporaryFile(dir=path.parent):
        pass


def replaceable(path: Path) -> bool:
    """Whether a new file may take the place of `path`: no for a device or a pipe, such as /dev/null."""
    return path.is_file() or not path.exists()


def check_folder_writable(folder: Path) -> None:
    """Find out, without a trace, whether files can be written into a folder that may have to be made first.

    Raises OSError when they cannot.
    """
    existing = next(place for place in (folder, *folder.absolute().parents) if place.exists())
    with tempfile.TemporaryFile(dir=existing):
        pass


@contextlib.contextmanager
def replacing(path: Path, mode: int) -> Iterator[IO[bytes]]:
    """Yield a new file that takes the place of `path`, with the permissions `mode`, when the body ends.

    Whenever it stops, `path` has the old content or the new one. Raises OSError when the file cannot be written.
    """
    descriptor, partial = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with os.fdopen(descriptor, "wb") as file:
            yield file
        Path(partial).chmod(mode)
        Path(partial).replace(path)
    except BaseException:
        Path(partial).unlink(missing_ok=True)
        raise


def write_whole(path: Path, text: str) -> None:
    """Replace a file, in a folder that exists, by one with this text, which is on the disk before the name is.

    Whenever this stops, the file has the old content or the new one. Only its owner may read it (mode
    0600). Raises OSError when it cannot be written.
    """
    with replacing(path, 0o600) as file:
        file.write(text.encode())
        file.flush()
        os.fsync(file.fileno())
