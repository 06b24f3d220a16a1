"""Prints our latency beside ONNX Runtime's and other peers': `python benchmarks/speed.py [MODEL|FILE.onnx ...]`.

Every runner has a process of its own and equal threads; they take turns of a fraction of a second, one at a time. A
ratio is our latency over the peer's, the median over the rounds (p50) and of the minima; below one we are faster. The
goal stands beside it, that of the precision of our build: x marks a miss with the whole interval of the ratio, ? one
that may be chance. ONNX Runtime, PyTorch and OpenVINO f32 compute in fp32, whatever --precision says. Noise is the
range of the medians of our rounds; with --threads 1 --cpu-time, other work on the machine adds next to none. With
--busy N, N processes compute beside the runners, as on a machine that is shared. The error is the largest difference
from ONNX Runtime's outputs over their largest value. Below the table stands, for each missed goal, the share of the
machine's peak that it takes: operations per second, by the textbook's algorithms. A file has no goals and no PyTorch
model, and runs at sizes at which ONNX Runtime runs it.
"""

import argparse
import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Literal

import numpy as np
import peaks
import prepare
import runners
from catalogue import MODELS, Model, find
from commandline import add_peers, new_parser, not_negative, positive, run_main, state_folder
from flops import gflop
from rich import box
from rich.console import Console
from rich.table import Table
from runners import RUNNERS, Figures, Runner, RunnerJob

from tvmflow.comparison import Interval, Plan
from tvmflow.errors import InputError, TvmflowError
from tvmflow.hardware.target import processor
from tvmflow.onnx_model.graph import rounds_activations
from tvmflow.onnx_model.reading import read_onnx
from tvmflow.workspace import Record

_TITLES: dict[Runner, str] = {
    "onnxruntime": "ONNX Runtime",
    "openvino": "OpenVINO f32",
    "openvino_default": "OpenVINO default",
    "pytorch": "PyTorch eager",
}
Outcome = Literal["kept", "unclear", "missed"]
_MARKS: Mapping[Outcome, str] = {"kept": " ", "unclear": "?", "missed": "x"}
# Beyond this relative error the outputs are wrong, and a ratio means nothing. Random weights amplify rounding:
# OpenVINO's bf16 has an error of 0.36 on ResNet-50. The gate of a release is far stricter.
_LARGEST_ERROR = {"fp32": 1e-3, "bf16": 0.5}
# The same for a model that rounds its activations, as a quantised one does: a last digit decides between two levels.
_LARGEST_OF_ROUNDED = 0.5


class Ratio(Record):
    """Our latency over a peer's, of the medians and of the minima, and whether it keeps the `goal`, if there is one.

    `p50` is the median of the rounds' ratios, and `interval` its confidence interval, which goes from 0 to infinity for
    fewer than eight rounds. A goal is "missed" where the whole interval is above it, "unclear" where only `p50` is.
    """

    p50: float
    min: float
    interval: Interval
    goal: float | None
    outcome: Outcome


class Row(Record):
    """The figures of one model by runner, and the ratios by peer; `failure` says why our build has none.

    `gflop` are the operations of its products by the textbook's algorithms, in units of 1e9; None where unknown.
    """

    gflop: float | None
    runners: dict[Runner, Figures]
    ratios: dict[Runner, Ratio]
    failure: str | None


class Document(Record):
    """The document that `--json` writes; latencies are milliseconds.

    `load` is the machine's load average before the run; figures are noisy where it is above zero. `busy` is the number
    of processes that computed beside the runners. `peak` is the machine's peak in fp32 with these threads, in GFLOP/s.
    """

    cpu: str
    batch: int
    threads: int
    trials: int
    precision: str
    rounds: int
    clock: runners.Clock
    load: float
    busy: int
    peak: float
    models: dict[str, Row]


