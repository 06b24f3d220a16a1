"""Compiles ONNX models to libraries: import into Relax, lowering, CPU schedules, build."""

from tvmflow.compiler.build import BuildOptions, CompiledModel, LoadedModel, build, can_build, list_passes, lower
from tvmflow.compiler.choices import Choices
from tvmflow.compiler.graph import Workload, workloads
from tvmflow.compiler.importer import Imported, import_onnx
from tvmflow.compiler.inspection import Inspected, Inspection, PassIR
from tvmflow.compiler.serialise import ir_text, load_module, load_params, save_module, save_params

__all__ = [
    "BuildOptions",
    "Choices",
    "CompiledModel",
    "Imported",
    "Inspected",
    "Inspection",
    "LoadedModel",
    "PassIR",
    "Workload",
    "build",
    "can_build",
    "import_onnx",
    "ir_text",
    "list_passes",
    "load_module",
    "load_params",
    "lower",
    "save_module",
    "save_params",
    "workloads",
]
