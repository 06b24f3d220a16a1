"""Compile an example of every ONNX operator and keep the verdicts in docs/operators.json, for docs/generate.py.

python docs/judge_operators.py             judges all operators anew
python docs/judge_operators.py Conv Add    judges these
python docs/judge_operators.py --new       judges those that are imported and have no verdict yet

The examples are the node tests of the ONNX package. Each is judged as it is, and with all inputs but the first as
constants, as weights and axes are in models; the better verdict counts. Some operators have examples of their own.
"""

import argparse
import importlib
import json
import pkgutil
import sys
import tempfile
import warnings
from collections.abc import Collection, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from onnx import numpy_helper

VERDICTS_FILE = Path(__file__).parent / "operators.json"
_TARGET = "x86-64-v3"
# The most examples that are tried until one is fast.
_MOST_EXAMPLES = 4
# Inputs as models have them, for operators whose examples are smaller than any rule takes: shapes and attributes.
_OWN_EXAMPLES: dict[str, tuple[list[list[int]], dict[str, Any]]] = {
    "AveragePool": ([[1, 32, 28, 28]], {"kernel_shape": [3, 3], "strides": [2, 2]}),
    "ConvTranspose": ([[1, 32, 14, 14], [32, 32, 2, 2]], {"strides": [2, 2]}),
    "Conv": ([[1, 32, 28, 28], [32, 32, 3, 3]], {"pads": [1, 1, 1, 1]}),
    "Einsum": ([[1, 2, 16, 32], [1, 2, 16, 32]], {"equation": "bhid,bhjd->bhij"}),
    "GlobalAveragePool": ([[1, 32, 28, 28]], {}),
    "GlobalMaxPool": ([[1, 32, 28, 28]], {}),
    "LogSoftmax": ([[16, 64]], {}),
    "MaxPool": ([[1, 32, 28, 28]], {"kernel_shape": [3, 3], "strides": [2, 2]}),
    "Softmax": ([[16, 64]], {}),
}
_BEST_FIRST = ("fast", "fallback", "folded")


def judge(operator: str, examples: list[Any]) -> dict[str, str]:
    """The best verdict of an operator's examples, `{"verdict": ..., "rule": ...}`; empty where none is compiled."""
    from tvmflow.compiler.diagnosis import diagnose
    from tvmflow.errors import TvmflowError
    from tvmflow.hardware.target import resolve

    best: dict[str, str] = {}
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "model.onnx"
        own = [_own_example(operator)] if operator in _OWN_EXAMPLES else []
        for example in [*own, *examples[:_MOST_EXAMPLES]]:
            for model in [example] if isinstance(example, onnx.ModelProto) else _forms(example):
                if best.get("verdict") == "fast":
                    return best
                path.write_bytes(model.SerializeToString())
                try:
                    diagnosis = diagnose(path, resolve(_TARGET))
                except TvmflowError:
                    continue
                is_own = {operator, *_inlined(model, operator)}
                for item in diagnosis.operators:
                    if item.operator not in is_own or item.verdict not in _BEST_FIRST or diagnosis.refusals:
                        continue
                    rank = _BEST_FIRST.index(item.verdict)
                    if not best or rank < _BEST_FIRST.index(best["verdict"]):
                        best = {"verdict": item.verdict, "rule": item.rule}
    return best


def _own_example(operator: str) -> onnx.ModelProto:
    """A model of one node; all inputs but the first are weights."""
    shapes, attributes = _OWN_EXAMPLES[operator]
    names = [f"x{place}" for place in range(len(shapes))]
    generator = np.random.default_rng(0)
    weights = [
        numpy_helper.from_array(generator.normal(size=shape).astype("float32"), name)
        for name, shape in list(zip(names, shapes, strict=True))[1:]
    ]
    graph = onnx.helper.make_graph(
        [onnx.helper.make_node(operator, names, ["y"], **attributes)],
        operator,
        [onnx.helper.make_tensor_value_info(names[0], onnx.TensorProto.FLOAT, shapes[0])],
        [onnx.helper.make_tensor_value_info("y", onnx.TensorProto.FLOAT, [None] * len(shapes[0]))],
        weights,
    )
    return onnx.helper.make_model(graph, opset_imports=[onnx.helper.make_opsetid("", 18)], ir_version=9)


