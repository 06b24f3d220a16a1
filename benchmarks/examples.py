"""Prints the examples' bundles beside ONNX Runtime and PyTorch: `python benchmarks/examples.py [FILE ...]`.

Each model goes through the steps of a release up to the benchmark: processes of their own, in turn, equal threads. A
figure is a median over all rounds; a ratio below one means that the bundle is faster.
"""

import argparse
from pathlib import Path

from rich import box
from rich.console import Console
from rich.table import Table

from flows.release import override
from tasks.benchmark import BenchmarkResult, benchmark
from tasks.build import build
from tasks.export import export
from tasks.package import package
from tasks.relax_import import relax_import
from tasks.step import Context
from tasks.train import train
from tasks.tune import tune
from tvmflow import settings as machine
from tvmflow import spec as release_file
from tvmflow.cli.display import RichReporter
from tvmflow.workspace import Workspace

EXAMPLES = Path(__file__).parent.parent / "examples"
MODELS = ("digits/release", "vision/mobilenet_v2", "vision/resnet18", "vision/resnet50", "encoder/release")


def measure(file: Path, trials: int | None, runs: int | None) -> BenchmarkResult:
    """Build the model of a release file for this machine and measure it."""
    spec = override(release_file.load(file), ["native"], trials, runs)
    settings = machine.load()
    context = Context(spec, settings, Workspace(settings.state))
    (target,) = spec.resolved_targets()
    trained = train.fn(context) if spec.train is not None else None
    exported = export.fn(context, trained)
    imported = relax_import.fn(context, exported)
    tuned = tune.fn(context, imported, target)
    built = build.fn(context, imported, tuned, target)
    packaged = package.fn(context, exported, imported, tuned, built, target)
    return benchmark.fn(context, exported, packaged, target, trained).result


def main() -> None:
    """Measure every file and print one table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("files", nargs="*", type=Path, default=[EXAMPLES / f"{name}.yaml" for name in MODELS])
    parser.add_argument("--trials", type=int, help="tuning trials per model; without it, what the release file says")
    parser.add_argument("--runs", type=int, help="timed runs of each runner per model")
    arguments = parser.parse_args()
    table = Table(box=box.SIMPLE_HEAD)
    for heading in ("model", "at", "p50 ms", "min ms", "/ ONNX RT p50", "min", "/ PyTorch p50", "min", "noise"):
        table.add_column(heading, justify="left" if heading in ("model", "at") else "right")
    with RichReporter(Console(stderr=True)).live():
        for file in arguments.files:
            result = measure(file, arguments.trials, arguments.runs)
            for point in result.points:
                ours = point.runners["tvm"].latency_ms
                peers = [point.runners[name].latency_ms for name in ("onnxruntime", "pytorch")]
                ratios = [f"{value:.2f}" for peer in peers for value in (ours.p50 / peer.p50, ours.min / peer.min)]
                name = release_file.load(file).name
                table.add_row(name, point.label, f"{ours.p50:.3f}", f"{ours.min:.3f}", *ratios, f"{point.noise:.0%}")
    Console(width=120).print(table)
    print(f"{result.runs} runs of each in {result.threads} threads; noise: how far the bundle's own rounds differ")


if __name__ == "__main__":
    main()
