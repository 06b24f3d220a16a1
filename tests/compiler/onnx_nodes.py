"""The operator node tests of the ONNX package, through the whole compiler: `python tests/compiler/onnx_nodes.py`.

Each case is written to a file, imported, built for this machine and run in a worker process, and compared with the
case's own results, or with ONNX Runtime's where `onnx_nodes.toml` says so. A worker that crashes or hangs fails one
case. Libraries run from memory, without the linker.
"""

# ruff: noqa: T201

import argparse
import json
import multiprocessing
import os
import sys
import tempfile
import time
import tomllib
import warnings
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from fnmatch import fnmatchcase
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

os.environ.setdefault("TVM_NUM_THREADS", "1")

import numpy as np
import onnx
from onnx import numpy_helper

EXPLANATIONS = Path(__file__).with_name("onnx_nodes.toml")
# Files that draw operators at random, so that a normal run has few of those that they name.
_DRAWN = ("test_compiler_random.py", "test_compiler_sweep.py")
_TIMEOUT = 120.0


@dataclass(frozen=True)
class Result:
    """The outcome of a case.

    `outcome` is `passed`, `refused` (an error of ours, one sentence), `wrong` (other numbers, shapes or types) or
    `crashed` (any other exception, a signal or no answer in time). `constants` is True when the case passed
    only with its small inputs, such as shapes and axes, as constants of the model.
    """

    name: str
    outcome: str
    message: str = ""
    constants: bool = False


def cases() -> dict[str, Any]:
    """The node tests of the installed ONNX package, by name."""
    from onnx.backend.test.loader import load_model_tests

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # some expected values are computed by dividing by zero
        return {case.name.removeprefix("test_"): case for case in load_model_tests(kind="node")}


def representatives(node_tests: dict[str, Any], reasons: dict[str, list[str]]) -> list[str]:
    """The names of one case per pattern that explains, and of one for operators that are not explained.

    These are the operators that no other test file here names, and every seventh of the others. The case is the
    simplest one; the expanded twins of cases with an operator are left out.
    """
    named = "".join(path.read_text() for path in EXPLANATIONS.parent.glob("test_*.py") if path.name not in _DRAWN)
    by_simplicity = sorted(node_tests, key=lambda name: (len(name), name))
    by_pattern: dict[str, str] = {}
    by_operator: dict[tuple[str, str], str] = {}
    for name in by_simplicity:
        node = node_tests[name].model.graph.node[0]
        patterns = [pattern for those in reasons.values() for pattern in those if fnmatchcase(name, pattern)]
        for pattern in patterns:
            by_pattern.setdefault(pattern, name)
        if not patterns and "_expanded" not in name:
            by_operator.setdefault((node.domain, node.op_type), name)
    elsewhere = [name for (_, operator), name in by_operator.items() if f'"{operator}"' in named]
    alone = [name for name in by_operator.values() if name not in elsewhere]
    return list(dict.fromkeys([*by_pattern.values(), *alone, *elsewhere[::7]]))


def check(case: Any, folder: Path, level: int = 3) -> Result:
    """Build and run one case, with this `opt-level` of LLVM; does not catch crashes of the process."""
    from tvmflow.errors import TvmflowError

    name = case.name.removeprefix("test_")
    refusal = ""
    for constants in (False, True):
        model = _with_constants(case) if constants else case.model
        if model is None:
            break
        try:
            message = _differences(case, model, folder, level)
        except TvmflowError as error:
            refusal = refusal or str(error).replace(f"{folder}/", "")
            if "\n" in refusal or len(refusal) > 700:
                return Result(name, "crashed", f"the error is no sentence: {refusal}")
            continue
        except Exception as error:
            return Result(name, "crashed", f"{type(error).__name__}: {error}")
        return Result(name, "wrong" if message else "passed", message, constants)
    return Result(name, "refused", refusal)


def _with_constants(case: Any) -> onnx.ModelProto | None:
    """The model with all inputs of at most one dimension, but the first, as constants."""
    model = onnx.ModelProto()
    model.CopyFrom(case.model)
    values = dict(zip((value.name for value in model.graph.input), map(_array, case.data_sets[0][0]), strict=False))
    constants = {
        name: value
        for name, value in list(values.items())[1:]
        if isinstance(value, np.ndarray | np.generic) and value.ndim <= 1 and value.dtype != object
    }
    if not constants:
        return None
    inputs = [value for value in model.graph.input if value.name not in constants]
    del model.graph.input[:]
    model.graph.input.extend(inputs)
    model.graph.initializer.extend(
        numpy_helper.from_array(np.asarray(value), name) for name, value in constants.items()
    )
    return model


