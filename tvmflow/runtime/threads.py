"""The worker threads of models: their number in a call, and how often an idle one looks for work before it sleeps.

A library has threads of its own (`compiler/threads.c`), which `start` starts. A library that was built before libraries
had threads uses TVM's pool: TVM gives every thread that calls a model a pool of workers at the thread's first call.
TVM_NUM_THREADS then sets the size of the pool. A later call can use fewer workers of the pool; the pool cannot grow.
The first worker of the process reads TVM_THREAD_POOL_SPIN_COUNT, and nothing reads it again.
"""

import ctypes
import os
import re
import threading
import warnings
from collections.abc import Callable
from typing import Any

from tvmflow.errors import InputError
from tvmflow.hardware import cores
from tvmflow.hardware.target import host

_COUNT = "TVM_NUM_THREADS"
_SPIN = "TVM_THREAD_POOL_SPIN_COUNT"
_BIND = "TVM_BIND_THREADS"

SPIN = 4000
"""How many times an idle worker looks for work before it sleeps: for a millisecond or two on a free core.

That bridges the pauses between the functions of a model. Each look gives the core to whoever waits for it, so that with
TVM's own 300000 a process on a busy machine took minutes to end: a worker of TVM's does not notice the end before it
sleeps.
"""


class _Pool(threading.local):
    """A thread's pool of workers: the number last requested (0 before the first call), and the number in use."""

    requested = 0
    size = 0


_lock = threading.Lock()
_pool = _Pool()
# The user's value of TVM_NUM_THREADS, and the value that this module wrote in its place.
_user_count: int | None = None
_own_count: str | None = None
_counts: set[int] = set()
# What the threads of all libraries share: the library that ran a parallel loop last.
_latest_library = ctypes.c_uint32()
_is_started = False

are_mixed = False
"""Whether models that use TVM's pool use different numbers of workers: each call has to say its own then."""


def choose_count(requested: int | None, most: int | None) -> int:
    """Return the number of threads of a model's calls, the thread of the caller included.

    The number is `requested`, else the user's TVM_NUM_THREADS, else the smaller of `most` and the number of cores that
    this process may use (`most` None: the number of cores). `most` does not limit the first two. Raises InputError for
    `requested` below 1 and for a TVM_NUM_THREADS that is no positive integer.
    """
    global _user_count
    _check("threads", requested, 1)
    with _lock:
        variable = os.environ.get(_COUNT)
        if _own_count is None or variable != _own_count:
            _user_count = _parse(_COUNT, variable, 1)
        return requested or _user_count or min(most or host().cores, host().cores)


def choose_spin(requested: int | None) -> int:
    """Return how many times an idle worker looks for work before it sleeps.

    The number is `requested`, else the user's TVM_THREAD_POOL_SPIN_COUNT, else `SPIN`. Raises InputError for
    `requested` below 0, and for a variable that is negative or no whole number.
    """
    _check("spin", requested, 0)
    variable = _parse(_SPIN, os.environ.get(_SPIN), 0)
    return next((number for number in (requested, variable) if number is not None), SPIN)


def _check(name: str, value: int | None, least: int) -> None:
    if value is not None and value < least:
        raise InputError(f"{name} is {value}, expected {least} or more")


def _parse(name: str, value: str | None, least: int) -> int | None:
    """The number in an environment variable; None where it is not set. Raises InputError for anything else."""
    if value is None:
        return None
    if not re.fullmatch("[0-9]{1,9}", value) or int(value) < least:
        expected = "a positive number" if least else "a number"
        raise InputError(f"the environment variable {name} is {value!r}, expected {expected}")
    return int(value)


def start(library: Any, threads: int, looks: int) -> "Callable[[], None] | None":
    """Start the threads of a library and return the function that ends them; None for a library that has none.

    `threads` is the number of threads of a call, with the caller's own. `looks` is how many times an idle one looks for
    work before it sleeps. Warns when the system gives fewer threads.
    """
    if not library.implements_function("tvmflow_start_threads", query_imports=True):
        return None
    start_threads = library.get_function("tvmflow_start_threads", query_imports=True)
    stop_threads: Callable[[], None] = library.get_function("tvmflow_stop_threads", query_imports=True)
    system = ctypes.CDLL(None)
    functions = (system.pthread_create, system.pthread_join)
    addresses = (ctypes.cast(function, ctypes.c_void_p).value for function in functions)
    size = start_threads(threads, looks, *addresses, ctypes.addressof(_latest_library))
    if size < threads:
        warnings.warn(
            f"the system gives {size} of {threads} threads: raise its limit (`ulimit -u`) or ask for fewer threads",
            RuntimeWarning,
            stacklevel=5,
        )
    return stop_threads


def reserve(size: int, spin: int | None) -> None:
    """Set TVM's environment variables so that pools which TVM starts later suit a model of `size` workers.

    `spin` is how many times a worker looks for work before it sleeps. None keeps the number that is set by the user's
    TVM_THREAD_POOL_SPIN_COUNT or an earlier model, else it is `SPIN`. Once the process has workers, `spin` has no
    effect, and a RuntimeWarning says so if it differs.
    """
    global _own_count, are_mixed
    with _lock:
        _counts.add(size)
        are_mixed = len(_counts) > 1
        _own_count = os.environ[_COUNT] = str(max(_counts))
        if _own_count == "1" or cores.are_restricted():
            # TVM would bind workers to the first hardware threads: every caller with one worker to the first of them,
            # two workers to one core, or workers to the cores of another process.
            os.environ.setdefault(_BIND, "0")
        if not _is_started:
            os.environ.setdefault(_SPIN, str(SPIN))
        if spin is not None and os.environ.get(_SPIN) != str(spin):
            if _is_started:
                warnings.warn(
                    f"spin={spin} comes too late, this process has workers already: give it with the first model, "
                    f"or set {_SPIN}",
                    RuntimeWarning,
                    stacklevel=5,
                )
            else:
                os.environ[_SPIN] = str(spin)


def use_workers(count: int) -> int:
    """Let this thread's calls use `count` workers of TVM's pool, or all if it has fewer; return the number in use."""
    global _is_started
    if _pool.requested != count:
        from tvm_ffi import get_global_func

        _is_started = True
        pool_size = get_global_func("runtime.NumThreads")
        # The first call of it starts the pool.
        if pool_size() != count:
            get_global_func("runtime.config_threadpool")(0, count)
        _pool.requested, _pool.size = count, pool_size()
    return _pool.size
