"""Runs functions that are scheduled for a GPU on the CPU: their CUDA kernels, compiled as C++, by an emulator."""

import ctypes
import importlib
import os
import re
import shutil
import subprocess
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import tvm
import tvm_ffi
from tvm import relax, tirx
from tvm.tirx import PrimFunc

from tvmflow.compiler.statements import replace_variables

_COMPILER = shutil.which("g++") or "g++"
_EMULATOR = Path(__file__).with_name("cuda")
_DIMENSIONS = ("blockIdx", "threadIdx", "clusterCtaIdx")
_SHARED = re.compile(r"extern __shared__ (?:(?:__align__|alignas)\(\d+\) )?(\w+) (\w+)\[\];")


class Emulation:
    """The kernels of a module of scheduled functions.

    `functions` are the scheduled functions by name, `launches` the kernels of each, and `source` is their CUDA code.
    """

    def __init__(self, mod: tvm.IRModule, target: tvm.target.Target, folder: Path) -> None:
        """Generate the CUDA code for `target`, and compile it as C++ in `folder`."""
        names = {str(variable.name_hint): function for variable, function in mod.functions_items()}
        self.functions = {name: item for name, item in names.items() if isinstance(item, PrimFunc)}
        symbols = {name: _numbered(item).with_attr("global_symbol", name) for name, item in self.functions.items()}
        build = importlib.import_module("tvm.tirx.build")
        pipeline, _, finalize = tirx.get_default_tir_pipeline(target)
        with target:
            lowered = pipeline(tirx.transform.BindTarget(target)(tvm.IRModule(symbols)))
        host, devices = build.split_host_device_mods(lowered)
        (device,) = devices.values()
        device = finalize()(device)
        self._kernels = {str(item.attrs["global_symbol"]): item for _, item in device.functions_items()}
        self.launches = {
            str(item.attrs["global_symbol"]).removeprefix("__tvm_ffi_"): _launches(item)
            for _, item in host.functions_items()
        }
        self.source = tvm.get_global_func("target.build.cuda")(device, target).inspect_source()
        self._library = self._compile(folder)

    def _compile(self, folder: Path) -> ctypes.CDLL:
        emulated = _SHARED.sub(r"\1* \2 = reinterpret_cast<\1*>(emulated::shared());", self.source)
        emulated = emulated.replace("__shared__ alignas", "__shared__ __align__")
        launchers = [_launcher(name, kernel) for name, kernel in self._kernels.items()]
        # A library of the same name that is loaded already would be taken for this one.
        folder = Path(tempfile.mkdtemp(dir=folder))
        source, library = folder / "kernels.cpp", folder / "kernels.so"
        source.write_text("\n".join(['#include "emulator.h"', emulated, *launchers]))
        options = ["-std=c++17", "-O1", "-w", "-fPIC", "-shared", "-fno-strict-aliasing", f"-I{_EMULATOR}"]
        options += _nonsense_option()
        done = subprocess.run([_COMPILER, *options, "-o", library, source], capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr[-4000:]
        return ctypes.CDLL(str(library))

    def run(self, name: str, *arrays: "np.ndarray[Any, Any]") -> None:
        """Run a function on its parameters' arrays, in order, and arrays of sizes; it writes its outputs in place."""
        sizes: dict[str, int] = {}
        buffers: dict[str, np.ndarray[Any, Any]] = {}
        for place, (parameter, array) in enumerate(zip(self.functions[name].params, arrays, strict=True)):
            if not tirx.is_buffer_var(parameter):
                sizes[_name(place)] = int(array)
                continue
            assert array.flags.c_contiguous
            assert str(array.dtype) == str(parameter.dtype), (parameter, array.dtype)
            buffers[_name(place)] = array
            for size, extent in zip(parameter.shape, array.shape, strict=True):
                if isinstance(size, tirx.Var):
                    sizes[str(size.name)] = extent
        for launch in self.launches[name]:
            self._launch(launch, buffers, sizes)

    def _launch(
        self,
        launch: "Launch",
        buffers: "dict[str, np.ndarray[Any, Any]]",
        sizes: Mapping[str, int],
    ) -> None:
        kernel, extents, known = self._kernels[launch.kernel], launch.extents, dict(sizes)
        for variable, value in launch.values:
            known[variable] = _evaluate(value, known)
        pointers = (ctypes.c_void_p * len(kernel.params))()
        kept = []
        for place, parameter in enumerate(kernel.params):
            key = str(parameter.name).removesuffix("_ptr")
            if key in buffers:
                pointers[place] = buffers[key].ctypes.data
            elif key in launch.memory:
                pointers[place] = _allocate(key, launch.memory[key], known, buffers).ctypes.data
            else:
                kept.append(ctypes.c_int64(_evaluate(launch.arguments[place], known)))
                pointers[place] = ctypes.cast(ctypes.pointer(kept[-1]), ctypes.c_void_p)
        numbers = [
            _evaluate(extents.get(f"{kind}.{axis}", tirx.IntImm("int64", 1)), known)
            for kind in _DIMENSIONS
            for axis in "xyz"
        ]
        shared = _evaluate(extents.get("tirx.use_dyn_shared_memory", tirx.IntImm("int64", 0)), known)
        function = getattr(self._library, f"launch_{launch.kernel}")
        function(pointers, (ctypes.c_int64 * 10)(*numbers, shared))


@cache
def _nonsense_option() -> list[str]:
    """The option with which variables begin with nonsense, as registers do; none for compilers before GCC 12."""
    option = "-ftrivial-auto-var-init=pattern"
    command = [_COMPILER, option, "-x", "c++", "-E", os.devnull]
    return [option] if subprocess.run(command, capture_output=True, check=False).returncode == 0 else []


def _name(place: int) -> str:
    return f"parameter_{place}"


def _numbered(function: PrimFunc) -> PrimFunc:
    """The function with a name of its own for each parameter, by which the parameters of its kernels are found."""
    sizes: dict[Any, Any] = {
        item: tirx.Var(_name(place), item.ty)
        for place, item in enumerate(function.params)
        if not tirx.is_buffer_var(item)
    }
    parameters = {
        item: sizes[item]
        if item in sizes
        else tirx.decl_buffer(
            [replace_variables(size, sizes) for size in item.shape], item.dtype, _name(place), layout=None
        )
        for place, item in enumerate(function.params)
    }
    body = replace_variables(function.body, parameters)
    return PrimFunc(list(parameters.values()), body, function.ret_type).with_attr(dict(function.attrs or {}))


@dataclass(frozen=True)
class Launch:
    """A kernel that a host function launches: its arguments, and its numbers of blocks and threads by their names.

    `values` are the variables that the host function computes before it, and `memory` has the tensors between kernels.
    """

    kernel: str
    arguments: list[Any]
    extents: dict[str, Any]
    values: list[tuple[str, Any]]
    memory: dict[str, Any]


def _allocate(
    name: str, tensor: Any, sizes: Mapping[str, int], buffers: "dict[str, np.ndarray[Any, Any]]"
) -> "np.ndarray[Any, Any]":
    """The array of a tensor between kernels, as the first of them gets it."""
    shape = [_evaluate(size, sizes) for size in tensor.shape]
    buffers[name] = np.full(int(np.prod(shape)) * np.dtype(str(tensor.dtype)).itemsize, 0xFF, "uint8")
    return buffers[name]


def _launches(host: PrimFunc) -> list[Launch]:
    launches: list[Launch] = []
    values: list[tuple[str, Any]] = []
    memory: dict[str, Any] = {}

    def bind(statement: tirx.Bind) -> None:
        if str(statement.var.name).startswith("cse"):
            values.append((str(statement.var.name), statement.value))

    def visit(call: tvm.ir.Call) -> None:
        if str(getattr(call.op, "name", "")).endswith("call_ffi_kernel"):
            tags = [str(tag) for tag in call.attrs["launch_params"]]
            name, *arguments = call.args
            extents = dict(zip(tags, arguments[len(arguments) - len(tags) :], strict=True))
            launches.append(Launch(str(name.value), arguments, extents, values, memory))

    def allocate(statement: tirx.AllocBuffer) -> None:
        memory[str(statement.buffer.name)] = statement.buffer

    tvm_ffi.structural_walk(host.body, [(tirx.Bind, bind), (tvm.ir.Call, visit), (tirx.AllocBuffer, allocate)])
    return launches


def _evaluate(expression: Any, sizes: Mapping[str, int]) -> int:
    values = {
        variable: tirx.IntImm(variable.ty, sizes[str(variable.name)])
        for variable in tirx.analysis.undefined_vars(expression)
    }
    return int(tvm.sym.Analyzer().simplify(replace_variables(expression, values)))


def _launcher(name: str, kernel: PrimFunc) -> str:
    """The C function that runs a kernel."""
    arguments = []
    for place, parameter in enumerate(kernel.params):
        kind = f"decltype(argument<{place}>({name}))"
        is_pointer = str(parameter.name).endswith("_ptr")
        arguments.append(f"({kind})(arguments[{place}])" if is_pointer else f"*({kind}*)(arguments[{place}])")
    return f"""
template <int PLACE, class Result, class... Types>
auto argument(Result (*)(Types...)) -> std::tuple_element_t<PLACE, std::tuple<Types...>>;
extern "C" void launch_{name}(void** arguments, int64_t* n) {{
  auto size = [&](int i) {{ return dim3{{int(n[i]), int(n[i + 1]), int(n[i + 2])}}; }};
  emulated::launch(size(0), size(3), size(6), n[9], [=] {{ {name}({", ".join(arguments)}); }});
}}"""


class EmulatedModel:
    """A model that is scheduled for a GPU; its kernels run in the emulator, one after another."""

    def __init__(self, mod: tvm.IRModule, target: tvm.target.Target, folder: Path) -> None:
        self._main = mod["main"]
        self._kernels = Emulation(mod, target, folder)

    def __call__(self, *inputs: "np.ndarray[Any, Any]") -> "list[np.ndarray[Any, Any]]":
        """Return the outputs of `main` for these inputs, in order."""
        values: dict[Any, Any] = dict(zip(self._main.params, inputs, strict=True))
        sizes = {
            str(size.name): extent
            for parameter, array in zip(self._main.params, inputs, strict=True)
            for size, extent in zip(parameter.ty.shape.values, array.shape, strict=True)
            if isinstance(size, tirx.Var)
        }
        for binding in (binding for block in self._main.body.blocks for binding in block.bindings):
            values[binding.var] = self._value(binding.value, values, sizes)
        result = values[self._main.body.body]
        return list(result) if isinstance(result, tuple) else [result]

    def _value(self, expr: Any, values: dict[Any, Any], sizes: Mapping[str, int]) -> Any:
        if tvm.ir.is_prim_expr(expr):
            return np.asarray(_evaluate(expr, sizes))
        if isinstance(expr, relax.Var):
            return values[expr]
        if isinstance(expr, tvm.ir.GenericConst):
            return expr.value.numpy()
        if isinstance(expr, relax.Tuple):
            return tuple(self._value(field, values, sizes) for field in expr.fields)
        if isinstance(expr, relax.TupleGetItem):
            return self._value(expr.tuple_value, values, sizes)[expr.index]
        assert str(expr.op.name) == "relax.call_tir", expr
        function, arguments = expr.args[0], self._value(expr.args[1], values, sizes)
        (kind,) = expr.ty_args
        kinds = list(kind.fields) if isinstance(kind, relax.TupleType) else [kind]
        # What a kernel does not write is not a number, or as improbable.
        outputs = [
            np.frombuffer(b"\xff" * (np.dtype(str(item.dtype)).itemsize * int(np.prod(shape))), str(item.dtype))
            .reshape(shape)
            .copy()
            for item in kinds
            for shape in [tuple(_evaluate(size, sizes) for size in item.shape.values)]
        ]
        self._kernels.run(str(function.name_hint), *(np.asarray(item, order="C") for item in arguments), *outputs)
        return tuple(outputs) if isinstance(kind, relax.TupleType) else outputs[0]
