"""The worker threads of TVM: how many a model's calls use, and how long they look for work before they sleep.

Every thread that calls a model gets a pool of its own at its first call, as large as TVM_NUM_THREADS says then. Later a
pool can be used in part, it cannot grow. TVM_THREAD_POOL_SPIN_COUNT is read once, by the first worker of the process.
"""

import os
import threading
import warnings

from tvmflow.errors import InputError
from tvmflow.target import host

_COUNT = "TVM_NUM_THREADS"
_SPIN = "TVM_THREAD_POOL_SPIN_COUNT"
_BIND = "TVM_BIND_THREADS"


class _Pool(threading.local):
    """The pool of a thread: how many workers were asked of it last, 0 before its first call, and how many it uses."""

    asked = 0
    used = 0


_lock = threading.Lock()
_pool = _Pool()
_users: str | None = None
_written: str | None = None
_counts: set[int] = set()
_started = False

mixed = False
"""Whether models of this process use different numbers of workers: each call has to say its own then."""


def settle(asked: int | None, built_for: int, spin: int | None) -> int:
    """The number of workers for a model that is loaded now; sets the environment for the pools that start later.

    `asked` comes first, then the user's TVM_NUM_THREADS, then what the bundle was built for as far as there are cores.
    Warns of a `spin` that comes too late. Raises InputError for numbers that make no sense.
    """
    global _users, _written, mixed
    for name, value, least in (("threads", asked, 1), ("spin", spin, 0)):
        if value is not None and value < least:
            raise InputError(f"{name} is {value}, expected {least} or more")
    with _lock:
        found = os.environ.get(_COUNT)
        if found != _written:
            _users = found
        if _users is not None and not (_users.isdigit() and int(_users)):
            raise InputError(f"the environment variable {_COUNT} is {_users!r}, expected a positive number")
        count = asked or int(_users or 0) or min(built_for, host().cores)
        _counts.add(count)
        mixed = len(_counts) > 1
        _written = os.environ[_COUNT] = str(max(_counts))
        if _written == "1":
            # TVM would bind every thread that calls a model to the first core.
            os.environ.setdefault(_BIND, "0")
        if spin is not None and os.environ.get(_SPIN) != str(spin):
            if _started:
                warnings.warn(
                    f"spin={spin} comes too late, this process has workers already: give it with the first model, "
                    f"or set {_SPIN}",
                    RuntimeWarning,
                    stacklevel=3,
                )
            else:
                os.environ[_SPIN] = str(spin)
    return count


def use(count: int) -> int:
    """Give the calls of this thread `count` workers, or as many as its pool has; returns how many that is."""
    global _started
    if _pool.asked != count:
        from tvm_ffi import get_global_func

        _started = True
        size = get_global_func("runtime.NumThreads")
        # The first question starts the pool.
        if size() != count:
            get_global_func("runtime.config_threadpool")(0, count)
        _pool.asked, _pool.used = count, size()
    return _pool.used
