"""Peers: a bundle beside other runtimes on the same ONNX file, in rounds of fresh processes that take turns."""

import os
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType
from typing import Any, Literal

import numpy as np

from tasks.comparison import observe_conditions
from tasks.step import path_of
from tasks.turns import Processes, Round, Run, Turn, TurnJob, load_bundle, load_onnxruntime, make_turn
from tvmflow.arrays import NamedArrays
from tvmflow.bundle import read_manifest
from tvmflow.comparison import Comparison, Plan, find_steady, percentile, runs_needed
from tvmflow.errors import InputError
from tvmflow.hardware.target import host
from tvmflow.processes.children import Child, Emit
from tvmflow.workspace import Record

Peer = Literal["onnxruntime", "openvino", "torch", "torch.compile"]
Runner = Literal["tvmflow", "onnxruntime", "openvino", "torch", "torch.compile"]
PERCENTILES = (50, 90, 99)

# The packages that load an ONNX file, by peer, and how to install one.
_PACKAGES = {"openvino": "openvino", "torch": "onnx2pytorch", "torch.compile": "onnx2pytorch"}
_INSTALL = {"openvino": "pip install openvino", "onnx2pytorch": "pip install --no-deps onnx2pytorch"}
# The rounds of a benchmark: fewer have no interval, more change nothing. Each runner takes so many turns in a round.
_FEWEST_ROUNDS, _MOST_ROUNDS, _TURNS = 8, 100, 5
# The least seconds and the fewest runs of a turn.
_TURN_SECONDS, _LEAST_RUNS = 0.06, 3


class Figures(Record):
    """The figures of one runner over all rounds.

    `runs` is the number of runs after the warm-up. `percentiles_ms` are None where `runs` is too small. `throughput` is
    in runs per second. `load_ms`, `first_ms` (loading the model, and its first run) and `peak_memory`, in bytes, are
    medians over the rounds' processes. `joules` is the energy of the processor per run, None where the machine does not
    report it. `error` is the largest difference of an output from the sample's in any round, divided by the largest
    value of that output in the sample.
    """

    runs: int
    percentiles_ms: dict[int, float | None]
    throughput: float
    load_ms: float
    first_ms: float
    peak_memory: int
    joules: float | None
    error: float

    def percentile(self, which: int) -> str:
        """Return a percentile in ms as text; for one without enough runs, "-" with the number of runs that are missing.

        `which` is one of PERCENTILES.
        """
        value = self.percentiles_ms[which]
        return f"{value:.3f}" if value is not None else f"- ({runs_needed(which) - self.runs} runs more)"


class Contest(Record):
    """A bundle beside its peers: the figures of each runner, and the comparison of the bundle with each peer.

    `failures` has a sentence for each peer that could not be measured.
    """

    figures: dict[Runner, Figures]
    comparisons: dict[Peer, Comparison]
    failures: dict[Peer, str]


def explain_missing(peer: Peer) -> str | None:
    """Return why a peer cannot be measured in this installation, None where it can."""
    package = _PACKAGES.get(peer)
    if package is None or find_spec(package) is not None:
        return None
    return f"{peer} needs {package}: {_INSTALL[package]}"


def hold_contest(
    onnx: Path,
    bundle: Path,
    samples: Path,
    peers: Sequence[Peer],
    *,
    threads: int,
    seconds: float,
    log: Path,
    timeout: float,
    progress: Callable[[int, int], None],
) -> Contest:
    """Measure a bundle and its peers on `threads` threads, in as many rounds as fit into `seconds`, 8 to 100.

    They run on the first of the `samples`, a file of `tvmflow.samples`. In each round every runner has a new process
    and takes five turns, in random order. A peer that fails takes no further part.
    Raises BundleError where the bundle does not run here, StepError where its process fails.
    """
    failures = {peer: reason for peer in peers if (reason := explain_missing(peer)) is not None}
    runners: list[Runner] = ["tvmflow", *(peer for peer in peers if peer not in failures)]
    threads = min(threads, host().cores)
    bundle_threads = min(threads, read_manifest(bundle).max_threads or threads)
    job = TurnJob(
        runner="tvmflow",
        onnx=onnx,
        bundle=bundle,
        samples=samples,
        threads=threads,
        bundle_threads=bundle_threads,
        runs=_LEAST_RUNS,
        seconds=_TURN_SECONDS,
    )
    load, rounds, budget = os.getloadavg()[0], list[Round[Runner]](), _FEWEST_ROUNDS
    random = np.random.default_rng(0)
    while len(rounds) < budget:
        progress(len(rounds), budget)
        start = time.monotonic()
        completed, failed = _measure_round(job, runners, log, timeout, random)
        for peer, reason in failed.items():
            runners.remove(peer)
            failures[peer] = reason
        if not rounds:
            budget = min(max(int(seconds / (time.monotonic() - start)), _FEWEST_ROUNDS), _MOST_ROUNDS)
        rounds.append(completed)
    conditions = observe_conditions((bundle_threads, threads), load)
    plan = Plan(looks=(len(rounds),))
    return Contest(
        figures={runner: _figures(rounds, runner) for runner in runners},
        comparisons={
            peer: Comparison(
                plan=plan, pairs=tuple(item.pair("tvmflow", peer) for item in rounds), conditions=conditions
            )
            for peer in peers
            if peer not in failures
        },
        failures=failures,
    )