def _differences(case: Any, model: onnx.ModelProto, folder: Path, level: int) -> str:
    """How the results of the built model differ from those of the case; empty if they are equal."""
    from tvmflow.compiler import build, import_onnx
    from tvmflow.hardware.target import resolve
    from tvmflow.onnx_model.labels import replace_labels

    path = folder / f"{case.name.removeprefix('test_')}.onnx"
    path.write_bytes(model.SerializeToString())
    imported = import_onnx(path)
    path.unlink()
    loaded = build(imported, resolve({**resolve("native").tvm, "opt-level": level})).load()
    names = [value.name for value in case.model.graph.input]
    inputs_left = {value.name for value in model.graph.input}
    results = [value.name for value in model.graph.output]
    numbered = onnx.ModelProto()
    numbered.CopyFrom(model)
    labels = replace_labels(numbered)
    for data_set in case.data_sets:
        inputs, expected = ([_array(value) for value in values] for values in data_set)
        arrays = [
            np.asarray(_without_strings(value, labels.get(name, ())), order="C")
            for name, value in zip(names, inputs, strict=False)
            if name in inputs_left
        ]
        actual = loaded.run(*arrays)
        if case.name.removeprefix("test_") in runtime_cases():
            described = expected
            expected = _onnxruntime_outputs(case.model, inputs)
            if not any(_difference(*pair, case.rtol, case.atol) for pair in zip(expected, described, strict=True)):
                return "ONNX Runtime's results are those of the case: it needs no entry in onnx_nodes.toml"
        if len(actual) != len(expected):
            return f"{len(actual)} results, {len(expected)} expected"
        for name, array, expected_array in zip(results, actual, expected, strict=True):
            described = np.asarray(_without_strings(expected_array, labels.get(name, ())))
            message = _difference(array, described, case.rtol, case.atol)
            if message:
                return message
    return ""


def _without_strings(value: Any, labels: Sequence[str]) -> Any:
    """An array of strings as their places in the labels, -1 for another string; other values as they are."""
    if getattr(value, "dtype", np.dtype("f4")).kind != "O":
        return value
    texts = [item.decode() if isinstance(item, bytes) else item for item in value.ravel()]
    return np.array([labels.index(text) if text in labels else -1 for text in texts]).reshape(value.shape)


def _onnxruntime_outputs(model: onnx.ModelProto, inputs: Sequence[Any]) -> list[Any]:
    import onnxruntime

    session = onnxruntime.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])
    names = [value.name for value in model.graph.input]
    return list(session.run(None, dict(zip(names, map(np.asarray, inputs), strict=True))))


def _array(value: Any) -> Any:
    return numpy_helper.to_array(value) if isinstance(value, onnx.TensorProto) else value


def _difference(actual: Any, expected: Any, rtol: float, atol: float) -> str:
    if actual.dtype != expected.dtype or actual.shape != expected.shape:
        return f"{actual.dtype}{list(actual.shape)}, expected {expected.dtype}{list(expected.shape)}"
    if actual.dtype.kind in "biu":
        bad = actual != expected
    else:
        # Sums of half precision differ by units in the last place with the order of summation.
        rtol = max(rtol, {"float16": 2.0**-8, "bfloat16": 2.0**-5}.get(str(actual.dtype), 0.0))
        one, other = (
            array.astype("complex128" if array.dtype.kind == "c" else "float64") for array in (actual, expected)
        )
        # The zeros of a transform are rounding errors of its largest numbers.
        largest = np.max(np.abs(other), where=np.isfinite(other), initial=0.0)
        bad = ~np.isclose(one, other, rtol=rtol, atol=max(atol, 2.0**-24 * largest), equal_nan=True)
    if not bad.any():
        return ""
    place = tuple(int(axis[0]) for axis in np.nonzero(bad))
    return f"{int(bad.sum())} of {bad.size} differ, at {list(place)}: {actual[place]}, expected {expected[place]}"


def _work(connection: Connection, level: int) -> None:
    # The output of TVM and LLVM must not mix with the answer.
    silent = os.open(os.devnull, os.O_WRONLY)
    os.dup2(silent, 1)
    os.dup2(silent, 2)
    with tempfile.TemporaryDirectory(prefix="tvmflow-nodes-") as folder:
        while True:
            case = connection.recv()
            if case is None:
                return
            connection.send(check(case, Path(folder), level))


class _Worker:
    def __init__(self, level: int) -> None:
        context = multiprocessing.get_context("spawn")
        self.connection, theirs = context.Pipe()
        self.process = context.Process(target=_work, args=(theirs, level), daemon=True)
        self.process.start()
        theirs.close()
        self.name = ""
        self.deadline = 0.0

    def begin(self, case: Any) -> None:
        self.name = case.name.removeprefix("test_")
        self.deadline = time.monotonic() + _TIMEOUT
        self.connection.send(case)

    def stop(self) -> None:
        self.process.kill()
        self.process.join()
        self.connection.close()


