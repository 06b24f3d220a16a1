"""Prints how long models take on an NVIDIA GPU, beside PyTorch on the same GPU: `python benchmarks/gpu.py [MODEL ...]`.

Needs a GPU and a build of PyTorch for CUDA. A MODEL is one of the catalogue, which is built for this GPU, or a bundle
that `tvmflow compile` made elsewhere, of a file named like a model: `resnet50.onnx`. The bundle's file has `fp16` in
its name if that is its precision: `resnet50.fp16.bundle`.

PyTorch runs the model in the bundle's precision, convolutions with the channels last and cuDNN's search for the fastest
algorithm, without TF32 in fp32: call by call (eager), as one CUDA graph (graph), and with --compile by torch.compile,
whose CUDA graphs are on (compiled). `us` are microseconds on the GPU for one call whose inputs are there, the median of
several turns of many calls each; `call` is a whole call from Python with NumPy arrays. `error` is the largest
difference from ONNX Runtime's outputs in float32, which the bundle holds, over the largest of them.
"""

import importlib.util
import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from catalogue import Model, find
from commandline import new_parser, positive, run_main, state_folder
from deployment import Unavailable, gpu
from rich import box
from rich.console import Console
from rich.table import Table

from tvmflow import runtime
from tvmflow.errors import InputError, TvmflowError
from tvmflow.hardware.target import Precision
from tvmflow.workspace import Record

# Turns of each way, and calls in a turn.
_TURNS, _CALLS = 9, 50


class Row(Record):
    """The figures of a model: microseconds by way, and the error of ours. A way that fails has none."""

    model: str
    precision: Precision
    batch: int
    tvmflow: float
    call: float
    error: float
    eager: float | None = None
    graph: float | None = None
    compiled: float | None = None


def measure(file: Path, compiles: bool) -> Row:
    """Measure a bundle and PyTorch. Raises BundleError for a bundle that this machine cannot run."""
    import torch

    with runtime.load(file) as loaded:
        name = loaded.manifest.name.split(".")[0].split("-")[0]
        (model,) = find([name])
        inputs, golden = loaded.sample
        outputs = loaded(**inputs)
        errors = [
            float(np.abs(outputs[key].astype("float64") - value).max() / np.abs(value).max())
            for key, value in golden.items()
        ]
        half = "fp16" in file.name
        peers = _peers(model, inputs, torch.float16 if half else torch.float32, compiles)
        ways: dict[str, Callable[[], Any]] = {"tvmflow": _device_call(loaded, inputs), **peers}
        times = _take_turns(ways)
        call = _median(lambda: loaded(**inputs))
    batch = next(iter(inputs.values())).shape[0]
    return Row(model=name, precision="fp16" if half else "fp32", batch=batch, call=call, error=max(errors), **times)


def _device_call(loaded: runtime.CompiledModel, inputs: Any) -> Callable[[], Any]:
    """A call of the bundle's function on inputs that are on the GPU."""
    call = loaded._prepare_function("main", list(inputs.values()))
    tensors = [to_tensor(array) for to_tensor, array in zip(call.inputs, inputs.values(), strict=True)]
    return lambda: call.function(*tensors, *call.others)


def _peers(model: Model, inputs: Any, dtype: Any, compiles: bool) -> dict[str, Callable[[], Any]]:
    """PyTorch's ways to run a model."""
    import torch

    torch.backends.cudnn.benchmark = True
    torch.backends.cudnn.allow_tf32 = torch.backends.cuda.matmul.allow_tf32 = False
    network = _create(model).eval().cuda().to(dtype)
    tensors = [torch.from_numpy(array).cuda() for array in inputs.values()]
    tensors = [item.to(dtype) if item.is_floating_point() else item for item in tensors]
    if any(item.dim() == 4 for item in tensors):
        network = network.to(memory_format=torch.channels_last)
        tensors = [item.to(memory_format=torch.channels_last) if item.dim() == 4 else item for item in tensors]

    def run(function: Callable[..., Any]) -> Callable[[], Any]:
        def call() -> Any:
            with torch.inference_mode():
                return function(*tensors)

        return call

    eager = run(network)
    stream, graph = torch.cuda.Stream(), torch.cuda.CUDAGraph()
    with torch.cuda.stream(stream):
        for _ in range(3):
            eager()
    torch.cuda.synchronize()
    with torch.inference_mode(), torch.cuda.graph(graph):
        network(*tensors)
    ways = {"eager": eager, "graph": graph.replay}
    if compiles:
        compiled = run(torch.compile(network, mode="reduce-overhead"))
        for _ in range(3):
            compiled()
        ways["compiled"] = compiled
    return ways


