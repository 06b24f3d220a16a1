"""Benchmark: measure the latency of the bundle and of its peers, in rounds of fresh processes that take turns.

The peers use the same number of threads; the bundle uses fewer where its build was faster on fewer.
"""

import os
import time
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, Literal

import numpy as np

from tasks.comparison import observe_conditions, plan_pairs
from tasks.export import ExportResult
from tasks.original import Original
from tasks.package import PackageResult
from tasks.step import Step, StepRunner, TargetJob, path_of
from tasks.turns import Processes, Round, Run, Turn, TurnJob, load_bundle, load_onnxruntime, make_turn
from tvmflow import samples
from tvmflow.arrays import Array, NamedArrays
from tvmflow.bundle import read_manifest
from tvmflow.comparison import Comparison, Pair, Plan, compare, percentile
from tvmflow.documents.figures import PEERS, Concurrency, Latency, Measurement, Measurements, Point, Runner
from tvmflow.errors import VerdictError
from tvmflow.hardware.target import Target, host
from tvmflow.processes.children import Child, Emit
from tvmflow.source import Source, load_module
from tvmflow.spec import Benchmark, Gates, Input, Samples, Spec
from tvmflow.workspace import Artifact, StepResult, Workspace

# The most turns of a runner at a point in a round, and the untimed runs before each but the first: the data of the
# others have displaced its own in the caches.
_TURNS, _UNTIMED = 5, 1


class RunnerJob(TurnJob):
    """One turn of the bundle or a peer; PyTorch runs the model that `source` makes."""

    source: Source


class BenchmarkJob(TargetJob):
    """The bundle, its original, and how to measure both; `points` are the sizes of symbolic dimensions to measure.

    The `peers` use `threads` threads, the bundle `bundle_threads`. `bounds` gives, for each peer that has gates, the
    largest ratios of the bundle's latency to the peer's that they allow.
    """

    not_in_key: ClassVar[Mapping[str, Any]] = {"original": {"source"}}

    original: Original
    onnx: Artifact
    bundle: Artifact
    samples: Artifact
    section: Benchmark
    peers: tuple[Literal["onnxruntime", "pytorch"], ...]
    points: tuple[dict[str, int], ...]
    threads: int
    bundle_threads: int
    bounds: dict[Literal["onnxruntime", "pytorch"], tuple[float, ...]]

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
        peers = tuple(peer for peer in section.peers if peer != "pytorch" or original.source.framework == "pytorch")
        return cls(
            original=original,
            onnx=exported.onnx,
            bundle=packaged.bundle,
            samples=exported.samples,
            target=target,
            section=section,
            peers=peers,
            points=tuple(samples.measured_sizes(inputs, exported.dimensions)),
            threads=threads,
            bundle_threads=min(limit or threads, threads),
            bounds={peer: bounds for peer in peers if (bounds := spec.ratio_bounds(peer))},
        )


class BenchmarkResult(Measurements, StepResult):
    """The measurements of a bundle and its peers."""


def turn_work(job: RunnerJob, emit: Emit) -> Turn:
    """Make one turn of a runner in the runner's own process and return its times."""
    return make_turn(job, {"tvm": load_bundle, "onnxruntime": load_onnxruntime, "pytorch": _load_pytorch})


def work(job: BenchmarkJob, runner: StepRunner) -> BenchmarkResult:
    """Measure the bundle and its peers, ONNX Runtime and PyTorch eager, at each of the job's points.

    The runners take turns in random order. With `bounds`, rounds are added until the interval of every bounded ratio
    excludes its bound, but no more than fit into the runner's `comparison_seconds` (12 to 150). Raises StepError when a
    runner's process crashes or takes too long, BundleError when the bundle does not run here.
    """
    random = np.random.default_rng(0)
    load, start = os.getloadavg()[0], time.monotonic()
    rounds = [_measure_round(job, runner, random)]
    plan = Plan(looks=(job.section.rounds,))
    if job.bounds:
        longest = plan_pairs(runner.comparison_seconds, time.monotonic() - start)
        looks = tuple(look for look in longest.looks if look > job.section.rounds)
        plan = Plan(looks=looks or plan.looks)

    def measure(index: int) -> dict[Runner, Pair]:
        if index:
            rounds.append(_measure_round(job, runner, random))
        return {peer: rounds[index].pair("tvm", peer) for peer in job.peers}

    bounds: dict[Runner, tuple[float, ...]] = {peer: job.bounds.get(peer, ()) for peer in job.peers}
    pairs = compare(plan, bounds, measure, lambda done, budget: runner.emit(done, budget, "in turn"))
    conditions = observe_conditions((job.bundle_threads, job.threads), load)
    original = job.onnx.whole_size
    size: dict[Runner, int] = {"tvm": job.bundle.size, "onnxruntime": original, "pytorch": original}
    return BenchmarkResult(
        runs=len(rounds) * job.section.repeats,
        threads=job.threads,
        points=tuple(_point(sizes, index, rounds, job.peers, size) for index, sizes in enumerate(job.points)),
        concurrency=tuple(_concurrency(callers, rounds, ("tvm", *job.peers)) for callers in job.section.callers),
        comparisons={peer: Comparison(plan=plan, pairs=each, conditions=conditions) for peer, each in pairs.items()},
    )


benchmark = Step("benchmark", BenchmarkResult, work)