def run(cases_to_check: Sequence[Any], processes: int, level: int = 3) -> Iterator[Result]:
    """Check cases in worker processes, with this `opt-level` of LLVM; results come as they are ready."""
    waiting = list(reversed(cases_to_check))
    workers: list[_Worker] = []
    try:
        while waiting or workers:
            while waiting and len(workers) < processes:
                workers.append(_Worker(level))
                workers[-1].begin(waiting.pop())
            ready = wait([worker.connection for worker in workers], timeout=1.0)
            for worker in list(workers):
                result = None
                if worker.connection in ready:
                    try:
                        result = worker.connection.recv()
                    except EOFError:
                        worker.process.join()
                        code = worker.process.exitcode
                        result = Result(worker.name, "crashed", f"the process ended with exit code {code}")
                        workers.remove(worker)
                elif time.monotonic() > worker.deadline:
                    result = Result(worker.name, "crashed", f"no answer in {_TIMEOUT:.0f} s")
                    worker.stop()
                    workers.remove(worker)
                if result is None:
                    continue
                yield result
                if worker in workers and waiting:
                    worker.begin(waiting.pop())
                elif worker in workers:
                    worker.stop()
                    workers.remove(worker)
    finally:
        for worker in workers:
            worker.stop()


def explanations() -> dict[str, list[str]]:
    """Return the patterns of the names of refused cases, by the reason for the refusal."""
    return {entry["reason"]: entry["cases"] for entry in tomllib.loads(EXPLANATIONS.read_text())["refused"]}


def runtime_cases() -> set[str]:
    """Return the names of the cases whose results are not those of ONNX Runtime, which are taken instead."""
    return {name for entry in tomllib.loads(EXPLANATIONS.read_text())["runtime"] for name in entry["cases"]}


def reason_of(name: str, reasons: dict[str, list[str]]) -> str | None:
    """Return the first reason with a pattern that matches a case; None where there is none."""
    for reason, patterns in reasons.items():
        if any(fnmatchcase(name, pattern) for pattern in patterns):
            return reason
    return None


def _category(name: str, node_tests: dict[str, Any]) -> str:
    """The part of ONNX that defines a case's operator: math, nn, tensor and so on."""
    model = node_tests.get(name.partition("_expanded")[0], node_tests[name]).model
    node = model.graph.node[0]
    schemas = [
        schema for schema in onnx.defs.get_all_schemas() if (schema.name, schema.domain) == (node.op_type, node.domain)
    ]
    return Path(schemas[0].file).parent.name if schemas else "other"


def main() -> int:
    """Print the pass rate by category, and every case that does not pass with its reason; 1 where one has none."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("patterns", nargs="*", default=["*"], help="names of cases, as in 'resize_*'")
    parser.add_argument("--processes", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--json", type=Path, help="also write the results there, one a line")
    options = parser.parse_args()
    node_tests, reasons = cases(), explanations()
    names = [name for name in node_tests if any(fnmatchcase(name, pattern) for pattern in options.patterns)]
    results = list(run([node_tests[name] for name in names], options.processes))
    if options.json:
        options.json.write_text("".join(json.dumps(asdict(result)) + "\n" for result in results))
    table: dict[str, Counter[str]] = {}
    for result in results:
        outcome = "constants" if result.constants and result.outcome == "passed" else result.outcome
        for row in (_category(result.name, node_tests), "all"):
            table.setdefault(row, Counter())[outcome] += 1
    columns = ("passed", "constants", "refused", "wrong", "crashed")
    print(f"{'':16}" + "".join(f"{column:>11}" for column in columns) + f"{'pass rate':>11}")
    for row in sorted(table, key=lambda row: (row == "all", row)):
        counts = table[row]
        rate = (counts["passed"] + counts["constants"]) / counts.total()
        print(f"{row:16}" + "".join(f"{counts[column]:11}" for column in columns) + f"{rate:11.1%}")
    print("constants: passed with the inputs that say shapes, axes and the like as constants of the model\n")
    explained: dict[str, list[str]] = {}
    unexplained = []
    for result in results:
        reason = reason_of(result.name, reasons) if result.outcome == "refused" else None
        if reason is not None:
            explained.setdefault(reason, []).append(result.name)
        elif result.outcome != "passed":
            unexplained.append(result)
    for reason, those in sorted(explained.items(), key=lambda item: -len(item[1])):
        print(f"{len(those):5} refused: {reason}\n      {' '.join(those)}")
    for result in unexplained:
        print(f"UNEXPLAINED {result.outcome} {result.name}: {result.message}")
    return int(bool(unexplained))


if __name__ == "__main__":
    sys.exit(main())
