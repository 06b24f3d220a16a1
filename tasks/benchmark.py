"""Benchmark: the bundle and its peers, each in a process of its own, in turn, with equal threads."""

import resource
import time
from collections.abc import Callable, Mapping
from typing import Any, Literal

import numpy as np

from tasks.export import ExportResult, find_source
from tasks.package import PackageResult
from tasks.step import Context, Job, step
from tasks.train import TrainResult, weights_path
from tvmflow import samples
from tvmflow.errors import VerdictError
from tvmflow.process import Child, Emit
from tvmflow.progress import reporter
from tvmflow.source import Source, load_module, open_session, run_session
from tvmflow.spec import Benchmark
from tvmflow.target import Target, host
from tvmflow.workspace import Artifact, Outcome, Record, StepResult, run_step

Runner = Literal["tvm", "onnxruntime", "pytorch"]


class RunnerJob(Job):
    """One round of one runner: `repeats` timed runs after `warmup` untimed ones, on the first sample."""

    runner: Runner
    source: Source
    onnx: Artifact
    bundle: Artifact
    samples: Artifact
    threads: int
    warmup: int
    repeats: int


class Round(StepResult):
    """The times of one round in seconds per run, the load time in seconds, the peak memory so far in bytes."""

    seconds: tuple[float, ...]
    load_seconds: float
    peak_memory: int


class Latency(Record):
    """Milliseconds per run over all rounds, and runs per second at the median."""

    mean: float
    std: float
    p50: float
    p90: float
    p99: float
    min: float
    throughput: float


class Measured(Record):
    """One runner: latency, seconds for all runs together, load time in seconds, peak memory and size in bytes."""

    latency_ms: Latency
    total_seconds: float
    load_seconds: float
    peak_memory: int
    size: int


class BenchmarkResult(StepResult):
    """The runners measured side by side in one phase.

    `ratio` is the bundle's median over the peer's, below one being faster. `noise` is the largest difference between
    the bundle's round medians, relative to their median.
    """

    runs: int
    threads: int
    runners: dict[Runner, Measured]
    ratio: dict[Runner, float]
    noise: float


_loaded: dict[str, tuple[Callable[[], object], float]] = {}


def work(job: RunnerJob, emit: Emit) -> Round:
    """Run one round, in the runner's own process, which loads the model with its first round."""
    if job.runner not in _loaded:
        start = time.perf_counter()
        prepare = {"tvm": _bundle, "onnxruntime": _onnxruntime, "pytorch": _pytorch}[job.runner]
        run = prepare(job)
        _loaded[job.runner] = run, time.perf_counter() - start
    run, load_seconds = _loaded[job.runner]
    for _ in range(job.warmup):
        run()
    seconds = []
    for _ in range(job.repeats):
        start = time.perf_counter()
        run()
        seconds.append(time.perf_counter() - start)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    return Round(seconds=tuple(seconds), load_seconds=load_seconds, peak_memory=peak)


@step
def benchmark(
    context: Context,
    exported: Outcome[ExportResult],
    packaged: Outcome[PackageResult],
    target: Target,
    trained: Outcome[TrainResult] | None = None,
) -> Outcome[BenchmarkResult]:
    """Measure the bundle, ONNX Runtime and PyTorch eager in turn, on the first sample's sizes."""
    section: Benchmark = context.spec.benchmark
    source, identity = find_source(context, weights_path(context, trained))
    peers = [peer for peer in section.peers if peer != "pytorch" or source.framework == "pytorch"]
    job = RunnerJob(
        home=context.workspace.folder,
        runner="tvm",
        source=source,
        onnx=exported.result.onnx,
        bundle=packaged.result.bundle,
        samples=exported.result.samples,
        threads=section.threads or min(target.threads, host().cores),
        warmup=section.warmup,
        repeats=section.repeats,
    )
    reads: dict[str, Any] = {
        **job.model_dump(mode="json", exclude={"home", "source", "runner"}),
        "source": identity,
        "rounds": section.rounds,
        "peers": peers,
    }
    return run_step(
        context.workspace,
        "benchmark",
        reads,
        BenchmarkResult,
        lambda: _measure(context, job, [*peers], target),
        target=target.name,
    )


