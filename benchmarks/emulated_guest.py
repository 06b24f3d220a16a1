"""Runs recorded libraries and compares their outputs; the program of the machine that `emulated.py` emulates.

It needs NumPy and TVM's runtime alone. Each library runs in a fork, whose end by a signal is a fault of the library.
"""

import json
import os
import sys
from itertools import groupby
from pathlib import Path
from typing import Any

import numpy as np
import tvm_ffi

from tvmflow.runtime import library as runtime

# The largest difference from the outputs of AVX2, as a share of the largest output.
_DIFFERENCE = {"fp32": 2e-4, "int8": 2e-4, "bf16": 6e-2, "fp16": 6e-2}
_HALF = 2e-2  # Of outputs in float16.
# A line of progress comes after so many libraries.
_STEP = 50


def main(folder: Path) -> None:
    """Run all records of a folder, and print faults and a last line that begins with DONE."""
    runtime.load()
    runs = [(json.loads(path.read_text()), path) for path in folder.glob("*.json")]
    runs.sort(key=lambda item: (item[0]["library"], item[1]))
    faults = count = 0
    for name, group in groupby(runs, key=lambda item: item[0]["library"]):
        items = list(group)
        sys.stdout.flush()
        child = os.fork()
        if child == 0:
            code = 1
            try:
                code = int(not _run_all(folder, name, items))
            finally:
                sys.stdout.flush()
                os._exit(code)
        code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        if code < 0:
            print(f"ENDED by signal {-code}: {items[0][0]['test']}")
        faults += code != 0
        count += 1
        if count % _STEP == 0:
            print(f"RUN {count} libraries, {faults} faults")
    print(f"DONE {count} libraries, {faults} faults")


def _run_all(folder: Path, name: str, items: list[tuple[dict[str, Any], Path]]) -> bool:
    """Run a library as its records say; whether all outputs are those of AVX2."""
    find = runtime.create_machine(tvm_ffi.load_module(str(folder / f"{name}.so")))
    agrees = True
    for run, path in items:
        try:
            reason = _compare(find, run, np.load(path.with_suffix(".npz")), np.load(folder / f"{name}.weights.npz"))
        except Exception as error:
            reason = f"{type(error).__name__}: {str(error).splitlines()[0][:200]}"
        if reason:
            print(f"DIFFERS {run['test']}, {run['function']}: {reason}")
            agrees = False
    return agrees


def _compare(find: Any, run: dict[str, Any], arrays: Any, weights: Any) -> str:
    """Run a function; return how its outputs differ, nothing where they do not."""
    packed = tuple(tvm_ffi.from_dlpack(weights[key]) for key in weights)
    if run["packs"]:
        packed = tuple(find("pack_weights")(*packed))
    inputs = [tvm_ffi.from_dlpack(arrays[key]) for key in arrays if key.startswith("input")]
    result = find(run["function"])(*inputs, *packed)
    outputs = [result] if isinstance(result, tvm_ffi.Tensor) else list(result)
    for key, tensor in zip((key for key in arrays if key.startswith("output")), outputs, strict=True):
        actual, expected = np.from_dlpack(tensor), arrays[key]
        if (actual.shape, actual.dtype) != (expected.shape, expected.dtype):
            return f"{key} is {actual.dtype}{actual.shape}, not {expected.dtype}{expected.shape}"
        if actual.dtype.kind != "f":
            # What reduced precisions round otherwise may change integers.
            if run["precision"] in ("fp32", "int8") and not np.array_equal(actual, expected):
                return f"{np.count_nonzero(actual != expected)} of {actual.size} numbers of {key} differ"
            continue
        bound = _HALF if expected.dtype == np.float16 else _DIFFERENCE[run["precision"]]
        actual, expected = actual.astype("float64"), expected.astype("float64")
        scale = np.abs(expected[np.isfinite(expected)]).max(initial=0.0) or 1.0
        if not np.allclose(actual, expected, rtol=0.0, atol=bound * scale, equal_nan=True):
            finite = np.isfinite(actual) & np.isfinite(expected)
            largest = np.abs(actual[finite] - expected[finite]).max(initial=0.0)
            return f"{key} differs by {largest / scale:.1e} of its largest number"
    return ""


if __name__ == "__main__":
    main(Path(sys.argv[1]))
