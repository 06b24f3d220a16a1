"""Peers: a bundle beside other runtimes on the same ONNX file, in rounds of fresh processes that take turns."""

import contextlib
import os
import resource
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType
from typing import Any, Literal

import numpy as np

from tasks.comparison import measure_reference, observe_conditions
from tvmflow import npz
from tvmflow.arrays import NamedArrays
from tvmflow.bundle import read_manifest
from tvmflow.comparison import Comparison, Pair, Plan, find_steady, percentile, runs_needed
from tvmflow.energy import joules_between, read_counters
from tvmflow.errors import InputError
from tvmflow.onnx_model.session import open_session, run_session
from tvmflow.process import Child, Emit
from tvmflow.target import host
from tvmflow.workspace import Record

Peer = Literal["onnxruntime", "openvino", "torch", "torch.compile"]
Runner = Literal["tvmflow", "onnxruntime", "openvino", "torch", "torch.compile"]
PERCENTILES = (50, 90, 99)

# The packages that load an ONNX file, by peer, and how to install one.
_PACKAGES = {"openvino": "openvino", "torch": "onnx2pytorch", "torch.compile": "onnx2pytorch"}
_INSTALL = {"openvino": "pip install openvino", "onnx2pytorch": "pip install --no-deps onnx2pytorch"}
# The rounds of a benchmark: fewer have no interval, more change nothing. Each runner takes so many turns in a round.
_FEWEST_ROUNDS, _MOST_ROUNDS, _TURNS = 8, 100, 5
_TURN_SECONDS, _LEAST_RUNS = 0.06, 3

Run = Callable[[], Sequence[Any]]


class TurnJob(Record):
    """A turn of one runner on the sample, an `.npz` of a bundle; the first turn of a process loads the model."""

    runner: Runner
    onnx: Path
    bundle: Path
    sample: Path
    threads: int


class Turn(Record):
    """The seconds of the runs of a turn, one after the other.

    `load_seconds` and `first_seconds` are those of loading the model and of its first run. `peak_memory` is in bytes.
    `error` is the largest difference from the sample's outputs over their largest value.
    """

    seconds: tuple[float, ...]
    load_seconds: float
    first_seconds: float
    peak_memory: int
    error: float


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
    sample: Path,
    peers: Sequence[Peer],
    *,
    threads: int,
    seconds: float,
    log: Path,
    timeout: float,
    progress: Callable[[int, int], None],
) -> Contest:
    """Measure a bundle and its peers on `threads` threads, in as many rounds as fit into `seconds`, 8 to 100.

    In each round every runner has a fresh process and takes five turns, in random order; it is stopped (SIGSTOP) while
    it is not its turn, so that its threads take no core from the others. A peer that fails takes no further part.
    Raises BundleError where the bundle does not run here, StepError where its process fails.
    """
    failures = {peer: reason for peer in peers if (reason := explain_missing(peer)) is not None}
    runners: list[Runner] = ["tvmflow", *(peer for peer in peers if peer not in failures)]
    threads = min(threads, host().cores)
    job = TurnJob(runner="tvmflow", onnx=onnx, bundle=bundle, sample=sample, threads=threads)
    load, rounds, budget = os.getloadavg()[0], list[_Round](), _FEWEST_ROUNDS
    random = np.random.default_rng(0)
    while len(rounds) < budget:
        progress(len(rounds), budget)
        start = time.monotonic()
        completed = _Round(job, runners, log, timeout, random)
        for peer, reason in completed.failures.items():
            runners.remove(peer)
            failures[peer] = reason
        if not rounds:
            budget = min(max(int(seconds / (time.monotonic() - start)), _FEWEST_ROUNDS), _MOST_ROUNDS)
        rounds.append(completed)
    conditions = observe_conditions((min(threads, read_manifest(bundle).max_threads or threads), threads), load)
    plan = Plan(looks=(len(rounds),))
    return Contest(
        figures={runner: _figures([item.turns[runner] for item in rounds], rounds, runner) for runner in runners},
        comparisons={
            peer: Comparison(plan=plan, pairs=tuple(item.pair(peer) for item in rounds), conditions=conditions)
            for peer in peers
            if peer not in failures
        },
        failures=failures,
    )


