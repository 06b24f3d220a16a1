"""The search space of a function, and the searches that propose schedules from it.

It is one module because each search is a short adapter of the same MetaSchedule context.
"""

import contextlib
import itertools
import json
import logging
import math
import random
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any, Literal, Protocol, get_args

from tvmflow.tuning.traces import trace_of

if TYPE_CHECKING:
    from tvm.tirx import PrimFunc

TunerName = Literal["xgb", "ga", "random", "grid"]
TUNERS: tuple[str, ...] = get_args(TunerName)

# MetaSchedule's default of 512 costs a minute before the first candidate and is no better in so few trials.
_POPULATION = 48
_XGB_WARMUP_TRIALS = 16

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Proposal:
    """A schedule to measure: its trace as JSON, and MetaSchedule's own candidate."""

    trace: str
    candidate: Any


@dataclass(frozen=True)
class Variants:
    """The schedules (TVM's `Schedule`) that the compiler's rules can make of a function.

    With `only`, the search proposes no schedules of MetaSchedule's rules. It is set for a kernel of several stages:
    MetaSchedule looks at each loop by itself, takes the kernel apart, and finds nothing faster.
    """

    schedules: Sequence[Any]
    only: bool = False


class Search(Protocol):
    """Proposes schedules of one function and learns from their measurements."""

    def propose(self) -> list[Proposal]:
        """Return the next schedules, none of which was proposed before; an empty list when there are no more."""

    def tell(self, proposals: Sequence[Proposal], seconds: Sequence[float | None]) -> None:
        """Learn from the measured seconds of each proposal, None where it failed."""

    def start_from(self, trace: str, seconds: float) -> None:
        """Let later proposals start from a schedule (its trace as JSON) that an earlier run has measured."""

    @property
    def is_beyond_rules(self) -> bool:
        """Whether the schedules of the compiler's own rules have all been proposed."""


def make_search(
    func: "PrimFunc",
    target: str,
    tuner: TunerName,
    *,
    batch: int,
    seed: int,
    cost_model: Any | None,
    variants: Variants | None = None,
) -> Search:
    """Return a search over the schedules of `func` (normalized) for `target` (TVM target as JSON).

    It proposes all `variants` first, then schedules that MetaSchedule's own rules make, `batch` at a time.

    `xgb` evolves schedules that a gradient-boosted model of their cost rates best, `ga` evolves the fastest measured
    ones without a model, `random` draws each decision anew, and `grid` walks through the product of all decisions in
    steps that spread evenly. The same `seed` (1 to 2**31 - 2) makes the same proposals as long as the measurements
    are the same; `random` and `grid` do not depend on measurements. `cost_model` comes from `make_cost_model`.
    """

    def make_generic() -> Search:
        if tuner == "grid":
            return _GridSearch(func, target, batch, seed)
        return _MetaScheduleSearch(func, target, tuner, batch, seed, cost_model)

    if variants is None:
        return make_generic()
    own = _VariantSearch(func, target, tuner, variants.schedules, batch, seed, cost_model)
    return own if variants.only else _Sequence(own, make_generic)


def make_cost_model(tuner: TunerName, *, seed: int, threads: int) -> Any | None:
    """Return the cost model of a run with `tuner`, for all its functions; None for a tuner that uses none."""
    from tvm.s_tir import meta_schedule as ms

    if tuner == "ga":
        with _NumpySeed(seed).active():
            return ms.cost_model.RandomModel(seed=seed)
    if tuner == "xgb":
        return ms.cost_model.XGBModel(num_warmup_samples=_XGB_WARMUP_TRIALS, num_tuning_cores=threads)
    return None


@contextlib.contextmanager
def without_tensor_intrinsics() -> Iterator[None]:
    """Keep `TuneContext` from importing the tensor intrinsics of GPUs while the body runs.

    The import takes 20 seconds, and the search space of a CPU uses none of them.
    """
    import tvm

    name = "tvm.s_tir.tensor_intrin"
    if name in sys.modules:
        yield
        return
    stand_in = ModuleType(name)
    stand_in.__path__ = [str(Path(tvm.__file__).parent / "s_tir" / "tensor_intrin")]
    sys.modules[name] = stand_in
    try:
        yield
    finally:
        del sys.modules[name]


