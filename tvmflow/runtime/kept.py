"""The memory that TVM's virtual machines keep for later calls, and its limit.

TVM keeps each block of memory that a call no longer needs, for a call that needs one of exactly that size. A model of
free sizes needs other blocks at each size, so that the memory of a server would grow with every size that it sees.
"""

import ctypes
import os
import threading
import time
from pathlib import Path

# Bytes that may be kept whatever the models need: as much as a network for images or texts needs for one call.
_LEAST = 1 << 28
# Seconds between two looks at the memory of the process; a look takes about a hundredth of it.
_INTERVAL = 2.5e-3


class _Limit:
    """Gives the kept memory back to the system when it exceeds twice what the largest call needed.

    What is kept is estimated by the growth of the process. A growth for other reasons makes it give memory back early,
    which costs the following call the time to get it again.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._time = 0.0
        # The size of the process when the memory was last given back and at the last look, and its largest growth in a
        # call, in bytes.
        self._start = self._latest = _resident()
        self._largest = 0

    def check(self) -> None:
        """Give the kept memory back if it is too much, before a call. Threads may call it at once."""
        now = time.monotonic()
        if now - self._time < _INTERVAL or not self._lock.acquire(blocking=False):
            return
        try:
            self._time, size = now, _resident()
            if size - self._start > max(_LEAST, 2 * self._largest):
                _release()
                size = self._start = _resident()
            self._latest = size
        finally:
            self._lock.release()

    def learn(self) -> None:
        """Learn what a call needed, after it. Threads may call it at once."""
        # A shorter call needs little: the system clears each page at the first write.
        if time.monotonic() - self._time >= _INTERVAL and self._lock.acquire(blocking=False):
            try:
                self._largest = max(self._largest, _resident() - self._latest)
            finally:
                self._lock.release()

    def leave_out(self) -> None:
        """Leave out how the process grew since the last look, by the weights of a model for example."""
        with self._lock:
            size = _resident()
            self._start, self._latest = self._start + size - self._latest, size

    def release(self) -> None:
        """Give the kept memory back, as that of a model that is closed."""
        with self._lock:
            _release()
            self._start = self._latest = _resident()


def _resident() -> int:
    """The bytes of memory that the process has; 0 where the system does not say so."""
    try:
        return int(Path("/proc/self/statm").read_bytes().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except OSError:
        return 0


def _release() -> None:
    import tvm_ffi

    tvm_ffi.get_global_func("vm.builtin.memory_manager.clear")()
    # The C library keeps what TVM frees, between blocks that are still in use; others than glibc lack this function.
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)


# TVM keeps the memory of all models of a process together.
limit = _Limit()
