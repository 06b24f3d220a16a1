"""Benchmark: the bundle and its peers, each in a process of its own, in turn, with equal threads."""

import resource
import time
from collections.abc import Callable, Mapping
from typing import Any, Literal

import numpy as np

from tasks.export import ExportResult, find_source
from tasks.package import PackageResult
from tasks.step import Context, Job, step
from tasks.train import TrainResult
from tvmflow import samples
from tvmflow.bundle import read_manifest
from tvmflow.errors import VerdictError
from tvmflow.process import Child, Emit
from tvmflow.progress import reporter
from tvmflow.samples import Named
from tvmflow.source import Source, load_module, open_session, run_session
from tvmflow.spec import Benchmark, Input, Samples
from tvmflow.target import Target, host
from tvmflow.workspace import Artifact, Outcome, Record, StepResult, run_step

Runner = Literal["tvm", "onnxruntime", "pytorch"]


class RunnerJob(Job):
    """One round of one runner: `repeats` timed runs after `warmup` untimed ones, on the sample number `point`.

    `threads` are those of the peers, and of the bundle unless it was found to be faster on fewer: `own_threads`.
    """

    runner: Runner
    point: int
    source: Source
    onnx: Artifact
    bundle: Artifact
    samples: Artifact
    threads: int
    own_threads: int
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


class Point(Record):
    """The runners measured side by side at one choice of the symbolic dimensions' sizes.

    `ratio` is the bundle's median over the peer's, below one being faster. `noise` is the largest difference between
    the bundle's round medians, relative to their median.
    """

    sizes: dict[str, int]
    runners: dict[Runner, Measured]
    ratio: dict[Runner, float]
    noise: float

    @property
    def label(self) -> str:
        """The sizes in words, as "batch 1"; empty for static shapes."""
        return ", ".join(f"{name} {size}" for name, size in self.sizes.items())


class BenchmarkResult(StepResult):
    """What was measured, the typical sizes first; `runs` is the number of timed runs of each runner at each point."""

    runs: int
    threads: int
    points: tuple[Point, ...]

    @property
    def typical(self) -> Point:
        """The point that a release is judged by."""
        return self.points[0]


_loaded: dict[str, tuple[Callable[[Named], object], float]] = {}


def work(job: RunnerJob, emit: Emit) -> Round:
    """Run one round, in the runner's own process, which loads the model with its first round."""
    if job.runner not in _loaded:
        start = time.perf_counter()
        prepare = {"tvm": _bundle, "onnxruntime": _onnxruntime, "pytorch": _pytorch}[job.runner]
        run = prepare(job)
        _loaded[job.runner] = run, time.perf_counter() - start
    run, load_seconds = _loaded[job.runner]
    inputs = samples.load(job.workspace.path(job.samples))[job.point][0]
    return timed(lambda: run(inputs), job.warmup, job.repeats, load_seconds)


def timed(run: Callable[[], object], warmup: int, repeats: int, load_seconds: float) -> Round:
    """One round in this process: `repeats` timed runs after `warmup` untimed ones."""
    for _ in range(warmup):
        run()
    seconds = []
    for _ in range(repeats):
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
    """Measure the bundle, ONNX Runtime and PyTorch eager in turn, at each size that the release file names."""
    section: Benchmark = context.spec.benchmark
    source, identity = find_source(context, trained)
    peers = [peer for peer in section.peers if peer != "pytorch" or source.framework == "pytorch"]
    threads = section.threads or min(target.threads, host().cores)
    own = read_manifest(context.file(packaged.result.bundle)).threads
    job = RunnerJob(
        home=context.workspace.folder,
        runner="tvm",
        point=0,
        source=source,
        onnx=exported.result.onnx,
        bundle=packaged.result.bundle,
        samples=exported.result.samples,
        threads=threads,
        own_threads=own if own < target.threads else threads,
        warmup=section.warmup,
        repeats=section.repeats,
    )
    points = samples.measured_sizes(
        [Input(name=item.name, shape=item.shape, samples=Samples(kind="ones")) for item in exported.result.inputs],
        context.spec.dimensions,
    )
    reads: dict[str, Any] = {
        **job.model_dump(mode="json", exclude={"home", "source", "runner", "point"}),
        "source": identity,
        "points": points,
        "rounds": section.rounds,
        "peers": peers,
    }
    return run_step(
        context.workspace,
        "benchmark",
        reads,
        BenchmarkResult,
        lambda: _measure(context, job, [*peers], points, target),
        target=target.name,
    )