def _make_context(func: "PrimFunc", target: str, seed: int, strategy: Any) -> Any:
    """MetaSchedule's context over its CPU rules, without `RewriteLayout`.

    RewriteLayout would pack a weight inside the function, at every call; the compiler packs it once.
    """
    import tvm
    from tvm.s_tir import meta_schedule as ms

    postprocs = [
        step for step in ms.postproc.Postproc.create("llvm") if not isinstance(step, ms.postproc.RewriteLayout)
    ]
    space = ms.space_generator.PostOrderApply(
        sch_rules=ms.schedule_rule.ScheduleRule.create("llvm"),
        postprocs=postprocs,
        mutator_probs=ms.mutator.Mutator.create("llvm"),
    )
    with without_tensor_intrinsics():
        return ms.TuneContext(
            tvm.IRModule({"main": func}),
            target=tvm.target.Target(json.loads(target)),
            space_generator=space,
            search_strategy=strategy,
            rand_state=seed,
            num_threads=1,  # With more, proposals depend on which thread is first; and it is no faster.
            logger=logger,
        )


def _to_proposal(candidate: Any) -> Proposal:
    return Proposal(trace_of(candidate.sch), candidate)


class _NumpySeed:
    """A random state of its own for MetaSchedule's cost models, which draw from NumPy's global state."""

    def __init__(self, seed: int) -> None:
        import numpy as np

        self._state: Any = np.random.RandomState(seed).get_state()

    @contextlib.contextmanager
    def active(self) -> Iterator[None]:
        """Make it NumPy's global state while the body runs."""
        import numpy as np

        outside = np.random.get_state()
        np.random.set_state(self._state)
        try:
            yield
        finally:
            self._state = np.random.get_state()
            np.random.set_state(outside)


class _BeyondRules:
    """A search that goes beyond the compiler's own rules."""

    is_beyond_rules = True


class _MetaScheduleSearch(_BeyondRules):
    """MetaSchedule's evolutionary search (`xgb`, `ga`) or replay with new decisions (`random`)."""

    # After so many draws in a row with nothing but earlier proposals, the space counts as exhausted.
    _EMPTY_DRAWS = 5

    def __init__(
        self, func: "PrimFunc", target: str, tuner: TunerName, batch: int, seed: int, cost_model: Any | None
    ) -> None:
        from tvm.s_tir import meta_schedule as ms

        if tuner == "random":
            strategy = ms.search_strategy.ReplayTrace()
        else:
            strategy = ms.search_strategy.EvolutionarySearch(
                population_size=_POPULATION,
                init_measured_ratio=0.5 if tuner == "ga" else 0.25,
                init_min_unmeasured=4,
                genetic_num_iters=1,
                eps_greedy=0.15,
            )
        self._context = _make_context(func, target, seed, strategy)
        self._cost_model = cost_model
        self._database = ms.database.MemoryDatabase()
        self._workload = self._database.commit_workload(self._context.mod)
        self._earlier_proposals: set[str] = set()
        self._numpy = _NumpySeed(seed)
        self._context.pre_tuning(sys.maxsize >> 32, batch, None, self._database, cost_model)

    def propose(self) -> list[Proposal]:
        for _ in range(self._EMPTY_DRAWS):
            with self._numpy.active():
                candidates = self._context.generate_measure_candidates()
            if not candidates:
                return []
            proposals = {proposal.trace: proposal for proposal in map(_to_proposal, candidates)}
            new = [proposal for trace, proposal in proposals.items() if trace not in self._earlier_proposals]
            if new:
                self._earlier_proposals.update(proposals)
                return new
            self._context.notify_runner_results(candidates, [runner_result(None) for _ in candidates])
        return []

    def tell(self, proposals: Sequence[Proposal], seconds: Sequence[float | None]) -> None:
        candidates = [proposal.candidate for proposal in proposals]
        results = [runner_result(value) for value in seconds]
        self._context.notify_runner_results(candidates, results)
        if self._cost_model is not None and candidates:
            self._cost_model.update(self._context, candidates, results)
        for candidate, value in zip(candidates, seconds, strict=True):
            if value is not None:
                self._commit(candidate.sch.trace, value)

    def start_from(self, trace: str, seconds: float) -> None:
        from tvm.s_tir import Schedule
        from tvm.s_tir.schedule import Trace

        schedule = Schedule(self._context.mod)
        Trace.apply_json_to_schedule(json.loads(trace), schedule)
        self._commit(schedule.trace, seconds)

    def _commit(self, trace: Any, seconds: float) -> None:
        from tvm.s_tir import meta_schedule as ms

        record = ms.database.TuningRecord(trace, self._workload, [seconds], self._context.target, None)
        self._database.commit_tuning_record(record)


