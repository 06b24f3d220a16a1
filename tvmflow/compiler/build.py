"""Builds an imported model into a shared library for a target, and reports the schedules and passes."""

import shlex
import shutil
import subprocess
import tempfile
import threading
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from difflib import get_close_matches
from functools import cache, cached_property, partial
from pathlib import Path
from typing import Any, Literal

import tvm
import tvm_ffi
from tvm import relax
from tvm.support import cc
from tvm.tirx import PrimFunc

from tvmflow.arrays import Array
from tvmflow.bundle import DIRECT_MAIN, PACK_WEIGHTS, PACKED_AT_LOAD, Weights
from tvmflow.compiler import outputs
from tvmflow.compiler.annotations import DIRECT
from tvmflow.compiler.choices import Choices
from tvmflow.compiler.codegen import code_target, compile_module
from tvmflow.compiler.direct import add_direct_main
from tvmflow.compiler.gpu.code import compile_kernels, packer
from tvmflow.compiler.graph import lower_module, variant_name
from tvmflow.compiler.hoisting import hoist_weights, share_weights, size_of_constants
from tvmflow.compiler.importer import Imported
from tvmflow.compiler.inspection import Inspected, Inspection, KeepIR, code_of
from tvmflow.compiler.machine import machine
from tvmflow.compiler.messages import shorten
from tvmflow.compiler.operators.packing import runs_at_load
from tvmflow.compiler.passes import pass_names
from tvmflow.compiler.passes.storage import ShareMemory
from tvmflow.compiler.passes.views import ViewReshapes
from tvmflow.compiler.schedules import ScheduleWarning, error_bounds, schedule, with_other_form
from tvmflow.compiler.serialise import ir_text
from tvmflow.errors import BuildError, MachineError, OptionError, TargetError
from tvmflow.hardware import cores
from tvmflow.hardware.target import Precision, Target, compute_capability, explain_missing_unit
from tvmflow.runtime.profile import RULE

# The worker threads of a library, in C: the linker compiles it and adds it to the library.
_THREADS = Path(__file__).with_name("threads.c")
# Bytes of weights. Code reaches what is within 2 GiB of it, and packed weights may be larger than those of the model.
_MOST_WEIGHTS_INSIDE = 1 << 30
# The name of the rule for functions that run loops (`passes.loops`).
_LOOP_RULE = "loop"
# The first compute capability with copies to shared memory in the background.
_LEAST_CAPABILITY = 8, 0


