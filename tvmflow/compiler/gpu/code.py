"""Compiles the kernels of a library for a GPU by nvcc, and puts their machine code in the place of their source.

TVM's wheel generates CUDA source and leaves it to the process that loads the library to compile it. That process would
need TVM's compiler and nvcc.
"""

import ctypes
import hashlib
import json
import shlex
import shutil
import struct
import subprocess
import tempfile
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import tvm
from tvm.support import cc

from tvmflow import files
from tvmflow.compiler.messages import shorten
from tvmflow.errors import BuildError
from tvmflow.hardware.target import host

# TVM's symbol of the serialised modules in a library.
_SYMBOL = "__tvm_ffi__library_bin"
_COUNT = struct.Struct("<Q")
_SOURCE_FORMAT, _CODE_FORMAT = b"cuda", b"fatbin"
_TIMEOUT = 3600.0
_UNKNOWN = "TVM packs modules in an unknown form; install the version of apache-tvm that tvmflow names"


def compile_kernels(library: Any, arch: str, cache: Path | None) -> dict[str, bytes]:
    """Return the machine code for each CUDA source that a module of TVM holds, by the source.

    `arch` is nvcc's name of the architecture, such as `sm_90`. `cache` is a folder for the code. Raises BuildError
    where nvcc is missing or fails.
    """
    return {source: _compile(source, arch, cache) for source in _sources(library)}


def _sources(module: Any) -> Iterator[str]:
    for item in module.imports:
        if item.kind == "cuda":
            yield item.inspect_source()
        yield from _sources(item)


def _compile(source: str, arch: str, cache: Path | None) -> bytes:
    compiler = shutil.which("nvcc")
    if compiler is None:
        raise BuildError("CUDA kernels need nvcc, which is not installed; install NVIDIA's CUDA toolkit")
    # Machine code for the architecture, and code of which the driver makes that of later ones.
    virtual = arch.replace("sm_", "compute_")
    codes = [f"-gencode=arch={virtual},code=[{arch},{virtual}]"]
    options = ["-fatbin", *codes, "-std=c++17", "-O3", "-split-compile=0", "-diag-suppress=1444"]
    version = subprocess.run([compiler, "--version"], capture_output=True, text=True, timeout=60, check=False).stdout
    key = hashlib.sha256("\n".join([version, *options, source]).encode()).hexdigest()
    place = None if cache is None else cache / f"{key}.fatbin"
    if place is not None and place.is_file():
        return place.read_bytes()
    with tempfile.TemporaryDirectory(prefix="tvmflow-") as folder:
        # nvcc writes the name of the file into the code.
        (Path(folder) / "kernels.cu").write_text(source)
        command = [compiler, *options, "-o", "kernels.fatbin", "kernels.cu"]
        done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=_TIMEOUT, check=False)
        if done.returncode != 0:
            # Warnings come first.
            lines = [line for line in done.stderr.splitlines() if "error" in line] or done.stderr.splitlines()
            message = shorten(Exception("\n".join(lines)))
            raise BuildError(f"nvcc does not compile the kernels for {arch}: {message}")
        code = (Path(folder) / "kernels.fatbin").read_bytes()
    if place is not None:
        place.parent.mkdir(parents=True, exist_ok=True)
        with files.replacing(place, 0o644) as whole:
            whole.write(code)
    return code


def packer(code: Mapping[str, bytes]) -> Callable[..., str]:
    """Return the function by which TVM's `export_library` packs modules, with machine code in the place of source.

    `code` is the result of `compile_kernels`.
    """
    return partial(_pack, code)


def _pack(code: Mapping[str, bytes], module: Any, is_system_library: bool, prefix: str, folder: str) -> str:
    """Write the modules that a library imports as an assembly file, and return its path."""
    place = Path(folder)
    machine = json.dumps({"kind": "llvm", "mtriple": f"{host().arch}-linux-gnu"})
    packed = tvm.runtime._ffi_api.ModulePackImportsToLLVM(module, is_system_library, machine, prefix)
    packed.write_to_file(str(place / "packed.o"))
    content = with_code(_read_symbol(place / "packed.o"), code)
    (place / "imports.bin").write_bytes(content)
    assembly = place / "imports.s"
    # Where code can be far from data, the linker needs a section of its own for gigabytes.
    assembly.write_text(
        f'.section .rodata\n.balign 64\n.globl {_SYMBOL}\n{_SYMBOL}:\n.incbin "{place / "imports.bin"}"\n'
        '.section .note.GNU-stack,"",%progbits\n'
    )
    return str(assembly)


def _read_symbol(file: Path) -> bytes:
    """Return the serialised modules in an object file of this machine."""
    library = file.with_suffix(".so")
    compiler = shlex.split(cc.get_cc() or "")
    done = subprocess.run(
        [*compiler, "-shared", "-o", library, file], capture_output=True, text=True, timeout=_TIMEOUT, check=False
    )
    if done.returncode != 0:
        raise BuildError(f"{compiler} does not link the packed modules: {shorten(Exception(done.stderr))}")
    loaded = ctypes.CDLL(str(library))
    size = ctypes.c_uint64.in_dll(loaded, _SYMBOL)
    return ctypes.string_at(ctypes.addressof(size), _COUNT.size + size.value)


def with_code(packed: bytes, code: Mapping[str, bytes]) -> bytes:
    """Return serialised modules with machine code in the place of CUDA source.

    TVM serialises a tree of modules as its size, the tree (the place of each module's first import among `children`,
    and `children`), and for each module its kind and content; the library itself has no content. A CUDA module is a
    format, its functions, and the code. Raises BuildError for other content.
    """
    try:
        result = _with_code(_Reader(packed), code)
    except struct.error as error:
        raise BuildError(_UNKNOWN) from error
    return _COUNT.pack(len(result)) + result


def _with_code(reader: "_Reader", code: Mapping[str, bytes]) -> bytes:
    packed = reader.content
    if reader.count() != len(packed) - _COUNT.size:
        raise BuildError(_UNKNOWN)
    begin = reader.place
    starts = [reader.count() for _ in range(reader.count())]
    for _ in range(reader.count()):
        reader.count()
    parts = [packed[begin : reader.place]]
    for _ in starts[1:]:
        begin = reader.place
        kind = reader.text()
        content = b"" if kind == b"_lib" else reader.text()
        if kind == _SOURCE_FORMAT:
            parts.append(_text(kind) + _text(_replace_source(content, code)))
        else:
            parts.append(packed[begin : reader.place])
    if reader.place != len(packed):
        raise BuildError(_UNKNOWN)
    return b"".join(parts)


def _replace_source(content: bytes, code: Mapping[str, bytes]) -> bytes:
    head = _text(_SOURCE_FORMAT)
    for source, machine_code in code.items():
        tail = _text(source.encode())
        if content.startswith(head) and content.endswith(tail):
            return _text(_CODE_FORMAT) + content[len(head) : -len(tail)] + _text(machine_code)
    raise BuildError(_UNKNOWN)


def _text(content: bytes) -> bytes:
    return _COUNT.pack(len(content)) + content


class _Reader:
    """Reads TVM's serialised numbers and texts one by one."""

    def __init__(self, content: bytes) -> None:
        self.content = content
        self.place = 0

    def count(self) -> int:
        (value,) = _COUNT.unpack_from(self.content, self.place)
        self.place += _COUNT.size
        return int(value)

    def text(self) -> bytes:
        size = self.count()
        self.place += size
        return self.content[self.place - size : self.place]
