"""Side by side: two bundles measured in turn, run by run, here and now."""

import time
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path

import numpy as np

from tasks.step import Job
from tvmflow import npz
from tvmflow.bundle import extract, read_manifest
from tvmflow.process import Child, Emit
from tvmflow.samples import Named
from tvmflow.target import host
from tvmflow.workspace import Record, StepResult, Workspace

# Pairs of rounds, and seconds and runs of each: more than half of the pairs must be disturbed to change the median.
_PAIRS = 9
# As many as `is_faster` is meant for.
DECIDING_PAIRS = 25
_ROUND_SECONDS = 0.25
_LEAST_RUNS, _MOST_RUNS = 7, 2000
# In which share of the pairs the faster of two bundles must be the faster one.
_SURE = 0.8


class Beside(Record):
    """A bundle's latency over another's in each pair of neighbouring rounds, and the median milliseconds of each."""

    ratios: tuple[float, ...]
    candidate_ms: float
    held_ms: float

    @property
    def ratio(self) -> float:
        """The median over the pairs: neither a disturbed round nor a machine that slows down decides."""
        return float(np.median(self.ratios))

    @property
    def spread(self) -> float:
        """How far the pairs are apart, relative to their median."""
        return float(np.ptp(self.ratios)) / self.ratio

    @property
    def lower(self) -> int:
        """In how many of the pairs the bundle's latency is the lower one."""
        return sum(value < 1 for value in self.ratios)

    def told(self, candidate: str, held: str) -> str:
        """As "the new one's latency is 0.974 of the old one's (1.231 ms beside 1.264 ms), lower in 25 of 25 pairs"."""
        times = f"{self.candidate_ms:.3f} ms beside {self.held_ms:.3f} ms"
        lower = f"lower in {self.lower} of {len(self.ratios)} pairs"
        return f"{candidate} latency is {self.ratio:.3f} of {held} ({times}), {lower}"

    @property
    def reversed(self) -> "Beside":
        """The same with the two bundles in each other's place."""
        ratios = tuple(1 / value for value in self.ratios)
        return Beside(ratios=ratios, candidate_ms=self.held_ms, held_ms=self.candidate_ms)

    def is_faster(self, gain: float) -> bool:
        """Whether the latency is below `gain` of the other's, and lower in four of five pairs.

        Of two equal builds one is by chance lower in 20 of 25 pairs once in 490 times, and hardly ever by one or two
        per cent in the median as well.
        """
        return self.ratio < gain and self.lower >= _SURE * len(self.ratios)


class PairJob(Job):
    """One pair of rounds of two bundles: as many runs of each, in turn, on a sample as fit into `seconds`."""

    bundles: tuple[Path, Path]
    sample: Path
    threads: tuple[int, int]
    seconds: float


class Pair(StepResult):
    """The median seconds of a run of each of the two bundles."""

    seconds: tuple[float, float]


def side_by_side(
    workspace: Workspace,
    name: str,
    candidate: Path,
    held: Path,
    *,
    timeout: float,
    progress: Callable[[int, int], None],
    pairs: int = _PAIRS,
    gain: float | None = None,
    inputs: Named | None = None,
) -> Beside:
    """Measure two bundles in turn, each with the threads that it would use here.

    They run on `inputs`, else on the golden sample of `candidate`, by turns within a pair of rounds, so that whatever
    else the machine does meets both. Each pair is one of a new process: where memory comes to lie makes a bundle faster
    or slower for as long as a process lives, by several per cent. Either is loaded and run first every other time.
    `name` names the logs, `progress` hears how many of how many pairs are done. With a `gain` it ends before when no
    more pairs could make `candidate` the faster one by `is_faster`. Raises BundleError for a bundle that does not run
    here, InputError where `held` takes other inputs.
    """
    sides = [candidate, held]
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
            swapped = pair % 2 == 1
            first, second = reversed(sides) if swapped else sides
            job = PairJob(
                home=workspace.folder,
                bundles=(first, second),
                sample=sample,
                threads=(threads[first], threads[second]),
                seconds=_ROUND_SECONDS,
            )
            with Child("tasks.sidebyside:work", log=workspace.folder / "logs" / f"{name}.log") as child:
                one, other = child.call(job, Pair, timeout=timeout).seconds
            medians.append((other, one) if swapped else (one, other))
            lost = sum(mine >= others for mine, others in medians)
            if gain is not None and lost > (1 - _SURE) * pairs:
                break
    times = np.array(medians)
    return Beside(
        ratios=tuple(map(float, times[:, 0] / times[:, 1])),
        candidate_ms=float(np.median(times[:, 0])) * 1e3,
        held_ms=float(np.median(times[:, 1])) * 1e3,
    )


def work(job: PairJob, emit: Emit) -> Pair:
    """Run a pair of rounds, in a process of its own."""
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
                models[place](**inputs)  # The other one's data has taken the place of its own in the caches.
                start = time.perf_counter()
                models[place](**inputs)
                seconds[place].append(time.perf_counter() - start)
    one, other = (float(np.median(values)) for values in seconds)
    return Pair(seconds=(one, other))
