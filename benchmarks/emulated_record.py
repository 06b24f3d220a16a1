"""A pytest plugin that keeps what tests build for a processor that this machine does not have; see `emulated.py`.

A model for the preset EMULATED_PRESET, or for others with AVX-512, is built for x86-64-v3 as well; the test gets the
outputs of that build. The folder EMULATED_FOLDER gets the library of the first one as `NAME.so`, with its weights where
these are apart, and for each run the inputs and outputs as `NAME.npz` and what they are as `NAME.json`.
"""

import dataclasses
import functools
import itertools
import json
import os
import sys
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np

from tvmflow.arrays import Array
from tvmflow.bundle import PACKED_AT_LOAD
from tvmflow.hardware import target as targets
from tvmflow.hardware.target import Target


def _with_features_of(preset: str) -> None:
    """Let this machine have the features that a preset needs, for all who ask."""
    host = targets.host()
    wide = dataclasses.replace(host, features=host.features.union(targets.resolve(preset).features))
    targets.host = functools.cache(lambda: wide)  # type: ignore[assignment]


_FOLDER = Path(os.environ["EMULATED_FOLDER"])
# The bytes of the inputs and outputs of a run, and of the weights, above which it is left out.
_LARGEST, _LARGEST_WEIGHTS = 6 << 20, 20 << 20

# The compiler is imported when the machine has these features.
_with_features_of(os.environ["EMULATED_PRESET"])
_compiler = import_module("tvmflow.compiler")
_module = sys.modules["tvmflow.compiler.build"]
_build, _load = _module.build, _module.CompiledModel.load
# Each model that has a twin for AVX2, by its id, with this twin and the precision.
_twins: dict[int, tuple[Any, Any, str]] = {}
_names = (f"{os.getpid()}-{count}" for count in itertools.count())


class _Recorded:
    """The twin of a loaded model, for AVX2, which keeps each run for the model itself."""

    def __init__(self, model: Any, twin: Any, precision: str) -> None:
        self._model, self._twin, self._precision = model, _load(twin), precision
        self._library: str | None = None

    def __getattr__(self, name: str) -> Any:
        return getattr(self._twin, name)

    def run(self, *inputs: Any, function: str = "main") -> list[Array]:
        """Run the twin, and keep the run."""
        arrays = [np.array(item if isinstance(item, np.ndarray) else item.numpy(), order="C") for item in inputs]
        outputs: list[Array] = self._twin.run(*inputs, function=function)
        weights = sum(value.nbytes for value in self._model.params.values())
        if sum(array.nbytes for array in (*arrays, *outputs)) < _LARGEST and weights < _LARGEST_WEIGHTS:
            self._keep(arrays, outputs, function)
        return outputs

    def _keep(self, inputs: list[Array], outputs: list[Array], function: str) -> None:
        name = next(_names)
        if self._library is None:
            self._library = name
            self._model.executable.export_library(str(_FOLDER / f"{name}.so"))
            np.savez(_FOLDER / f"{name}.weights.npz", *self._model.params.values())
        arrays = dict(_numbered("input", inputs)) | dict(_numbered("output", outputs))
        np.savez(_FOLDER / f"{name}.npz", **arrays)  # type: ignore[arg-type]
        run = {
            "library": self._library,
            "function": function,
            "packs": self._model.weights in PACKED_AT_LOAD,
            "precision": self._precision,
            "test": os.environ.get("PYTEST_CURRENT_TEST", "").removeprefix("tests/compiler/").removesuffix(" (call)"),
        }
        (_FOLDER / f"{name}.json").write_text(json.dumps(run))


def _numbered(name: str, arrays: list[Array]) -> Iterator[tuple[str, Array]]:
    """Arrays by names; NumPy's files have no bfloat16, whose bits they hold."""
    for count, array in enumerate(arrays):
        yield f"{name}{count}", array.view(np.uint16) if array.dtype.name == "bfloat16" else array


def _build_twice(imported: Any, target: Target, options: Any = None, *rest: Any, **named: Any) -> Any:
    """Build a model, and where it needs AVX-512 its twin for AVX2."""
    model = _build(imported, target, options, *rest, **named)
    if any(feature.startswith(("avx512", "avx_vnni", "amx")) for feature in target.features):
        options = options or _compiler.BuildOptions()
        tvm = {key: value for key, value in target.tvm.items() if key != "mattr"}
        twin_options = options if options.precision == "int8" else dataclasses.replace(options, precision="fp32")
        twin = _build(imported, targets.resolve({**tvm, "mcpu": "x86-64-v3"}), twin_options, *rest, **named)
        _twins[id(model)] = model, twin, options.precision
    return model


def _load_twin(model: Any) -> Any:
    return _Recorded(*_twins[id(model)]) if id(model) in _twins else _load(model)


_module.build = _compiler.build = _build_twice
_module.CompiledModel.load = _load_twin
