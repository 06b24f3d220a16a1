"""The user's own functions, named `package.module:function` in a release file."""

import importlib
import os
import re
import sys
import sysconfig
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tvmflow.bundle import sha256_file
from tvmflow.errors import TvmflowError
from tvmflow.workspace import Sources

_INSTALLED = tuple(
    {str(Path(sysconfig.get_path(name)).resolve()) for name in ("stdlib", "platstdlib", "purelib", "platlib")}
)

# The folders of the standard library. A file in them may be a link to another place: Debian's sitecustomize.py leads to
# /etc.
_STANDARD = {Path(sysconfig.get_path(name)).resolve() for name in ("stdlib", "platstdlib")}


# The codes by which a message is bold or coloured in a terminal.
_COLOURS = re.compile("\x1b\\[[0-9;]*m")


def find(path: str, what: str, error: type[TvmflowError]) -> Callable[..., Any]:
    """Import `package.module:function` and return the function.

    Raises `error` when there is no such module or function, its import fails, or it cannot be called; where an import
    failed, its exception is the cause of the error. `what` names the function's role in the message, such as "model
    factory".
    """
    module, _, name = path.partition(":")
    try:
        content = importlib.import_module(module)
    except ModuleNotFoundError as problem:
        if problem.name and (module == problem.name or module.startswith(problem.name + ".")):
            raise error(
                f"{what} {path!r}: there is no module {module!r} beside the release file or among the installed"
            ) from problem
        raise error(f"{what} {path!r} imports {problem.name!r}, which is not installed") from problem
    except Exception as problem:
        raise error(f"{what} {path!r}: importing {module!r} raised {describe(problem)}") from problem
    function = getattr(content, name, None)
    if function is None:
        raise error(f"{what} {path!r}: module {module!r} has no {name!r}")
    if not callable(function):
        raise error(f"{what} {path!r} is a {type(function).__name__}, not a function")
    return function  # type: ignore[no-any-return]


def call(path: str, what: str, error: type[TvmflowError], /, *args: object, **arguments: object) -> Any:
    """Call the function that `path` (`package.module:function`) names with the other arguments; return its result.

    `what` says in messages what the function is for. Raises `error` when there is no such function or its module cannot
    be imported, and when the function raises an exception, whose type and message the error gives.
    """
    function = find(path, what, error)
    try:
        return function(*args, **arguments)
    except SystemExit as problem:
        raise error(f"{what} {path!r} ended the process by sys.exit({problem.code}); let it return") from problem
    except Exception as problem:
        raise error(f"{what} {path!r} raised {describe(problem)}") from problem


def describe(problem: BaseException) -> str:
    """Return the type of an exception and the first line of its message, at most 300 characters of it."""
    words = _COLOURS.sub("", str(problem)).strip().splitlines()
    return f"{type(problem).__name__}: {words[0][:300]}" if words else type(problem).__name__


def imported_sources(folder: Path | None = None) -> Sources:
    """Return the user's modules that this process has imported, with their SHA-256.

    Modules of Python, of installed packages and of this project do not count. Paths in `folder` are relative to it, all
    others absolute and named; without `folder` all are absolute.
    """
    project = str(Path(__file__).resolve().parent.parent)
    base = folder.resolve() if folder is not None else None
    digests: dict[str, str] = {}
    names: dict[str, str] = {}
    # A process has thousands of modules in hundreds of folders, and to follow the links of a path takes long.
    folders: dict[str, Path] = {}
    # Of a module that has two names, the first in alphabetical order stays.
    for imported_as, module in sorted(sys.modules.copy().items(), reverse=True):
        file = getattr(module, "__file__", None)
        if not file or not file.endswith(".py"):
            continue
        parent = os.path.dirname(file)  # noqa: PTH120
        if parent not in folders:
            folders[parent] = Path(parent).resolve()
        is_standard = folders[parent] in _STANDARD
        if (is_standard or str(folders[parent]).startswith(_INSTALLED)) and not os.path.islink(file):  # noqa: PTH114
            continue
        path = Path(file).resolve()
        package = module.__name__.partition(".")[0]
        is_ours = package in ("tvmflow", "tasks", "flows") and str(path).startswith(project)
        is_installed = is_standard or "site-packages" in path.parts or str(path).startswith(_INSTALLED)
        if not is_ours and not is_installed and module.__name__ != "__main__" and path.is_file():
            if base is not None and path.is_relative_to(base):
                digests[str(path.relative_to(base))] = sha256_file(path)
            else:
                digests[str(path)], names[str(path)] = sha256_file(path), imported_as
    return Sources(files=dict(sorted(digests.items())), names=dict(sorted(names.items())))
