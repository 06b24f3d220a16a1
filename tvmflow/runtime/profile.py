"""Where the time of a run goes: the functions that TVM's virtual machine calls, timed by its instrument."""

import tempfile
import time
from collections.abc import Callable, Collection
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from tvmflow.bundle import Manifest, extract, read_manifest
from tvmflow.runtime.uri import files

RULE = "schedule_rule"
"""The attribute that names, in a bundle's `mod.json`, the rule that scheduled a function."""
MACHINE = "(virtual machine)"
"""Stands for all that the virtual machine does between the compiled functions."""


@dataclass(frozen=True)
class FunctionTime:
    """A compiled function: seconds of all its calls in one run, and the bytes that they read and write.

    `shapes` are the arguments of its first call, the result last.
    """

    name: str
    calls: int
    seconds: float
    bytes: int
    shapes: tuple[tuple[int, ...], ...]


def function_times(
    machine: Any,
    run: Callable[[], object],
    names: Collection[str],
    repeats: int,
    synchronize: Callable[[], object] = lambda: None,
) -> tuple[FunctionTime, ...]:
    """Time the functions `names` that `run` calls in a virtual machine, the slowest first.

    The time of a call is the smallest of `repeats` runs, so that other work on the machine hardly shows. `synchronize`
    waits for a device that works on after a call has returned. The machine has no instrument afterwards.
    """
    recorder = _Recorder(synchronize)
    machine.set_instrument(recorder)
    try:
        for _ in range(repeats):
            recorder.restart()
            run()
    finally:
        machine.set_instrument(None)
    return _grouped(recorder.sites, names)


def rules(path_or_uri: Path | str, manifest: Manifest) -> dict[str, str]:
    """The compiled functions of a bundle, and the rule that scheduled each; needs all of TVM, not its runtime alone."""
    import tvm

    found = files(path_or_uri)
    file = next(file for file in found if read_manifest(file) == manifest)
    with tempfile.TemporaryDirectory(prefix="tvmflow-") as folder:
        extract(file, Path(folder))
        lowered = tvm.ir.load_json((Path(folder) / "mod.json").read_text())
    return {
        str(variable.name_hint): str((function.attrs or {}).get(RULE, ""))
        for variable, function in lowered.functions_items()
        if isinstance(function, tvm.tirx.PrimFunc)
    }


@dataclass
class _Site:
    """One call site: the function's name, the arguments' shapes and bytes, and the smallest time in seconds."""

    name: str
    shapes: tuple[tuple[int, ...], ...]
    bytes: int
    seconds: float = float("inf")


class _Recorder:
    """The instrument that the virtual machine calls before and after each function."""

    def __init__(self, synchronize: Callable[[], object]) -> None:
        self.sites: list[_Site] = []
        self._synchronize = synchronize
        self._position = 0
        self._start = 0.0

    def restart(self) -> None:
        """Begin with the first call site again."""
        self._position = 0

    def __call__(self, func: Any, name: str, before: bool, _returned: Any, *args: Any) -> int:
        if before:
            if self._position == len(self.sites):
                tensors = [value for value in args if hasattr(value, "shape") and hasattr(value, "dtype")]
                shapes = tuple(tuple(int(dim) for dim in value.shape) for value in tensors)
                moved = sum(int(np.prod(value.shape)) * np.dtype(str(value.dtype)).itemsize for value in tensors)
                self.sites.append(_Site(str(name), shapes, moved))
            self._start = time.perf_counter()
            return 0
        self._synchronize()
        seconds = time.perf_counter() - self._start
        site = self.sites[self._position]
        site.seconds = min(site.seconds, seconds)
        self._position += 1
        return 0


def _grouped(sites: list[_Site], names: Collection[str]) -> tuple[FunctionTime, ...]:
    """The call sites of each function together; what the virtual machine does itself is one entry."""
    groups: dict[str, list[_Site]] = {}
    for site in sites:
        groups.setdefault(site.name if site.name in names else MACHINE, []).append(site)
    functions = [
        FunctionTime(
            name=name,
            calls=len(own),
            seconds=sum(site.seconds for site in own),
            bytes=sum(site.bytes for site in own) if name in names else 0,
            shapes=own[0].shapes if name in names else (),
        )
        for name, own in groups.items()
    ]
    return tuple(sorted(functions, key=lambda function: -function.seconds))