@dataclass(frozen=True)
class BuildOptions:
    """Options of a build.

    `opt_level`, `required_passes`, `disabled_passes` and `config` are those of TVM's pass context. `exec_mode` is the
    form of `main`: bytecode for the virtual machine, or compiled code. `weights` says where the weights are: "inside"
    the library, or "apart" from it, as the model has them; more than a GiB of weights is apart nonetheless. Packed
    weights that the library makes when it is loaded are parameters of `main`, which follow the inputs.
    `precision` is the type of the operands of convolutions and matrix products; `int8` is for quantised models.
    `fast_algorithms` allows Winograd's algorithm, which multiplies less and rounds more. Each of
    `variants` maps names of symbolic dimensions to sizes, and adds a function with these sizes beside `main`.
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
    """The use of one algorithm of fewer multiplications in a library.

    `functions` is the number of functions that use it, and `bound` the largest of their error bounds
    (`schedules.error_bounds`).
    """

    functions: int
    bound: float


@dataclass(frozen=True)
class LoadedModel:
    """A compiled model in this process, for programs that run it once or time its functions.

    `library` has the model's functions, and `machine` is TVM's virtual machine on the CPU. `weights` are the packed
    weights, as tensors, that `main` and each variant take after their inputs.
    """

    library: Any
    machine: Any
    weights: tuple[Any, ...]

    def run(self, *inputs: Any, function: str = "main") -> list[Array]:
        """Run a function with C-contiguous arrays or tensors as inputs, in order, and return its outputs, in order."""
        tensors = (item if isinstance(item, tvm.runtime.Tensor) else tvm.runtime.tensor(item) for item in inputs)
        result = self.machine[function](*tensors, *self.weights)
        return [item.numpy() for item in ([result] if hasattr(result, "numpy") else result)]


@dataclass(frozen=True)
class CompiledModel:
    """A compiled model.

    `executable` is TVM's executable for the virtual machine. `unscheduled` is the lowered module without schedules
    and weights; each function has the name of the rule that scheduled it as its attribute `schedule_rule`. `params`
    are the packed weights, in the order in which `main` takes them after the inputs; it is empty unless `weights` is
    "apart". `weights` says where the weights are: in the library ("inside"), in `params` ("apart"), or in the
    library, which packs some of them when it is loaded ("unpacked"). `pass_timings` are pairs of a pass and its
    seconds on all cores together, without the seconds of the passes that it runs. `schedules` are pairs of a function
    and the rule that scheduled it. `variants` gives, for each function beside `main`, the sizes of symbolic
    dimensions that it is compiled for. `algorithms` are the algorithms of fewer multiplications that the library
    uses, by name. `threads` is the number of worker threads that the schedules assume. `arch` is the architecture of
    the target. `cross_compiler` is the command that links the library, None for the compiler of this machine.
    `inspected` are the parts of the build that the Inspection asked for. `fresh_outputs` is true where every call
    writes all outputs to memory that nothing else uses. `has_direct_main` is true where the library has the direct
    form of `main`, and `has_direct_forms` where it has any: that of `main`, or of a loop. `kernels` is the machine
    code of a GPU for each CUDA source of the library.
    """

    executable: Any
    unscheduled: tvm.IRModule
    params: dict[str, Array]
    weights: Weights
    pass_timings: list[tuple[str, float]]
    schedules: list[tuple[str, str]]
    variants: dict[str, dict[str, int]]
    algorithms: dict[str, Algorithm]
    threads: int
    arch: str
    cross_compiler: str | None
    inspected: Inspected
    fresh_outputs: bool
    has_direct_main: bool
    has_direct_forms: bool
    kernels: Mapping[str, bytes]

    @cached_property
    def ir_text(self) -> str:
        """The unscheduled module as TVMScript."""
        return ir_text(self.unscheduled)

    @cached_property
    def ir_json(self) -> str:
        """The unscheduled module as TVM's JSON."""
        return str(tvm.ir.save_json(self.unscheduled))

    def load(self) -> LoadedModel:
        """Load a model for this machine's CPU into this process, and pack its weights."""
        library = self._link() if self._calls_between_parts() else self.executable.jit()
        machine = relax.VirtualMachine(library, tvm.cpu())
        weights = tuple(map(tvm.runtime.tensor, self.params.values()))
        if self.weights in PACKED_AT_LOAD:
            weights = machine[PACK_WEIGHTS](*weights)
        return LoadedModel(library, machine, tuple(weights))

    def _calls_between_parts(self) -> bool:
        """Whether parts of the library call each other by symbols, as direct forms do."""
        return self.has_direct_forms and any(library.imports for library in self.executable.mod.imports)

    def _link(self) -> tvm.runtime.Module:
        with tempfile.TemporaryDirectory(prefix="tvmflow-") as folder:
            library = Path(folder) / "mod.so"
            self.executable.export_library(str(library))
            return tvm.runtime.load_module(str(library))

    def export(self, path: Path) -> None:
        """Link the shared library and write it to `path`. Equal models, targets and options give equal bytes.

        The library of a CPU has worker threads of its own (`threads.c`), which `runtime.CompiledModel` starts. Raises
        BuildError when the linker is missing or fails, or the file cannot be written.
        """
        words = shlex.split(self.cross_compiler or "")
        compiler, options = (words[0], words[1:]) if words else (None, [])
        triple = cc.get_target_by_dump_machine(compiler)
        link = cc.cross_compiler(compiler, options, get_target_triple=triple) if compiler else None
        if self.arch == "cuda":
            own: dict[str, Any] = {"fpack_imports": packer(self.kernels)}
        else:
            # TVM describes all variables for debuggers, which have no source to show them with.
            own = {"addons": [str(_THREADS)], "options": ["-O2", "-Wl,--strip-debug"]}
        try:
            # The file is replaced as a whole: a process that has loaded the old library would crash on changed bytes.
            with tempfile.TemporaryDirectory(prefix=".tvmflow-", dir=Path(path).parent) as folder:
                library = Path(folder) / "mod.so"
                self.executable.export_library(str(library), fcompile=link, **own)
                library.replace(path)
        except Exception as error:
            raise BuildError(
                f"the library {path.name!r} could not be linked with {compiler or cc.get_cc()!r}: {shorten(error)}"
            ) from error


