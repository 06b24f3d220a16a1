"""The code that a module can reach: what a step's cache key says about this project's own sources."""

import hashlib
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from grimp import ImportGraph

_ROOTS = ("tvmflow", "tasks", "flows")


def reachable_modules(module: str) -> frozenset[str]:
    """Return the modules of this project that run when `module` does: itself, and what it imports, directly or not.

    Every import statement counts, also one within a function, except those under TYPE_CHECKING. An import of a module
    is also one of the packages that it lies in. A module that is none of this project's reaches nothing.
    """
    graph = _graph()
    if module not in graph.modules:
        return frozenset()
    return frozenset({module, *graph.find_upstream_modules(module)})


@cache
def code_digest(module: str) -> str:
    """Return the SHA-256, in hexadecimal, of the source code of all modules that `module` reaches.

    The C files in the folders of these modules count too.
    """
    digest = hashlib.sha256()
    sources = {name: _source(name) for name in sorted(reachable_modules(module))}
    for name, source in sources.items():
        digest.update(name.encode() + b"\0" + source.read_bytes() + b"\0")
    for folder in sorted({source.parent for source in sources.values()}):
        for source in sorted(folder.glob("*.c")):
            digest.update(source.name.encode() + b"\0" + source.read_bytes() + b"\0")
    return digest.hexdigest()


@cache
def _graph() -> "ImportGraph":
    """The imports among the modules of this project, and of each module's package by the module."""
    import grimp

    roots = [root for root in _ROOTS if find_spec(root) is not None]
    graph = grimp.build_graph(*roots, cache_dir=None, exclude_type_checking_imports=True)
    for module in graph.modules:
        package = module.rpartition(".")[0]
        if package:
            graph.add_import(importer=module, imported=package)
    return graph


@cache
def _source(module: str) -> Path:
    """The file of a module of this project."""
    root, *parts = module.split(".")
    path = Path(_folder(root), *parts)
    return path / "__init__.py" if path.is_dir() else path.with_suffix(".py")


@cache
def _folder(root: str) -> str:
    """The folder of a package of this project that lies in no other."""
    spec = find_spec(root)
    assert spec is not None  # noqa: S101 - the graph has the modules of packages that exist
    assert spec.submodule_search_locations is not None  # noqa: S101
    return spec.submodule_search_locations[0]
