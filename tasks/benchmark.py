"""Benchmark: measure the latency of the bundle and of its peers in turn, each in its own process.

The peers use the same number of threads; the bundle uses fewer where its build was faster on fewer.
"""

import resource
import time
from collections.abc import Callable, Mapping
from typing import Any, ClassVar, Literal

import numpy as np

from tasks.export import ExportResult
from tasks.original import Original
from tasks.package import PackageResult
from tasks.step import Job, Step, StepRunner, path_of
from tvmflow import samples
from tvmflow.bundle import read_manifest
from tvmflow.comparison import percentile
from tvmflow.errors import VerdictError
from tvmflow.figures import Latency, Measurement, Measurements, Point, Runner
from tvmflow.process import Child, Emit
from tvmflow.samples import NamedArrays
from tvmflow.source import load_module, open_session, run_session
from tvmflow.spec import Benchmark, Gates, Input, Samples, Spec
from tvmflow.target import Target, host
from tvmflow.workspace import Artifact, StepResult, Workspace


class RoundJob(Job):
    """One round of one runner: `warmup` untimed runs, then `repeats` timed ones, on the sample with the index `point`.

    The peers use `threads` threads. The bundle uses `bundle_threads`: fewer where its build was faster on fewer.
    """

    runner: Runner
    point: int
    original: Original
    onnx: Artifact
    bundle: Artifact
    samples: Artifact
    threads: int
    bundle_threads: int
    warmup: int
    repeats: int

    @property
    def needs_torch(self) -> bool:
        """Whether PyTorch is the runner."""
        return self.runner == "pytorch"


class BenchmarkJob(Job):
    """The bundle, its original, and how to measure both; `points` are the sizes of symbolic dimensions to measure."""

    not_in_key: ClassVar[Mapping[str, Any]] = {"original": {"source"}}

    original: Original
    onnx: Artifact
    bundle: Artifact
    samples: Artifact
    target: Target
    section: Benchmark
    peers: tuple[Literal["onnxruntime", "pytorch"], ...]
    points: tuple[dict[str, int], ...]
    threads: int
    bundle_threads: int

    @property
    def label(self) -> str:
        """The target's name."""
        return self.target.name

    @classmethod
    def of(
        cls,
        spec: Spec,
        workspace: Workspace,
        original: Original,
        exported: ExportResult,
        packaged: PackageResult,
        target: Target,
    ) -> "BenchmarkJob":
        """Return the job that benchmarks one bundle of a release file's model.

        Raises BundleError for a damaged bundle.
        """
        section = spec.benchmark
        threads = section.threads or min(target.threads, host().cores)
        limit = read_manifest(workspace.path(packaged.bundle)).max_threads
        inputs = [Input(name=item.name, shape=item.shape, samples=Samples(kind="ones")) for item in exported.inputs]
        return cls(
            original=original,
            onnx=exported.onnx,
            bundle=packaged.bundle,
            samples=exported.samples,
            target=target,
            section=section,
            peers=tuple(peer for peer in section.peers if peer != "pytorch" or original.source.framework == "pytorch"),
            points=tuple(samples.measured_sizes(inputs, exported.dimensions)),
            threads=threads,
            bundle_threads=min(limit or threads, threads),
        )


class Round(StepResult):
    """The times of one round: seconds of each run, seconds to load the model, and the process's peak memory (bytes)."""

    seconds: tuple[float, ...]
    load_seconds: float
    peak_memory: int


class BenchmarkResult(Measurements, StepResult):
    """The measurements of a bundle and its peers."""


# The models that a runner's process has loaded, and the seconds that took.
_loaded: dict[str, tuple[Callable[[NamedArrays], object], float]] = {}


def round_work(job: RoundJob, emit: Emit) -> Round:
    """Run one round in the runner's own process, which loads the model before its first round."""
    if job.runner not in _loaded:
        start = time.perf_counter()
        prepare = {"tvm": _bundle, "onnxruntime": _onnxruntime, "pytorch": _pytorch}[job.runner]
        run = prepare(job)
        _loaded[job.runner] = run, time.perf_counter() - start
    run, load_seconds = _loaded[job.runner]
    inputs = samples.load(job.workspace.path(job.samples))[job.point][0]
    return timed(lambda: run(inputs), job.warmup, job.repeats, load_seconds)


def timed(run: Callable[[], object], warmup: int, repeats: int, load_seconds: float) -> Round:
    """Call `run` `warmup` times untimed, then `repeats` times timed; return the times in seconds as one round.

    `load_seconds` is passed on to the round.
    """
    for _ in range(warmup):
        run()
    seconds = []
    for _ in range(repeats):
        start = time.perf_counter()
        run()
        seconds.append(time.perf_counter() - start)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    return Round(seconds=tuple(seconds), load_seconds=load_seconds, peak_memory=peak)


