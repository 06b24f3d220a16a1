"""Builds an imported model into a shared library for a target, and says what was done."""

import shlex
import shutil
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from difflib import get_close_matches
from functools import cache
from pathlib import Path
from typing import Any, Literal

import numpy as np
import tvm
import tvm_ffi
from tvm.support import cc
from tvm.tirx import PrimFunc

from tvmflow.compiler.choices import Choices
from tvmflow.compiler.codegen import compile_module
from tvmflow.compiler.graph import hoist_weights, lower_module, variant_name
from tvmflow.compiler.importer import Imported
from tvmflow.compiler.inspection import Inspected, Inspection, KeepIR, code_of
from tvmflow.compiler.machine import machine
from tvmflow.compiler.passes import pass_names
from tvmflow.compiler.reason import reason
from tvmflow.compiler.schedules import error_bounds, schedule
from tvmflow.compiler.serialise import ir_text
from tvmflow.errors import BuildError, OptionError, TargetError
from tvmflow.runtime.profile import RULE
from tvmflow.target import Precision, Target, explain_missing_unit


@dataclass(frozen=True)
class BuildOptions:
    """How to build: TVM's pass context, how the virtual machine runs `main`, and where the weights go.

    `weights="apart"` makes the packed weights parameters of `main` that follow the inputs. Each of `variants`, sizes of
    symbolic dimensions, is built as a function of its own beside `main`, with static shapes for those sizes.
    `precision` is what convolutions and matrix products compute in; `int8` is for quantised models. `winograd` allows
    convolutions by Winograd's algorithm, which is faster and rounds more.
    """

    opt_level: int = 3
    required_passes: tuple[str, ...] = ()
    disabled_passes: tuple[str, ...] = ()
    config: Mapping[str, Any] = field(default_factory=dict)
    exec_mode: Literal["bytecode", "compiled"] = "bytecode"
    weights: Literal["inside", "apart"] = "inside"
    precision: Precision = "fp32"
    fast_algorithms: bool = True
    variants: tuple[Mapping[str, int], ...] = ()


@dataclass(frozen=True)
class Algorithm:
    """How many functions use an algorithm of fewer multiplications, and the largest of their error bounds."""

    functions: int
    bound: float


@dataclass(frozen=True)
class Built:
    """A compiled model.

    `ir_text` and `ir_json` are the lowered, unscheduled module without its weights, whose functions name the rule that
    scheduled them as the attribute `schedule_rule`; `params` are the packed weights that `main` takes after the inputs,
    in order, when they are kept apart; `pass_timings` are seconds by pass, inner passes not counted twice; `schedules`
    says which rule scheduled each function; `variants` are the sizes that the library has functions of their own for,
    by function; `inspected` is what was asked to be kept.
    """

    executable: Any
    ir_text: str
    ir_json: str
    params: dict[str, np.ndarray[Any, Any]]
    pass_timings: list[tuple[str, float]]
    schedules: list[tuple[str, str]]
    variants: dict[str, dict[str, int]]
    algorithms: dict[str, Algorithm]
    threads: int
    cross_compiler: str | None
    inspected: Inspected

    def export(self, path: Path) -> None:
        """Write the shared library. Equal models, targets and options give equal bytes.

        Raises BuildError when the linker is missing or fails.
        """
        words = shlex.split(self.cross_compiler or "")
        compiler, options = (words[0], words[1:]) if words else (None, [])
        triple = cc.get_target_by_dump_machine(compiler)
        link = cc.cross_compiler(compiler, options, get_target_triple=triple) if compiler else None
        try:
            # A file that replaces another whole: writing into a library that is loaded crashes who uses it.
            with tempfile.TemporaryDirectory(prefix=".tvmflow-", dir=Path(path).parent) as folder:
                library = Path(folder) / "mod.so"
                self.executable.export_library(str(library), fcompile=link)
                library.replace(path)
        except Exception as error:
            raise BuildError(
                f"{path}: the library could not be linked with {compiler or cc.get_cc()!r}: {reason(error)}"
            ) from error


def can_build(target: Target) -> None:
    """Raise TargetError, in one sentence, if this TVM or this machine's compilers cannot build for `target`."""
    compiler = shlex.split(target.cross_compiler or "")[:1]
    if compiler and shutil.which(compiler[0]) is None:
        raise TargetError(f"target {target.name!r} needs the cross compiler {compiler[0]!r}, which is not installed")
    if not target.cross_compiler and cc.get_cc() is None:
        raise TargetError(f"target {target.name!r} needs a C++ compiler to link with, install g++ or clang++")
    if target.arch == "cuda":
        _check_cuda(target)
    else:
        _check_llvm(target)
    try:
        probe = tvm.IRModule({"main": _probe()})
        tvm.tirx.build(_schedule(probe, target, None)[0], target=tvm.target.Target(target.tvm))
    except Exception as error:
        raise TargetError(
            f"target {target.name!r} cannot be built by TVM {tvm.__version__}: {reason(error)}"
        ) from error


