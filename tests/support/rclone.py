"""rclone's S3 server as the local stack runs it: real, and without conditional writes."""

import contextlib
import os
import re
import secrets
import subprocess
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

from tvmflow.processes.launch import program_command
from tvmflow.store.config import StoreConfig
from tvmflow.store.rclone import server_command, server_environment

_START_SECONDS = 30.0
_STOP_SECONDS = 5.0
_ADDRESS = re.compile(rb"Starting s3 server on \[(http://127\.0\.0\.1:\d+)/?\]")


@contextlib.contextmanager
def rclone_s3(data: Path, *, bucket: str, before: StoreConfig | None = None) -> Iterator[StoreConfig]:
    """Serve the folder `data` over S3 while the body runs; yield a store whose writers a lock decides between.

    The server ends with the body, and with this process. With `before`, the store of a server that has ended, it is
    started again with the same address and keys.
    """
    access_key, secret_key = secrets.token_hex(10), secrets.token_hex(20)
    address = "127.0.0.1:0"
    if before is not None:
        access_key, secret_key = before.access_key or "", before.secret_key or ""
        address = (before.endpoint or "").removeprefix("http://")
    (data / bucket).mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryFile() as log:
        server = subprocess.Popen(
            program_command(server_command(data, address)),
            env=server_environment(access_key, secret_key),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=log,
            start_new_session=True,
        )
        try:
            yield StoreConfig(
                bucket,
                endpoint=_await_address(server, log),
                access_key=access_key,
                secret_key=secret_key,
                lock=data / ".lock",
            )
        finally:
            server.terminate()
            try:
                server.wait(_STOP_SECONDS)
            except subprocess.TimeoutExpired:
                server.kill()
                server.wait()


def _await_address(server: "subprocess.Popen[bytes]", log: BinaryIO) -> str:
    """The address that the kernel gave the server, from its log."""
    deadline = time.monotonic() + _START_SECONDS
    while True:
        text = os.pread(log.fileno(), 2**16, 0)
        if address := _ADDRESS.search(text):
            return address[1].decode()
        assert server.poll() is None, text
        assert time.monotonic() < deadline, "rclone does not start"
        time.sleep(0.02)
