"""Lists every operator of the ONNX standard with how it is imported, from the tables that the importer uses."""

import ast
import inspect
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache
from typing import Any, Literal

import onnx
import onnx.defs

from tvmflow.compiler.onnx import (
    CONTROL,
    CONVERTERS,
    RANDOM,
    FreeSizeError,
    UnsupportedFormError,
    has_converter,
    is_function,
)
from tvmflow.onnx_model.graph import operator_name

Kind = Literal["converter", "function", "refused"]
# The package of the converters.
_CONVERTERS = "tvmflow.compiler.onnx"


@dataclass(frozen=True)
class Operator:
    """An operator of the standard.

    `versions` are the opsets that define or change it, the oldest first. `kind` is `converter` where a converter
    imports it, `function` where ONNX's own function body replaces it, and `refused`, with a `reason`, elsewhere.
    `refused_forms` are the forms that the converter refuses, as its errors name them; `...` stands for a part that
    depends on the model.
    """

    domain: str
    name: str
    versions: tuple[int, ...]
    kind: Kind
    reason: str
    refused_forms: tuple[str, ...]


def list_operators() -> list[Operator]:
    """Return all operators that the installed ONNX package defines, sorted by domain and name."""
    versions: dict[tuple[str, str], set[int]] = {}
    for schema in onnx.defs.get_all_schemas_with_history():
        versions.setdefault((schema.domain, schema.name), set()).add(schema.since_version)
    return [
        _describe(schema, tuple(sorted(versions[schema.domain, schema.name])))
        for schema in sorted(onnx.defs.get_all_schemas(), key=lambda schema: (schema.domain, schema.name.lower()))
    ]


def list_contributed() -> dict[str, tuple[str, ...]]:
    """Return the operators of com.microsoft that have a converter, sorted, each with the forms that it refuses."""
    prefix = "com.microsoft."
    names = sorted((name.removeprefix(prefix) for name in CONVERTERS if name.startswith(prefix)), key=str.lower)
    return {name: tuple(_refused_forms(CONVERTERS[prefix + name])) for name in names}


def _describe(schema: Any, versions: tuple[int, ...]) -> Operator:
    node = onnx.NodeProto(op_type=schema.name, domain=schema.domain)
    if has_converter(node):
        converters: dict[str, Callable[..., Any]] = {**CONVERTERS, **CONTROL}
        forms = tuple(_refused_forms(converters.get(operator_name(node))))
        return Operator(schema.domain, schema.name, versions, "converter", "", forms)
    missing = sorted({inner.op_type for inner in schema.function_body.node if not _is_imported(inner)})
    if is_function(node) and missing:
        reason = f"its function body needs {', '.join(missing)}"
        return Operator(schema.domain, schema.name, versions, "refused", reason, ())
    if is_function(node):
        return Operator(schema.domain, schema.name, versions, "function", "", ())
    return Operator(schema.domain, schema.name, versions, "refused", _why_refused(schema), ())


def _is_imported(node: onnx.NodeProto) -> bool:
    return has_converter(node) or is_function(node)


def _why_refused(schema: Any) -> str:
    if not schema.domain and schema.name in RANDOM:
        return "its results are random"
    if schema.domain.endswith("training"):
        return "it trains a model: export the model for inference"
    for values, verb in ((schema.inputs, "takes"), (schema.outputs, "returns")):
        for value in values:
            kinds = {kind.partition("(")[0] for kind in value.types}
            if value.types == {"tensor(string)"}:
                return f"it {verb} strings"
            if "tensor" not in kinds:
                return f"it {verb} {'maps' if 'map' in kinds else 'sequences or optional values'}"
    return "no converter"


def _refused_forms(converter: Callable[..., Any] | None) -> Iterator[str]:
    """The messages of the errors that a converter raises, or a function of the converters' package that it calls."""
    if converter is None:
        return
    waiting = [(converter.__module__, converter.__qualname__.partition(".")[0])]
    visited: set[tuple[str, str]] = set()
    forms: dict[str, None] = {}
    while waiting:
        module, name = place = waiting.pop()
        called = getattr(sys.modules[module], name, None)
        own = getattr(called, "__module__", "")
        if place in visited or not inspect.isfunction(called) or not own.startswith(_CONVERTERS):
            continue
        visited.add(place)
        for node in ast.walk(_functions_of(own)[called.__name__]):
            if isinstance(node, ast.Name):
                waiting.append((own, node.id))
            elif isinstance(node, ast.Raise) and (form := _form_of(node)):
                forms[form] = None
    yield from sorted(forms)


@cache
def _functions_of(module: str) -> dict[str, ast.FunctionDef]:
    """The functions of a module by name."""
    tree = ast.parse(inspect.getsource(sys.modules[module]))
    return {node.name: node for node in tree.body if isinstance(node, ast.FunctionDef)}


def _form_of(statement: ast.Raise) -> str:
    """The message of a `raise UnsupportedFormError(...)` or of a kind of it; empty for another one."""
    call = statement.exc
    if not isinstance(call, ast.Call) or not isinstance(call.func, ast.Name) or not call.args:
        return ""
    message = call.args[0]
    if call.func.id not in (UnsupportedFormError.__name__, FreeSizeError.__name__):
        return ""
    if isinstance(message, ast.JoinedStr):
        parts = [str(part.value) if isinstance(part, ast.Constant) else "..." for part in message.values]
        return "".join(parts)
    return str(message.value) if isinstance(message, ast.Constant) else ""
