"""Prints the cost model's estimates beside measurements: `python benchmarks/costs.py MODEL|FILE.onnx`.

For every decision that the cost model takes by cycles, such as the algorithm of a convolution or whether a block is
computed whole, the model is lowered with each option, and the functions that the option changes are measured. The table
has the estimate and the measurement of every option, in microseconds. Below stand the rank correlation (Spearman's) of
the two over all options, and the time that is lost by taking the cost model's option rather than the fastest one, as a
share of the time of all fastest options. The clock that turns cycles into microseconds is measured, too. A file with
free dimensions is measured at sizes at which ONNX Runtime runs it, a model of the catalogue at its own.
"""

import contextlib
import json
import math
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import prepare
from commandline import new_parser, run_main, state_folder
from rich import box
from rich.console import Console
from rich.table import Table

from tvmflow import npz
from tvmflow.hardware.target import Target
from tvmflow.processes import children
from tvmflow.processes.children import Emit
from tvmflow.workspace import Record

if TYPE_CHECKING:
    from tvmflow.tuning.decisions import Function, Lower, Site
    from tvmflow.tuning.measure import Measurer

_SCRIPT = Path(__file__)
# The kinds of decisions that the cost model takes by cycles.
_KINDS = ("algorithm", "block")


class CostsJob(Record):
    """The job to measure every option of the decisions of an ONNX file on a target, for inputs of these shapes."""

    onnx: Path
    shapes: dict[str, tuple[int, ...]]
    target: Target


class Option(Record):
    """An option of a decision: the cost model's cycles, and the measured seconds; None where it cannot be measured."""

    name: str
    cycles: float
    seconds: float | None


class Decision(Record):
    """A decision with its options, the cost model's choice first.

    The time of an option in a run of the model is `calls` times its seconds.
    """

    kind: str
    subject: str
    calls: int
    options: tuple[Option, ...]


class Costs(Record):
    """The decisions of a model, and the cycles per second of this machine's clock."""

    decisions: tuple[Decision, ...]
    clock: float

    @property
    def correlation(self) -> float | None:
        """Spearman's rank correlation of estimate and measurement over all measured options.

        None for fewer than three, and as `correlate` says.
        """
        pairs = [
            (option.cycles, option.seconds)
            for decision in self.decisions
            for option in decision.options
            if option.seconds is not None
        ]
        return correlate(pairs) if len(pairs) > 2 else None

    @property
    def loss(self) -> float | None:
        """The share of time lost by taking the cost model's option of each decision rather than the fastest one.

        Decisions with an option that could not be measured do not count; None without any other decision.
        """
        chosen = fastest = 0.0
        for decision in self.decisions:
            seconds = [option.seconds for option in decision.options]
            if None in seconds:
                continue
            chosen += decision.calls * (seconds[0] or 0.0)
            fastest += decision.calls * min(second or 0.0 for second in seconds)
        return chosen / fastest - 1 if fastest else None


def correlate(pairs: Sequence[tuple[float, float]]) -> float | None:
    """Return Spearman's rank correlation of pairs; equal values share the mean of their ranks.

    None where all first values or all second values are equal, which have no rank.
    """
    first, second = (_ranks([pair[place] for pair in pairs]) for place in (0, 1))
    mean = (len(pairs) + 1) / 2
    products = sum((a - mean) * (b - mean) for a, b in zip(first, second, strict=True))
    squares = math.prod(sum((rank - mean) ** 2 for rank in ranks) for ranks in (first, second))
    return products / math.sqrt(squares) if squares else None


def _ranks(values: Sequence[float]) -> list[float]:
    ordered = sorted(values)
    return [(2 * ordered.index(value) + ordered.count(value) + 1) / 2 for value in values]


