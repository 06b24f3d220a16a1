"""A profile of a run: the time of each function that TVM's virtual machine calls, measured by an instrument."""

import tempfile
import time
from collections.abc import Callable, Collection
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from tvmflow.bundle import Manifest, extract, read_manifest
from tvmflow.runtime.uri import locate

RULE = "schedule_rule"
"""The attribute that names, in a bundle's `mod.json`, the rule that scheduled a function."""
MACHINE = "(virtual machine)"
"""The name of the profile's entry for the virtual machine's own work between the compiled functions."""


@dataclass(frozen=True)
class FunctionTime:
    """A compiled function in one run: its number of calls, and the seconds and bytes (read and written) of all of them.

    `shapes` are the shapes of the arrays in its first call: the inputs, then the results.
    """

    name: str
    calls: int
    seconds: float
    bytes: int
    shapes: tuple[tuple[int, ...], ...]


def measure_functions(
    machine: Any,
    run: Callable[[], object],
    names: Collection[str],
    repeats: int,
    synchronize: Callable[[], object] = lambda: None,
) -> tuple[FunctionTime, ...]:
    """Time the functions that `run` calls in a virtual machine; return them, the slowest first.

    Functions that are not in `names` are one entry, MACHINE. The time of a call is the smallest of `repeats` runs, so
    that other work on the machine hardly changes it. `synchronize` waits for a device that still works when a call has
    returned. The machine has no instrument afterwards.
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


def schedule_rules(path_or_uri: Path | str, manifest: Manifest) -> dict[str, str]:
    """Return the name of each compiled function's schedule rule, by function; "" for a function without one.

    A release at `path_or_uri` has several bundles: the one with this `manifest` is read. Needs the whole package tvm,
    not its runtime library alone. Raises BundleError for a damaged bundle, StoreError when a release cannot be fetched.
    """
    import tvm

    files = locate(path_or_uri)
    file = next(file for file in files if read_manifest(file) == manifest)
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
    """A call site: the function's name, its arguments' shapes and bytes, and the smallest time so far in seconds."""

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
        """Begin a run: the next call is the first call site's."""
        self._position = 0

    def __call__(self, func: Any, name: str, before: bool, _returned: Any, *args: Any) -> int:
        if before:
            if self._position == len(self.sites):
                tensors = [value for value in args if hasattr(value, "shape") and hasattr(value, "dtype")]
                shapes = tuple(tuple(int(dim) for dim in value.shape) for value in tensors)
                moved_bytes = sum(int(np.prod(value.shape)) * np.dtype(str(value.dtype)).itemsize for value in tensors)
                self.sites.append(_Site(str(name), shapes, moved_bytes))
            self._start = time.perf_counter()
            return 0
        self._synchronize()
        seconds = time.perf_counter() - self._start
        site = self.sites[self._position]
        site.seconds = min(site.seconds, seconds)
        self._position += 1
        return 0


def _grouped(sites: list[_Site], names: Collection[str]) -> tuple[FunctionTime, ...]:
    """Add up the call sites of each function; all others are one entry, MACHINE."""
    groups: dict[str, list[_Site]] = {}
    for site in sites:
        groups.setdefault(site.name if site.name in names else MACHINE, []).append(site)
    functions = [
        FunctionTime(
            name=name,
            calls=len(group),
            seconds=sum(site.seconds for site in group),
            bytes=sum(site.bytes for site in group) if name in names else 0,
            shapes=group[0].shapes if name in names else (),
        )
        for name, group in groups.items()
    ]
    return tuple(sorted(functions, key=lambda function: -function.seconds))