def _measure_round(
    job: TurnJob, runners: Sequence[Runner], log: Path, timeout: float, random: np.random.Generator
) -> tuple[Round[Runner], dict[Peer, str]]:
    """Measure one round; return the turns of the runners that did not fail, and a sentence for each that did."""
    turns: dict[tuple[int, Runner], list[Turn]] = {}
    failures: dict[Peer, str] = {}

    def start(name: Runner) -> Child:
        file = log.with_name(f"{log.stem}-{name}{log.suffix}")
        return Child(path_of(work), log=file, torch=name.startswith("torch"))

    with Processes(runners, start, timeout, random) as processes:
        for number in range(_TURNS + 1):
            for name in processes.shuffle():
                if name in failures:
                    continue
                try:
                    turn = processes.take_turn(job.model_copy(update={"runner": name}))
                except Exception as error:
                    if name == "tvmflow":
                        raise
                    failures[name] = str(error)
                    turns.pop((0, name), None)
                    continue
                if number:  # The first turn loads the model, and is not counted.
                    turns.setdefault((0, name), []).append(turn)
        return Round(turns, processes.kernel_seconds), failures


def _figures(rounds: Sequence[Round[Runner]], runner: Runner) -> Figures:
    series = [item.seconds(runner) for item in rounds]
    steady = np.concatenate([each[find_steady(each) :] for each in series])
    joules = [value for item in rounds if (value := item.joules(runner)) is not None]
    last = [item.turns[0, runner][-1] for item in rounds]
    return Figures(
        runs=len(steady),
        percentiles_ms={
            which: None if (value := percentile(steady.tolist(), which)) is None else value * 1e3
            for which in PERCENTILES
        },
        throughput=len(steady) / float(steady.sum()),
        load_ms=float(np.median([turn.load_seconds for turn in last])) * 1e3,
        first_ms=float(np.median([turn.first_seconds for turn in last])) * 1e3,
        peak_memory=int(np.median([turn.peak_memory for turn in last])),
        joules=float(np.median(joules)) if joules else None,
        error=float(np.max([turn.error for turn in last])),
    )


def work(job: TurnJob, emit: Emit) -> Turn:
    """Make one turn of a runner in the runner's own process and return its times."""
    return make_turn(job, _LOADERS, _measure_error)


def _measure_error(outputs: Mapping[str, Any] | Sequence[Any], expected: NamedArrays) -> float:
    """Return the largest difference from the expected outputs, in order, over their largest value."""
    results = list(outputs.values()) if isinstance(outputs, Mapping) else outputs
    if len(results) != len(expected):
        raise InputError(f"it returns {len(results)} outputs, the model has {len(expected)}")
    errors = [
        float(np.max(np.abs(np.asarray(result, np.float64) - theirs), initial=0.0))
        / (float(np.max(np.abs(theirs), initial=0.0)) or 1.0)
        for result, theirs in zip(results, expected.values(), strict=True)
        if np.issubdtype(theirs.dtype, np.number)
    ]
    # Not max(), which may pass over a NaN.
    return float(np.max(errors, initial=0.0))


def _load_openvino(job: TurnJob) -> Run:
    import openvino

    options = {
        "PERFORMANCE_HINT": "LATENCY",
        "INFERENCE_NUM_THREADS": job.threads,
        "NUM_STREAMS": 1,
        "INFERENCE_PRECISION_HINT": "f32",
    }
    request = openvino.Core().compile_model(str(job.onnx), "CPU", options).create_infer_request()
    # Inputs and outputs are shared, so that OpenVINO copies as little as it can.
    return lambda inputs: list(request.infer(dict(inputs), share_inputs=True, share_outputs=True).values())


def _load_torch(job: TurnJob, is_compiled: bool = False) -> Run:
    import onnx
    import torch

    _stand_in_for_torchvision()
    import onnx2pytorch

    torch.set_num_threads(job.threads)
    module = onnx2pytorch.ConvertModel(onnx.load(job.onnx), experimental=True).eval()
    call = torch.compile(module) if is_compiled else module

    def run(inputs: NamedArrays) -> Sequence[Any]:
        with torch.inference_mode():
            outputs = call(*(torch.from_numpy(array) for array in inputs.values()))
        return [output.numpy() for output in (outputs if isinstance(outputs, (tuple, list)) else (outputs,))]

    return run


def _stand_in_for_torchvision() -> None:
    """Let the converter import where torchvision is not installed: it needs it for a few operators alone."""
    if find_spec("torchvision") is None:
        for name in ("torchvision", "torchvision.ops", "torchvision.io"):
            module: Any = ModuleType(name)
            module.__getattr__ = lambda attribute: None
            sys.modules[name] = module


_LOADERS: Mapping[str, Callable[[TurnJob], Run]] = {
    "tvmflow": load_bundle,
    "onnxruntime": load_onnxruntime,
    "openvino": _load_openvino,
    "torch": _load_torch,
    "torch.compile": partial(_load_torch, is_compiled=True),
}
