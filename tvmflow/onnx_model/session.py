"""Sessions of ONNX Runtime, which computes what an ONNX model says."""

import tempfile
from collections import Counter
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from tvmflow.arrays import NamedArrays
from tvmflow.errors import ExportError
from tvmflow.hardware import memory
from tvmflow.onnx_model.external_data import load, save
from tvmflow.usercode import describe

if TYPE_CHECKING:
    import onnx
    import onnxruntime


# What to do where a model does not take its samples.
_ADVICE = "give samples that it takes under `inputs` of a release file"


def open_session(
    path: Path,
    threads: int | None = None,
    *,
    prints_errors: bool = True,
    optimizes: bool = True,
    exact: bool = True,
    packs: bool = True,
) -> "onnxruntime.InferenceSession":
    """Load an ONNX file with ONNX Runtime on the CPU. Raises ExportError when ONNX Runtime cannot load it.

    `threads` is the number of threads of an operator, by default ONNX Runtime's choice. With `prints_errors`, ONNX
    Runtime itself prints the error of a run that fails. Without `optimizes` it runs the graph as the file has it.
    Without `packs` it is loaded sooner and runs slower: weights stay as the file has them, and each run packs them.

    With `exact`, it computes what the file says, on every processor. ONNX Runtime's own defaults take less time: they
    add two products of 8-bit integers in 16 bits on x86 processors without VNNI, which cuts large sums off, and they
    round to 8 bits what is multiplied with weights that the file stores in 4 bits before a DequantizeLinear. For the
    exact sums it makes unsigned weights of signed ones. It cannot do that twice with the same weights, so each layer
    gets its own copy of them then. A model for which it has no such operator is loaded with the defaults.
    """
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.log_severity_level = 3 if prints_errors else 4
    if not optimizes:
        options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
    if not packs:
        options.add_session_config_entry("session.disable_prepacking", "1")
    if exact:
        options.add_session_config_entry("session.x64quantprecision", "1")
        options.add_session_config_entry("session.qdq_matmulnbits_accuracy_level", "1")
    if threads is not None:
        options.intra_op_num_threads = threads
    try:
        return onnxruntime.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])
    except Exception as error:
        if exact:
            return _open_without_sharing(path, options) or open_session(
                path, threads, prints_errors=prints_errors, optimizes=optimizes, exact=False, packs=packs
            )
        # The file may be a copy, whose place says nothing to a user.
        cause = describe(error).replace(f"Load model from {path} failed:", "").replace(str(path), path.name)
        raise ExportError(f"ONNX Runtime cannot load the model ({cause})") from error


def _open_without_sharing(path: Path, options: "onnxruntime.SessionOptions") -> "onnxruntime.InferenceSession | None":
    """Load an ONNX file in which no two nodes share 8-bit weights; None where they share none, or where that fails."""
    import onnxruntime

    try:
        model = load(path)
        if not _unshare_weights(model.graph):
            return None
        with tempfile.TemporaryDirectory() as folder:
            copy = Path(folder) / "model.onnx"
            save(model, copy)
            return onnxruntime.InferenceSession(str(copy), options, providers=["CPUExecutionProvider"])
    except Exception:
        return None


def _unshare_weights(graph: "onnx.GraphProto") -> bool:
    """Give each node its own copy of signed 8-bit weights, dequantised or not; whether two nodes shared any."""
    import onnx

    initializers = {item.name: item for item in graph.initializer}
    weights = {name for name, item in initializers.items() if item.data_type == onnx.TensorProto.INT8}
    dequantised = {
        node.output[0]: node
        for node in graph.node
        if node.op_type == "DequantizeLinear" and node.input[0] in weights and initializers.keys() >= set(node.input)
    }
    uses: Counter[str] = Counter()

    def own(name: str) -> str:
        uses[name] += 1
        return name if uses[name] == 1 else f"{name}:{uses[name]}"

    nodes = []
    for node in graph.node:
        for place, name in enumerate(node.input):
            if name in dequantised and (copy := own(name)) != name:
                nodes.append(onnx.NodeProto())
                nodes[-1].CopyFrom(dequantised[name])
                nodes[-1].name, nodes[-1].output[0], node.input[place] = copy, copy, copy
        nodes.append(node)
    for node in nodes:
        for place, name in enumerate(node.input):
            if name in weights and (copy := own(name)) != name:
                graph.initializer.add().CopyFrom(initializers[name])
                graph.initializer[-1].name = node.input[place] = copy
    ordered = onnx.GraphProto(node=nodes)
    del graph.node[:]
    graph.node.extend(ordered.node)
    return max(uses.values(), default=0) > 1


def to_function(session: "onnxruntime.InferenceSession") -> Callable[[NamedArrays], NamedArrays]:
    """Return a function from inputs to outputs by name that is as fast as the session, so that it may be timed.

    It raises ExportError when ONNX Runtime cannot run the model on the inputs.
    """
    names = [output.name for output in session.get_outputs()]

    def run(inputs: NamedArrays) -> NamedArrays:
        try:
            return dict(zip(names, session.run(names, inputs), strict=True))
        except Exception as error:
            raise _run_error(error, _ADVICE) from error

    return run


def run_session(
    session: "onnxruntime.InferenceSession",
    inputs: NamedArrays,
    most_memory: int | None = None,
    advice: str = _ADVICE,
) -> NamedArrays:
    """Return ONNX Runtime's outputs by name.

    Raises ExportError, which ends with `advice`, when it cannot run the model on these inputs, or needs more than
    `most_memory` bytes for it. With that limit, ONNX Runtime keeps no memory for later runs.
    """
    names = [output.name for output in session.get_outputs()]
    run = partial(session.run, names, inputs)
    try:
        return dict(zip(names, run() if most_memory is None else _run_within(run, most_memory), strict=True))
    except Exception as error:
        raise _run_error(error, advice) from error


def _run_error(error: Exception, advice: str) -> ExportError:
    return ExportError(f"ONNX Runtime cannot run the model on the samples ({describe(error)}); {advice}")


def _run_within(run: Callable[..., Any], most_memory: int) -> Any:
    """Run a session within so many bytes of memory, of which it keeps none."""
    import onnxruntime

    options = onnxruntime.RunOptions()
    options.add_run_config_entry("memory.enable_memory_arena_shrinkage", "cpu:0")
    with memory.limit(most_memory):
        return run(options)


def compute_values(model: "onnx.ModelProto", inputs: Mapping[str, Any]) -> dict[str, Any]:
    """Return the tensors of a model's main graph by name, its inputs among them, as ONNX Runtime computes them.

    Raises ExportError when it cannot run the model.
    """
    import onnx

    copy = onnx.ModelProto()
    copy.CopyFrom(model)
    present = {value.name for value in model.graph.output}
    results = dict.fromkeys(name for node in model.graph.node for name in node.output if name and name not in present)
    copy.graph.output.extend(onnx.ValueInfoProto(name=name) for name in results)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "model.onnx"
        save(copy, path)
        session = open_session(path)
    values = {**run_session(session, dict(inputs)), **inputs}
    return {name: value for name, value in values.items() if isinstance(value, np.ndarray)}