def measure(model: Model | Path, arguments: argparse.Namespace, state: Path, show_step: Callable[[str], None]) -> Row:
    """Export and build a model of the catalogue, or build an ONNX file, and measure it.

    `show_step` is called with a line of progress before each step.
    """
    if isinstance(model, Path):
        label, goals, source, folders = model.stem, {}, None, ()
        peers = [name for name in arguments.peers if name != "pytorch"]
        onnx, sample = model, prepare.sample_for(model, state)
    else:
        label, goals = model.name, model.goals.get(arguments.precision, {})
        source, folders, peers = prepare.source(model), (model.folder,), arguments.peers
        show_step(f"{label}: exporting")
        onnx, sample = prepare.export(model, arguments.batch, state), prepare.sample(model, arguments.batch, state)
    show_step(f"{label}: building")
    bundle, failure = None, None
    try:
        name = f"{label}-{arguments.precision}-batch{arguments.batch}"
        name = f"{name}-threads{arguments.threads}-trials{arguments.trials}"
        target = prepare.native(arguments.threads)
        bundle = prepare.build(name, onnx, sample, target, state, arguments.trials, arguments.precision)
    except TvmflowError as error:
        failure = str(error)
    job = RunnerJob(
        runner="tvmflow",
        onnx=onnx,
        sample=sample,
        expected=state / f"{label}-expected.npz",
        bundle=bundle,
        source=source,
        threads=arguments.threads,
        seconds=arguments.seconds,
        clock=runners.clock(arguments.cpu_time, arguments.threads),
    )
    names: list[Runner] = [*(["tvmflow"] if bundle else []), *peers]  # type: ignore[list-item]
    with runners.busy_processes(arguments.busy), runners.Contest(state, folders) as contest:
        figures = contest.measure(job, names, arguments.rounds, lambda step: show_step(f"{label}: {step}"))
    if bundle is None:
        figures["tvmflow"] = Figures(failure=failure)
    ours = figures["tvmflow"]
    if failure is None and ours.failure is not None:
        failure = ours.failure
    largest = _LARGEST_OF_ROUNDED if rounds_activations(read_onnx(onnx)) else _LARGEST_ERROR[arguments.precision]
    if failure is None and not (ours.error is not None and ours.error <= largest):
        failure = f"the outputs differ from ONNX Runtime's by {ours.error:.1e} of their largest value"
    ratios = _ratios(goals, figures)
    return Row(gflop=gflop(onnx), runners=figures, ratios=ratios, failure=failure)


def _ratios(goals: Mapping[str, float], figures: Mapping[Runner, Figures]) -> dict[Runner, Ratio]:
    ours = figures["tvmflow"]
    ratios: dict[Runner, Ratio] = {}
    for name, peer in figures.items():
        if name == "tvmflow" or not ours.min or not peer.min:
            continue
        goal = goals.get(name)
        rounds = [one / other for one, other in zip(ours.medians, peer.medians, strict=True)]
        p50, interval = float(np.median(rounds)), Plan(looks=(len(rounds),)).interval(rounds)
        outcome: Outcome = "kept"
        if goal is not None and p50 > goal:
            outcome = "missed" if interval.judge(goal) == "fail" else "unclear"
        ratios[name] = Ratio(p50=p50, min=ours.min / peer.min, interval=interval, goal=goal, outcome=outcome)
    return ratios


def show(document: Document, peers: Sequence[Runner]) -> Table:
    """Return the table of all models."""
    table = Table(box=box.SIMPLE_HEAD)
    for heading in ("model", "p50 ms", "min ms"):
        table.add_column(heading, justify="left" if heading == "model" else "right", no_wrap=True)
    for peer in peers:
        table.add_column(f"/ {_TITLES[peer]}\np50   min   goal", justify="right", no_wrap=True)
    for heading in ("noise", "error"):
        table.add_column(heading, justify="right", no_wrap=True)
    for name, row in document.models.items():
        ours = row.runners["tvmflow"]
        table.add_row(
            name,
            _figure(ours.p50, ".3f"),
            _figure(ours.min, ".3f"),
            *(_ratio(row.ratios.get(peer)) for peer in peers),
            _figure(ours.noise, ".0%"),
            _figure(ours.error, ".0e"),
        )
    return table


def _figure(value: float | None, form: str) -> str:
    return "-" if value is None else format(value, form)


def _ratio(ratio: Ratio | None) -> str:
    if ratio is None:
        return "-" + " " * 17
    goal = "" if ratio.goal is None else f"{ratio.goal:.2f}"
    text = f"{ratio.p50:5.2f} {ratio.min:5.2f}  {goal:4} {_MARKS[ratio.outcome]}"
    return f"[red]{text}[/red]" if ratio.outcome == "missed" else text


def _remarks(document: Document) -> list[str]:
    """The type in which OpenVINO computes, and the reasons for missing figures, each once."""
    remarks: dict[str, None] = {}
    for name, row in document.models.items():
        if row.failure is not None:
            remarks[f"{name}: {row.failure}"] = None
        for runner, item in row.runners.items():
            if runner == "openvino_default" and item.precision:
                remarks[f"OpenVINO default computes in {item.precision} here"] = None
            if runner != "tvmflow" and item.failure is not None:
                is_missing = item.failure == runners.INSTALL_OPENVINO
                remarks[item.failure if is_missing else f"{name}, {_TITLES[runner]}: {item.failure}"] = None
    return list(remarks)


