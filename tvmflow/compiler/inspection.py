"""Views of a build for a person to read: the module before and after passes, and the code in several forms."""

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, Literal

import tvm
from tvm.tirx import PrimFunc

from tvmflow.compiler.serialise import ir_text
from tvmflow.errors import BuildError

Code = Literal["ll", "asm", "relax", "tir"]
# The names of these forms in TVM's LLVM modules.
_LLVM_FORMS: dict[Code, str] = {"ll": "ll", "asm": "s"}


@dataclass(frozen=True)
class Inspection:
    """The parts of a build to keep: the module before and after the passes named here, and the code in these forms.

    `relax` is the lowered module without its weights, and `tir` the scheduled functions. `ll` is LLVM's intermediate
    representation and `asm` the assembly of the functions that run on a CPU.
    """

    before: tuple[str, ...] = ()
    after: tuple[str, ...] = ()
    code: tuple[Code, ...] = ()

    @property
    def needs_llvm(self) -> bool:
        """Whether a form is LLVM's (`ll` or `asm`): the build then generates code anew, for the cache holds no text."""
        return bool(_LLVM_FORMS.keys() & set(self.code))


@dataclass(frozen=True)
class PassIR:
    """A module as TVMScript, before or after the pass `name`; its constants larger than a scalar have no values."""

    when: Literal["before", "after"]
    name: str
    text: str


@dataclass(frozen=True)
class Inspected:
    """The parts of a build that an Inspection asked for: modules in the order of the passes, and code by its form."""

    passes: list[PassIR] = field(default_factory=list)
    code: dict[Code, str] = field(default_factory=dict)


@tvm.instrument.pass_instrument
class KeepIR:
    """Appends to `modules` the module before and after each pass that the inspection names."""

    def __init__(self, inspection: Inspection, modules: list[PassIR]) -> None:
        self._inspection = inspection
        self._modules = modules

    def run_before_pass(self, mod: tvm.IRModule, info: tvm.transform.PassInfo) -> None:
        """Append the module that the pass reads, if the inspection names the pass."""
        if info.name in self._inspection.before:
            self._modules.append(PassIR("before", str(info.name), ir_text(mod)))

    def run_after_pass(self, mod: tvm.IRModule, info: tvm.transform.PassInfo) -> None:
        """Append the module that the pass returned, if the inspection names the pass."""
        if info.name in self._inspection.after:
            self._modules.append(PassIR("after", str(info.name), ir_text(mod)))


def code_of(
    forms: tuple[Code, ...], lowered: tvm.IRModule, scheduled: tvm.IRModule, executable: Any
) -> dict[Code, str]:
    """Return the code of a build as text, by form; `Inspection` describes the forms.

    Raises BuildError when the library has no code of a form.
    """
    code: dict[Code, str] = {}
    for form in dict.fromkeys(forms):
        if form == "relax":
            code[form] = ir_text(lowered)
        elif form == "tir":
            functions = {var: func for var, func in scheduled.functions_items() if isinstance(func, PrimFunc)}
            code[form] = ir_text(tvm.IRModule(functions))
        else:
            modules = [module for module in _imported_modules(executable.mod) if module.kind == "llvm"]
            if not modules:
                raise BuildError(f"the library has no LLVM code to write as {form!r}; leave it out")
            code[form] = "\n".join(str(module.inspect_source(_LLVM_FORMS[form])) for module in modules)
    return code


def _imported_modules(module: Any) -> Iterator[Any]:
    for item in module.imports:
        yield item
        yield from _imported_modules(item)
