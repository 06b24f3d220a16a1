"""The docstring of a public function says what None means, and does not point at another docstring for its meaning."""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SOURCES = sorted(path for folder in ("tvmflow", "tasks", "flows") for path in (ROOT / folder).rglob("*.py"))
_Function = ast.FunctionDef | ast.AsyncFunctionDef
_OPTIONAL = re.compile(r"\| None\b|\bNone \|")
_POINTER = re.compile(r"\bas `[\w.]+` (has|does|do)\b|\bare those of `|\bis as (in|for) `|\b[Rr]aises as (`|the)")


def _functions(tree: ast.AST, class_text: str = "") -> Iterator[tuple[_Function, str, str]]:
    """The public functions of a module or class: each with its docstring, and with the docstring of its class."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.ClassDef):
            yield from _functions(node, ast.get_docstring(node) or "")
        elif isinstance(node, _Function) and not node.name.startswith("_") and (text := ast.get_docstring(node)):
            yield node, text, class_text


def _is_command(function: _Function) -> bool:
    """Whether the function is a command of the command line, whose options explain themselves."""
    return any(".command(" in ast.unparse(decorator) for decorator in function.decorator_list)


def _may_be_none(annotation: ast.expr | None) -> bool:
    return annotation is not None and _OPTIONAL.search(ast.unparse(annotation)) is not None


def _arguments_that_may_be_none(function: _Function) -> list[str]:
    arguments = function.args
    positional = [*arguments.posonlyargs, *arguments.args]
    defaults = [*[None] * (len(positional) - len(arguments.defaults)), *arguments.defaults, *arguments.kw_defaults]
    pairs = zip([*positional, *arguments.kwonlyargs], defaults, strict=True)
    return [
        item.arg
        for item, value in pairs
        if _may_be_none(item.annotation) or (isinstance(value, ast.Constant) and value.value is None)
    ]


def _faults(source: str) -> list[str]:
    """What the docstrings of a module leave open, each fault with the name of its function."""
    faults = []
    for function, text, class_text in _functions(ast.parse(source)):
        if _may_be_none(function.returns):
            faults += [] if re.search(r"\bNone\b", text) else [f"{function.name} may return None"]
        for name in [] if _is_command(function) else _arguments_that_may_be_none(function):
            is_named = re.search(rf"\b{name}\b", f"{text}\n{class_text}")
            faults += [] if is_named else [f"{function.name} has the argument {name}"]
        if pointer := _POINTER.search(" ".join(text.split())):
            faults.append(f"{function.name} points elsewhere: {pointer[0]}")
    return faults


def test_no_docstring_leaves_the_meaning_of_none_open() -> None:
    faults = [f"{path.relative_to(ROOT)}: {fault}" for path in SOURCES for fault in _faults(path.read_text())]
    assert len(SOURCES) > 100
    assert "\n".join(faults) == ""


@pytest.mark.parametrize(
    ("signature", "docstring", "faults"),
    [
        ("find(key: str) -> int | None", "Find a key.", ["find may return None"]),
        ("find(key: str) -> int | None", "Find a key; None without one.", []),
        ('find(key: str) -> "int | None"', "Find a key in Nonesuch.", ["find may return None"]),
        ("read(path, size=None)", "Read a file.", ["read has the argument size"]),
        ("read(path, *, id=None)", "Read a file, did it.", ["read has the argument id"]),
        ("read(path, *, size=None)", "Read a file of `size` bytes.", []),
        ("read(path, size: int | None)", "Read a file.", ["read has the argument size"]),
        ("save(path)", "Save a file as\n`load` does.", ["save points elsewhere: as `load` does"]),
        ("_find(key: str) -> int | None", "Find a key.", []),
    ],
)
def test_an_open_docstring_is_a_fault(signature: str, docstring: str, faults: list[str]) -> None:
    assert _faults(f'def {signature}:\n    """{docstring}"""\n') == faults


def test_the_docstring_of_a_class_may_name_an_argument_of_its_methods() -> None:
    source = 'class Store:\n    """A store of `size` bytes."""\n    def read(self, size=None):\n        """Read."""\n'
    assert _faults(source) == []
