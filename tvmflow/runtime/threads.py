"""The worker threads of TVM: their number in a call, and how often an idle one looks for work before it sleeps.

TVM gives every thread that calls a model a pool of workers at the thread's first call. TVM_NUM_THREADS then sets the
size of the pool. A later call can use fewer workers of the pool; the pool cannot grow. The first worker of the process
reads TVM_THREAD_POOL_SPIN_COUNT, and nothing reads it again.
"""

import os
import re
import threading
import warnings

from tvmflow import cores
from tvmflow.errors import InputError
from tvmflow.target import host

_COUNT = "TVM_NUM_THREADS"
_SPIN = "TVM_THREAD_POOL_SPIN_COUNT"
_BIND = "TVM_BIND_THREADS"

SPIN = 4000
"""How many times an idle worker looks for work before it sleeps: for a millisecond or two on a free core.

That bridges the pauses between the functions of a model. Each look gives the core to whoever waits for it, so that with
TVM's own 300000 a process on a busy machine took minutes to end: a worker does not notice the end before it sleeps.
"""


class _Pool(threading.local):
    """A thread's pool of workers: the number last requested (0 before the first call), and the number in use."""

    requested = 0
    size = 0


_lock = threading.Lock()
_pool = _Pool()
# The user's value of TVM_NUM_THREADS, and the value that this module wrote in its place.
_user_count: str | None = None
_own_count: str | None = None
_counts: set[int] = set()
_is_started = False

are_mixed = False
"""Whether models of this process use different numbers of workers: each call has to say its own then."""


def reserve(requested: int | None, most: int | None, spin: int | None) -> int:
    """Return the number of workers for a model that is being loaded, and set the environment of later pools.

    The number is `requested`, else the user's TVM_NUM_THREADS, else the number of cores that this process may use, but
    not above `most`. `spin` is how many times a worker looks for work before it sleeps; None leaves the value that this
    process has or the user's TVM_THREAD_POOL_SPIN_COUNT, else it is `SPIN`.
    Warns if the process has workers already and so ignores `spin`. Raises InputError for `requested` below 1, for
    `spin` below 0, and for a TVM_NUM_THREADS that is no positive integer.
    """
    global _user_count, _own_count, are_mixed
    for name, value, least in (("threads", requested, 1), ("spin", spin, 0)):
        if value is not None and value < least:
            raise InputError(f"{name} is {value}, expected {least} or more")
    with _lock:
        variable = os.environ.get(_COUNT)
        if variable != _own_count:
            _user_count = variable
        if _user_count is not None and not re.fullmatch("0*[1-9][0-9]{0,8}", _user_count):
            raise InputError(f"the environment variable {_COUNT} is {_user_count!r}, expected a positive number")
        count = requested or int(_user_count or 0) or min(most or host().cores, host().cores)
        _counts.add(count)
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
                    stacklevel=3,
                )
            else:
                os.environ[_SPIN] = str(spin)
    return count


def use_workers(count: int) -> int:
    """Let this thread's calls use `count` workers, or its whole pool if that is smaller; return the number in use."""
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
