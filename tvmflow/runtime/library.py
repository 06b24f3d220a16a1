"""TVM's runtime library on a CPU, used without TVM's Python package, whose import takes several times as long.

This module replaces `tvm/base.py` (loading the library) and `tvm/runtime/vm.py` (a virtual machine) of TVM 0.27.
"""

import ctypes
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from tvmflow.errors import BundleError

# TVM's numbers of the device types `cpu` and `cuda`, and of the allocator that keeps freed memory for later calls.
_CPU, GPU, _POOLED_ALLOCATOR = 1, 2, 2


@cache
def load() -> None:
    """Load the library once per process; a later `import tvm` uses it. Raises BundleError if there is none."""
    place = folder()
    with without_torch():
        # First: it loads the library of tvm-ffi, which the others need.
        import tvm_ffi  # noqa: F401
    try:
        ctypes.CDLL(str(place / "libtvm_runtime.so"), ctypes.RTLD_GLOBAL)
    except OSError as error:
        raise BundleError(f"TVM's runtime library cannot be loaded ({error}); install apache-tvm anew") from error
    extra = place / "libtvm_runtime_extra.so"
    if extra.is_file():
        # Sorting and random numbers, which compiled models call.
        ctypes.CDLL(str(extra), ctypes.RTLD_GLOBAL)


def folder() -> Path:
    """Return the folder of TVM's libraries. Raises BundleError if TVM is not installed."""
    package = find_spec("tvm")
    if package is None or package.origin is None:
        raise BundleError("bundles run with the package apache-tvm, which is not installed; install tvmflow anew")
    return Path(os.environ.get("TVM_LIBRARY_PATH") or Path(package.origin).parent / "lib")


def create_machine(library: Any, *, on_gpu: bool = False) -> "Callable[[str], Callable[..., Any]]":
    """Create a virtual machine of a library; return the function that looks up its functions by name.

    It runs on the CPU, or with `on_gpu` on the first GPU.
    """
    machine = library["vm_load_executable"]()
    devices = (GPU, _CPU) if on_gpu else (_CPU,)
    machine["vm_initialization"](*(item for device in devices for item in (device, 0, _POOLED_ALLOCATOR)))
    find_function: Callable[[str], Callable[..., Any]] = machine.get_function
    return find_function


def rewrap(library: Any) -> Any:
    """Return the library as an object of the class that TVM's Python package registers when it is imported."""
    import tvm_ffi

    return tvm_ffi.convert(lambda item: item)(library)


@contextmanager
def without_torch() -> Iterator[None]:
    """Keep `tvm_ffi` from importing torch while the body runs, because that import takes seconds.

    Meanwhile torch cannot be imported in any thread. If it is imported already, nothing changes.
    """
    if "torch" in sys.modules:
        yield
        return
    sys.modules["torch"] = None  # type: ignore[assignment]
    try:
        yield
    finally:
        del sys.modules["torch"]