def can_build(target: Target) -> None:
    """Raise TargetError if TVM cannot build for `target`, MachineError if the tools of this machine cannot."""
    compiler = shlex.split(target.cross_compiler or "")[:1]
    if compiler and shutil.which(compiler[0]) is None:
        raise MachineError(f"target {target.name!r} needs the cross compiler {compiler[0]!r}, which is not installed")
    if not target.cross_compiler and cc.get_cc() is None:
        raise MachineError(f"target {target.name!r} needs a C++ compiler to link with, install g++ or clang++")
    if target.arch == "cuda":
        _check_cuda(target)
    else:
        _check_llvm(target)
    try:
        probe = tvm.IRModule({"main": _probe()})
        tvm.tirx.build(_schedule(probe, target, None)[0], target=tvm.target.Target(target.tvm))
    except Exception as error:
        raise TargetError(
            f"target {target.name!r} cannot be built by TVM {tvm.__version__}: {shorten(error)}"
        ) from error


def _check_llvm(target: Target) -> None:
    """Raise MachineError for an architecture that TVM's LLVM lacks; TVM itself would crash when it generates code."""
    arch = str(target.tvm.get("mtriple", target.arch)).partition("-")[0]
    if arch not in [str(name) for name in tvm_ffi.get_global_func("target.llvm_get_targets")()]:
        raise MachineError(f"target {target.name!r}: the LLVM of this TVM knows no architecture {arch!r}")


def _check_cuda(target: Target) -> None:
    compiler = shutil.which("nvcc")
    if compiler is None:
        raise MachineError(f"target {target.name!r} needs nvcc, which is not installed")
    listing = subprocess.run([compiler, "--list-gpu-code"], capture_output=True, text=True, timeout=60, check=False)
    architectures, arch = listing.stdout.split(), _cuda_arch(target)
    if architectures and arch.rstrip("af") not in architectures:
        raise MachineError(f"target {target.name!r}: this nvcc knows no {arch!r}; it knows {', '.join(architectures)}")


def _cuda_arch(target: Target) -> str:
    """The architecture of a target's GPU, such as `sm_90`. Raises TargetError without one, or for one below 8.0."""
    capability = compute_capability(target.tvm)
    if capability is None:
        raise TargetError(f"target {target.name!r} names no compute capability; name one such as cuda-sm90")
    if capability < _LEAST_CAPABILITY:
        raise TargetError(f"target {target.name!r}: GPUs of a compute capability below 8.0 lack what the kernels use")
    return str(target.tvm["arch"])


def _probe() -> PrimFunc:
    x = tvm.te.placeholder((16,), "float32", name="x")
    y = tvm.te.compute((16,), lambda i: x[i] + 1.0, name="y")
    return tvm.te.create_prim_func([x, y]).with_attr("global_symbol", "main")


