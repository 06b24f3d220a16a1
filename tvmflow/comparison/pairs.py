"""Pairs: two sides measured together in fresh processes, until their ratio is clear or the budget is spent."""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TypeVar

import numpy as np

from tvmflow import npz
from tvmflow.comparison.plan import Interval, Plan
from tvmflow.comparison.samples import find_steady
from tvmflow.workspace import Record

K = TypeVar("K")

# The machine is uneven when the reference kernel takes this much longer in slow pairs than in fast ones, as a share.
_UNEVEN = 0.05


class Samples(Record):
    """The seconds of every run of both sides of a pair and of the reference kernel, rounded to single precision.

    The runs of the candidate and of the baseline with the same index were measured right after each other. `loads` has
    one number for each time that both sides were loaded: the runs of each side until the next load. It is empty where
    they were loaded once.
    """

    candidate: tuple[float, ...]
    baseline: tuple[float, ...]
    reference: tuple[float, ...]
    loads: tuple[int, ...] = ()


class Pair(Record):
    """The median seconds of the steady runs of both sides in a pair of fresh processes, or in one that they share.

    `ratio` is the median of the candidate's time over the baseline's, run by run: what slows both cancels out. `warmup`
    is the number of runs of each side that were left out as warm-up, in all loads together; `runs` is the number of the
    other runs. `reference` is the median seconds of the reference kernel.
    """

    candidate: float
    baseline: float
    ratio: float
    runs: int
    warmup: int
    reference: float

    @classmethod
    def of_turns(
        cls, candidate: Sequence[Sequence[float]], baseline: Sequence[Sequence[float]], kernel_seconds: Sequence[float]
    ) -> "Pair":
        """Return the figures of two processes that ran alternately; a turn is several runs of one of them.

        `candidate` and `baseline` hold the seconds of the runs of each turn. The median of a turn counts as one run.
        Turns with the same index were measured right after each other. `kernel_seconds` holds the reference kernel's
        seconds.
        """
        first, second = (tuple(float(np.median(turn)) for turn in turns) for turns in (candidate, baseline))
        return cls.of(Samples(candidate=first, baseline=second, reference=tuple(kernel_seconds)))

    @classmethod
    def of(cls, samples: Samples) -> "Pair":
        """Return the figures of a pair's samples without the warm-up that follows each load.

        `find_steady` finds the end of the warm-up of each side, and the later end counts for both.
        """
        is_steady = np.ones(len(samples.candidate), bool)
        start = 0
        for runs in samples.loads or (len(is_steady),):
            sides = (samples.candidate[start : start + runs], samples.baseline[start : start + runs])
            is_steady[start : start + max(map(find_steady, sides))] = False
            start += runs
        candidate, baseline = np.array(samples.candidate)[is_steady], np.array(samples.baseline)[is_steady]
        return cls(
            candidate=float(np.median(candidate)),
            baseline=float(np.median(baseline)),
            ratio=float(np.median(candidate / baseline)),
            runs=len(candidate),
            warmup=len(is_steady) - len(candidate),
            reference=float(np.median(samples.reference)),
        )


class Conditions(Record):
    """The conditions of both sides: the processor, and the indices of the cores that they may use.

    `threads` are the numbers of threads of the candidate and of the baseline. `load` is the machine's load average
    before and after the measurement.
    """

    processor: str
    cores: tuple[int, ...]
    threads: tuple[int, int]
    load: tuple[float, float]


