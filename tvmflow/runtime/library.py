"""TVM's runtime library without TVM's Python package, whose import costs several times as much, or the compiler too.

Does for a CPU what `tvm/base.py` (loading) and `tvm/runtime/vm.py` (a virtual machine) do in TVM 0.27.
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

_CPU, _POOLED = 1, 2


@cache
def load() -> None:
    """Load the library, once; a later `import tvm` finds it loaded. Raises BundleError where there is none."""
    package = find_spec("tvm")
    if package is None or package.origin is None:
        raise BundleError("bundles run with the package apache-tvm, which is not installed; install tvmflow anew")
    folder = Path(os.environ.get("TVM_LIBRARY_PATH") or Path(package.origin).parent / "lib")
    with without_torch():
        # First, for it brings the library of tvm-ffi, on which the others depend.
        import tvm_ffi  # noqa: F401
    try:
        ctypes.CDLL(str(folder / "libtvm_runtime.so"), ctypes.RTLD_GLOBAL)
    except OSError as error:
        raise BundleError(f"TVM's runtime library cannot be loaded ({error}); install apache-tvm anew") from error
    extra = folder / "libtvm_runtime_extra.so"
    if extra.is_file():
        # Sorting and random numbers, which compiled models call.
        ctypes.CDLL(str(extra), ctypes.RTLD_GLOBAL)


def machine(library: Any) -> "Callable[[str], Callable[..., Any]]":
    """A new virtual machine of a library on the CPU, as what gives its functions by name."""
    made = library["vm_load_executable"]()
    made["vm_initialization"](_CPU, 0, _POOLED)
    function: Callable[[str], Callable[..., Any]] = made.get_function
    return function


def wrapped_anew(library: Any) -> Any:
    """The same library as an object of the class that Python has for one by now."""
    import tvm_ffi

    return tvm_ffi.convert(lambda item: item)(library)


@contextmanager
def without_torch() -> Iterator[None]:
    """Keep `tvm_ffi` from importing torch, which it does wherever torch is installed and which costs seconds."""
    if "torch" in sys.modules:
        yield
        return
    sys.modules["torch"] = None  # type: ignore[assignment]
    try:
        yield
    finally:
        del sys.modules["torch"]
