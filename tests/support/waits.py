"""Waiting for a condition instead of sleeping."""

import subprocess
import time
from collections.abc import Callable
from typing import TypeVar

import pytest

T = TypeVar("T")

# The least pause between two polls.
_PAUSE_SECONDS = 0.02
# The pause is at least this many times as long as the condition took: polling must not slow a server down.
_PAUSE_FACTOR = 4.0


def wait_until(
    condition: Callable[[], T],
    timeout: float = 240.0,
    message: str | Callable[[], str] = "the condition did not become true",
    *,
    process: "subprocess.Popen[str] | subprocess.Popen[bytes] | None" = None,
) -> T:
    """Poll until `condition` returns something true, and return that.

    The test fails after `timeout` seconds with `message` (a function is called then, e.g. to read a log). It fails at
    once when `process` has ended; after the timeout `process` is killed, so that nothing waits for it.
    """
    deadline = time.monotonic() + timeout
    while True:
        start = time.monotonic()
        if value := condition():
            return value
        end = time.monotonic()
        if process is not None and process.poll() is not None:
            output = process.communicate() if process.stdout or process.stderr else ""
            pytest.fail(f"the process ended with code {process.returncode}: {_text(message)} {output}")
        if end > deadline:
            if process is not None:
                process.kill()
            pytest.fail(f"not within {timeout:.0f} s: {_text(message)}")
        time.sleep(max(_PAUSE_SECONDS, _PAUSE_FACTOR * (end - start)))


def _text(message: str | Callable[[], str]) -> str:
    return message if isinstance(message, str) else message()
