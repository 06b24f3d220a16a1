"""Tries the comparison that gates use: `python benchmarks/verdicts.py --verdicts 50`.

A bundle is compared with itself, and with itself made slower on purpose by a wait after each run. A gate that allows a
ratio of 1.01 should let the first pass and refuse the others. The table has the share of each verdict, the pairs and
the seconds of one. Verdicts and pairs stay in the state folder, so that the command continues where it was interrupted;
`--fresh` begins anew. Exit code 1 when the goal is missed: the bundle itself is never refused, slower ones
are caught, by 10 and 5 % every time, by 2 % in nine of ten. 1 % is at the bound.

With `--pool PAIRS` so many pairs are measured for each slowdown, and the verdicts are made from pairs drawn from these
at random: a short form in a few minutes.
"""

import argparse
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
import prepare
from catalogue import find
from commandline import new_parser, output_file, positive, run_main, state_folder
from rich import box
from rich.console import Console
from rich.table import Table

from tasks.comparison import compare_latency
from tvmflow import npz
from tvmflow.comparison import Comparison, Plan, Verdict
from tvmflow.hardware.target import processor
from tvmflow.report import charts
from tvmflow.workspace import Record, Workspace

_TIMEOUT = 600.0
# The smallest share of verdicts that must be "pass" or "fail", by the slowdown in per cent.
_PASSED = {0.0: 1.0}
_CAUGHT = {2.0: 0.9, 5.0: 1.0, 10.0: 1.0}
_COLOURS: Mapping[Verdict, str] = {"pass": "#2e7d32", "undecided": "#8d6e63", "fail": "#c62828"}


class Outcome(Record):
    """One verdict: the slowdown in per cent, the number of pairs, and the seconds."""

    slowdown: float
    verdict: Verdict
    ratio: float
    pairs: int
    seconds: float


class Row(Record):
    """All verdicts at one slowdown in per cent: shares by verdict, the median ratio, median and largest seconds."""

    slowdown: float
    verdicts: int
    shares: dict[Verdict, float]
    ratio: float
    pairs: float
    seconds: float
    longest: float


class Document(Record):
    """The document that `--json` writes; `pool` is the number of pairs from which verdicts were drawn, None if none."""

    cpu: str
    model: str
    bound: float
    pool: int | None
    rows: tuple[Row, ...]


class Trial:
    """A bundle that is compared with itself on `sample`, an `.npz` of inputs.

    A gate allows the ratio `bound`. A verdict takes at most `seconds`, and `state` is the folder of the measurements.
    """

    def __init__(self, bundle: Path, sample: Path, state: Path, bound: float, seconds: float) -> None:
        self.bundle, self.bound, self.seconds = bundle, bound, seconds
        self._inputs = npz.read(sample)
        self._state = state

    def compare(self, slowdown: float, bounds: Sequence[float], seconds: float) -> Comparison:
        """Compare the bundle, slower by `slowdown` per cent, with itself, until each of the `bounds` is decided.

        The comparison takes about `seconds` at most, and has at least 12 pairs.
        """
        return compare_latency(
            Workspace(self._state),
            self._state / "verdicts.log",
            self.bundle,
            self.bundle,
            timeout=_TIMEOUT,
            progress=lambda done, total: None,
            seconds=seconds,
            bounds=bounds,
            inputs=self._inputs,
            slowdown=slowdown / 100,
        )

    def kept(self, part: str) -> Path:
        """Return the path of the file that keeps measurements with this bundle and bound; `part` ends its name."""
        return self._state / f"verdicts-{self.bundle.name.partition('.')[0]}-{self.bound:g}-{part}"

    def outcome(self, slowdown: float) -> Outcome:
        """Compare the bundle, slower by `slowdown` per cent, with itself, and return the verdict."""
        start = time.monotonic()
        comparison = self.compare(slowdown, (self.bound,), self.seconds)
        return Outcome(
            slowdown=slowdown,
            verdict=comparison.interval.judge(self.bound),
            ratio=comparison.ratio,
            pairs=len(comparison.pairs),
            seconds=time.monotonic() - start,
        )

    def drawn_outcomes(self, slowdown: float, pool: int, count: int) -> list[Outcome]:
        """Measure `pool` pairs, and return `count` verdicts on pairs that are drawn from these with replacement.

        Pairs of earlier runs are used. `slowdown` is in per cent.
        """
        outcomes = self.kept(f"{slowdown:g}-pairs")
        lines = outcomes.read_text().splitlines() if outcomes.exists() else []
        while len(lines) < pool:
            # As few pairs as a comparison may have: an interrupt loses no more.
            start = time.monotonic()
            new = self.compare(slowdown, (), 0.0).ratios
            lines += [f"{ratio!r} {(time.monotonic() - start) / len(new)!r}" for ratio in new]
            outcomes.write_text("".join(f"{line}\n" for line in lines))
        ratios, durations = zip(*(map(float, line.split()) for line in lines), strict=True)
        pair_seconds = float(np.median(durations))
        plan = Plan.up_to(min(150, max(12, int(self.seconds / pair_seconds))))
        random = np.random.default_rng(0)
        return [
            _judge(plan, list(random.choice(ratios, plan.budget)), slowdown, self.bound, pair_seconds)
            for _ in range(count)
        ]


def _judge(plan: Plan, ratios: list[float], slowdown: float, bound: float, pair_seconds: float) -> Outcome:
    """The verdict at the first look that decides."""
    for look in plan.looks:
        verdict = plan.interval(ratios[:look]).judge(bound)
        if verdict != "undecided":
            break
    ratio = float(np.median(ratios[:look]))
    return Outcome(slowdown=slowdown, verdict=verdict, ratio=ratio, pairs=look, seconds=look * pair_seconds)