def _create(model: Model) -> Any:
    """Create a model of the catalogue. The files of several models have one name, so each is a module of its own."""
    file, _, function = model.factory.partition(":")
    spec = importlib.util.spec_from_file_location(f"{model.folder.name}_{file}", model.folder / f"{file}.py")
    if spec is None or spec.loader is None:
        raise InputError(f"there is no file {file}.py in {model.folder}")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return getattr(module, function)(**dict(model.arguments))


def _take_turns(ways: dict[str, Callable[[], Any]]) -> dict[str, float]:
    times: dict[str, list[float]] = {name: [] for name in ways}
    for call in ways.values():
        _seconds(call, _CALLS)
    for _ in range(_TURNS):
        for name, call in ways.items():
            times[name].append(_seconds(call, _CALLS) / _CALLS * 1e6)
    return {name: statistics.median(values) for name, values in times.items()}


def _seconds(call: Callable[[], Any], count: int) -> float:
    import torch

    torch.cuda.synchronize()
    start = time.perf_counter()
    for _ in range(count):
        call()
    torch.cuda.synchronize()
    return time.perf_counter() - start


def _median(call: Callable[[], Any]) -> float:
    return statistics.median(_seconds(call, 1) for _ in range(_CALLS)) * 1e6


def build(name: str, precision: Precision, batch: int, state: Path) -> Path:
    """Export a model of the catalogue, and build it for this machine's GPU by `tvmflow compile`."""
    import prepare

    (model,) = find([name])
    onnx = prepare.export(model, batch, state)
    bundle = state / f"{name}.{precision}.{batch}.bundle"
    with tempfile.TemporaryDirectory(dir=state) as folder:
        named = Path(folder) / f"{name}.onnx"
        named.symlink_to(onnx)
        options = ["--target", gpu().name, "--precision", precision, "-o", str(bundle)]
        done = subprocess.run(
            [str(Path(sys.executable).with_name("tvmflow")), "compile", str(named), *options], check=False
        )
    if done.returncode != 0:
        raise InputError(f"{name} was not built; its error stands above")
    return bundle


def print_table(rows: Sequence[Row], device: str) -> None:
    """Print a line for each model: microseconds, and our time over PyTorch's."""
    table = Table(box=box.SIMPLE_HEAD, title=device)
    for column in ("model", "precision", "batch", "us", "call", "/ eager", "/ graph", "/ compiled", "error"):
        table.add_column(column, justify="left" if column in ("model", "precision") else "right")
    for row in rows:
        ratios = [f"{row.tvmflow / peer:.2f}" if peer else "-" for peer in (row.eager, row.graph, row.compiled)]
        figures = [f"{row.tvmflow:.0f}", f"{row.call:.0f}", *ratios, f"{row.error:.1e}"]
        table.add_row(row.model, row.precision, str(row.batch), *figures)
    Console(width=100).print(table)


def main(argv: Sequence[str] | None = None) -> int:
    """Measure the models of the command line; return the exit code."""
    parser = new_parser(__doc__)
    parser.add_argument("models", nargs="*", default=["resnet50", "bert_base"], metavar="MODEL", help="or a bundle")
    parser.add_argument("--precision", choices=["fp32", "fp16"], default="fp16", help="of the models (fp16)")
    parser.add_argument("--batch", type=positive, default=1, help="of the models (1)")
    parser.add_argument("--compile", action="store_true", help="measure torch.compile, which takes a minute a model")
    arguments = parser.parse_args(argv)
    try:
        import torch
    except ImportError as error:
        raise InputError("PyTorch is not installed") from error
    if not torch.cuda.is_available():
        raise InputError("this build of PyTorch sees no NVIDIA GPU; install one for CUDA on a machine with a GPU")
    rows, failures = [], 0
    for name in arguments.models:
        try:
            file = Path(name)
            if not file.is_file():
                file = build(name, arguments.precision, arguments.batch, state_folder(arguments))
            rows.append(measure(file, arguments.compile))
        except (TvmflowError, Unavailable) as error:
            failures += 1
            print(f"{name}: {error}", file=sys.stderr)
    print_table(rows, torch.cuda.get_device_name(0))
    if arguments.json:
        arguments.json.write_text(json.dumps([row.model_dump(mode="json") for row in rows], indent=2))
    return 1 if failures else 0


if __name__ == "__main__":
    run_main(main)
