"""Benchmark: measure the latency of the bundle and of its peers, in rounds of fresh processes that take turns.

The peers use the same number of threads; the bundle uses fewer where its build was faster on fewer.
"""

import os
import resource
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass, field
from threading import Barrier, BrokenBarrierError
from typing import Any, ClassVar, Literal

import numpy as np

from tasks.comparison import measure_reference, observe_conditions, plan_pairs
from tasks.export import ExportResult
from tasks.original import Original
from tasks.package import PackageResult
from tasks.step import Job, Step, StepRunner, TargetJob, path_of
from tvmflow import samples
from tvmflow.arrays import Array, NamedArrays
from tvmflow.bundle import read_manifest
from tvmflow.comparison import Comparison, Pair, Plan, compare, percentile
from tvmflow.energy import joules_between, read_counters
from tvmflow.errors import VerdictError
from tvmflow.figures import PEERS, Concurrency, Latency, Measurement, Measurements, Point, Runner
from tvmflow.onnx_model.session import open_session, run_session
from tvmflow.process import Child, Emit
from tvmflow.source import load_module
from tvmflow.spec import Benchmark, Gates, Input, Samples, Spec
from tvmflow.target import Target, host
from tvmflow.workspace import Artifact, StepResult, Workspace

# The most turns of a runner at a point in a round, and the untimed runs before each but the first: the data of the
# others have displaced its own in the caches.
_TURNS, _UNTIMED = 5, 1