def _misses(document: Document) -> list[str]:
    """For each missed goal, the shares of the machine's peak that the goal, our build and the peer take."""
    lines = []
    for name, row in document.models.items():
        ours = row.runners["tvmflow"]
        for peer, ratio in row.ratios.items():
            theirs = row.runners[peer].p50
            if ratio.outcome == "kept" or ratio.goal is None or not row.gflop or not theirs or not ours.p50:
                continue
            goal_share, own_share, peer_share = (
                row.gflop / milliseconds * 1e3 / document.peak
                for milliseconds in (ratio.goal * theirs, ours.p50, theirs)
            )
            lines.append(
                f"{name}, {ratio.goal:.2f} of {_TITLES[peer]}: {row.gflop:.2f} GFLOP at {goal_share:.0%} of the peak; "
                f"ours {own_share:.0%}, theirs {peer_share:.0%}"
            )
    return lines


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """Return the options of the command line."""
    parser = new_parser(__doc__)
    models = f"of {', '.join(MODELS)}, or ONNX files; all models without one"
    parser.add_argument("models", nargs="*", metavar="MODEL|FILE.onnx", help=models)
    parser.add_argument("--batch", type=positive, default=1, help="size of the first dimension of every input (1)")
    parser.add_argument("--trials", type=not_negative, default=0, help="tuning trials before the build (0)")
    parser.add_argument("--precision", choices=list(_LARGEST_ERROR), default="fp32", help="of our build (fp32)")
    parser.add_argument("--cpu-time", action="store_true", help="measure CPU time, not wall time; with --threads 1")
    parser.add_argument("--rounds", type=positive, default=8, help="turns of each runner (8)")
    parser.add_argument("--seconds", type=float, default=0.5, help="of timed runs in a turn, at least three runs (0.5)")
    parser.add_argument("--busy", type=not_negative, default=0, help="processes that compute beside the runners (0)")
    add_peers(parser, list(_TITLES))
    return parser.parse_args(arguments)


def _chosen(arguments: argparse.Namespace) -> dict[str, Model | Path]:
    """The models and files to measure, by name. Raises InputError for an unknown name, and for a batch of files."""
    files = [name for name in arguments.models if name.endswith(".onnx")]
    if files and arguments.batch != 1:
        raise InputError(f"--batch is for models of the catalogue, and {files[0]} has the sizes of its file")
    names = [name for name in arguments.models if name not in files]
    models = find(names) if names or not files else []
    return {**{model.name: model for model in models}, **{Path(file).stem: Path(file) for file in files}}


def main() -> int:
    """Measure the models and print one table; return 1 when a build failed or gives wrong outputs."""
    arguments = parse()
    models = _chosen(arguments)
    clock = runners.clock(arguments.cpu_time, arguments.threads)
    # The outputs are compared with ONNX Runtime's.
    arguments.peers = [name for name in RUNNERS if name == "onnxruntime" or name in arguments.peers]
    state = state_folder(arguments)
    errors, load = Console(stderr=True), os.getloadavg()[0]
    rows: dict[str, Row] = {}
    with errors.status("measuring the peak") as status:
        peak = peaks.measure(prepare.native(arguments.threads), state).gflops
        for name, model in models.items():
            rows[name] = measure(model, arguments, state, status.update)
    document = Document(
        cpu=processor(),
        batch=arguments.batch,
        threads=arguments.threads,
        trials=arguments.trials,
        precision=arguments.precision,
        rounds=arguments.rounds,
        clock=clock,
        load=load,
        busy=arguments.busy,
        peak=peak,
        models=rows,
    )
    Console(width=max(150, Console().width)).print(show(document, arguments.peers), highlight=False)
    print(
        f"{document.cpu}; {document.precision}, batch {document.batch}, threads {document.threads}, {clock} time, "
        f"{document.trials or 'no'} tuning trials, {document.rounds} rounds, load {load:.1f} before, "
        f"{document.busy or 'no'} busy processes beside; "
        f"peak {document.peak:.0f} GFLOP/s; x: the goal is missed, ?: perhaps"
    )
    for line in (*_misses(document), *_remarks(document)):
        print(line)
    if arguments.json is not None:
        arguments.json.write_text(document.model_dump_json(indent=1))
    return int(any(row.failure is not None for row in rows.values()))


if __name__ == "__main__":
    run_main(main)
