"""Generates a library's machine code, or takes the code of the same functions from a cache."""

import hashlib
import tempfile
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import tvm
import tvm_ffi
from tvm import relax, tirx
from tvm.ir import StringImm
from tvm.relax import vm_build
from tvm.tirx import PrimFunc
from tvm.tirx.build import codegen_build

from tvmflow.compiler.annotations import DIRECT
from tvmflow.compiler.argument_checks import keep_checks_of_inputs
from tvmflow.compiler.lowering import lower_functions
from tvmflow.hardware import cores
from tvmflow.reach import code_digest

_CALL_CPACKED = tvm.ir.Op.get("tirx.tvm_call_cpacked")
# TVM's calling convention: its number, what precedes the names of functions in their symbols, and its parameters, which
# are the function's own data, the arguments, their number, and the result.
_C_PACKED = 1
_PREFIX = "__tvm_ffi_"
_CONVENTION = {"self_handle": "handle", "args": "handle", "num_args": "int32", "result": "handle"}
_DIGEST_SIZE = hashlib.sha256().digest_size
# The functions of one part of a library: parts are generated side by side, and each is an entry of the cache. The
# number changes the library's bytes, so that it cannot depend on the machine that builds.
PART = 16


def code_target(options: Mapping[str, Any]) -> tvm.target.Target:
    """Return TVM's target of these options (`tvmflow.hardware.target.Target.tvm`), with which code is generated for it.

    On x86-64 loads from unrelated places stay single loads, unless the options say something of gathers. LLVM would
    join such loads to one instruction, which AMD's processors run slower than the loads.
    """
    attributes = [str(item) for item in options.get("mattr", ())]
    if not str(options.get("mtriple", "")).startswith("x86_64") or any("gather" in item for item in attributes):
        return tvm.target.Target(dict(options))
    return tvm.target.Target({**options, "mattr": [*attributes, "+prefer-no-gather"]})


def compile_module(
    scheduled: tvm.IRModule,
    target: tvm.target.Target,
    pipeline: tvm.transform.Pass,
    exec_mode: str,
    cache: Path | None,
    in_order: bool,
    inputs: int,
) -> Any:
    """Run `pipeline` on a scheduled module, generate its code, and return TVM's executable for the virtual machine.

    The pipeline holds all passes after scheduling and generates no code itself. `exec_mode` is `bytecode` (interpreted)
    or `compiled`. All cores that the process may use lower functions and generate code. With `in_order` TVM's passes
    lower one part of the library after another, for instruments that read the modules. The first `inputs` parameters of
    the model's functions are its inputs; the others are weights. Raises TVM's own errors.

    `cache` is a folder of object files that several processes may share; without it, the code stays in memory. A file
    has the code of a part of the library, and its name is the SHA-256 of the part's functions (without weights), TVM's
    version, the code of this project that lowers functions, the target and the pass context. The exported library is
    the same, byte for byte, with the cache and without it.
    """
    if target.kind.name != "llvm":
        return relax.build(scheduled, target, relax_pipeline=pipeline, exec_mode=exec_mode)
    # The steps of relax.build, repeated here because relax.build cannot take machine code from a cache and generates
    # all code on one core.
    with target:
        mod = pipeline(keep_checks_of_inputs(scheduled, inputs))
    builder = relax.ExecBuilder()
    functions = vm_build._filter_tir(vm_build._vmcodegen(builder, mod, exec_mode))
    library = None
    if functions is not None:
        # Compiled code calls functions by their symbols, known within a part alone.
        parts = _parts(functions, PART if exec_mode == "bytecode" else len(functions.functions))
        library, *others = _generate(parts, target, cache, in_order)
        for other in others:
            library.import_module(other)
    constants = dict((mod.attrs or {}).get("const_name_to_constant", {}))
    return relax.VMExecutable(vm_build._ffi_api.VMLink(builder, target, library, [], constants))