def summarise(outcomes: Sequence[Outcome]) -> tuple[Row, ...]:
    """Return a row for each slowdown, in ascending order."""
    rows = []
    for slowdown in sorted({outcome.slowdown for outcome in outcomes}):
        group = [outcome for outcome in outcomes if outcome.slowdown == slowdown]
        verdicts = [outcome.verdict for outcome in group]
        rows.append(
            Row(
                slowdown=slowdown,
                verdicts=len(group),
                shares={verdict: verdicts.count(verdict) / len(group) for verdict in _COLOURS},
                ratio=float(np.median([outcome.ratio for outcome in group])),
                pairs=float(np.median([outcome.pairs for outcome in group])),
                seconds=float(np.median([outcome.seconds for outcome in group])),
                longest=max(outcome.seconds for outcome in group),
            )
        )
    return tuple(rows)


def misses(rows: Sequence[Row]) -> list[str]:
    """Return a sentence for each goal that is missed."""
    sentences = []
    for row in rows:
        for goals, verdict in ((_PASSED, "pass"), (_CAUGHT, "fail")):
            goal = goals.get(row.slowdown, 0.0)
            share = row.shares["pass"] if verdict == "pass" else row.shares["fail"]
            if share < goal:
                sentences.append(f"slower by {row.slowdown:g} %: {verdict} in {share:.0%}, the goal is {goal:.0%}")
    return sentences


def show(rows: Sequence[Row]) -> Table:
    """Return the table."""
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for heading in ("slower by", "verdicts", "pass", "undecided", "fail", "ratio", "pairs", "seconds", "longest"):
        table.add_column(heading, justify="right", no_wrap=True)
    for row in rows:
        table.add_row(
            f"{row.slowdown:g} %",
            str(row.verdicts),
            *(f"{row.shares[verdict]:.0%}" for verdict in _COLOURS),
            f"{row.ratio:.4f}",
            f"{row.pairs:.0f}",
            f"{row.seconds:.0f}",
            f"{row.longest:.0f}",
        )
    return table


def picture(rows: Sequence[Row], bound: float) -> str:
    """Return the shares of the verdicts by slowdown, as an SVG file."""
    bars = {
        f"slower by {row.slowdown:g} %": {str(verdict): share for verdict, share in row.shares.items()} for row in rows
    }
    colours = {str(verdict): colour for verdict, colour in _COLOURS.items()}
    return charts.standalone(charts.shares(f"Verdicts of a gate that allows a ratio of {bound:g}", bars, colours))


def parse() -> argparse.Namespace:
    """Return the options of the command line."""
    parser = new_parser(__doc__)
    parser.add_argument("--model", default="squeezenet", help="of the catalogue (squeezenet)")
    parser.add_argument("--verdicts", type=positive, default=50, help="at each slowdown (50)")
    parser.add_argument("--slowdowns", type=float, nargs="+", default=[0.0, 1.0, 2.0, 5.0, 10.0], metavar="PERCENT")
    parser.add_argument("--bound", type=float, default=1.01, help="the ratio that the gate allows (1.01)")
    parser.add_argument("--seconds", type=float, default=120.0, help="the budget of a verdict (120)")
    parser.add_argument("--pool", type=positive, metavar="PAIRS", help="draw the verdicts from so many pairs")
    parser.add_argument("--svg", type=output_file, metavar="FILE", help="write the picture to a file")
    parser.add_argument("--fresh", action="store_true", help="forget the verdicts of earlier runs")
    return parser.parse_args()


def main() -> int:
    """Run the benchmark and return the exit code."""
    options = parse()
    state = state_folder(options)
    (model,) = find([options.model])
    sample = prepare.sample(model, 1, state)
    target = prepare.native(options.threads)
    name = f"{model.name}-verdicts-threads{options.threads}"
    bundle = prepare.build(name, prepare.export(model, 1, state), sample, target, state)
    trial = Trial(bundle, sample, state, options.bound, options.seconds)
    errors = Console(stderr=True)
    outcomes: list[Outcome] = []
    if options.fresh:
        for file in state.glob(trial.kept("*").name):
            file.unlink()
    if options.pool is not None:
        for slowdown in options.slowdowns:
            errors.print(f"{slowdown:g} %: {options.pool} pairs")
            outcomes += trial.drawn_outcomes(slowdown, options.pool, options.verdicts)
    else:
        decisions = trial.kept(f"{options.seconds:g}")
        if decisions.exists():
            outcomes = [Outcome.model_validate_json(line) for line in decisions.read_text().splitlines()]
        for turn in range(options.verdicts):
            for slowdown in options.slowdowns:
                if sum(outcome.slowdown == slowdown for outcome in outcomes) > turn:
                    continue
                outcomes.append(trial.outcome(slowdown))
                with decisions.open("a") as stream:
                    stream.write(outcomes[-1].model_dump_json() + "\n")
                errors.print(f"{slowdown:g} %: {outcomes[-1].verdict}, {outcomes[-1].pairs} pairs")
    document = Document(
        cpu=processor(), model=model.name, bound=options.bound, pool=options.pool, rows=summarise(outcomes)
    )
    Console(width=110).print(show(document.rows), highlight=False)
    how = f"drawn from {options.pool} pairs each" if options.pool else "each measured anew"
    print(f"{document.cpu}; {model.name}, gate {options.bound:g}, at most {options.seconds:g} s a verdict, {how}")
    for line in misses(document.rows):
        print(line)
    if options.json is not None:
        options.json.write_text(document.model_dump_json(indent=1))
    if options.svg is not None:
        options.svg.write_text(picture(document.rows, options.bound))
    return int(bool(misses(document.rows)))


if __name__ == "__main__":
    run_main(main)
