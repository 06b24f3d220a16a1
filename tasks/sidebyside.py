"""Side by side: two bundles measured in turn, each in a process of its own, here and now."""

import time
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path

import numpy as np

from tasks.benchmark import Round, timed
from tasks.step import Job
from tvmflow import npz
from tvmflow.bundle import extract, read_manifest
from tvmflow.process import Child, Emit
from tvmflow.target import host
from tvmflow.workspace import Record, Workspace

# Pairs of rounds, and seconds and runs of each: more than half of the pairs must be disturbed to change the median.
_PAIRS = 9
_ROUND_SECONDS = 0.1
_LEAST_RUNS, _MOST_RUNS = 5, 1000
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

    @property
    def reversed(self) -> "Beside":
        """The same with the two bundles in each other's place."""
        ratios = tuple(1 / value for value in self.ratios)
        return Beside(ratios=ratios, candidate_ms=self.held_ms, held_ms=self.candidate_ms)

    def is_faster(self, gain: float) -> bool:
        """Whether the latency is below `gain` of the other's, and lower in four of five pairs.

        Of two equal builds one is by chance lower in 12 of 15 pairs once in 57 times, and hardly ever by one or two
        per cent in the median as well.
        """
        return self.ratio < gain and self.lower >= _SURE * len(self.ratios)


class PairJob(Job):
    """One round of one bundle: as many runs on a golden sample as fit into `seconds`."""

    bundle: Path
    sample: Path
    threads: int
    seconds: float


def side_by_side(
    workspace: Workspace,
    name: str,
    candidate: Path,
    held: Path,
    *,
    timeout: float,
    progress: Callable[[int, int], None],
    pairs: int = _PAIRS,
) -> Beside:
    """Measure two bundles in turn with equal threads, on the golden sample of `candidate`.

    Each pair of rounds is one of new processes: where memory and threads come to lie makes a process faster or slower
    than the next for as long as it lives, by several per cent. In a pair either goes first every other time. `name`
    names the logs, `progress` hears how many of how many pairs are done. Raises BundleError for a bundle that does not
    run here, InputError where `held` takes other inputs.
    """
    sides = {"candidate": candidate, "held": held}
    threads = min(host().cores, *(read_manifest(path).threads for path in sides.values()))
    medians: dict[str, list[float]] = {side: [] for side in sides}
    with workspace.scratch() as folder:
        extract(candidate, folder)
        for pair in range(pairs):
            progress(pair, pairs)
            with ExitStack() as stack:
                rounds: dict[str, Callable[[], Round]] = {}
                for side in sorted(sides, reverse=pair % 2 == 1):
                    log = workspace.folder / "logs" / f"{name}-{side}.log"
                    child = stack.enter_context(Child("tasks.sidebyside:work", log=log))
                    job = PairJob(
                        home=workspace.folder,
                        bundle=sides[side],
                        sample=folder / "sample.npz",
                        threads=threads,
                        seconds=_ROUND_SECONDS,
                    )
                    rounds[side] = _caller(child, job, timeout)
                # The first rounds warm up and are not counted.
                for counted in (False, True):
                    for side, run in rounds.items():
                        seconds = float(np.median(run().seconds))
                        if counted:
                            medians[side].append(seconds)
    return Beside(
        ratios=tuple(map(float, np.array(medians["candidate"]) / np.array(medians["held"]))),
        candidate_ms=float(np.median(medians["candidate"])) * 1e3,
        held_ms=float(np.median(medians["held"])) * 1e3,
    )


def _caller(child: Child, job: PairJob, timeout: float) -> Callable[[], Round]:
    return lambda: child.call(job, Round, timeout=timeout)


_loaded: list[tuple[Callable[[], object], float, int]] = []


def work(job: PairJob, emit: Emit) -> Round:
    """Run one round, in the bundle's own process, which loads it with its first round."""
    if not _loaded:
        from tvmflow import runtime

        start = time.perf_counter()
        model = runtime.load(job.bundle, threads=job.threads)
        load_seconds = time.perf_counter() - start
        arrays = npz.read(job.sample)
        inputs = {key.removeprefix("input:"): value for key, value in arrays.items() if key.startswith("input:")}
        start = time.perf_counter()
        model(**inputs)
        model(**inputs)
        runs = int(job.seconds / max(1e-9, (time.perf_counter() - start) / 2))
        _loaded.append((lambda: model(**inputs), load_seconds, min(max(runs, _LEAST_RUNS), _MOST_RUNS)))
    run, load_seconds, runs = _loaded[0]
    return timed(run, 1, runs, load_seconds)