class _VariantSearch:
    """Proposes the schedules that the compiler's rules make of a function, each once.

    `xgb` proposes those first that the cost model rates best, `grid` those that differ least from the compiler's own
    choice, and the other tuners shuffle them by the seed.
    """

    def __init__(
        self,
        func: "PrimFunc",
        target: str,
        tuner: TunerName,
        variants: Sequence[Any],
        batch: int,
        seed: int,
        cost_model: Any | None,
    ) -> None:
        from tvm.s_tir import meta_schedule as ms

        self._context = _make_context(func, target, seed, ms.search_strategy.ReplayTrace())
        # Only the cost model of `xgb` rates schedules.
        self._cost_model = cost_model if tuner == "xgb" else None
        self._batch = batch
        self._numpy = _NumpySeed(seed)
        arguments = ms.arg_info.ArgInfo.from_entry_func(self._context.mod, remove_preproc=True)
        self._open = [_to_proposal(ms.search_strategy.MeasureCandidate(variant, arguments)) for variant in variants]
        if tuner in ("ga", "random"):
            random.Random(seed).shuffle(self._open)  # noqa: S311  # No secret depends on it.

    def propose(self) -> list[Proposal]:
        if self._cost_model is not None and len(self._open) > self._batch:
            with self._numpy.active():
                scores = self._cost_model.predict(self._context, [proposal.candidate for proposal in self._open])
            order = sorted(range(len(scores)), key=lambda place: (-float(scores[place]), place))
            self._open = [self._open[place] for place in order]
        proposals, self._open = self._open[: self._batch], self._open[self._batch :]
        return proposals

    def tell(self, proposals: Sequence[Proposal], seconds: Sequence[float | None]) -> None:
        if self._cost_model is None or not proposals:
            return
        candidates = [proposal.candidate for proposal in proposals]
        with self._numpy.active():
            self._cost_model.update(self._context, candidates, [runner_result(value) for value in seconds])

    @property
    def is_beyond_rules(self) -> bool:
        return not self._open

    def start_from(self, trace: str, seconds: float) -> None:
        """Do not propose this schedule again."""
        self._open = [proposal for proposal in self._open if proposal.trace != trace]


class _Sequence:
    """Two searches in turn: the second one begins when the first one has nothing left to propose."""

    def __init__(self, first: Search, make_second: Callable[[], Search]) -> None:
        self._search = first
        self._make_second: Callable[[], Search] | None = make_second
        self._parents: list[tuple[str, float]] = []

    @property
    def is_beyond_rules(self) -> bool:
        return self._search.is_beyond_rules

    def propose(self) -> list[Proposal]:
        proposals = self._search.propose()
        if proposals or self._make_second is None:
            return proposals
        self._search, self._make_second = self._make_second(), None
        for trace, seconds in self._parents:
            self._search.start_from(trace, seconds)
        return self._search.propose()

    def tell(self, proposals: Sequence[Proposal], seconds: Sequence[float | None]) -> None:
        self._search.tell(proposals, seconds)

    def start_from(self, trace: str, seconds: float) -> None:
        self._parents.append((trace, seconds))
        self._search.start_from(trace, seconds)


def runner_result(seconds: float | None) -> Any:
    """Return MetaSchedule's result for a candidate that took `seconds`, or for a failed one if that is None."""
    from tvm.s_tir import meta_schedule as ms

    return ms.runner.RunnerResult(None, "failed") if seconds is None else ms.runner.RunnerResult([seconds], None)


@dataclass(frozen=True)
class _Choice:
    """A sampling instruction of a trace, by its index, and the decisions that it may take."""

    index: int
    decisions: list[Any]