def _measure(context: Context, job: RunnerJob, peers: list[Runner], target: Target) -> BenchmarkResult:
    rounds = context.spec.benchmark.rounds
    runners: list[Runner] = ["tvm", *peers]
    children: dict[Runner, Child] = {}
    results: dict[Runner, list[Round]] = {runner: [] for runner in runners}
    try:
        for runner in runners:
            children[runner] = Child(
                "tasks.benchmark:work",
                log=context.log(f"benchmark-{runner}", target.name),
                paths=(context.spec.folder,),
                torch=runner == "pytorch",
            )
        done = 0
        for _ in range(rounds):
            for runner in runners:
                reporter().progressed("benchmark", target.name, done, rounds * len(runners), runner)
                told = job.model_copy(update={"runner": runner})
                results[runner].append(children[runner].call(told, Round, timeout=context.timeout))
                done += 1
    finally:
        for child in children.values():
            child.close()
    sizes = {"tvm": job.bundle.size, "onnxruntime": job.onnx.size, "pytorch": job.onnx.size}
    measured = {runner: _summary(results[runner], sizes[runner]) for runner in runners}
    ours = measured["tvm"].latency_ms.p50
    medians = [float(np.median(item.seconds)) for item in results["tvm"]]
    return BenchmarkResult(
        runs=rounds * job.repeats,
        threads=job.threads,
        runners=measured,
        ratio={peer: ours / measured[peer].latency_ms.p50 for peer in peers},
        noise=(max(medians) - min(medians)) / float(np.median(medians)),
    )


def gate_failures(context: Context, result: BenchmarkResult, bundle: Artifact, target: Target) -> list[str]:
    """What the release file's gates say against the measurements; empty when all are kept."""
    gates = context.spec.gates
    measured: Mapping[str, tuple[float | None, float | None, str]] = {
        "max_latency_ms": (result.runners["tvm"].latency_ms.p50, gates.max_latency_ms, "p50 latency in ms"),
        "max_ratio_onnxruntime": (
            result.ratio.get("onnxruntime"),
            gates.max_ratio_onnxruntime,
            "latency over ONNX Runtime's",
        ),
        "max_ratio_pytorch": (result.ratio.get("pytorch"), gates.max_ratio_pytorch, "latency over PyTorch's"),
        "max_bundle_mb": (bundle.size / 1e6, gates.max_bundle_mb, "bundle size in MB"),
    }
    failures = []
    for gate, (value, bound, what) in measured.items():
        if bound is None:
            continue
        if value is None:
            raise VerdictError(f"gate {gate} cannot be checked: add the peer to benchmark.peers")
        if value > bound:
            failures.append(f"target {target.name!r}: {what} is {value:.4g}, gate {gate} allows {bound:g}")
    return failures


def _bundle(job: RunnerJob) -> Callable[[], object]:
    from tvmflow import runtime

    model = runtime.load(job.workspace.path(job.bundle), threads=job.threads)
    inputs = samples.load(job.workspace.path(job.samples))[0][0]
    return lambda: model(**inputs)


def _onnxruntime(job: RunnerJob) -> Callable[[], object]:
    session = open_session(job.workspace.path(job.onnx), job.threads)
    inputs = samples.load(job.workspace.path(job.samples))[0][0]
    return lambda: run_session(session, inputs)


def _pytorch(job: RunnerJob) -> Callable[[], object]:
    import torch

    torch.set_num_threads(job.threads)
    module = load_module(job.source)
    inputs = samples.load(job.workspace.path(job.samples))[0][0]
    tensors = [torch.from_numpy(array) for array in inputs.values()]

    def run() -> object:
        with torch.inference_mode():
            return module(*tensors)

    return run


def _summary(rounds: list[Round], size: int) -> Measured:
    seconds = np.array([value for item in rounds for value in item.seconds])
    p50, p90, p99 = (float(value) * 1e3 for value in np.percentile(seconds, (50, 90, 99)))
    return Measured(
        latency_ms=Latency(
            mean=float(seconds.mean()) * 1e3,
            std=float(seconds.std()) * 1e3,
            p50=p50,
            p90=p90,
            p99=p99,
            min=float(seconds.min()) * 1e3,
            throughput=1e3 / p50,
        ),
        total_seconds=float(seconds.sum()),
        load_seconds=rounds[0].load_seconds,
        peak_memory=max(item.peak_memory for item in rounds),
        size=size,
    )
