"""Runs compiled functions on buffers that begin and end at protected pages, so that no byte outside is touched unseen.

The parent compiles the functions into one library; a child process, which imports TVM's runtime alone, calls each of
them twice: with every buffer right after a protected page, and with every buffer right before one. A read or write
beyond that page ends the child, and the parent names the function. Inputs are read-only. What is left of a buffer's
last 64 bytes holds NaN, which a result must not take up and a function must not overwrite.
"""

import ctypes
import json
import mmap
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from tvmflow.arrays import Array

if TYPE_CHECKING:
    from tvm.tirx import PrimFunc

    from tvmflow.hardware.target import Target


# The alignment of every buffer that TVM's runtime allocates.
_ALIGNMENT = 64
_READ, _READ_WRITE = mmap.PROT_READ, mmap.PROT_READ | mmap.PROT_WRITE
_PROTECTED = 0
_UNTOUCHED = 0xFF  # As float32 and as bfloat16 this byte repeated is NaN.


def assert_within_buffers(
    functions: "Mapping[str, PrimFunc]",
    target: "Target",
    *sizes: Mapping[str, int],
    seed: int = 0,
    preload: Path | None = None,
) -> None:
    """Compile scheduled functions for a target that this machine runs, and run them on guarded buffers on two threads.

    Each of `sizes` are those of symbolic dimensions, by name; the functions run once for each. `preload` is a library
    whose functions they call, None for none. Raises AssertionError
    that names the first function, and its sizes, which reads or writes outside its buffers, or which leaves an element
    of a floating-point result unwritten or not a number.
    """
    import tvm
    from tvm.tirx.build import codegen_build

    from tvmflow.compiler.codegen import code_target
    from tvmflow.compiler.lowering import lower_functions

    marked = {
        name: func.with_attr("global_symbol", name).with_attr("tirx.is_scheduled", True)
        for name, func in functions.items()
    }
    with tempfile.TemporaryDirectory(prefix="guarded-") as folder:
        library = Path(folder) / "functions.so"
        options = code_target(target.tvm)
        codegen_build(lower_functions(tvm.IRModule(marked), options), options).export_library(str(library))
        calls = [
            {"name": name, "sizes": dict(chosen), "parameters": _parameters(func, chosen)}
            for chosen in sizes or ({},)
            for name, func in functions.items()
        ]
        (Path(folder) / "calls.json").write_text(json.dumps({"seed": seed, "calls": calls}))
        child = subprocess.run(
            [sys.executable, str(Path(__file__).resolve()), folder],
            env={
                **os.environ,
                "TVM_NUM_THREADS": "2",
                "TVM_USE_RUNTIME_LIB": "1",
                **({} if preload is None else {"LD_PRELOAD": str(preload)}),
            },
            capture_output=True,
            text=True,
            timeout=300,
            check=False,
        )
    function = child.stdout.splitlines()[-1].rstrip() if child.stdout else "(none)"
    if child.returncode < 0:
        name = signal.Signals(-child.returncode).name
        raise AssertionError(f"{function} reads or writes outside its buffers: {name}")
    assert child.returncode == 0, f"{function}: {child.stderr.strip()[-1000:]}"


def _parameters(func: "PrimFunc", sizes: Mapping[str, int]) -> list[dict[str, Any]]:
    """The shape and type of each parameter of a function, and whether the function writes it."""
    import tvm_ffi
    from tvm import sym, tirx

    buffers: list[Any] = []
    tvm_ffi.structural_walk(func.body, (tirx.BufferStore, lambda store: buffers.append(store.buffer)))

    def size(dim: Any) -> int:
        values: dict[Any, Any] = {}
        tvm_ffi.structural_walk(dim, (tirx.Var, lambda var: values.setdefault(var, sizes.get(var.name))))
        analyzer = sym.Analyzer()
        for variable, value in values.items():
            analyzer.bind(variable, tirx.IntImm("int64", value))
        return int(analyzer.simplify(dim))

    last = func.params[-1]
    return [
        {
            "shape": [size(dim) for dim in parameter.shape],
            "dtype": str(parameter.dtype),
            "written": parameter.same_as(last) or any(parameter.same_as(buffer) for buffer in buffers),
        }
        for parameter in func.params
    ]