def lower(
    imported: Imported, target: Target, options: BuildOptions | None = None, choices: Choices | None = None
) -> tvm.IRModule:
    """Lower a model to a module whose `main` calls fused, unscheduled functions.

    Weights are constants, except those that a function `pack_weights` packs when the library is loaded
    (`passes.packing.PackAtLoad`). `options` None means the defaults. `choices.overrides` overrides decisions of the
    cost model, and `choices.sites` collects the decisions of the build; without `choices` the cost model decides. The
    same input gives the same module in every process. Raises BuildError when a pass fails, OptionError for an unknown
    pass or a wrong option, TargetError for a precision that the target's processor has no instructions for.
    """
    options = options or BuildOptions()
    _check_precision(target, options)
    with _passes(options, target):
        return _lowered(imported, target, options, choices)


def _lowered(imported: Imported, target: Target, options: BuildOptions, choices: Choices | None) -> tvm.IRModule:
    lower_packing = partial(
        lower_module,
        imported,
        target,
        choices or Choices(),
        variants=options.variants,
        precision=options.precision,
        fast=options.fast_algorithms,
    )
    if not _are_apart(imported, options):
        return lower_packing(packed_at_load="larger")
    lowered = lower_packing(packed_at_load="all")
    # What runs within loops, and what was computed of constants, is not packed at load.
    if size_of_constants(lowered) > _MOST_WEIGHTS_INSIDE:
        lowered = lower_packing(packed_at_load="none")
    return lowered