def _check_llvm(target: Target) -> None:
    """TVM crashes rather than raise when it generates code for an architecture that its LLVM lacks."""
    arch = str(target.tvm.get("mtriple", target.arch)).partition("-")[0]
    known = [str(name) for name in tvm_ffi.get_global_func("target.llvm_get_targets")()]
    if arch not in known:
        raise TargetError(f"target {target.name!r}: the LLVM of this TVM knows no architecture {arch!r}")


def _check_cuda(target: Target) -> None:
    compiler = shutil.which("nvcc")
    if compiler is None:
        raise TargetError(f"target {target.name!r} needs nvcc, which is not installed")
    listed = subprocess.run([compiler, "--list-gpu-code"], capture_output=True, text=True, timeout=60, check=False)
    known, wanted = listed.stdout.split(), str(target.tvm.get("arch", ""))
    if known and wanted and wanted.removesuffix("a") not in known:
        raise TargetError(f"target {target.name!r}: this nvcc knows no {wanted!r}; it knows {', '.join(known)}")


def _probe() -> PrimFunc:
    x = tvm.te.placeholder((16,), "float32", name="x")
    y = tvm.te.compute((16,), lambda i: x[i] + 1.0, name="y")
    return tvm.te.create_prim_func([x, y]).with_attr("global_symbol", "main")


def lower(
    imported: Imported, target: Target, options: BuildOptions | None = None, choices: Choices | None = None
) -> tvm.IRModule:
    """Canonicalise, fold, lay out and fuse: `main` calls fused, unscheduled functions and holds packed weights.

    `choices` are decisions to make otherwise than the cost model, and take note of those that are met.
    The same input gives the same module in every process. Raises BuildError when a pass fails, TargetError for a
    precision that the target's processor has no instructions for.
    """
    options = options or BuildOptions()
    _check_precision(target, options)
    with _passes(options, target):
        return _lowered(imported, target, options, choices)


def _lowered(imported: Imported, target: Target, options: BuildOptions, choices: Choices | None) -> tvm.IRModule:
    return lower_module(
        imported, target, choices or Choices(), options.variants, options.precision, options.fast_algorithms
    )


def build(
    imported: Imported,
    target: Target,
    options: BuildOptions | None = None,
    tuned: Callable[[PrimFunc], PrimFunc | None] | None = None,
    cache: Path | None = None,
    inspect: Inspection | None = None,
    choices: Choices | None = None,
) -> Built:
    """Build a model for a target.

    `tuned` may return a scheduled replacement, with the same parameters, for an unscheduled fused function; where it
    returns None the analytic rules schedule the function. `cache` is a folder that keeps generated code: a model with
    the same functions, whatever its weights, then takes little more than linking. `inspect` says what to keep of the
    build for a person to read. `choices` are decisions to make otherwise than the cost model.

    Raises BuildError when a pass or the code generator fails, OptionError for an unknown pass or a wrong option,
    TargetError for a target TVM does not know and for a precision that its processor has no instructions for.
    """
    options = options or BuildOptions()
    _check_precision(target, options)
    inspect = inspect or Inspection()
    _check_passes("inspected", (*inspect.before, *inspect.after))
    cache = None if inspect.needs_llvm else cache
    timings: dict[str, float] = {}
    inspected = Inspected()
    instruments = [_Timing(timings), KeepIR(inspect, inspected.passes)]
    with _passes(options, target, instruments):
        lowered = _lowered(imported, target, options, choices)
        bare, weights = hoist_weights(lowered)
        apart = options.weights == "apart"
        scheduled, schedules = _schedule(bare if apart else lowered, target, tuned)
        native = tvm.target.Target(target.tvm)
        pipeline = _finalize(target, native)
        try:
            executable = compile_module(scheduled, native, pipeline, options.exec_mode, cache)
        except Exception:
            # TVM refuses a few schedules only when it generates code: these functions do without.
            simpler = _replace_refused(scheduled, lowered, schedules, target)
            if simpler is None:
                raise
            schedules = simpler
            executable = compile_module(scheduled, native, pipeline, options.exec_mode, cache)
        bare = _with_rules(bare, schedules)
        inspected.code.update(code_of(inspect.code, bare, scheduled, executable))
    return Built(
        executable=executable,
        ir_text=ir_text(bare),
        ir_json=str(tvm.ir.save_json(bare)),
        params=weights if apart else {},
        pass_timings=list(timings.items()),
        schedules=schedules,
        variants={variant_name(sizes): dict(sizes) for sizes in options.variants},
        algorithms=_algorithms(lowered),
        threads=target.threads,
        cross_compiler=target.cross_compiler,
        inspected=inspected,
    )