class _Round:
    """One round: `turns` has the turns of every runner that did not fail, `energies` the joules of its counted ones."""

    def __init__(
        self, job: TurnJob, runners: Sequence[Runner], log: Path, timeout: float, random: np.random.Generator
    ) -> None:
        self.turns: dict[Runner, list[Turn]] = {}
        self.failures: dict[Peer, str] = {}
        self.energies: dict[Runner, list[float]] = {}
        self.reference: list[float] = []
        names = [runners[index] for index in random.permutation(len(runners))]
        with contextlib.ExitStack() as stack:
            children: dict[Runner, Child] = {}
            for name in names:
                file = log.with_name(f"{log.stem}-{name}{log.suffix}")
                child = Child("tasks.peers:work", log=file, torch=name.startswith("torch"))
                children[name] = stack.enter_context(child)
            for turn in range(_TURNS + 1):  # The first turn loads the model, and is not counted.
                for index in random.permutation(len(names)):
                    name = names[index]
                    if name in self.failures:
                        continue
                    self.reference += measure_reference()
                    try:
                        self._take(children[name], job.model_copy(update={"runner": name}), timeout, counted=turn > 0)
                    except Exception as error:
                        if name == "tvmflow":
                            raise
                        self.failures[name] = str(error)
                        self.turns.pop(name, None)

    def pair(self, peer: Peer) -> Pair:
        """Return the bundle beside a peer, by the medians of their turns: those with the same number are neighbours."""
        candidate, baseline = ([turn.seconds for turn in self.turns[name][1:]] for name in ("tvmflow", peer))
        return Pair.of_turns(candidate, baseline, self.reference)

    def _take(self, child: Child, job: TurnJob, timeout: float, counted: bool) -> None:
        before = read_counters()
        turn = child.take_turn(job, Turn, timeout=timeout)
        joules = joules_between(before, read_counters())
        self.turns.setdefault(job.runner, []).append(turn)
        if counted and joules is not None:
            self.energies.setdefault(job.runner, []).append(joules)

    def joules(self, runner: Runner) -> float | None:
        """Return the joules of a run of a runner over all of its counted turns, None where they were not measured.

        A turn has one run that is not timed.
        """
        energies, turns = self.energies.get(runner, []), self.turns[runner][1:]
        if not turns or len(energies) != len(turns):
            return None
        return sum(energies) / sum(len(turn.seconds) + 1 for turn in turns)


def _seconds(turns: Sequence[Turn]) -> tuple[float, ...]:
    return tuple(value for turn in turns for value in turn.seconds)


def _figures(turns: Sequence[Sequence[Turn]], rounds: Sequence[_Round], runner: Runner) -> Figures:
    series = [_seconds(each[1:]) for each in turns]
    steady = np.concatenate([each[find_steady(each) :] for each in series])
    joules = [value for item in rounds if (value := item.joules(runner)) is not None]
    return Figures(
        runs=len(steady),
        percentiles_ms={
            which: None if (value := percentile(steady.tolist(), which)) is None else value * 1e3
            for which in PERCENTILES
        },
        throughput=len(steady) / float(steady.sum()),
        load_ms=float(np.median([each[0].load_seconds for each in turns])) * 1e3,
        first_ms=float(np.median([each[0].first_seconds for each in turns])) * 1e3,
        peak_memory=int(np.median([each[-1].peak_memory for each in turns])),
        joules=float(np.median(joules)) if joules else None,
        error=float(np.max([each[0].error for each in turns])),
    )


# The model of this process, the seconds that it took to load and to run first, and its error.
_loaded: tuple[Run, float, float, float] | None = None


