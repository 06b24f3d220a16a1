"""What a person may look at while a model is built: the module around passes, and the code in readable forms."""

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, Literal

import tvm
from tvm.tirx import PrimFunc

from tvmflow.compiler.serialise import ir_text
from tvmflow.errors import BuildError

Code = Literal["ll", "asm", "relax", "tir"]
# LLVM modules call their forms so.
_LLVM_FORMS: dict[Code, str] = {"ll": "ll", "asm": "s"}


@dataclass(frozen=True)
class Inspection:
    """The passes whose module is kept before and after they run, and the forms in which the code is kept.

    `relax` is the lowered module without its weights, `tir` the scheduled functions, `ll` LLVM's intermediate
    representation and `asm` the assembly of those that run on a CPU.
    """

    before: tuple[str, ...] = ()
    after: tuple[str, ...] = ()
    code: tuple[Code, ...] = ()

    @property
    def needs_llvm(self) -> bool:
        """Whether the functions must be generated anew: an object file of the cache has no such form."""
        return bool(_LLVM_FORMS.keys() & set(self.code))


@dataclass(frozen=True)
class PassIR:
    """A module as TVMScript, before or after a pass ran on it; constants larger than a scalar are not listed."""

    when: Literal["before", "after"]
    name: str
    text: str


@dataclass(frozen=True)
class Inspected:
    """What an Inspection has kept: modules in the order of the passes, and code by its form."""

    passes: list[PassIR] = field(default_factory=list)
    code: dict[Code, str] = field(default_factory=dict)


@tvm.instrument.pass_instrument
class KeepIR:
    """Keeps the module before and after the passes that an inspection names."""

    def __init__(self, inspection: Inspection, kept: list[PassIR]) -> None:
        self._inspection = inspection
        self._kept = kept

    def run_before_pass(self, mod: tvm.IRModule, info: tvm.transform.PassInfo) -> None:
        """Keep what the pass is given."""
        if info.name in self._inspection.before:
            self._kept.append(PassIR("before", str(info.name), ir_text(mod)))

    def run_after_pass(self, mod: tvm.IRModule, info: tvm.transform.PassInfo) -> None:
        """Keep what the pass has made."""
        if info.name in self._inspection.after:
            self._kept.append(PassIR("after", str(info.name), ir_text(mod)))


def code_of(
    forms: tuple[Code, ...], lowered: tvm.IRModule, scheduled: tvm.IRModule, executable: Any
) -> dict[Code, str]:
    """The code in the given forms; see Inspection. Raises BuildError when the library has no code of a form."""
    kept: dict[Code, str] = {}
    for form in dict.fromkeys(forms):
        if form == "relax":
            kept[form] = ir_text(lowered)
        elif form == "tir":
            functions = {var: func for var, func in scheduled.functions_items() if isinstance(func, PrimFunc)}
            kept[form] = ir_text(tvm.IRModule(functions))
        else:
            modules = [module for module in _imported(executable.mod) if module.kind == "llvm"]
            if not modules:
                raise BuildError(f"the library has no LLVM code to write as {form!r}; leave it out")
            kept[form] = "\n".join(str(module.inspect_source(_LLVM_FORMS[form])) for module in modules)
    return kept


def _imported(module: Any) -> Iterator[Any]:
    for item in module.imports:
        yield item
        yield from _imported(item)