def _algorithms(lowered: tvm.IRModule) -> dict[str, Algorithm]:
    bounds: dict[str, list[float]] = {}
    for _, function in lowered.functions_items():
        for name, bound in error_bounds(function).items() if isinstance(function, PrimFunc) else ():
            bounds.setdefault(name, []).append(bound)
    return {name: Algorithm(len(found), max(found)) for name, found in sorted(bounds.items())}


def _check_precision(target: Target, options: BuildOptions) -> None:
    reason = explain_missing_unit(target, options.precision)
    if reason is not None:
        raise TargetError(reason)


def _schedule(
    lowered: tvm.IRModule, target: Target, tuned: Callable[[PrimFunc], PrimFunc | None] | None
) -> tuple[tvm.IRModule, list[tuple[str, str]]]:
    mod = tvm.IRModule(dict(lowered.functions_items()), attrs=lowered.attrs)
    if target.arch == "cuda":
        from tvm.s_tir import dlight

        gpu = dlight.gpu
        with tvm.target.Target(target.tvm):
            rules = (gpu.Matmul(), gpu.GEMV(), gpu.Reduction(), gpu.GeneralReduction(), gpu.Fallback())
            mod = dlight.ApplyDefaultSchedule(*rules)(mod)
        names = sorted(v.name_hint for v, f in mod.functions_items() if isinstance(f, PrimFunc))
        return mod, [(name, "dlight") for name in names]
    cpu = machine(target)
    chosen: list[tuple[str, str]] = []
    for variable, function in sorted(lowered.functions_items(), key=lambda item: str(item[0].name_hint)):
        if not isinstance(function, PrimFunc) or _is_scheduled(function):
            continue
        replacement = tuned(function) if tuned else None
        if replacement is not None:
            replacement, rule = replacement.with_attr("tirx.is_scheduled", True), "tuned"
            if "global_symbol" in function.attrs:
                replacement = replacement.with_attr("global_symbol", function.attrs["global_symbol"])
        else:
            replacement, rule = schedule(function, cpu)
        mod.update_func(variable, replacement)
        chosen.append((variable.name_hint, rule))
    return mod, chosen


def _replace_refused(
    scheduled: tvm.IRModule, lowered: tvm.IRModule, chosen: list[tuple[str, str]], target: Target
) -> list[tuple[str, str]] | None:
    """Put simpler schedules in the place of those that do not compile; None if all of them do."""
    native, cpu = tvm.target.Target(target.tvm), machine(target)
    result = dict(chosen)
    for name, rule in chosen:
        variable = scheduled.get_global_var(name)
        if rule in ("dlight", "none") or _compiles(scheduled[variable], native):
            continue
        simpler = [schedule(lowered[name], cpu)] if rule == "tuned" else []
        simpler.append(schedule(lowered[name], cpu, rules={}))
        simpler.append((lowered[name].with_attr("tirx.is_scheduled", True), "none"))
        simple, rule = next((option for option in simpler if _compiles(option[0], native)), simpler[-1])
        scheduled.update_func(variable, simple)
        result[name] = rule
    return list(result.items()) if list(result.items()) != chosen else None


def _compiles(func: PrimFunc, native: tvm.target.Target) -> bool:
    try:
        tvm.tirx.build(tvm.IRModule({"main": func.with_attr("global_symbol", "main")}), target=native)
    except Exception:
        return False
    return True


def _is_scheduled(function: PrimFunc) -> bool:
    return bool(function.attrs and function.attrs.get("tirx.is_scheduled", False))


def _finalize(target: Target, native: tvm.target.Target) -> tvm.transform.Pass:
    if target.arch == "cuda":
        from tvm.relax.backend.cuda import pipeline
    else:
        from tvm.relax.backend.cpu_generic import pipeline
    passes = [*pipeline.dataflow_lower_passes(native), *pipeline.finalize_passes(native), TidyShapeFunctions()]
    return tvm.transform.Sequential(passes, name="finalize")