def work(job: TurnJob, emit: Emit) -> Turn:
    """Run one turn of a runner in the runner's own process and return its times.

    The first turn in a process also loads the model and compares its outputs with the sample's.
    """
    global _loaded
    if _loaded is None:
        arrays = npz.read(job.sample)
        inputs, outputs = npz.part(arrays, "input:"), npz.part(arrays, "output:")
        start = time.perf_counter()
        run = _LOADERS[job.runner](job, inputs)
        loaded = time.perf_counter()
        results = run()
        first = time.perf_counter()
        _loaded = run, loaded - start, first - loaded, _error(results, list(outputs.values()))
    run, load_seconds, first_seconds, error = _loaded
    run()
    seconds, total = list[float](), 0.0
    while total < _TURN_SECONDS or len(seconds) < _LEAST_RUNS:
        start = time.perf_counter()
        run()
        seconds.append(time.perf_counter() - start)
        total += seconds[-1]
    return Turn(
        seconds=tuple(seconds),
        load_seconds=load_seconds,
        first_seconds=first_seconds,
        peak_memory=resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
        error=error,
    )


def _error(results: Sequence[Any], expected: Sequence[Any]) -> float:
    """The largest difference from the expected outputs, in order, over their largest value."""
    if len(results) != len(expected):
        raise InputError(f"it returns {len(results)} outputs, the model has {len(expected)}")
    errors = [
        float(np.max(np.abs(np.asarray(result, np.float64) - theirs), initial=0.0))
        / (float(np.max(np.abs(theirs), initial=0.0)) or 1.0)
        for result, theirs in zip(results, expected, strict=True)
        if np.issubdtype(theirs.dtype, np.number)
    ]
    # Not max(), which may pass over a NaN.
    return float(np.max(errors, initial=0.0))


def _load_tvmflow(job: TurnJob, inputs: NamedArrays) -> Run:
    from tvmflow import runtime

    model = runtime.load(job.bundle, threads=min(job.threads, read_manifest(job.bundle).max_threads or job.threads))
    return lambda: list(model(**inputs).values())


def _load_onnxruntime(job: TurnJob, inputs: NamedArrays) -> Run:
    session = open_session(job.onnx, job.threads, exact=False)
    return lambda: list(run_session(session, inputs).values())


def _load_openvino(job: TurnJob, inputs: NamedArrays) -> Run:
    import openvino

    options = {
        "PERFORMANCE_HINT": "LATENCY",
        "INFERENCE_NUM_THREADS": job.threads,
        "NUM_STREAMS": 1,
        "INFERENCE_PRECISION_HINT": "f32",
    }
    request = openvino.Core().compile_model(str(job.onnx), "CPU", options).create_infer_request()
    # Inputs and outputs are shared, so that OpenVINO copies as little as it can.
    return lambda: list(request.infer(dict(inputs), share_inputs=True, share_outputs=True).values())


def _load_torch(job: TurnJob, inputs: NamedArrays, is_compiled: bool = False) -> Run:
    import onnx
    import torch

    _stand_in_for_torchvision()
    import onnx2pytorch

    torch.set_num_threads(job.threads)
    module = onnx2pytorch.ConvertModel(onnx.load(job.onnx), experimental=True).eval()
    call = torch.compile(module) if is_compiled else module
    tensors = [torch.from_numpy(array) for array in inputs.values()]

    def run() -> Sequence[Any]:
        with torch.inference_mode():
            outputs = call(*tensors)
        return [output.numpy() for output in (outputs if isinstance(outputs, (tuple, list)) else (outputs,))]

    return run


def _stand_in_for_torchvision() -> None:
    """Let the converter import where torchvision is not installed: it needs it for a few operators alone."""
    if find_spec("torchvision") is None:
        for name in ("torchvision", "torchvision.ops", "torchvision.io"):
            module: Any = ModuleType(name)
            module.__getattr__ = lambda attribute: None
            sys.modules[name] = module


_LOADERS: Mapping[Runner, Callable[[TurnJob, NamedArrays], Run]] = {
    "tvmflow": _load_tvmflow,
    "onnxruntime": _load_onnxruntime,
    "openvino": _load_openvino,
    "torch": _load_torch,
    "torch.compile": lambda job, inputs: _load_torch(job, inputs, is_compiled=True),
}