class Comparison(Record):
    """A candidate beside a baseline: pairs of measurements, and the plan by which they were made."""

    plan: Plan
    pairs: tuple[Pair, ...]
    conditions: Conditions

    @property
    def ratios(self) -> tuple[float, ...]:
        """The candidate's latency over the baseline's in each pair."""
        return tuple(pair.ratio for pair in self.pairs)

    @property
    def ratio(self) -> float:
        """The median of `ratios`."""
        return float(np.median(self.ratios))

    @property
    def interval(self) -> Interval:
        """The interval of the median ratio."""
        return self.plan.interval(self.ratios)

    @property
    def candidate_ms(self) -> float:
        """The median milliseconds of a run of the candidate."""
        return float(np.median([pair.candidate for pair in self.pairs])) * 1e3

    @property
    def baseline_ms(self) -> float:
        """The median milliseconds of a run of the baseline."""
        return float(np.median([pair.baseline for pair in self.pairs])) * 1e3

    @property
    def unevenness(self) -> float:
        """The 90th percentile of the reference kernel's time over the pairs, divided by the 10th, minus one."""
        fast, slow = np.percentile([pair.reference for pair in self.pairs], (10, 90))
        return float(slow / fast) - 1

    @property
    def spread(self) -> float:
        """The 90th percentile of the candidate's time over the pairs, divided by the 10th, minus one."""
        fast, slow = np.percentile([pair.candidate for pair in self.pairs], (10, 90))
        return float(slow / fast) - 1

    @property
    def is_uneven(self) -> bool:
        """Whether the machine was uneven: `unevenness` is more than 0.05."""
        return self.unevenness > _UNEVEN

    def describe(self, candidate: str, baseline: str) -> str:
        """Return the comparison in words; the arguments name the two sides.

        For example "the new one's latency is 0.974 (0.968 to 0.981) of the old one's (1.231 ms beside 1.264 ms, 25
        pairs)".
        """
        times = f"{self.candidate_ms:.3f} ms beside {self.baseline_ms:.3f} ms, {len(self.pairs)} pairs"
        note = ""
        if self.is_uneven:
            note = f"; the machine was uneven: a fixed kernel took {1 + self.unevenness:.2f} times as long at times"
        return f"{candidate} latency is {self.ratio:.3f} ({self.interval}) of {baseline} ({times}{note})"

    def describe_gate(self, candidate: str, baseline: str, gate: str, bound: float) -> str:
        """Return a sentence with the ratio of `candidate` to `baseline`, its interval and what a gate allows.

        `candidate` and `baseline` are the words for the two builds, `gate` the gate's name in the release file, and
        `bound` the largest ratio that it allows. For an undecided comparison the sentence adds how many pairs of runs
        are missing.
        """
        sentence = f"{self.describe(candidate, baseline)}, gate {gate} allows {bound:g}"
        if self.interval.judge(bound) == "undecided":
            sentence += f": undecided, {self.describe_lack(bound)}"
        return sentence

    def describe_lack(self, bound: float) -> str:
        """Return a clause on an undecided comparison: how many pairs would decide about `bound`, and the budget."""
        pairs = self.plan.pairs_needed(self.ratios, bound)
        if pairs is None:
            return f"no number of pairs tells this ratio from {bound:g}"
        return f"about {pairs} pairs would decide, the budget is {self.plan.budget}"


def compare(
    plan: Plan,
    bounds: Mapping[K, Sequence[float]],
    measure: Callable[[int], Mapping[K, Pair]],
    progress: Callable[[int, int], None] = lambda done, budget: None,
) -> dict[K, tuple[Pair, ...]]:
    """Measure pairs until every interval decides about all of its `bounds`, or until the plan's budget is spent.

    A candidate may be compared with several baselines at once: `bounds` and the result have an entry for each baseline.
    `measure` gets the index of a pair, measures it, and returns it for each baseline. `progress` gets the number of
    pairs that are measured and the budget. The intervals are computed at the plan's looks (`Interval.judge` decides).
    Without any bound the whole budget is measured. Returns the pairs in the order of measurement.
    """
    pairs: dict[K, list[Pair]] = {name: [] for name in bounds}
    done = 0
    for look in plan.looks:
        for index in range(done, look):
            progress(index, plan.budget)
            for name, pair in measure(index).items():
                pairs[name].append(pair)
        done = look
        intervals = {name: plan.interval([pair.ratio for pair in each]) for name, each in pairs.items()}
        verdicts = [intervals[name].judge(bound) for name, each in bounds.items() for bound in each]
        if verdicts and "undecided" not in verdicts:
            break
    return {name: tuple(each) for name, each in pairs.items()}


def write_samples(path: Path, samples: Sequence[Samples]) -> None:
    """Write the samples of all pairs of a comparison to a compressed `.npz` file as float32. Raises OSError."""
    arrays = {
        f"{index}.{name}": np.asarray(values, np.float32)
        for index, pair in enumerate(samples)
        for name, values in pair.model_dump().items()
    }
    np.savez_compressed(path, **arrays)  # type: ignore[arg-type]


def read_samples(path: Path) -> list[Samples]:
    """Read what `write_samples` has written. Raises OSError, ValueError for another file."""
    arrays = npz.read(path)
    names = Samples.model_fields
    pairs = range(len(arrays) // len(names))
    if arrays.keys() != {f"{index}.{name}" for index in pairs for name in names}:
        raise ValueError("it does not hold the times of a comparison")
    return [Samples(**{name: tuple(arrays[f"{index}.{name}"].tolist()) for name in names}) for index in pairs]
