"""Comparison: the latencies of two bundles, measured on this machine with runs that alternate between the two."""

import os
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from pathlib import Path

import numpy as np

from tasks.step import Job, StepRunner
from tvmflow import npz
from tvmflow.arrays import NamedArrays
from tvmflow.bundle import extract, read_manifest
from tvmflow.comparison import Comparison, Conditions, Pair, Plan, compare
from tvmflow.comparison.pairs import Samples, write_samples
from tvmflow.hardware.target import host, processor
from tvmflow.processes.children import Child, Emit
from tvmflow.workspace import Artifact, StepResult, Workspace

# The pairs of a budget: fewer could decide nothing, more would tell apart what nobody notices.
_FEWEST_PAIRS, _MOST_PAIRS = 12, 150
# Seconds of a pair, in which both bundles are loaded again and again, of the runs after a load, and at most where
# loading takes long.
_PAIR_SECONDS, _LOAD_SECONDS, _LONGEST_LOAD_SECONDS = 0.8, 0.06, 2.0
# The runs of each side after a load.
_LEAST_RUNS, _MOST_RUNS = 7, 1000
# The reference kernel takes square roots of numbers that stay in the first cache: its time shows the clock alone.
_REFERENCE_NUMBERS, _REFERENCE_CALLS, _REFERENCE_RUNS = 2048, 100, 5


class PairJob(Job):
    """Two bundles, the candidate and the baseline, whose runs on a sample alternate for at least `seconds`.

    `sample` is an `.npz` file with the inputs by name, `threads` the number of threads of each bundle, and `seed`
    decides which bundle is loaded and run first. Each run of the candidate is made longer by the fraction `slowdown` of
    its time.
    """

    bundles: tuple[Path, Path]
    sample: Path
    threads: tuple[int, int]
    seconds: float
    seed: int
    slowdown: float = 0.0


class PairSamples(StepResult):
    """The times of all runs of a pair."""

    samples: Samples


def compare_in_step(
    runner: StepRunner,
    candidate: Path,
    baseline: Path,
    *,
    bounds: Sequence[float],
    message: str = "in turn",
    inputs: NamedArrays | None = None,
) -> tuple[Comparison, Artifact]:
    """Compare the latencies of two bundles by `compare_latency`, within the time that the settings give a step for it.

    The step reports its progress with `message`. The comparison ends when each of the `bounds` is decided, and the
    bundles run on `inputs`, arrays by name; None means the typical inputs of `candidate`. Returns the comparison, and
    the file with the times of all runs. Raises BundleError for a bundle that does not run here,
    InputError where `baseline` takes other inputs.
    """
    with runner.workspace.scratch() as folder:
        samples = folder / "samples.npz"
        comparison = compare_latency(
            runner.workspace,
            runner.log(),
            candidate,
            baseline,
            timeout=runner.timeout,
            progress=lambda done, total: runner.emit(done, total, message),
            seconds=runner.comparison_seconds,
            bounds=bounds,
            inputs=inputs,
            samples=samples,
        )
        return comparison, runner.workspace.keep(samples)


def compare_latency(
    workspace: Workspace,
    log: Path,
    candidate: Path,
    baseline: Path,
    *,
    timeout: float,
    progress: Callable[[int, int], None],
    seconds: float,
    bounds: Sequence[float],
    inputs: NamedArrays | None = None,
    slowdown: float = 0.0,
    samples: Path | None = None,
) -> Comparison:
    """Compare the latencies of two bundles, each on the number of threads that it would use here.

    They run on `inputs`, arrays by name, by default on the typical inputs of `candidate`. Their runs alternate, so that
    other load on the machine slows both; which is loaded first, and which runs first, is random. The comparison
    consists of pairs, each a new process that runs both bundles many times: the placement of memory makes a bundle
    faster or slower by several per cent throughout a process. Processes print to `log` and are killed after `timeout`
    seconds; `progress` gets the number of pairs done and the largest number. The comparison ends when the confidence
    interval of the ratio, candidate / baseline, excludes each of the `bounds`, or after as many pairs as fit into
    `seconds`, 12 to 150 of them: the duration of the first pair tells how many, before any ratio is looked at. A
    `slowdown` above 0 makes each run of the candidate longer by that fraction of its time, to test the comparison. The
    times of all runs are written to the file `samples`, unless it is None. Raises BundleError for a bundle that does
    not run here, InputError where `baseline` takes other inputs.
    """
    limits = read_manifest(candidate).max_threads, read_manifest(baseline).max_threads
    threads = min(host().cores, limits[0] or host().cores), min(host().cores, limits[1] or host().cores)
    with workspace.scratch() as folder:
        extract(candidate, folder)
        sample = folder / "inputs.npz"
        npz.write(sample, npz.typical_inputs(npz.read(folder / "sample.npz")) if inputs is None else inputs)

        def measure(index: int) -> Samples:
            job = PairJob(
                home=workspace.folder,
                bundles=(candidate, baseline),
                sample=sample,
                threads=threads,
                seconds=_PAIR_SECONDS,
                seed=index,
                slowdown=slowdown,
            )
            with Child("tasks.comparison:work", log=log) as child:
                return child.call(job, PairSamples, timeout=timeout).samples

        return compare_pairs(measure, threads, seconds, bounds, progress, samples)


