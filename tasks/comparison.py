"""Comparison: the latencies of two bundles, measured in turn, run by run, on this machine."""

import time
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path

import numpy as np

from tasks.step import Job
from tvmflow import npz
from tvmflow.bundle import extract, read_manifest
from tvmflow.process import Child, Emit
from tvmflow.samples import NamedArrays
from tvmflow.target import host
from tvmflow.workspace import Record, StepResult, Workspace

# Pairs of rounds, and seconds and runs of each: more than half of the pairs must be disturbed to change the median.
_PAIRS = 9
# The number of pairs for which `is_faster` decides reliably.
DECIDING_PAIRS = 25
_ROUND_SECONDS = 0.25
_LEAST_RUNS, _MOST_RUNS = 7, 2000
# The share of the pairs in which the faster bundle must have the lower latency.
_SURE = 0.8


class LatencyComparison(Record):
    """A candidate's latency over a baseline's in each pair of rounds, and the median milliseconds of a run of each."""

    ratios: tuple[float, ...]
    candidate_ms: float
    baseline_ms: float

    @property
    def ratio(self) -> float:
        """The median of `ratios`, which neither a disturbed round nor a machine that slows down changes."""
        return float(np.median(self.ratios))

    @property
    def spread(self) -> float:
        """The largest of `ratios` minus the smallest, divided by their median."""
        return float(np.ptp(self.ratios)) / self.ratio

    @property
    def wins(self) -> int:
        """The number of pairs in which the candidate's latency is the lower one."""
        return sum(value < 1 for value in self.ratios)

    def describe(self, candidate: str, baseline: str) -> str:
        """Return the comparison in words; the arguments name the two sides.

        For example "the new one's latency is 0.974 of the old one's (1.231 ms beside 1.264 ms), lower in 25 of 25
        pairs".
        """
        times = f"{self.candidate_ms:.3f} ms beside {self.baseline_ms:.3f} ms"
        wins = f"lower in {self.wins} of {len(self.ratios)} pairs"
        return f"{candidate} latency is {self.ratio:.3f} of {baseline} ({times}), {wins}"

    @property
    def reversed(self) -> "LatencyComparison":
        """The comparison with candidate and baseline exchanged."""
        ratios = tuple(1 / value for value in self.ratios)
        return LatencyComparison(ratios=ratios, candidate_ms=self.baseline_ms, baseline_ms=self.candidate_ms)

    def is_faster(self, gain: float) -> bool:
        """Whether the candidate's latency is below `gain` of the baseline's, and lower in four of five pairs.

        With two equal builds, one is lower in 20 of 25 pairs by chance once in 490 times; its median is hardly ever
        lower by one or two per cent as well.
        """
        return self.ratio < gain and self.wins >= _SURE * len(self.ratios)


class PairJob(Job):
    """One pair of rounds of two bundles on a sample: each runs in turn, as often as fits into `seconds` together."""

    bundles: tuple[Path, Path]
    sample: Path
    threads: tuple[int, int]
    seconds: float


class Pair(StepResult):
    """The median seconds of a run of each of the two bundles."""

    seconds: tuple[float, float]


def compare_latency(
    workspace: Workspace,
    log: Path,
    candidate: Path,
    baseline: Path,
    *,
    timeout: float,
    progress: Callable[[int, int], None],
    pairs: int = _PAIRS,
    gain: float | None = None,
    inputs: NamedArrays | None = None,
) -> LatencyComparison:
    """Measure two bundles in turn, each on the number of threads that it would use here.

    They run on `inputs`, arrays by name, by default on the golden sample of `candidate`. They alternate within a pair
    of rounds, so that other load on the machine slows both. Each pair runs in a new process, because the placement of
    memory makes a bundle faster or slower by several per cent throughout a process. The order of the two changes with
    each pair. Processes print to `log` and are killed after `timeout` seconds; `progress` gets the number of pairs done
    and of all `pairs`. With a `gain` the comparison ends as soon as no further pairs could make `candidate` the faster
    one by `is_faster`. Raises BundleError for a bundle that does not run here, InputError where `baseline` takes other
    inputs.
    """
    sides = [candidate, baseline]
    threads = {path: min(host().cores, read_manifest(path).threads) for path in sides}
    medians: list[tuple[float, float]] = []
    with workspace.scratch() as folder:
        extract(candidate, folder)
        sample = folder / "sample.npz"
        if inputs is not None:
            sample = folder / "inputs.npz"
            npz.write(sample, {f"input:{name}": array for name, array in inputs.items()})
        for pair in range(pairs):
            progress(pair, pairs)
            is_swapped = pair % 2 == 1
            first, second = reversed(sides) if is_swapped else sides
            job = PairJob(
                home=workspace.folder,
                bundles=(first, second),
                sample=sample,
                threads=(threads[first], threads[second]),
                seconds=_ROUND_SECONDS,
            )
            with Child("tasks.comparison:work", log=log) as child:
                one, other = child.call(job, Pair, timeout=timeout).seconds
            medians.append((other, one) if is_swapped else (one, other))
            losses = sum(candidate_seconds >= baseline_seconds for candidate_seconds, baseline_seconds in medians)
            if gain is not None and losses > (1 - _SURE) * pairs:
                break
    times = np.array(medians)
    return LatencyComparison(
        ratios=tuple(map(float, times[:, 0] / times[:, 1])),
        candidate_ms=float(np.median(times[:, 0])) * 1e3,
        baseline_ms=float(np.median(times[:, 1])) * 1e3,
    )


def work(job: PairJob, emit: Emit) -> Pair:
    """Run a pair of rounds in a child process and return the median seconds of each bundle."""
    from tvmflow import runtime

    arrays = npz.read(job.sample)
    inputs = {key.removeprefix("input:"): value for key, value in arrays.items() if key.startswith("input:")}
    with ExitStack() as stack:
        models = [
            stack.enter_context(runtime.load(bundle, threads=threads))
            for bundle, threads in zip(job.bundles, job.threads, strict=True)
        ]
        start = time.perf_counter()
        for model in models * 2:
            model(**inputs)
        runs = int(job.seconds / max(1e-9, (time.perf_counter() - start) / 2))
        seconds: list[list[float]] = [[], []]
        for turn in range(min(max(runs, _LEAST_RUNS), _MOST_RUNS)):
            for place in (0, 1) if turn % 2 == 0 else (1, 0):
                models[place](**inputs)  # The other bundle's data has displaced this one's in the caches.
                start = time.perf_counter()
                models[place](**inputs)
                seconds[place].append(time.perf_counter() - start)
    one, other = (float(np.median(values)) for values in seconds)
    return Pair(seconds=(one, other))