def _inlined(model: onnx.ModelProto, operator: str) -> set[str]:
    """The operators that stand for one that is inlined: any of its function body; empty for others."""
    from tvmflow.compiler.onnx import has_converter, is_function

    (node,) = [node for node in model.graph.node if node.op_type == operator.rpartition(".")[2]][:1]
    if has_converter(node) or not is_function(node):
        return set()
    return {schema.name for schema in onnx.defs.get_all_schemas() if schema.domain == ""}


def _forms(example: Any) -> Iterator[onnx.ModelProto]:
    """The example with all inputs but the first as constants, and as it is."""
    constant = onnx.ModelProto()
    constant.CopyFrom(example.model)
    values = dict(zip((value.name for value in constant.graph.input), example.data_sets[0][0], strict=False))
    arrays = {
        name: numpy_helper.to_array(value) if isinstance(value, onnx.TensorProto) else value
        for name, value in list(values.items())[1:]
    }
    arrays = {
        name: np.asarray(value)
        for name, value in arrays.items()
        if isinstance(value, np.ndarray | np.generic) and value.dtype != object
    }
    inputs = [value for value in constant.graph.input if value.name not in arrays]
    del constant.graph.input[:]
    constant.graph.input.extend(inputs)
    constant.graph.initializer.extend(numpy_helper.from_array(value, name) for name, value in arrays.items())
    yield constant
    yield example.model


def examples_by_operator(without: Collection[str] = ()) -> dict[str, list[Any]]:
    """The node tests of the ONNX package by operator, those of the largest results first.

    Its modules of the names `without` are left out: each computes its expected values when it is imported.
    """
    from onnx.backend.test.case import node as package

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # some expected values are computed by dividing by zero
        for module in pkgutil.walk_packages(package.__path__, f"{package.__name__}."):
            if module.name.rpartition(".")[2] not in without:
                importlib.import_module(module.name)
    cases = [case for case in package._NodeTestCases if "_expanded" not in case.name]
    by_operator: dict[str, list[Any]] = {}
    for case in cases:
        for node in case.model.graph.node[:1]:
            domain = "" if node.domain in ("", "ai.onnx") else f"{node.domain}."
            by_operator.setdefault(f"{domain}{node.op_type}", []).append(case)
    for group in by_operator.values():
        group.sort(key=lambda case: (-_size(case), case.name))
    return by_operator


def _size(case: Any) -> int:
    return max((int(np.size(value)) for value in case.data_sets[0][0] if isinstance(value, np.ndarray)), default=0)


def main() -> int:
    """Judge operators and write the file."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("operators", nargs="*")
    parser.add_argument("--new", action="store_true", help="only those that are imported and have no verdict yet")
    options = parser.parse_args()
    from tvmflow.compiler.operator_table import list_operators

    verdicts = json.loads(VERDICTS_FILE.read_text()) if VERDICTS_FILE.exists() else {}
    examples = examples_by_operator()
    for operator in list_operators():
        name = f"{operator.domain}.{operator.name}" if operator.domain else operator.name
        is_asked_for = name in options.operators or not options.operators
        if operator.kind == "refused":
            verdicts.pop(name, None)
        elif is_asked_for and not (options.new and name in verdicts):
            verdict = judge(name, examples.get(name, []))
            verdicts.pop(name, None)
            if verdict:
                verdicts[name] = verdict
            print(name, verdict, flush=True)
            _write(verdicts)
    _write(verdicts)
    return 0


def _write(verdicts: dict[str, dict[str, str]]) -> None:
    lines = ",\n".join(f"  {json.dumps(name)}: {json.dumps(verdicts[name])}" for name in sorted(verdicts))
    VERDICTS_FILE.write_text(f"{{\n{lines}\n}}\n")


if __name__ == "__main__":
    sys.exit(main())