def compare_pairs(
    measure: Callable[[int], Samples],
    threads: tuple[int, int],
    seconds: float,
    bounds: Sequence[float],
    progress: Callable[[int, int], None],
    samples: Path | None,
) -> Comparison:
    """Compare a candidate with a baseline; `measure` gets the index of a pair, measures it and returns its run times.

    The comparison ends when the confidence interval of the ratio, candidate / baseline, excludes each of the `bounds`,
    or after as many pairs as fit into `seconds`, 12 to 150 of them; the duration of the first pair tells how many.
    `threads` are the numbers of threads of the candidate and of the baseline. `progress` gets the number of pairs done
    and the largest number. The times of all runs are written to the file `samples`, unless it is None.
    """
    load, start = os.getloadavg()[0], time.monotonic()
    measurements = [measure(0)]
    plan = plan_pairs(seconds, time.monotonic() - start)

    def measure_pair(index: int) -> dict[None, Pair]:
        if index:
            measurements.append(measure(index))
        return {None: Pair.of(measurements[index])}

    pairs = compare(plan, {None: bounds}, measure_pair, progress)[None]
    if samples is not None:
        write_samples(samples, measurements)
    return Comparison(plan=plan, pairs=pairs, conditions=observe_conditions(threads, load))


def plan_pairs(seconds: float, pair_seconds: float) -> Plan:
    """Return the plan for as many pairs of `pair_seconds` each as fit into `seconds`, at least 12 and at most 150."""
    return Plan.up_to(min(max(int(seconds / pair_seconds), _FEWEST_PAIRS), _MOST_PAIRS))


def observe_conditions(threads: tuple[int, int], load: float) -> Conditions:
    """Return the conditions of a comparison that ends now; `load` was the machine's load when it began."""
    cores = tuple(sorted(os.sched_getaffinity(0)))
    return Conditions(processor=processor(), cores=cores, threads=threads, load=(load, os.getloadavg()[0]))


def work(job: PairJob, emit: Emit) -> PairSamples:
    """Run two bundles, their runs alternating; return the seconds of their runs and of the reference kernel.

    `compare_latency` calls this in a new child process for each pair.
    """
    inputs = npz.read(job.sample)
    random = np.random.default_rng(job.seed)
    seconds: tuple[list[float], list[float]] = ([], [])
    loads: list[int] = []
    kernel_seconds = time_kernel()
    start = time.perf_counter()
    while not loads or time.perf_counter() - start < job.seconds:
        times = _measure_load(job, inputs, random)
        for side in (0, 1):
            seconds[side].extend(times[side])
        loads.append(len(times[0]))
    kernel_seconds += time_kernel()
    samples = Samples(
        candidate=_to_single(seconds[0]),
        baseline=_to_single(seconds[1]),
        reference=_to_single(kernel_seconds),
        loads=tuple(loads),
    )
    return PairSamples(samples=samples)


def _measure_load(job: PairJob, inputs: NamedArrays, random: np.random.Generator) -> tuple[list[float], list[float]]:
    """Load both bundles in random order and run them in turn; return the seconds of each one's runs.

    The turns alternate strictly. A run that follows several of its own bundle finds more of its data in the caches: in
    a random order the ratios have two peaks, and which one holds the median is left to chance.
    """
    from tvmflow import runtime

    seconds: tuple[list[float], list[float]] = ([], [])
    start = time.perf_counter()
    with ExitStack() as stack:
        models = {
            int(side): stack.enter_context(runtime.load(job.bundles[side], threads=job.threads[side]))
            for side in random.permutation(2)
        }
        # A load that takes long is worth more runs.
        until = time.perf_counter() + max(
            min(job.seconds, _LOAD_SECONDS), min(time.perf_counter() - start, _LONGEST_LOAD_SECONDS)
        )
        for model in [*models.values()] * 2:
            model(**inputs)
        order = [int(side) for side in random.permutation(2)]
        while len(seconds[1]) < _LEAST_RUNS or (time.perf_counter() < until and len(seconds[1]) < _MOST_RUNS):
            for side in order:
                models[side](**inputs)  # The other bundle's data has displaced this one's in the caches.
                start = time.perf_counter()
                models[side](**inputs)
                end = time.perf_counter()
                if side == 0 and job.slowdown:
                    end += (end - start) * job.slowdown
                    while time.perf_counter() < end:
                        pass
                seconds[side].append(end - start)
    return seconds


def time_kernel() -> list[float]:
    """Return the seconds of five runs of the reference kernel.

    The kernel is the same for every model and computes in the L1 cache: its time shows the processor's clock.
    """
    numbers = np.linspace(1, 2, _REFERENCE_NUMBERS, dtype=np.float32)
    roots = np.empty_like(numbers)
    seconds = []
    for _ in range(_REFERENCE_RUNS):
        start = time.perf_counter()
        for _ in range(_REFERENCE_CALLS):
            np.sqrt(numbers, out=roots)
        seconds.append(time.perf_counter() - start)
    return seconds


def _to_single(seconds: Sequence[float]) -> tuple[float, ...]:
    """The seconds in single precision, in which they are kept."""
    return tuple(map(float, np.asarray(seconds, np.float32)))
