"""Generates a library's machine code, or takes the code of the same functions from a cache."""

import hashlib
import tempfile
from pathlib import Path
from typing import Any

import tvm
from tvm import relax
from tvm.relax import vm_build
from tvm.tirx import PrimFunc

_DIGEST_SIZE = hashlib.sha256().digest_size


def compile_module(
    scheduled: tvm.IRModule,
    target: tvm.target.Target,
    pipeline: tvm.transform.Pass,
    exec_mode: str,
    cache: Path | None = None,
) -> Any:
    """Run `pipeline` on a scheduled module, generate its code, and return TVM's executable for the virtual machine.

    The pipeline holds all passes after scheduling and generates no code itself. `exec_mode` is `bytecode` (interpreted)
    or `compiled`. Raises TVM's own errors.

    `cache` is a folder of object files that several processes may share. A file's name is the SHA-256 of the functions
    of the library (without its weights), TVM's version, the target and the pass context. The exported library is the
    same, byte for byte, with the cache and without it.
    """
    if cache is None:
        return relax.build(scheduled, target, relax_pipeline=pipeline, exec_mode=exec_mode)
    # The steps of relax.build, repeated here because relax.build cannot take machine code from a cache.
    with target:
        mod = pipeline(scheduled)
    builder = relax.ExecBuilder()
    code = vm_build._vmcodegen(builder, mod, exec_mode)
    functions = {
        str(function.attrs["global_symbol"]): function
        for _, function in code.functions_items()
        if isinstance(function, PrimFunc)
    }
    library = None
    if functions:
        place = cache / f"{_key(functions, target)}.o"
        content = _read(place)
        if content is None:
            compiled = tvm.tirx.build(vm_build._filter_tir(code), target=target)
            content = _write(place, compiled)
        library = _static_library(content, sorted(functions))
    constants = dict((mod.attrs or {}).get("const_name_to_constant", {}))
    return relax.VMExecutable(vm_build._ffi_api.VMLink(builder, target, library, [], constants))


def _key(functions: dict[str, PrimFunc], target: tvm.target.Target) -> str:
    context = tvm.transform.PassContext.current()
    settings = (
        tvm.__version__,
        str(target),
        context.opt_level,
        sorted(map(str, context.required_pass)),
        sorted(map(str, context.disabled_pass)),
        sorted((str(name), str(value)) for name, value in context.config.items()),
    )
    digest = hashlib.sha256(repr(settings).encode())
    for name, function in sorted(functions.items()):
        digest.update(f"\n{name}\n{tvm.ir.save_json(function)}".encode())
    return digest.hexdigest()


def _read(place: Path) -> bytes | None:
    """An object file of the cache; None if there is none, or it is damaged."""
    try:
        content = place.read_bytes()
    except FileNotFoundError:
        return None
    digest, content = content[:_DIGEST_SIZE], content[_DIGEST_SIZE:]
    return content if hashlib.sha256(content).digest() == digest else None


def _write(place: Path, compiled: Any) -> bytes:
    place.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=".tvmflow-", dir=place.parent) as folder:
        generated = Path(folder) / "functions.o"
        compiled.write_to_file(str(generated))
        content = generated.read_bytes()
        whole = Path(folder) / place.name
        whole.write_bytes(hashlib.sha256(content).digest() + content)
        whole.replace(place)
    return content


def _static_library(content: bytes, names: list[str]) -> Any:
    with tempfile.TemporaryDirectory(prefix="tvmflow-") as folder:
        file = Path(folder) / "functions.o"
        file.write_bytes(content)
        return tvm.runtime.load_static_library(str(file), names)