@tvm.transform.module_pass(opt_level=0, name="TidyShapeFunctions")
class TidyShapeFunctions:
    """Sorts the stores of the functions that compute shapes, and says that their arguments are apart from each other.

    TVM lists the stores in the order of memory addresses: the libraries of two processes would differ as soon as a
    model has two symbolic expressions. Its code generator takes the arguments of all functions of a library for what
    one function says of its own: kernels would keep their sums in memory rather than in registers.
    """

    def transform_module(self, mod: tvm.IRModule, _context: tvm.transform.PassContext) -> tvm.IRModule:
        """Rewrite the module's functions named `shape_func`."""
        for variable, function in mod.functions_items():
            if not isinstance(function, PrimFunc) or not variable.name_hint.startswith("shape_func"):
                continue
            stores = list(function.body.seq) if isinstance(function.body, tvm.tirx.SeqStmt) else []
            if stores and all(isinstance(store, tvm.tirx.BufferStore) for store in stores):
                ordered = tvm.tirx.SeqStmt(sorted(stores, key=lambda store: int(store.indices[0])))
                function = function.with_body(ordered)
            mod.update_func(variable, function.with_attr("tirx.noalias", True))
        return mod


def _with_rules(lowered: tvm.IRModule, schedules: Sequence[tuple[str, str]]) -> tvm.IRModule:
    """The lowered module whose functions say, as the attribute `schedule_rule`, which rule scheduled them."""
    rules = {lowered.get_global_var(name): rule for name, rule in schedules}
    functions = {
        variable: function.with_attr(RULE, rules[variable]) if variable in rules else function
        for variable, function in lowered.functions_items()
    }
    return tvm.IRModule(functions, attrs=lowered.attrs)


@contextmanager
def _passes(options: BuildOptions, target: Target, instruments: Sequence[Any] = ()) -> Iterator[None]:
    """TVM's pass context for the options; turns what its passes raise into BuildError."""
    _check_options(options)
    try:
        with tvm.transform.PassContext(
            opt_level=options.opt_level,
            required_pass=list(options.required_passes),
            disabled_pass=list(options.disabled_passes),
            config=dict(options.config),
            instruments=list(instruments),
        ):
            yield
    except (BuildError, TargetError):
        raise
    except Exception as error:
        without = f" without the passes {', '.join(options.disabled_passes)}" if options.disabled_passes else ""
        raise BuildError(f"TVM could not build for target {target.name!r}{without}: {reason(error)}") from error


def _check_options(options: BuildOptions) -> None:
    for kind, names in (("required", options.required_passes), ("disabled", options.disabled_passes)):
        _check_passes(kind, names)
    known_options = {str(name) for name in tvm.transform.PassContext.list_configs()}
    for name, value in options.config.items():
        if name not in known_options:
            close = get_close_matches(name, known_options, n=3, cutoff=0.5)
            hint = f"did you mean {' or '.join(map(repr, close))}?" if close else "see PassContext.list_configs()"
            raise OptionError(f"pass option {name!r} is unknown to TVM {tvm.__version__}; {hint}")
        try:
            tvm.transform.PassContext(config={name: value})
        except Exception as error:
            raise OptionError(f"pass option {name!r} cannot be {value!r}: {reason(error)}") from error
    if options.exec_mode not in ("bytecode", "compiled"):
        raise BuildError(f"exec_mode must be 'bytecode' or 'compiled', not {options.exec_mode!r}")
    if options.weights not in ("inside", "apart"):
        raise BuildError(f"weights must be 'inside' or 'apart', not {options.weights!r}")


def _check_passes(kind: str, names: Sequence[str]) -> None:
    for name in names:
        if name not in known_passes():
            close = get_close_matches(name, known_passes(), n=3, cutoff=0.5)
            hint = f"did you mean {' or '.join(map(repr, close))}?" if close else "see `known_passes` for all names"
            raise OptionError(f"{kind} pass {name!r} is unknown to TVM {tvm.__version__}; {hint}")


@cache
def known_passes() -> tuple[str, ...]:
    """The names of TVM's passes and ours, as `required_passes` and `disabled_passes` take them."""
    names = {*pass_names(), "TidyShapeFunctions"}
    for constructor in tvm_ffi.registry.list_global_func_names():
        family, middle, name = constructor.rpartition(".transform.")
        if middle and "." not in name and family in ("relax", "tirx", "s_tir"):
            names.add(name if family == "relax" else f"{family}.{name}")
    return tuple(sorted(names))


@tvm.instrument.pass_instrument
class _Timing:
    """Sums each pass's own seconds, without those of the passes it runs."""

    def __init__(self, seconds: dict[str, float]) -> None:
        self._seconds = seconds
        self._running: list[list[float]] = []

    def run_before_pass(self, _mod: tvm.IRModule, _info: tvm.transform.PassInfo) -> None:
        self._running.append([time.perf_counter(), 0.0])

    def run_after_pass(self, _mod: tvm.IRModule, info: tvm.transform.PassInfo) -> None:
        started, inner = self._running.pop()
        elapsed = time.perf_counter() - started
        self._seconds[info.name] = self._seconds.get(info.name, 0.0) + elapsed - inner
        if self._running:
            self._running[-1][1] += elapsed