class GuardedBuffer:
    """An array between two protected pages: right after the first one, or right before the second one."""

    def __init__(self, shape: list[int], dtype: str, *, at_end: bool) -> None:
        self._libc = ctypes.CDLL(None, use_errno=True)
        count = int(np.prod(shape, dtype="int64"))
        self.size = count * np.dtype(dtype).itemsize
        room = -(-max(self.size, 1) // _ALIGNMENT) * _ALIGNMENT
        self._length = -(-room // mmap.PAGESIZE) * mmap.PAGESIZE
        self._map = mmap.mmap(-1, self._length + 2 * mmap.PAGESIZE)
        self._first = ctypes.addressof(ctypes.c_char.from_buffer(self._map)) + mmap.PAGESIZE
        self._protect(self._first - mmap.PAGESIZE, mmap.PAGESIZE, _PROTECTED)
        self._protect(self._first + self._length, mmap.PAGESIZE, _PROTECTED)
        self._pages = np.frombuffer(self._map, "uint8", self._length, mmap.PAGESIZE)
        self._pages[:] = _UNTOUCHED
        self._start = self._length - room if at_end else 0
        self.array: Array = self._pages[self._start :][: self.size].view(dtype).reshape(shape)

    def protect_from_writes(self) -> None:
        """Make the array read-only for compiled code, too."""
        self._protect(self._first, self._length, _READ)

    def is_intact_outside(self) -> bool:
        """Whether no byte of the buffer's pages beside the array has changed."""
        before, after = self._pages[: self._start], self._pages[self._start + self.size :]
        return bool((before == _UNTOUCHED).all() and (after == _UNTOUCHED).all())

    def _protect(self, address: int, length: int, protection: int) -> None:
        if self._libc.mprotect(ctypes.c_void_p(address), ctypes.c_size_t(length), protection):
            raise OSError(ctypes.get_errno(), "mprotect failed")


def _fill(array: Array, rng: np.random.Generator) -> None:
    """Numbers that a kernel of this type meets: normal ones, bfloat16 as its bits, integers, and 0 for an index."""
    kind = array.dtype.name
    if kind.startswith("float"):
        array[:] = rng.standard_normal(array.shape)
    elif kind == "uint16":
        array[:] = rng.standard_normal(array.shape).astype("float32").view("uint32") >> 16
    elif kind in ("int8", "uint8"):
        array[:] = rng.integers(0, 100, array.shape)
    else:
        array[:] = 0


def _call(library: Any, name: str, parameters: list[dict[str, Any]], seed: int, *, at_end: bool) -> str:
    """Call a function once; returns what is wrong, empty where nothing is."""
    import tvm_ffi

    rng = np.random.default_rng(seed)
    buffers = [GuardedBuffer(item["shape"], item["dtype"], at_end=at_end) for item in parameters]
    for buffer, item in zip(buffers, parameters, strict=True):
        if not item["written"]:
            _fill(buffer.array, rng)
            buffer.protect_from_writes()
    library[name](*(tvm_ffi.from_dlpack(buffer.array) for buffer in buffers))
    for place, (buffer, item) in enumerate(zip(buffers, parameters, strict=True)):
        if not buffer.is_intact_outside():
            return f"parameter {place} of shape {item['shape']} was written outside"
        if item["written"] and buffer.array.dtype.kind == "f" and np.isnan(buffer.array).any():
            at = [int(index[0]) for index in np.nonzero(np.isnan(buffer.array))]
            return f"parameter {place} of shape {item['shape']} is not a number, or not written, at {at}"
    return ""


def main() -> int:
    """Run the calls of a folder; the last line of the output names the function that is running."""
    from tvmflow.runtime.library import load

    load()
    import tvm_ffi

    folder = Path(sys.argv[1])
    document = json.loads((folder / "calls.json").read_text())
    library = tvm_ffi.load_module(str(folder / "functions.so"))
    for call in document["calls"]:
        print(call["name"], call["sizes"] or "", flush=True)  # noqa: T201
        for at_end in (True, False):
            if wrong := _call(library, call["name"], call["parameters"], document["seed"], at_end=at_end):
                print(wrong, file=sys.stderr)  # noqa: T201
                return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