def build(
    imported: Imported,
    target: Target,
    options: BuildOptions | None = None,
    tuned: Callable[[PrimFunc], PrimFunc | None] | None = None,
    cache: Path | None = None,
    inspect: Inspection | None = None,
    choices: Choices | None = None,
) -> CompiledModel:
    """Build a model for a target.

    `options` None means the defaults. `tuned` may return a scheduled replacement, with the same parameters, for an
    unscheduled fused function; where it returns None the analytic rules schedule the function. `cache` is a folder that
    keeps generated code: a model with the same functions, whatever its weights, then takes little more than linking.
    `inspect` names the parts of the build to keep for a person to read. `choices` overrides decisions of the cost
    model, and collects those that the build meets.

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
        if target.arch == "cuda":
            # Makes copies that are reshapes views. TVM does not look at functions that are scheduled by hand.
            lowered = relax.transform.RewriteDataflowReshape()(lowered)
        place, lowered, params = _place_weights(lowered, _are_apart(imported, options))
        bare, _ = hoist_weights(lowered)
        scheduled, schedules = _schedule(lowered, target, tuned)
        if target.arch != "cuda":
            scheduled = add_direct_main(scheduled, len(imported.inputs))
        native = code_target(target.tvm)
        compile_scheduled = partial(
            compile_module,
            scheduled,
            native,
            _finalize(target, native),
            options.exec_mode,
            cache,
            in_order=bool(inspect.before or inspect.after),
            inputs=len(imported.inputs),
        )
        try:
            executable = compile_scheduled()
        except Exception:
            # TVM refuses a few schedules only when it generates code: their functions get simpler ones.
            simpler_schedules = _replace_refused(scheduled, lowered, schedules, target)
            if simpler_schedules is None:
                raise
            schedules = simpler_schedules
            executable = compile_scheduled()
        bare = _with_rules(bare, schedules)
        inspected.code.update(code_of(inspect.code, bare, scheduled, executable))
    return CompiledModel(
        executable=executable,
        unscheduled=bare,
        params=params,
        weights=place,
        pass_timings=list(timings.items()),
        schedules=schedules,
        variants={variant_name(sizes): dict(sizes) for sizes in options.variants},
        algorithms=_algorithms(lowered),
        threads=target.threads,
        arch=target.arch,
        cross_compiler=target.cross_compiler,
        inspected=inspected,
        fresh_outputs=outputs.are_fresh(lowered),
        has_direct_main=any(variable.name_hint == DIRECT_MAIN for variable in scheduled.get_global_vars()),
        has_direct_forms=any(DIRECT in (function.attrs or {}) for _, function in scheduled.functions_items()),
        kernels=compile_kernels(executable.mod, _cuda_arch(target), cache) if target.arch == "cuda" else {},
    )


def _place_weights(lowered: tvm.IRModule, apart: bool) -> tuple[Weights, tvm.IRModule, dict[str, Array]]:
    """Take the weights out of a lowered module if they are to be `apart`.

    Returns where they are, the module, and those outside of it.
    """
    if any(variable.name_hint == PACK_WEIGHTS for variable in lowered.get_global_vars()):
        return ("shared", *share_weights(lowered)) if apart else ("unpacked", lowered, {})
    return ("apart", *hoist_weights(lowered)) if apart else ("inside", lowered, {})


def _are_apart(imported: Imported, options: BuildOptions) -> bool:
    """Whether the weights are parameters of `main`: as the options say, or because a library cannot hold as many."""
    size = sum(value.nbytes for value in imported.params.values())
    return options.weights == "apart" or size > _MOST_WEIGHTS_INSIDE


def _algorithms(lowered: tvm.IRModule) -> dict[str, Algorithm]:
    bounds: dict[str, list[float]] = {}
    for _, function in lowered.functions_items():
        for name, bound in error_bounds(function).items() if isinstance(function, PrimFunc) else ():
            bounds.setdefault(name, []).append(bound)
    return {name: Algorithm(len(values), max(values)) for name, values in sorted(bounds.items())}


def _check_precision(target: Target, options: BuildOptions) -> None:
    message = explain_missing_unit(target, options.precision)
    if message is not None:
        raise TargetError(message)


def _schedule(
    lowered: tvm.IRModule, target: Target, tuned: Callable[[PrimFunc], PrimFunc | None] | None
) -> tuple[tvm.IRModule, list[tuple[str, str]]]:
    mod = tvm.IRModule(dict(lowered.functions_items()), attrs=lowered.attrs)
    if target.arch == "cuda":
        from tvmflow.compiler.gpu.schedules import schedule_functions

        return schedule_functions(mod, target)
    cpu = machine(target)
    functions = [
        (variable, function)
        for variable, function in sorted(lowered.functions_items(), key=lambda item: str(item[0].name_hint))
        if isinstance(function, PrimFunc) and not _is_scheduled(function)
    ]
    replacements = [tuned(function) if tuned else None for _, function in functions]

    def choose(item: tuple[tvm.ir.GlobalVar, PrimFunc], replacement: PrimFunc | None) -> tuple[PrimFunc, str]:
        variable, function = item
        if replacement is None:
            try:
                return schedule(function, cpu)
            except Exception as error:
                message = f"function {variable.name_hint!r} cannot be scheduled for target {target.name!r}"
                raise BuildError(f"{message}: {shorten(error)}") from error
        replacement = with_other_form(replacement, function, cpu).with_attr("tirx.is_scheduled", True)
        if "global_symbol" in function.attrs:
            replacement = replacement.with_attr("global_symbol", function.attrs["global_symbol"])
        return replacement, "tuned"

    # TVM's primitives take most of the time, and run on all cores.
    with ThreadPoolExecutor(cores.count()) as pool:
        results = list(pool.map(choose, functions, replacements))
    for (variable, _), (function, _) in zip(functions, results, strict=True):
        mod.update_func(variable, function)
    schedules = [(variable.name_hint, rule) for (variable, _), (_, rule) in zip(functions, results, strict=True)]
    loops = [name.name_hint for name, function in mod.functions_items() if DIRECT in (function.attrs or {})]
    return mod, [*schedules, *((name, _LOOP_RULE) for name in sorted(loops))]


def rules_of(lowered: tvm.IRModule, target: Target) -> dict[str, str]:
    """Return the name of the schedule rule of each unscheduled function of a lowered model, by the function's name.

    The functions that pack weights when the library is loaded are left out.
    """
    return {name: rule for name, rule in _schedule(lowered, target, None)[1] if not runs_at_load(lowered[name])}


def _replace_refused(
    scheduled: tvm.IRModule, lowered: tvm.IRModule, schedules: list[tuple[str, str]], target: Target
) -> list[tuple[str, str]] | None:
    """Replace, in `scheduled`, the schedules that do not compile by simpler ones; return the rules, None if all do."""
    native, cpu = code_target(target.tvm), machine(target)
    rules = dict(schedules)
    for name, rule in schedules:
        variable = scheduled.get_global_var(name)
        if rule in ("dlight", "none", _LOOP_RULE) or _compiles(scheduled[variable], native):
            continue
        candidates = [schedule(lowered[name], cpu)] if rule == "tuned" else []
        candidates.append(schedule(lowered[name], cpu, rules={}))
        candidates.append((lowered[name].with_attr("tirx.is_scheduled", True), "none"))
        replacement, rules[name] = next((item for item in candidates if _compiles(item[0], native)), candidates[-1])
        scheduled.update_func(variable, replacement)
        message = f"TVM generates no code for function {name!r} as rule {rule!r} schedules it: {rules[name]!r} takes it"
        warnings.warn(message, ScheduleWarning, stacklevel=1)
    return list(rules.items()) if list(rules.items()) != schedules else None


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
    # Reshapes are views already on a GPU; the functions that copied them have no callers.
    views = relax.transform.DeadCodeElimination() if target.arch == "cuda" else ViewReshapes()
    passes_of_tvm = pipeline.dataflow_lower_passes(native)
    lowering = [views, *(item for item in passes_of_tvm if str(item.info.name) != "RewriteDataflowReshape")]
    finalize = list(pipeline.finalize_passes(native))
    planned = [str(item.info.name) for item in finalize].index("LowerAllocTensor") + 1
    passes = [*lowering, *finalize[:planned], ShareMemory(), *finalize[planned:], TidyShapeFunctions()]
    return tvm.transform.Sequential(passes, name="finalize")


@tvm.transform.module_pass(opt_level=0, name="TidyShapeFunctions")
class TidyShapeFunctions:
    """Sorts the stores of the functions that compute shapes, and declares that their arguments do not alias.

    TVM orders these stores by memory addresses, so the libraries of two processes would differ as soon as a model has
    two symbolic expressions. And one function without the attribute `tirx.noalias` takes it from all functions of a
    library: kernels would then keep their sums in memory rather than in registers.
    """

    def transform_module(self, mod: tvm.IRModule, _context: tvm.transform.PassContext) -> tvm.IRModule:
        """Return the module with the functions whose names begin with `shape_func` tidied; others stay as they are.

        The stores of such a function are sorted by their indices, and it gets the attribute `tirx.noalias`. The class
        says why.
        """
        for variable, function in mod.functions_items():
            if not isinstance(function, PrimFunc) or not variable.name_hint.startswith("shape_func"):
                continue
            stores = list(function.body.seq) if isinstance(function.body, tvm.tirx.SeqStmt) else []
            if stores and all(isinstance(store, tvm.tirx.BufferStore) for store in stores):
                sorted_stores = tvm.tirx.SeqStmt(sorted(stores, key=lambda store: int(store.indices[0])))
                function = function.with_body(sorted_stores)
            mod.update_func(variable, function.with_attr("tirx.noalias", True))
        return mod


def _with_rules(lowered: tvm.IRModule, schedules: Sequence[tuple[str, str]]) -> tvm.IRModule:
    """The lowered module, each function with the rule that scheduled it as its attribute `schedule_rule`."""
    rules = {lowered.get_global_var(name): rule for name, rule in schedules}
    functions = {
        variable: function.with_attr(RULE, rules[variable]) if variable in rules else function
        for variable, function in lowered.functions_items()
    }
    return tvm.IRModule(functions, attrs=lowered.attrs)


@contextmanager
def _passes(options: BuildOptions, target: Target, instruments: Sequence[Any] = ()) -> Iterator[None]:
    """Enter TVM's pass context for the options; errors of passes become BuildError."""
    _check_options(options)
    # The kernels of a model whose sizes are known run as one CUDA graph.
    defaults = {"relax.backend.use_cuda_graph": True} if target.arch == "cuda" else {}
    try:
        with tvm.transform.PassContext(
            opt_level=options.opt_level,
            required_pass=list(options.required_passes),
            disabled_pass=list(options.disabled_passes),
            config={**defaults, **options.config},
            instruments=list(instruments),
        ):
            yield
    except (BuildError, TargetError):
        raise
    except Exception as error:
        passes = f" without the passes {', '.join(options.disabled_passes)}" if options.disabled_passes else ""
        sizes = sorted({f"{name}={size}" for variant in options.variants for name, size in variant.items()})
        advice = f"; the model must take the sizes that it gets functions for: {', '.join(sizes)}" if sizes else ""
        raise BuildError(f"TVM could not build for target {target.name!r}{passes}: {shorten(error)}{advice}") from error