def work(job: CostsJob, emit: Emit) -> Costs:
    """Measure the options in a child process."""
    threads = job.target.threads
    os.environ["TVM_NUM_THREADS"] = str(threads)
    from tvmflow import compiler
    from tvmflow.compiler.calibration import measure_clock
    from tvmflow.tuning.cache_state import weight_bytes
    from tvmflow.tuning.candidates import arguments_of
    from tvmflow.tuning.measure import use_measurer
    from tvmflow.tuning.model import Lowering

    lowering = Lowering(compiler.import_onnx(job.onnx, job.shapes), job.target, compiler.BuildOptions())
    sites, functions = lowering.functions({})
    weights = weight_bytes([(arguments_of(item.func) or (), item.calls) for item in functions])
    with use_measurer(None, job.target, threads=threads, timeout=60.0, deadline=math.inf, weights=weights) as measurer:
        times = _Times(measurer)
        decisions: dict[str, Decision] = {}
        for done, kind in enumerate(_KINDS):
            emit(done, len(_KINDS), kind)
            # The parts of blocks are measured as they are without the blocks.
            apart = {} if kind == "block" else {key: "apart" for key, site in sites.items() if site.kind == "block"}
            times_by_site = _in_turn if kind == "block" else _together
            for site, options in times_by_site(lowering.functions, kind, apart, times):
                calls, of_site = options[0][0], tuple(item for _, item in options)
                decisions[site.key] = Decision(kind=kind, subject=site.subject, calls=calls, options=of_site)
    return Costs(decisions=tuple(decisions.values()), clock=measure_clock(job.target))


def _together(
    lower: "Lower", kind: str, overrides: Mapping[str, str], times: "_Times"
) -> "Iterator[tuple[Site, list[tuple[int, Option]]]]":
    """Measure the options of all decisions of a kind, beside the options `made`; yield each with calls and options.

    The model is lowered once for each place in the lists of options, with the options there of all decisions.
    """
    sites, functions = lower(overrides)
    estimated = [site for site in sites.values() if site.kind == kind and len(site.cycles) == len(site.options) > 1]
    times_by_site: dict[str, list[tuple[int, Option]]] = {site.key: [] for site in estimated}
    for place in range(max((len(site.options) for site in estimated), default=0)):
        others = {site.key: site.options[place] for site in estimated if place < len(site.options)}
        _, functions = lower({**overrides, **others})
        for site in estimated:
            if site.key not in others:
                continue
            own = [item for item in functions if item.subject in (site.subject, *site.parts)]
            option = Option(name=others[site.key], cycles=site.cycles[place], seconds=times.of(own) if own else None)
            times_by_site[site.key].append((max((item.calls for item in own), default=0), option))
    yield from ((site, times_by_site[site.key]) for site in estimated)


def _in_turn(
    lower: "Lower", kind: str, overrides: Mapping[str, str], times: "_Times"
) -> "Iterator[tuple[Site, list[tuple[int, Option]]]]":
    """Measure the two options of each decision of a kind by all functions in which they differ; else as `_together`.

    Both options of a decision that the network has at several places are measured at all of them, and divided by their
    number.
    """
    sites, functions = lower(overrides)
    for site in sites.values():
        if site.kind != kind or len(site.cycles) != 2:
            continue
        _, others = lower({**overrides, site.key: site.options[1]})
        groups = excess(functions, others), excess(others, functions)
        places = max((item.calls for group in groups for item in group if item.subject == site.subject), default=1)
        options = []
        for name, cycles, group in zip(site.options, site.cycles, groups, strict=True):
            seconds = times.of_calls(group)
            seconds = None if seconds is None else seconds / places
            options.append((places, Option(name=name, cycles=cycles, seconds=seconds)))
        yield site, options


def excess(functions: "Sequence[Function]", others: "Sequence[Function]") -> "list[Function]":
    """Return the functions with the calls that they have more than the functions of the same code in `others`."""
    from tvmflow.tuning.traces import workload_key

    calls = {workload_key(item.scheduled): item.calls for item in others}
    more = ((item, item.calls - calls.get(workload_key(item.scheduled), 0)) for item in functions)
    return [replace(item, calls=count) for item, count in more if count > 0]