def _parts(functions: tvm.IRModule, size: int) -> list[tvm.IRModule]:
    """Divide a module into modules of at most `size` functions, of about as many each.

    Functions of one kind, whose names begin alike, go to different parts, so that all parts are about as much work. If
    there are several parts, each function that calls others by their symbols is one more.
    """
    items = sorted(functions.functions_items(), key=lambda item: str(item[0].name_hint))
    direct: list[tvm.IRModule] = []
    if len(items) > size:
        direct = [_with_callees(name, item, functions) for name, item in items if DIRECT in item.attrs]
        items = [(name, item) for name, item in items if DIRECT not in item.attrs]
    count = -(-len(items) // size)
    return [tvm.IRModule(dict(items[place::count]), attrs=functions.attrs) for place in range(count)] + direct


def _with_callees(variable: tvm.ir.GlobalVar, function: PrimFunc, functions: tvm.IRModule) -> tvm.IRModule:
    """Return a module of a function and of callers: one for each function that it calls by TVM's calling convention.

    TVM's code generator knows the symbols of the functions of a module alone. The callers have names of their own, and
    call the symbols that the linker resolves; LLVM inlines them.
    """
    called: dict[str, PrimFunc] = {}

    def rename(call: tvm.ir.Call) -> tvm.ir.Call:
        if not call.op.same_as(_CALL_CPACKED):
            return call
        name = str(call.args[0].value)
        caller = f"{variable.name_hint}_{name}"
        called[caller] = called.get(caller) or _caller_of(name, caller)
        return tvm.ir.Call(call.op, [StringImm(caller), *call.args[1:]], call.attrs, ret_ty=call.ty)

    renamed = function.with_body(tvm_ffi.structural_map(function.body, (tvm.ir.Call, rename)))
    callers = {tvm.ir.GlobalVar(name): caller for name, caller in called.items()}
    return tvm.IRModule({variable: renamed, **callers}, attrs=functions.attrs)


def _caller_of(name: str, caller: str) -> PrimFunc:
    """Return the function `caller` of TVM's calling convention, which passes its arguments on to function `name`."""
    parameters = [tirx.Var(item, kind) for item, kind in _CONVENTION.items()]
    code = tirx.Var("code", "int32")
    call = tirx.Bind(code, tirx.call_extern("int32", _PREFIX + name, *parameters))
    # TVM takes the condition first, whatever the signature says.
    succeeds = tirx.AssertStmt(code == 0, StringImm("RuntimeError"), [StringImm(f"function {name} failed")])
    attributes = {"global_symbol": _PREFIX + caller, "calling_conv": _C_PACKED, "tirx.noalias": True}
    body = tirx.SeqStmt([call, succeeds, tirx.Return(tirx.const(0, "int32"))])
    return PrimFunc(parameters, body, ret_type=tvm.ir.PrimType("int32")).with_attr(attributes)


def _generate(parts: list[tvm.IRModule], target: tvm.target.Target, cache: Path | None, in_order: bool) -> list[Any]:
    """Return the code of each part as a module of TVM, from the cache where it has it."""
    places = [None if cache is None else cache / f"{_key(part, target)}.o" for part in parts]
    contents = [None if place is None else _read(place) for place in places]
    missing = [part for part, content in zip(parts, contents, strict=True) if content is None]
    # LLVM's options, which a target can set, are those of the whole process while its code is generated.
    threads = 1 if target.attrs.get("cl-opt") else cores.count()
    with ThreadPoolExecutor(threads) as pool:
        lowered = iter([_lower(part, target) for part in missing] if in_order else _lower_all(missing, target, pool))
        jobs = [
            partial(_static_library, content, sorted(_symbols(part)))
            if content is not None
            else partial(_code, part, next(lowered), target, place)
            for part, content, place in zip(parts, contents, places, strict=True)
        ]
        return list(pool.map(lambda job: job(), jobs))


def _lower_all(parts: list[tvm.IRModule], target: tvm.target.Target, pool: ThreadPoolExecutor) -> list[tvm.IRModule]:
    """Lower parts of a library, each function by itself, so that all cores have about as much to do."""
    functions = [(place, item) for place, part in enumerate(parts) for item in part.functions_items()]
    # The longest ones first: the last to end would else have a core to itself.
    functions.sort(key=lambda function: -len(tvm.ir.save_json(function[1][1])))
    # The pass context is a thread's own.
    context = tvm.transform.PassContext.current()

    def lower(function: tuple[int, tuple[tvm.ir.GlobalVar, PrimFunc]]) -> tvm.IRModule:
        place, item = function
        with tvm.transform.PassContext(
            opt_level=context.opt_level,
            required_pass=context.required_pass,
            disabled_pass=context.disabled_pass,
            instruments=context.instruments,
            config=context.config,
        ):
            return _lower(tvm.IRModule(dict([item]), attrs=parts[place].attrs), target)

    lowered: list[dict[str, tuple[tvm.ir.GlobalVar, PrimFunc]]] = [{} for _ in parts]
    for (place, _), mod in zip(functions, pool.map(lower, functions), strict=True):
        # A function alone in a module is said to be the one that a library starts with.
        lowered[place] |= {
            str(variable.name_hint): (variable, function.without_attr("tirx.is_entry_func"))
            for variable, function in mod.functions_items()
        }
    return [
        tvm.IRModule(dict(item for _, item in sorted(items.items())), attrs=part.attrs)
        for items, part in zip(lowered, parts, strict=True)
    ]


def _code(part: tvm.IRModule, lowered: tvm.IRModule, target: tvm.target.Target, place: Path | None) -> Any:
    """Generate the code of a lowered part, write it to its place in the cache if it has one, and return its module."""
    code = codegen_build(lowered, target)
    return code if place is None else _static_library(_write(place, code), sorted(_symbols(part)))


def _lower(functions: tvm.IRModule, target: tvm.target.Target) -> tvm.IRModule:
    """Run the passes that end before code is generated, in this thread's pass context."""
    lowered = lower_functions(functions, target)
    # TVM's code generator reads this option itself, but the pass context of another thread.
    if tvm.transform.PassContext.current().config.get("tirx.disable_assert", False):
        lowered = tvm.tirx.transform.SkipAssert()(lowered)
    return lowered


def _symbols(functions: tvm.IRModule) -> dict[str, PrimFunc]:
    return {str(function.attrs["global_symbol"]): function for _, function in functions.functions_items()}


def _key(functions: tvm.IRModule, target: tvm.target.Target) -> str:
    context = tvm.transform.PassContext.current()
    settings = (
        tvm.__version__,
        code_digest("tvmflow.compiler.lowering"),
        str(target),
        context.opt_level,
        sorted(map(str, context.required_pass)),
        sorted(map(str, context.disabled_pass)),
        sorted((str(name), str(value)) for name, value in context.config.items()),
    )
    digest = hashlib.sha256(repr(settings).encode())
    for name, function in sorted(_symbols(functions).items()):
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