def _measure(
    context: Context, job: RunnerJob, peers: list[Runner], points: list[dict[str, int]], target: Target
) -> BenchmarkResult:
    rounds = context.spec.benchmark.rounds
    runners: list[Runner] = ["tvm", *peers]
    # Rounds outermost and runners innermost: what is compared is measured as close in time as can be.
    plan = [(point, runner) for _ in range(rounds) for point in range(len(points)) for runner in runners]
    results: dict[tuple[int, Runner], list[Round]] = {}
    children: dict[Runner, Child] = {}
    try:
        for runner in runners:
            children[runner] = Child(
                "tasks.benchmark:work",
                log=context.log(f"benchmark-{runner}", target.name),
                paths=(context.spec.folder,),
                torch=runner == "pytorch",
            )
        for done, (point, runner) in enumerate(plan):
            reporter().progressed("benchmark", target.name, done, len(plan), runner)
            told = job.model_copy(update={"runner": runner, "point": point})
            measured = children[runner].call(told, Round, timeout=context.timeout)
            results.setdefault((point, runner), []).append(measured)
    finally:
        for child in children.values():
            child.close()
    size = {"tvm": job.bundle.size, "onnxruntime": job.onnx.size, "pytorch": job.onnx.size}
    return BenchmarkResult(
        runs=rounds * job.repeats,
        threads=job.threads,
        points=tuple(
            _point(chosen, {runner: results[index, runner] for runner in runners}, size)
            for index, chosen in enumerate(points)
        ),
    )


def _point(chosen: dict[str, int], rounds: dict[Runner, list[Round]], size: Mapping[str, int]) -> Point:
    measured = {runner: _summary(items, size[runner]) for runner, items in rounds.items()}
    ours = measured["tvm"].latency_ms.p50
    medians = [float(np.median(item.seconds)) for item in rounds["tvm"]]
    return Point(
        sizes=chosen,
        runners=measured,
        ratio={runner: ours / item.latency_ms.p50 for runner, item in measured.items() if runner != "tvm"},
        noise=(max(medians) - min(medians)) / float(np.median(medians)),
    )


def gate_failures(context: Context, result: BenchmarkResult, bundle: Artifact, target: Target) -> list[str]:
    """What the release file's gates say against the measurements; empty when all are kept."""
    gates = context.spec.gates
    measured: Mapping[str, tuple[float | None, float | None, str]] = {
        "max_latency_ms": (result.typical.runners["tvm"].latency_ms.p50, gates.max_latency_ms, "p50 latency in ms"),
        "max_ratio_onnxruntime": (
            result.typical.ratio.get("onnxruntime"),
            gates.max_ratio_onnxruntime,
            "latency over ONNX Runtime's",
        ),
        "max_ratio_pytorch": (result.typical.ratio.get("pytorch"), gates.max_ratio_pytorch, "latency over PyTorch's"),
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


def _bundle(job: RunnerJob) -> Callable[[Named], object]:
    from tvmflow import runtime

    model = runtime.load(job.workspace.path(job.bundle), threads=job.own_threads)
    return lambda inputs: model(**inputs)


def _onnxruntime(job: RunnerJob) -> Callable[[Named], object]:
    session = open_session(job.workspace.path(job.onnx), job.threads)
    return lambda inputs: run_session(session, inputs)


def _pytorch(job: RunnerJob) -> Callable[[Named], object]:
    import torch

    torch.set_num_threads(job.threads)
    module = load_module(job.source)

    def run(inputs: Named) -> object:
        with torch.inference_mode():
            return module(*(torch.from_numpy(array) for array in inputs.values()))

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