class _GridSearch(_BeyondRules):
    """Walks through the product of all tile sizes and categories in even steps that visit every point once."""

    # Points that a post-processing step refuses are skipped; a batch tries no more points than this.
    _TRIED_PER_BATCH = 400

    def __init__(self, func: "PrimFunc", target: str, batch: int, seed: int) -> None:
        from tvm.s_tir import meta_schedule as ms

        self._context = _make_context(func, target, seed, ms.search_strategy.ReplayTrace())
        self._batch = batch
        self._seed = seed
        grids = [(design.trace, _choices(design.trace)) for design in self._context.generate_design_space()]
        self._points = _alternate([_walk(trace, choices, seed) for trace, choices in grids])

    def propose(self) -> list[Proposal]:
        proposals: list[Proposal] = []
        for trace, decisions in itertools.islice(self._points, self._TRIED_PER_BATCH):
            proposal = self._apply(trace, decisions)
            if proposal is not None:
                proposals.append(proposal)
            if len(proposals) == self._batch:
                break
        return proposals

    def tell(self, proposals: Sequence[Proposal], seconds: Sequence[float | None]) -> None:
        """Ignore `proposals` and their `seconds` (None where one failed): the grid does not depend on measurements."""

    def start_from(self, trace: str, seconds: float) -> None:
        """Do nothing: the grid has no parents."""

    def _apply(self, trace: Any, decisions: dict[int, Any]) -> Proposal | None:
        from tvm.s_tir import Schedule
        from tvm.s_tir import meta_schedule as ms

        indices = itertools.count()
        schedule = Schedule(self._context.mod, seed=self._seed, error_render_level="none")
        try:
            trace.apply_to_schedule(
                schedule,
                remove_postproc=True,
                decision_provider=lambda _inst, _inputs, _attrs, decision: decisions.get(next(indices), decision),
            )
            schedule.enter_postproc()
            is_valid = all(step.apply(schedule) for step in self._context.space_generator.postprocs)
        except Exception as error:  # TVM raises errors of many types for decisions that do not go together.
            logger.debug("a point of the grid is no schedule: %s", error)
            return None
        if not is_valid:
            return None
        arguments = ms.arg_info.ArgInfo.from_entry_func(schedule.mod, remove_preproc=True)
        return _to_proposal(ms.search_strategy.MeasureCandidate(schedule, arguments))


def _choices(trace: Any) -> list[_Choice]:
    choices = []
    for index, instruction in enumerate(trace.insts):
        if instruction.kind.name == "SamplePerfectTile":
            parts, innermost = (int(attr) for attr in instruction.attrs)
            extent = math.prod(int(factor) for factor in trace.get_decision(instruction))
            choices.append(_Choice(index, [t for t in _factorizations(extent, parts) if t[-1] <= innermost]))
        elif instruction.kind.name == "SampleCategorical":
            choices.append(_Choice(index, list(range(len(instruction.attrs[0])))))
    return choices


def _factorizations(extent: int, parts: int) -> Iterator[list[int]]:
    if parts == 1:
        yield [extent]
        return
    for factor in (divisor for divisor in range(1, extent + 1) if extent % divisor == 0):
        for rest in _factorizations(extent // factor, parts - 1):
            yield [factor, *rest]


def _walk(trace: Any, choices: list[_Choice], seed: int) -> Iterator[tuple[Any, dict[int, Any]]]:
    """Yield every point of one design's grid; a stride near the golden ratio of its size spreads them evenly."""
    size = math.prod(len(choice.decisions) for choice in choices)
    stride = max(1, round(size * (math.sqrt(5) - 1) / 2))
    while math.gcd(stride, size) != 1:
        stride += 1
    point = seed % size
    for _ in range(size):
        rest, decisions = point, {}
        for choice in choices:
            rest, index = divmod(rest, len(choice.decisions))
            decisions[choice.index] = choice.decisions[index]
        yield trace, decisions
        point = (point + stride) % size


def _alternate(walks: list[Iterator[tuple[Any, dict[int, Any]]]]) -> Iterator[tuple[Any, dict[int, Any]]]:
    """Yield one point of each walk in turn until all walks have ended."""
    while walks:
        for walk in list(walks):
            point = next(walk, None)
            if point is None:
                walks.remove(walk)
            else:
                yield point
