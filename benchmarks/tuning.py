"""Tunes the example models and measures what that gains: `python benchmarks/tuning.py --minutes 10`.

Each model is tuned in an empty state folder and built with and without tuning. The bundle that a release would ship is
measured in turn with the untuned one, each pair of rounds in a new process; as a control the untuned one is measured in
turn with itself. Then the model is tuned again with the same number of trials as its budget, as after a retraining:
nothing should be measured. The exit code is 1 when something is, or when a release would ship the slower bundle.
"""

import argparse
import json
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from commandline import positive
from rich import box
from rich.console import Console
from rich.table import Table

from tasks import choose, export, relax_import, sidebyside, tune
from tasks.step import Context
from tvmflow import settings as machine
from tvmflow import spec as release_file
from tvmflow.cli.display import RichReporter
from tvmflow.progress import reporter
from tvmflow.spec import Tune
from tvmflow.workspace import Workspace

_EXAMPLES = Path(__file__).parent.parent / "examples"
MODELS = {
    "resnet18": "vision/resnet18.yaml",
    "resnet50": "vision/resnet50.yaml",
    "mobilenet_v2": "vision/mobilenet_v2.yaml",
    "encoder": "encoder/release.yaml",
}
_TIMEOUT = 900.0


@dataclass(frozen=True)
class Row:
    """One model: the trials and minutes of its tuning, and the tuned build's latency over the untuned one's.

    `ratio` is the median over pairs of rounds, `low` and `high` are their quartiles, and `control` is the untuned
    build's latency over its own; `tuned` counts the workloads with a record or trials. The tuned build is the one that
    a release would ship, or the one with all records and decisions if it would ship the untuned one. `again_trials`
    and `again_seconds` are of the second run.
    """

    model: str
    trials: int
    minutes: float
    tuned: int
    decisions: int
    ratio: float
    low: float
    high: float
    ratios: tuple[float, ...]
    control: float
    untuned_ms: float
    tuned_ms: float
    shipped: str
    again_trials: int
    again_seconds: float


def measure(name: str, budget: Tune, pairs: int, state: Path) -> Row:
    """Tune one model and measure both builds."""
    spec = release_file.load(_EXAMPLES / MODELS[name]).model_copy(update={"tune": budget})
    (target,) = spec.resolve_targets()
    settings = machine.load().model_copy(update={"state": state, "share_records": False})
    context = Context(spec, settings, Workspace(state))
    exported = export.export.fn(context)
    imported = relax_import.relax_import.fn(context, exported)
    start = time.monotonic()
    tuned = tune.tune_more.fn(context, imported, target, budget, None)
    minutes = (time.monotonic() - start) / 60
    making = choose.Making(context, exported, imported, target)
    candidates = making.candidates(choose.to_build(context.workspace, tuned))
    shipped, choice = making.best(candidates)
    is_tuned = choice is not None and choice.result.shipped == "tuned"

    def beside_untuned(candidate: choose.Candidate) -> sidebyside.Beside:
        return sidebyside.side_by_side(
            context.workspace,
            f"{name}-tuning",
            *(context.file(item.packaged.result.bundle) for item in (candidate, candidates[-1])),
            timeout=_TIMEOUT,
            progress=lambda done, total: reporter().progressed("compare", name, done, total, "in turn"),
            pairs=pairs,
            inputs=choose.tuned_sample(context, exported),
        )

    beside = beside_untuned(shipped if is_tuned else candidates[0])
    control = beside_untuned(candidates[-1])
    start = time.monotonic()
    again = tune.tune_more.fn(context, imported, target, Tune(trials=max(1, tuned.result.trials)), None)
    ratios = sorted(beside.ratios)
    return Row(
        model=name,
        trials=tuned.result.trials,
        minutes=minutes,
        tuned=tuned.result.coverage.tuned,
        decisions=tuned.result.decisions,
        ratio=beside.ratio,
        low=ratios[len(ratios) // 4],
        high=ratios[-1 - len(ratios) // 4],
        ratios=beside.ratios,
        control=control.ratio,
        untuned_ms=beside.held_ms,
        tuned_ms=beside.candidate_ms,
        shipped=_describe(choice.result) if choice is not None else "untuned",
        again_trials=again.result.trials,
        again_seconds=time.monotonic() - start,
    )


def _describe(choice: choose.Choice) -> str:
    """As "tuned", "tuned, records alone" or "untuned, 1 thread"."""
    part = f", {choice.part} alone" if choice.shipped == "tuned" and choice.part != "all" else ""
    threads = f", {choice.threads} thread{'s' if choice.threads > 1 else ''}" if choice.threads else ""
    return f"{choice.shipped}{part}{threads}"


def show(rows: Sequence[Row]) -> None:
    """Print the table."""
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    columns = (
        "model",
        "trials",
        "minutes",
        "s / trial",
        "decided",
        "untuned ms",
        "tuned / untuned",
        "quartiles",
        "control",
        "shipped",
        "again",
    )
    for column in columns:
        table.add_column(column, justify="left" if column in ("model", "shipped") else "right", no_wrap=True)
    for row in rows:
        table.add_row(
            row.model,
            str(row.trials),
            f"{row.minutes:.1f}",
            f"{60 * row.minutes / row.trials:.2f}" if row.trials else "-",
            str(row.decisions),
            f"{row.untuned_ms:.2f}",
            f"{row.ratio:.3f}",
            f"{row.low:.3f} to {row.high:.3f}",
            f"{row.control:.3f}",
            row.shipped,
            f"{row.again_trials} trials, {row.again_seconds:.0f} s",
        )
    Console(width=None if sys.stdout.isatty() else 160).print(table)


def main() -> int:
    """Run the benchmark and return the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=10.0, help="to tune each model (10)")
    parser.add_argument("--model", action="append", choices=MODELS, help="repeatable; all of them by default")
    parser.add_argument("--pairs", type=positive, default=25, help="of rounds in turn (25)")
    parser.add_argument("--tuner", choices=("xgb", "ga", "random", "grid"), default="xgb")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures to a file")
    options = parser.parse_args()
    rows = []
    with RichReporter(Console(stderr=True)).live():
        for name in options.model or MODELS:
            with tempfile.TemporaryDirectory(prefix="tuning-") as state:
                rows.append(
                    measure(name, Tune(minutes=options.minutes, tuner=options.tuner), options.pairs, Path(state))
                )
            # So that an interrupt loses none of the models before it.
            show(rows[-1:])
            if options.json:
                options.json.write_text(json.dumps([asdict(row) for row in rows], indent=2) + "\n")
    if len(rows) > 1:
        show(rows)
    slower = [row.model for row in rows if row.shipped.startswith("tuned") and row.ratio > 1]
    repeated = [row.model for row in rows if row.again_trials]
    for problem, names in (("the slower build would ship", slower), ("the second run measured again", repeated)):
        if names:
            print(f"{problem}: {', '.join(names)}", file=sys.stderr)
    return 1 if slower or repeated else 0


if __name__ == "__main__":
    sys.exit(main())
