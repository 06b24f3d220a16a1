"""Sessions of ONNX Runtime, which computes what an ONNX model says."""

import tempfile
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from tvmflow.arrays import NamedArrays
from tvmflow.errors import ExportError
from tvmflow.hardware import memory
from tvmflow.onnx_model.external_data import save
from tvmflow.usercode import describe

if TYPE_CHECKING:
    import onnx
    import onnxruntime


def open_session(
    path: Path,
    threads: int | None = None,
    *,
    prints_errors: bool = True,
    optimizes: bool = True,
    exact: bool = True,
) -> "onnxruntime.InferenceSession":
    """Load an ONNX file with ONNX Runtime on the CPU. Raises ExportError when ONNX Runtime cannot load it.

    `threads` is the number of threads of an operator, by default ONNX Runtime's choice. With `prints_errors`, ONNX
    Runtime itself prints the error of a run that fails. Without `optimizes` it runs the graph as the file has it.

    With `exact`, it computes what the file says, on every processor. ONNX Runtime's own defaults take less time: they
    add two products of 8-bit integers in 16 bits on x86 processors without VNNI, which cuts large sums off, and they
    round to 8 bits what is multiplied with weights that the file stores in 4 bits before a DequantizeLinear. A model
    that ONNX Runtime cannot load so, because it makes unsigned weights of signed ones and has no such operator, is
    loaded with the defaults.
    """
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.log_severity_level = 3 if prints_errors else 4
    if not optimizes:
        options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
    if exact:
        options.add_session_config_entry("session.x64quantprecision", "1")
        options.add_session_config_entry("session.qdq_matmulnbits_accuracy_level", "1")
    if threads is not None:
        options.intra_op_num_threads = threads
    try:
        return onnxruntime.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])
    except Exception as error:
        if exact:
            return open_session(path, threads, prints_errors=prints_errors, optimizes=optimizes, exact=False)
        # The file may be a copy, whose place says nothing to a user.
        cause = describe(error).replace(f"Load model from {path} failed:", "").replace(str(path), path.name)
        raise ExportError(f"ONNX Runtime cannot load the model ({cause})") from error


def run_session(
    session: "onnxruntime.InferenceSession",
    inputs: NamedArrays,
    most_memory: int | None = None,
    advice: str = "give samples that it takes under `inputs` of a release file",
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
        raise ExportError(f"ONNX Runtime cannot run the model on the samples ({describe(error)}); {advice}") from error


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