def _measure_round(job: BenchmarkJob, runner: StepRunner, random: np.random.Generator) -> Round[Runner]:
    turns: dict[tuple[int, Runner], list[Turn]] = {}
    concurrent: dict[tuple[int, Runner], Turn] = {}
    runners: list[Runner] = ["tvm", *job.peers]
    jobs = {name: _runner_job(job, runner.workspace, name) for name in runners}

    def start(name: Runner) -> Child:
        return Child(
            path_of(turn_work),
            log=runner.log(name),
            paths=(runner.folder,),
            environment=runner.environment,
            torch=name == "pytorch",
        )

    with Processes(runners, start, runner.timeout, random) as processes:
        for point in range(len(job.points)):
            warmup = job.section.warmup
            for runs in _split(job.section.repeats):
                for name in processes.shuffle():
                    turn_job = jobs[name].model_copy(update={"point": point, "warmup": warmup, "runs": runs})
                    turns.setdefault((point, name), []).append(processes.take_turn(turn_job))
                warmup = _UNTIMED
        for callers in job.section.callers:
            for name in processes.shuffle():
                update = {"warmup": _UNTIMED, "runs": job.section.repeats, "callers": callers}
                concurrent[callers, name] = processes.take_turn(jobs[name].model_copy(update=update))
        return Round(turns, processes.kernel_seconds, concurrent)


def _split(repeats: int) -> list[int]:
    """The runs of each turn: at most five turns of about as many runs."""
    turns = min(_TURNS, repeats)
    return [repeats // turns + (turn < repeats % turns) for turn in range(turns)]


def _runner_job(job: BenchmarkJob, workspace: Workspace, name: Runner) -> RunnerJob:
    return RunnerJob(
        runner=name,
        source=job.original.source,
        onnx=workspace.path(job.onnx),
        bundle=workspace.path(job.bundle),
        samples=workspace.path(job.samples),
        threads=job.threads,
        bundle_threads=job.bundle_threads,
    )


def _point(
    sizes: dict[str, int],
    index: int,
    rounds: Sequence[Round[Runner]],
    peers: Sequence[Runner],
    size: Mapping[Runner, int],
) -> Point:
    medians = [float(np.median(each.seconds("tvm", index))) for each in rounds]
    return Point(
        sizes=sizes,
        runners={name: _summary(name, index, rounds, size[name]) for name in ("tvm", *peers)},
        ratio={peer: float(np.median([each.pair("tvm", peer, index).ratio for each in rounds])) for peer in peers},
        noise=(max(medians) - min(medians)) / float(np.median(medians)),
    )


def _concurrency(callers: int, rounds: Sequence[Round[Runner]], runners: Sequence[Runner]) -> Concurrency:
    latencies = {}
    for name in runners:
        turns = [each.concurrent[callers, name] for each in rounds]
        milliseconds = np.array([value for turn in turns for value in turn.seconds]) * 1e3
        throughput = float(np.median([len(turn.seconds) / turn.wall_seconds for turn in turns]))
        latencies[name] = _latency(milliseconds, throughput)
    return Concurrency(callers=callers, runs=len(milliseconds), runners=latencies)


def _latency(milliseconds: Array, throughput: float | None = None) -> Latency:
    """The figures of runs; `throughput` is that at the median unless it is given."""
    p50 = float(np.median(milliseconds))
    p90, p99 = (percentile(milliseconds, which) for which in (90, 99))
    return Latency(
        mean=float(milliseconds.mean()),
        std=float(milliseconds.std()),
        p50=p50,
        p90=p90,
        p99=p99,
        min=float(milliseconds.min()),
        throughput=1e3 / p50 if throughput is None else throughput,
    )


def gate_failures(gates: Gates, result: BenchmarkResult, bundle: Artifact, target: Target) -> list[str]:
    """Return a sentence for each gate of a release file that the measurements fail; empty when they keep all gates.

    `bundle` gives the size for `max_bundle_mb`. Raises VerdictError for a gate on a peer that was not measured.
    """
    ours = result.typical.runners["tvm"]
    figures = {
        "max_latency_ms": (ours.latency_ms.p50, gates.max_latency_ms, "p50 latency in ms"),
        "max_bundle_mb": (bundle.size / 1e6, gates.max_bundle_mb, "bundle size in MB"),
    }
    failures = [
        f"target {target.name!r}: {what} is {value:.4g}, gate {gate} allows {bound:g}"
        for gate, (value, bound, what) in figures.items()
        if bound is not None and value > bound
    ]
    for peer, words in PEERS.items():
        gate = f"max_ratio_{peer}"
        bound = getattr(gates, gate)
        if bound is None:
            continue
        if peer not in result.comparisons:
            raise VerdictError(f"gate {gate} cannot be checked: add the peer to benchmark.peers")
        comparison = result.comparisons[peer]
        if comparison.interval.judge(bound) != "pass":
            failures.append(comparison.describe_gate(f"target {target.name!r}:", f"{words}'s", gate, bound))
    return failures


def _load_pytorch(job: RunnerJob) -> Run:
    import torch

    torch.set_num_threads(job.threads)
    module = load_module(job.source)

    def run(inputs: NamedArrays) -> object:
        with torch.inference_mode():
            return module(*(torch.from_numpy(array) for array in inputs.values()))

    return run


def _summary(name: Runner, point: int, rounds: Sequence[Round[Runner]], size: int) -> Measurement:
    seconds = np.array([value for each in rounds for value in each.seconds(name, point)])
    turns = [each.turns[point, name] for each in rounds]
    loads = tuple(each[0].load_seconds for each in turns)
    peaks = tuple(max(turn.peak_memory for turn in each) for each in turns)
    return Measurement(
        latency_ms=_latency(seconds * 1e3),
        total_seconds=float(seconds.sum()),
        load_seconds=float(np.median(loads)),
        peak_memory=max(peaks),
        size=size,
        loads=loads,
        firsts=tuple(each[0].first_seconds for each in turns),
        peaks=peaks,
        joules=tuple(joules for each in rounds if (joules := each.joules(name)) is not None) if point == 0 else (),
    )