def _check_options(options: BuildOptions) -> None:
    for kind, passes in (("required", options.required_passes), ("disabled", options.disabled_passes)):
        _check_passes(kind, passes)
    names = {str(name) for name in tvm.transform.PassContext.list_configs()}
    for name, value in options.config.items():
        if name not in names:
            close = get_close_matches(name, names, n=3, cutoff=0.5)
            hint = f"did you mean {' or '.join(map(repr, close))}?" if close else "see PassContext.list_configs()"
            raise OptionError(f"pass option {name!r} is unknown to TVM {tvm.__version__}; {hint}")
        try:
            tvm.transform.PassContext(config={name: value})
        except Exception as error:
            raise OptionError(f"pass option {name!r} cannot be {value!r}: {shorten(error)}") from error
    if options.exec_mode not in ("bytecode", "compiled"):
        raise BuildError(f"exec_mode must be 'bytecode' or 'compiled', not {options.exec_mode!r}")
    if options.weights not in ("inside", "apart"):
        raise BuildError(f"weights must be 'inside' or 'apart', not {options.weights!r}")


def _check_passes(kind: str, names: Sequence[str]) -> None:
    for name in names:
        if name not in list_passes():
            close = get_close_matches(name, list_passes(), n=3, cutoff=0.5)
            hint = f"did you mean {' or '.join(map(repr, close))}?" if close else "see `list_passes` for all names"
            raise OptionError(f"{kind} pass {name!r} is unknown to TVM {tvm.__version__}; {hint}")