class TurnJob(Job):
    """One turn of one runner: `warmup` untimed runs, then `runs` timed ones, on the sample with the index `point`.

    The peers use `threads` threads. The bundle uses `bundle_threads`: fewer where its build was faster on fewer.
    `callers` threads make the runs concurrently; each of them makes all of the runs.
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
    runs: int
    callers: int = 1

    @property
    def needs_torch(self) -> bool:
        """Whether PyTorch is the runner."""
        return self.runner == "pytorch"


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


class Turn(StepResult):
    """The times of one turn: seconds of each run, seconds to load the model, and the process's peak memory (bytes).

    `first_seconds` is the time of the first run after the model was loaded, and `wall_seconds` that of all timed runs
    from the first one's start to the last one's end.
    """

    seconds: tuple[float, ...]
    load_seconds: float
    peak_memory: int
    first_seconds: float = 0.0
    wall_seconds: float = 0.0


class BenchmarkResult(Measurements, StepResult):
    """The measurements of a bundle and its peers."""


# The models that a runner's process has loaded, the seconds that took, and those of the first run.
_loaded: dict[str, tuple[Callable[[NamedArrays], object], float, float]] = {}


def turn_work(job: TurnJob, emit: Emit) -> Turn:
    """Run one turn of a runner in the runner's own process and return its times.

    The first turn in a process also loads the model and makes its first run.
    """
    inputs = samples.load(job.workspace.path(job.samples))[job.point][0]
    if job.runner not in _loaded:
        start = time.perf_counter()
        prepare = {"tvm": _bundle, "onnxruntime": _onnxruntime, "pytorch": _pytorch}[job.runner]
        run = prepare(job)
        ready = time.perf_counter()
        run(inputs)
        _loaded[job.runner] = run, ready - start, time.perf_counter() - ready
    run, load_seconds, first_seconds = _loaded[job.runner]
    turn = timed(lambda: run(inputs), job.warmup, job.runs, load_seconds, job.callers)
    return turn.model_copy(update={"first_seconds": first_seconds})


def timed(run: Callable[[], object], warmup: int, runs: int, load_seconds: float, callers: int = 1) -> Turn:
    """Call `run` `warmup` times untimed, then `runs` times timed; return the times in seconds as one turn.

    Where `callers` is above one, so many threads do so, and begin their timed runs together. `load_seconds` is passed
    on to the turn. Raises what `run` raises.
    """
    barrier = Barrier(callers)
    spans: list[tuple[float, float]] = []

    def call() -> list[float]:
        try:
            for _ in range(warmup):
                run()
            barrier.wait()
            begin, seconds = time.perf_counter(), []
            for _ in range(runs):
                start = time.perf_counter()
                run()
                seconds.append(time.perf_counter() - start)
        except BaseException:
            # The others would wait for this one for ever.
            barrier.abort()
            raise
        spans.append((begin, time.perf_counter()))
        return seconds

    if callers == 1:
        series = [call()]
    else:
        with ThreadPoolExecutor(callers) as pool:
            futures = [pool.submit(call) for _ in range(callers)]
        errors = [error for future in futures if (error := future.exception()) is not None]
        for error in sorted(errors, key=lambda error: isinstance(error, BrokenBarrierError)):
            raise error
        series = [future.result() for future in futures]
    return Turn(
        seconds=tuple(value for each in series for value in each),
        load_seconds=load_seconds,
        peak_memory=resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
        wall_seconds=max(end for _, end in spans) - min(begin for begin, _ in spans),
    )


@dataclass(frozen=True)
class Round:
    """One round of fresh processes, one per runner.

    `turns` has the turns by the index of the point and the runner. `reference` are the seconds of the reference kernel,
    a fixed computation that shows the processor's clock. `joules` are those of a run at the typical sizes by runner,
    where the machine tells them. `together` has the turn of several callers by their number and the runner.
    """

    turns: Mapping[tuple[int, Runner], Sequence[Turn]]
    reference: Sequence[float]
    joules: Mapping[Runner, float] = field(default_factory=dict)
    together: Mapping[tuple[int, Runner], Turn] = field(default_factory=dict)

    def seconds(self, point: int, name: Runner) -> list[float]:
        """Return the seconds of all runs of a runner at the point with the index `point`."""
        return [value for turn in self.turns[point, name] for value in turn.seconds]

    def pair(self, point: int, peer: Runner) -> Pair:
        """Return the bundle compared with a peer at the point with the index `point`, turn by turn."""
        candidate, baseline = ([turn.seconds for turn in self.turns[point, name]] for name in ("tvm", peer))
        return Pair.of_turns(candidate, baseline, self.reference)


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
        return {peer: rounds[index].pair(0, peer) for peer in job.peers}

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


def _measure_round(job: BenchmarkJob, runner: StepRunner, random: np.random.Generator) -> Round:
    turns: dict[tuple[int, Runner], list[Turn]] = {}
    together: dict[tuple[int, Runner], Turn] = {}
    reference: list[float] = []
    energies: dict[Runner, list[tuple[float, int]]] = {}
    names: list[Runner] = ["tvm", *job.peers]
    jobs = {name: _turn_job(job, runner, name) for name in names}
    with ExitStack() as stack:
        order = [names[index] for index in random.permutation(len(names))]
        children = {name: stack.enter_context(_start(runner, jobs[name])) for name in order}
        for point in range(len(job.points)):
            warmup = job.section.warmup
            for runs in _split(job.section.repeats):
                reference += measure_reference()
                for index in random.permutation(len(names)):
                    name = names[index]
                    turn = jobs[name].model_copy(update={"point": point, "warmup": warmup, "runs": runs})
                    before = read_counters()
                    result = children[name].take_turn(turn, Turn, timeout=runner.timeout)
                    joules = joules_between(before, read_counters())
                    turns.setdefault((point, name), []).append(result)
                    # The first turn loads the model.
                    if joules is not None and point == 0 and len(turns[point, name]) > 1:
                        energies.setdefault(name, []).append((joules, warmup + runs))
                warmup = _UNTIMED
        for callers in job.section.callers:
            for index in random.permutation(len(names)):
                name = names[index]
                update = {"point": 0, "warmup": _UNTIMED, "runs": job.section.repeats, "callers": callers}
                turn = jobs[name].model_copy(update=update)
                together[callers, name] = children[name].take_turn(turn, Turn, timeout=runner.timeout)
    joules_of_run = {
        name: sum(item[0] for item in each) / sum(item[1] for item in each) for name, each in energies.items()
    }
    return Round(turns, reference, joules_of_run, together)


def _start(runner: StepRunner, job: TurnJob) -> Child:
    return Child(
        path_of(turn_work),
        log=runner.log(job.runner),
        paths=(runner.folder,),
        environment=runner.environment,
        torch=job.needs_torch,
    )


def _split(repeats: int) -> list[int]:
    """The runs of each turn: at most five turns of about as many runs."""
    turns = min(_TURNS, repeats)
    return [repeats // turns + (turn < repeats % turns) for turn in range(turns)]


def _turn_job(job: BenchmarkJob, runner: StepRunner, name: Runner) -> TurnJob:
    turn_job = TurnJob(
        runner=name,
        point=0,
        original=job.original,
        onnx=job.onnx,
        bundle=job.bundle,
        samples=job.samples,
        threads=job.threads,
        bundle_threads=job.bundle_threads,
        warmup=0,
        runs=0,
    )
    return runner.place(turn_job)


def _point(
    sizes: dict[str, int], index: int, rounds: Sequence[Round], peers: Sequence[Runner], size: Mapping[Runner, int]
) -> Point:
    medians = [float(np.median(each.seconds(index, "tvm"))) for each in rounds]
    return Point(
        sizes=sizes,
        runners={name: _summary(name, index, rounds, size[name]) for name in ("tvm", *peers)},
        ratio={peer: float(np.median([each.pair(index, peer).ratio for each in rounds])) for peer in peers},
        noise=(max(medians) - min(medians)) / float(np.median(medians)),
    )


def _concurrency(callers: int, rounds: Sequence[Round], runners: Sequence[Runner]) -> Concurrency:
    latencies = {}
    for name in runners:
        turns = [each.together[callers, name] for each in rounds]
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


def _bundle(job: TurnJob) -> Callable[[NamedArrays], object]:
    from tvmflow import runtime

    model = runtime.load(job.workspace.path(job.bundle), threads=job.bundle_threads)
    return lambda inputs: model(**inputs)


def _onnxruntime(job: TurnJob) -> Callable[[NamedArrays], object]:
    session = open_session(job.workspace.path(job.onnx), job.threads, exact=False)
    return lambda inputs: run_session(session, inputs)


def _pytorch(job: TurnJob) -> Callable[[NamedArrays], object]:
    import torch

    torch.set_num_threads(job.threads)
    module = load_module(job.original.source)

    def run(inputs: NamedArrays) -> object:
        with torch.inference_mode():
            return module(*(torch.from_numpy(array) for array in inputs.values()))

    return run


def _summary(name: Runner, point: int, rounds: Sequence[Round], size: int) -> Measurement:
    seconds = np.array([value for each in rounds for value in each.seconds(point, name)])
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
        joules=tuple(each.joules[name] for each in rounds if name in each.joules) if point == 0 else (),
    )
