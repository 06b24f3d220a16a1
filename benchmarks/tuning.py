"""Tunes the example models and measures what that gains: `python benchmarks/tuning.py --minutes 10`.

Each model is tuned in an empty state folder of its own and built with and without its records. The build that a release
would ship is compared with the untuned bundle: they take turns, every pair in a new process. As a control the
untuned bundle is compared with itself. Then the model is tuned again with the number of trials of the first run as its
budget, as after a retraining. The second run must measure nothing. Exit code 1 when it measures something, or when a
release would ship the slower build.
"""

import argparse
import json
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from commandline import output_file, positive, run_main
from rich import box
from rich.console import Console
from rich.table import Table

from tasks.candidates import TargetBuilder, tunings_to_build
from tasks.choose import Candidate, Choice, tuned_sample
from tasks.comparison import compare_latency
from tasks.export import ExportJob, export
from tasks.options import variants
from tasks.original import find_original
from tasks.relax_import import ImportJob, relax_import
from tasks.step import StepRunner
from tasks.tune import TuneJob, tune_more
from tvmflow import spec as release_file
from tvmflow.cli.display import RichReporter
from tvmflow.comparison import Comparison
from tvmflow.progress import reporter
from tvmflow.settings import Settings
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
    """One model: the trials and minutes of its tuning, and the tuned build's latency relative to the untuned build's.

    `ratio` is the median over pairs, `low` and `high` are its interval, and `control` is the ratio of the untuned build
    to itself. `tuned` counts the workloads tried. The tuned build is the one that a release would ship; if a release
    would ship the untuned one, it is the build with all records and decisions. `again_trials` and `again_seconds`
    belong to the second run.
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


def measure(name: str, budget: Tune, seconds: float, state: Path) -> Row:
    """Tune one model, measure both builds, and return the figures."""
    spec = release_file.load(_EXAMPLES / MODELS[name]).model_copy(update={"tune": budget})
    (target,) = spec.resolve_targets()
    settings = Settings.load().model_copy(update={"state": state, "share_records": False})
    workspace = Workspace(state)
    runner = StepRunner.of(spec, settings, workspace)
    exported = export(runner, ExportJob.of(spec, find_original(spec, workspace))).result
    imported = relax_import(runner, ImportJob.of(spec, exported)).result
    job = TuneJob.of(spec, imported, target)
    start = time.monotonic()
    tuned = tune_more(runner, job, budget).result
    minutes = (time.monotonic() - start) / 60
    builder = TargetBuilder(runner, spec, exported, imported, target)
    candidates = builder.candidates(tunings_to_build(workspace, tuned))
    best, choice = builder.best(candidates)
    is_tuned = choice is not None and choice.result.shipped == "tuned"

    def compare_with_untuned(candidate: Candidate) -> Comparison:
        return compare_latency(
            workspace,
            workspace.folder / "logs" / f"{name}-tuning.log",
            *(workspace.path(item.packaged.bundle) for item in (candidate, candidates[-1])),
            timeout=_TIMEOUT,
            progress=lambda done, total: reporter().advance("compare", name, done, total, "in turn"),
            seconds=seconds,
            bounds=(),
            inputs=tuned_sample(workspace, exported, variants(spec, exported.inputs)),
        )

    comparison = compare_with_untuned(best if is_tuned else candidates[0])
    control = compare_with_untuned(candidates[-1])
    start = time.monotonic()
    again = tune_more(runner, job, Tune(trials=max(1, tuned.trials))).result
    return Row(
        model=name,
        trials=tuned.trials,
        minutes=minutes,
        tuned=tuned.coverage.tuned,
        decisions=tuned.decisions,
        ratio=comparison.ratio,
        low=comparison.interval.low,
        high=comparison.interval.high,
        ratios=comparison.ratios,
        control=control.ratio,
        untuned_ms=comparison.baseline_ms,
        tuned_ms=comparison.candidate_ms,
        shipped=_describe(choice.result) if choice is not None else "untuned",
        again_trials=again.trials,
        again_seconds=time.monotonic() - start,
    )


def _describe(choice: Choice) -> str:
    """Return text such as "tuned", "tuned, records alone" or "untuned, 1 thread"."""
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
        "interval",
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
    parser.add_argument("--seconds", type=positive, default=120, help="of a comparison (120)")
    parser.add_argument("--tuner", choices=("xgb", "ga", "random", "grid"), default="xgb")
    parser.add_argument("--json", type=output_file, metavar="FILE", help="write the figures to a file")
    options = parser.parse_args()
    rows = []
    with RichReporter(Console(stderr=True)).live():
        for name in options.model or MODELS:
            with tempfile.TemporaryDirectory(prefix="tuning-") as state:
                budget = Tune(minutes=options.minutes, tuner=options.tuner)
                rows.append(measure(name, budget, options.seconds, Path(state)))
            # Rows are written one by one, so that an interrupt loses no finished model.
            show(rows[-1:])
            if options.json:
                options.json.write_text(json.dumps([asdict(row) for row in rows], indent=2) + "\n")
    if len(rows) > 1:
        show(rows)
    slower = [row.model for row in rows if row.shipped.startswith("tuned") and row.ratio > 1]
    models = [row.model for row in rows if row.again_trials]
    for message, names in (("the slower build would ship", slower), ("the second run measured again", models)):
        if names:
            print(f"{message}: {', '.join(names)}", file=sys.stderr)
    return 1 if slower or models else 0


if __name__ == "__main__":
    run_main(main)