@cache
def list_passes() -> tuple[str, ...]:
    """Return the names of TVM's and this project's passes, sorted, in the form that `BuildOptions` takes."""
    names = {*pass_names(), "TidyShapeFunctions"}
    for constructor in tvm_ffi.registry.list_global_func_names():
        family, middle, name = constructor.rpartition(".transform.")
        if middle and "." not in name and family in ("relax", "tirx", "s_tir"):
            names.add(name if family == "relax" else f"{family}.{name}")
    return tuple(sorted(names))


@tvm.instrument.pass_instrument
class _Timing:
    """Sums the seconds of each pass over all threads, without those of the passes that it runs."""

    def __init__(self, seconds: dict[str, float]) -> None:
        self._seconds = seconds
        self._lock = threading.Lock()
        self._running: dict[int, list[list[float]]] = {}

    def run_before_pass(self, _mod: tvm.IRModule, _info: tvm.transform.PassInfo) -> None:
        self._running.setdefault(threading.get_ident(), []).append([time.perf_counter(), 0.0])

    def run_after_pass(self, _mod: tvm.IRModule, info: tvm.transform.PassInfo) -> None:
        running = self._running[threading.get_ident()]
        start_time, inner = running.pop()
        elapsed = time.perf_counter() - start_time
        with self._lock:
            self._seconds[info.name] = self._seconds.get(info.name, 0.0) + elapsed - inner
        if running:
            running[-1][1] += elapsed