class _Times:
    """The seconds of a call of each function, measured once."""

    def __init__(self, measurer: "Measurer") -> None:
        self._measurer = measurer
        self._seconds: dict[str, float | None] = {}

    def of(self, functions: "Sequence[Function]") -> float | None:
        """Return the seconds of a call of one function of each subject, the mean over its calls; None for a failure."""
        keys = self._measure(functions)
        total = 0.0
        for subject in {item.subject for item in functions}:
            calls = sum(item.calls for item in functions if item.subject == subject)
            for key, item in zip(keys, functions, strict=True):
                seconds = self._seconds[key]
                if item.subject == subject and seconds is None:
                    return None
                if item.subject == subject and seconds is not None:
                    total += item.calls * seconds / calls
        return total

    def of_calls(self, functions: "Sequence[Function]") -> float | None:
        """Return the seconds of all calls of the functions; None for a failure."""
        seconds = [self._seconds[key] for key in self._measure(functions)]
        if None in seconds:
            return None
        return sum(item.calls * (second or 0.0) for item, second in zip(functions, seconds, strict=True))

    def _measure(self, functions: "Sequence[Function]") -> list[str]:
        """Measure the functions that are new, and return the keys of all."""
        from tvmflow.tuning.decisions import candidate
        from tvmflow.tuning.traces import workload_key
        from tvmflow.tuning.worker_process import TrialError

        keys = [workload_key(item.scheduled) for item in functions]
        new = {key: item for key, item in zip(keys, functions, strict=True) if key not in self._seconds}
        libraries = self._measurer.build([candidate(item.scheduled) for item in new.values()])
        for key, library in zip(new, libraries, strict=True):
            self._seconds[key] = None
            with contextlib.suppress(TrialError):
                self._seconds[key] = None if isinstance(library, TrialError) else self._measurer.time(library)
        return keys


def measure(onnx: Path, sample: Path, threads: int, state: Path) -> Costs:
    """Measure the options of an ONNX file's decisions on this machine, at the sizes of the inputs in an `.npz`.

    The log is in `state`.
    """
    shapes = {name: array.shape for name, array in npz.read(sample).items()}
    job = CostsJob(onnx=onnx, shapes=shapes, target=prepare.native(threads))
    log = state / f"{onnx.stem}-costs.log"
    return children.call("costs:work", job, Costs, log=log, timeout=3600, paths=(_SCRIPT.parent,))


def show(name: str, costs: Costs) -> Table:
    """Return the table of one model: a line for each option, the cost model's choice first."""
    loss, correlation = costs.loss, costs.correlation
    title = f"{name}: rank correlation {_number(correlation, '.2f')}, time lost by choosing {_number(loss, '.1%')}"
    table = Table(box=box.SIMPLE_HEAD, title=title, title_justify="left")
    for heading in ("decision", "calls", "option", "estimate us", "measured us", "ratio"):
        is_text = heading in ("decision", "option")
        table.add_column(heading, justify="left" if is_text else "right", overflow="fold")
    for decision in costs.decisions:
        fastest = min((option.seconds for option in decision.options if option.seconds is not None), default=None)
        for place, option in enumerate(decision.options):
            estimate = option.cycles / costs.clock
            table.add_row(
                f"{decision.kind}: {decision.subject}" if place == 0 else "",
                str(decision.calls) if place == 0 else "",
                option.name + (" *" if option.seconds is not None and option.seconds == fastest else ""),
                f"{estimate * 1e6:.0f}",
                "-" if option.seconds is None else f"{option.seconds * 1e6:.0f}",
                f"{estimate / option.seconds:.2f}" if option.seconds else "-",
            )
    return table


def _number(value: float | None, form: str) -> str:
    return "-" if value is None else format(value, form)


def main() -> None:
    """Print one table per model."""
    parser = new_parser(__doc__)
    parser.add_argument("models", nargs="+", metavar="MODEL", help="a name of catalogue.py, or an ONNX file")
    arguments = parser.parse_args()
    state = state_folder(arguments)
    document: dict[str, Any] = {}
    for name in arguments.models:
        onnx, sample = prepare.file_and_sample(name, 1, state)
        costs = measure(onnx, sample, arguments.threads, state)
        document[name] = {**costs.model_dump(mode="json"), "correlation": costs.correlation, "loss": costs.loss}
        Console(width=max(160, Console().width)).print(show(name, costs))
    if arguments.json is not None:
        arguments.json.write_text(json.dumps(document, indent=1))


if __name__ == "__main__":
    run_main(main)