def work(job: BenchmarkJob, runner: StepRunner) -> BenchmarkResult:
    """Measure the bundle and its peers, ONNX Runtime and PyTorch eager, in turn at each of the job's points.

    Raises StepError when a runner's process crashes or takes too long, BundleError when the bundle does not run here.
    """
    rounds = job.section.rounds
    runners: list[Runner] = ["tvm", *job.peers]
    # Rounds outermost and runners innermost: the runners of a round take turns as close in time as possible.
    plan = [(point, name) for _ in range(rounds) for point in range(len(job.points)) for name in runners]
    results: dict[tuple[int, Runner], list[Round]] = {}
    jobs = {name: _round_job(job, runner, name) for name in runners}
    children: dict[Runner, Child] = {}
    try:
        for name in runners:
            children[name] = Child(
                path_of(round_work),
                log=runner.log(name),
                paths=(runner.folder,),
                environment=runner.environment,
                torch=jobs[name].needs_torch,
            )
        for done, (point, name) in enumerate(plan):
            runner.emit(done, len(plan), name)
            round_job = jobs[name].model_copy(update={"point": point})
            result = children[name].call(round_job, Round, timeout=runner.timeout)
            results.setdefault((point, name), []).append(result)
    finally:
        for child in children.values():
            child.close()
    size = {"tvm": job.bundle.size, "onnxruntime": job.onnx.size, "pytorch": job.onnx.size}
    return BenchmarkResult(
        runs=rounds * job.section.repeats,
        threads=job.threads,
        points=tuple(
            _point(sizes, {name: results[index, name] for name in runners}, size)
            for index, sizes in enumerate(job.points)
        ),
    )


benchmark = Step("benchmark", BenchmarkResult, work)


def _round_job(job: BenchmarkJob, runner: StepRunner, name: Runner) -> RoundJob:
    round_job = RoundJob(
        runner=name,
        point=0,
        original=job.original,
        onnx=job.onnx,
        bundle=job.bundle,
        samples=job.samples,
        threads=job.threads,
        bundle_threads=job.bundle_threads,
        warmup=job.section.warmup,
        repeats=job.section.repeats,
    )
    return runner.place(round_job)


def _point(sizes: dict[str, int], rounds: dict[Runner, list[Round]], size: Mapping[str, int]) -> Point:
    measurements = {runner: _summary(items, size[runner]) for runner, items in rounds.items()}
    p50 = measurements["tvm"].latency_ms.p50
    medians = [float(np.median(item.seconds)) for item in rounds["tvm"]]
    return Point(
        sizes=sizes,
        runners=measurements,
        ratio={runner: p50 / item.latency_ms.p50 for runner, item in measurements.items() if runner != "tvm"},
        noise=(max(medians) - min(medians)) / float(np.median(medians)),
    )


def gate_failures(gates: Gates, result: BenchmarkResult, bundle: Artifact, target: Target) -> list[str]:
    """Return a sentence for each gate of a release file that the measurements fail; empty when they keep all gates.

    `bundle` gives the size for `max_bundle_mb`. Raises VerdictError for a gate on a peer that was not measured.
    """
    typical = result.typical
    figures: Mapping[str, tuple[float | None, float | None, str]] = {
        "max_latency_ms": (typical.runners["tvm"].latency_ms.p50, gates.max_latency_ms, "p50 latency in ms"),
        "max_ratio_onnxruntime": (
            typical.ratio.get("onnxruntime"),
            gates.max_ratio_onnxruntime,
            "latency over ONNX Runtime's",
        ),
        "max_ratio_pytorch": (typical.ratio.get("pytorch"), gates.max_ratio_pytorch, "latency over PyTorch's"),
        "max_bundle_mb": (bundle.size / 1e6, gates.max_bundle_mb, "bundle size in MB"),
    }
    failures = []
    for gate, (value, bound, what) in figures.items():
        if bound is None:
            continue
        if value is None:
            raise VerdictError(f"gate {gate} cannot be checked: add the peer to benchmark.peers")
        if value > bound:
            failures.append(f"target {target.name!r}: {what} is {value:.4g}, gate {gate} allows {bound:g}")
    return failures


def _bundle(job: RoundJob) -> Callable[[NamedArrays], object]:
    from tvmflow import runtime

    model = runtime.load(job.workspace.path(job.bundle), threads=job.bundle_threads)
    return lambda inputs: model(**inputs)


def _onnxruntime(job: RoundJob) -> Callable[[NamedArrays], object]:
    session = open_session(job.workspace.path(job.onnx), job.threads)
    return lambda inputs: run_session(session, inputs)


def _pytorch(job: RoundJob) -> Callable[[NamedArrays], object]:
    import torch

    torch.set_num_threads(job.threads)
    module = load_module(job.original.source)

    def run(inputs: NamedArrays) -> object:
        with torch.inference_mode():
            return module(*(torch.from_numpy(array) for array in inputs.values()))

    return run


def _summary(rounds: list[Round], size: int) -> Measurement:
    seconds = np.array([value for item in rounds for value in item.seconds])
    p50 = float(np.median(seconds)) * 1e3
    p90, p99 = (percentile(seconds * 1e3, which) for which in (90, 99))
    return Measurement(
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
