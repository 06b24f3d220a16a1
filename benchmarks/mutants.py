"""How many faults the tests notice: mutants of modules, and the share of them that a test kills.

Each mutant changes one operator, number or condition of one module (Cosmic Ray's operators make the changes). Only the
tests that execute the changed line run, the fastest first, and the first failure kills the mutant; a mutant that no
test kills survived and is printed with its place and its change. By default a seeded sample is tried:

    python benchmarks/mutants.py                          a sample of all modules
    python benchmarks/mutants.py --sample 40 --seed 7     a smaller one, and another
    python benchmarks/mutants.py tvmflow/target.py --all  every mutant of one module
"""

import argparse
import ast
import difflib
import json
import multiprocessing
import os
import random
import shutil
import signal
import sys
import threading
import time
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
# The modules of which mutants are made, and the tests that must kill them.
SUITES: dict[str, tuple[str, ...]] = {
    "tvmflow/bundle": ("tests/bundle", "tests/core/test_core_verification.py"),
    "tvmflow/store": ("tests/store",),
    "tvmflow/promotion.py": ("tests/core/test_core_promotion.py",),
    "tvmflow/spec": ("tests/core/test_core_spec.py",),
    "tvmflow/target.py": ("tests/core/test_core_target.py", "tests/bundle/test_bundle_host.py"),
    "tvmflow/compiler/choices.py": ("tests/compiler/test_compiler_choices.py",),
}
# Cosmic Ray's operators, less those whose mutants fail on import or are equal to the original.
OPERATORS = (
    *("core/AddNot", "core/ExceptionReplacer", "core/NumberReplacer", "core/ReplaceAndWithOr", "core/ReplaceOrWithAnd"),
    *("core/ReplaceBreakWithContinue", "core/ReplaceContinueWithBreak", "core/ReplaceFalseWithTrue"),
    *("core/ReplaceTrueWithFalse", "core/ZeroIterationForLoop"),
    *("core/ReplaceBinaryOperator_Add_Sub", "core/ReplaceBinaryOperator_Sub_Add"),
    *("core/ReplaceBinaryOperator_Mul_FloorDiv", "core/ReplaceBinaryOperator_FloorDiv_Mul"),
    *("core/ReplaceBinaryOperator_Div_Mul", "core/ReplaceBinaryOperator_Mod_Add"),
    *("core/ReplaceBinaryOperator_BitOr_BitAnd", "core/ReplaceBinaryOperator_BitAnd_BitOr"),
    *("core/ReplaceComparisonOperator_Eq_NotEq", "core/ReplaceComparisonOperator_NotEq_Eq"),
    *("core/ReplaceComparisonOperator_Lt_LtE", "core/ReplaceComparisonOperator_LtE_Lt"),
    *("core/ReplaceComparisonOperator_Gt_GtE", "core/ReplaceComparisonOperator_GtE_Gt"),
    *("core/ReplaceComparisonOperator_Is_IsNot", "core/ReplaceComparisonOperator_IsNot_Is"),
    *("core/ReplaceUnaryOperator_Delete_Not", "core/ReplaceUnaryOperator_USub_UAdd"),
)
# What the tests import anyhow, once for all mutants rather than for each.
_PRELOADED = ("numpy", "onnx", "boto3", "moto.server", "mlflow", "pydantic", "yaml", "hypothesis", "psutil", "requests")
# Seconds: of tests for one mutant, of one test that is worth running, and of a mutant's tests over the original's.
_BUDGET, _LONGEST_TEST, _SLOWER = 20.0, 8.0, 4.0


@dataclass(frozen=True)
class Mutant:
    """One change: `operator`'s match number `occurrence` in `module`, at `line`."""

    module: str
    line: int
    operator: str
    occurrence: int


@dataclass(frozen=True)
class Case:
    """A test that passes: its address, seconds, and the lines of the modules that it executes."""

    address: str
    seconds: float
    lines: dict[str, list[int]]


@dataclass(frozen=True)
class Verdict:
    """What became of a mutant: `killed`, `survived`, `timeout`, or `untested` when no test reaches its line."""

    mutant: Mutant
    outcome: str
    seconds: float
    killer: str = ""


def modules_of(place: str, root: Path = ROOT) -> list[str]:
    """The modules at a place of SUITES, relative to the root."""
    path = root / place
    files = sorted(path.rglob("*.py")) if path.is_dir() else [path]
    return [str(file.relative_to(root)) for file in files]


def mutants_of(module: str, root: Path = ROOT) -> list[Mutant]:
    """All mutants of a module, outside annotations."""
    from cosmic_ray.ast import ast_nodes, get_ast
    from cosmic_ray.plugins import get_operator

    source = (root / module).read_text()
    annotations = _annotations(source)
    mutants = []
    for name in OPERATORS:
        operator = get_operator(name)()
        positions = [position for node in ast_nodes(get_ast(source)) for position in operator.mutation_positions(node)]
        mutants += [
            Mutant(module, start[0], name.removeprefix("core/"), occurrence)
            for occurrence, (start, _) in enumerate(positions)
            if not any(first <= start <= last for first, last in annotations)
        ]
    return sorted(mutants, key=lambda mutant: (mutant.line, mutant.operator, mutant.occurrence))


def mutated(mutant: Mutant, root: Path = ROOT) -> str | None:
    """The source of a mutant; None where the change leaves the program as it is or makes it no program."""
    from cosmic_ray.mutating import mutate_code
    from cosmic_ray.plugins import get_operator

    original = (root / mutant.module).read_text()
    code = mutate_code(original, get_operator(f"core/{mutant.operator}")(), mutant.occurrence)
    try:
        return code if code and ast.dump(ast.parse(code)) != ast.dump(ast.parse(original)) else None
    except SyntaxError:
        return None


def _annotations(source: str) -> list[tuple[tuple[int, int], tuple[int, int]]]:
    """Where a source has annotations: (line, column) of their starts and ends."""
    places = []
    for node in ast.walk(ast.parse(source)):
        for name in ("annotation", "returns"):
            value = getattr(node, name, None)
            if isinstance(value, ast.expr):
                end = (value.end_lineno or value.lineno, value.end_col_offset or value.col_offset)
                places.append(((value.lineno, value.col_offset), end))
    return places


def difference(mutant: Mutant, root: Path = ROOT) -> list[str]:
    """The lines that a mutant removes and adds."""
    before, after = (root / mutant.module).read_text().splitlines(), (mutated(mutant, root) or "").splitlines()
    lines = difflib.unified_diff(before, after, n=0, lineterm="")
    return [line for line in lines if line[:1] in "+-" and line[:3] not in ("+++", "---")]


def chosen_tests(mutant: Mutant, cases: Sequence[Case]) -> list[Case]:
    """The tests to run for a mutant: those that execute its line, the fastest first, within the budget.

    A line that runs when its module is imported is in no test's lines: then all that execute the module are taken.
    """
    reaching = [case for case in cases if mutant.line in case.lines.get(mutant.module, ())]
    reaching = reaching or [case for case in cases if mutant.module in case.lines]
    chosen, seconds = [], 0.0
    for case in sorted(reaching, key=lambda case: case.seconds):
        seconds += case.seconds
        if chosen and seconds > _BUDGET:
            break
        chosen.append(case)
    return chosen


class _Tracer:
    """A pytest plugin that records which lines of the modules each passing test executes, and its seconds."""

    def __init__(self, root: Path, modules: Sequence[str]) -> None:
        self.modules = {str(root / module): module for module in modules}
        self.lines: dict[str, set[int]] = defaultdict(set)
        self.cases: dict[str, Case] = {}
        self.failed: set[str] = set()

    def _trace(self, frame: Any, event: str, argument: Any) -> Any:
        module = self.modules.get(frame.f_code.co_filename)
        if module is None:
            return None
        lines = self.lines[module]

        def local(frame: Any, event: str, argument: Any) -> Any:
            lines.add(frame.f_lineno)
            return local

        return local(frame, event, argument)

    def pytest_runtest_logreport(self, report: Any) -> None:
        if not report.passed:
            self.failed.add(report.nodeid)
        old = self.cases.get(report.nodeid)
        executed = {module: sorted(lines) for module, lines in self.lines.items() if lines}
        seconds = report.duration + (old.seconds if old else 0.0)
        self.cases[report.nodeid] = Case(report.nodeid, seconds, executed)

    def pytest_runtest_logstart(self, nodeid: str) -> None:
        self.lines.clear()
        threading.settrace(self._trace)
        sys.settrace(self._trace)

    def pytest_runtest_logfinish(self, nodeid: str) -> None:
        sys.settrace(None)
        threading.settrace(None)  # type: ignore[arg-type]


class _Killer:
    """A pytest plugin that remembers the first test that fails."""

    def __init__(self) -> None:
        self.name = ""

    def pytest_runtest_logreport(self, report: Any) -> None:
        if report.failed and not self.name:
            self.name = report.nodeid


def _enter(root: Path, output: Path) -> None:
    """Make this process, just forked, one that tests the tree at `root` and prints to a file."""
    os.setsid()
    descriptor = os.open(output, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.dup2(descriptor, 1)
    os.dup2(descriptor, 2)
    os.chdir(root)
    sys.path.insert(0, str(root))
    os.environ["PYTHONPATH"] = str(root)


def _pytest(root: Path, arguments: Sequence[str], plugins: Sequence[Any]) -> int:
    import pytest

    fixed = ["-q", "-n", "0", "-p", "no:cacheprovider", "--hypothesis-seed=0", "--rootdir", str(root)]
    return int(pytest.main([*fixed, *arguments], plugins=list(plugins)))


def _forked(work: Any, timeout: float) -> int | None:
    """Run `work` in a fork of this process; its exit code, or None when it took too long. All it started is killed."""
    sys.stdout.flush()
    pid = os.fork()
    if pid == 0:
        code = 3
        try:
            code = work()
        finally:
            sys.stdout.flush()
            os._exit(code)
    deadline = time.monotonic() + timeout
    status = None
    while status is None and time.monotonic() < deadline:
        ended_pid, value = os.waitpid(pid, os.WNOHANG)
        if ended_pid:
            status = os.waitstatus_to_exitcode(value)
        else:
            time.sleep(0.02)
    with suppress(ProcessLookupError):
        os.killpg(pid, signal.SIGKILL)
    if status is None:
        os.waitpid(pid, 0)
    return status


def observe(root: Path, modules: Sequence[str], tests: Sequence[str]) -> list[Case]:
    """Run tests once on the original and return those that pass, with the lines that they execute."""
    result, log = root / "observed.json", root / "observed.log"
    result.unlink(missing_ok=True)

    def work() -> int:
        _enter(root, log)
        tracer = _Tracer(root, modules)
        _pytest(root, tests, [tracer])
        cases = [asdict(case) for name, case in tracer.cases.items() if name not in tracer.failed]
        result.write_text(json.dumps({"cases": cases, "failed": sorted(tracer.failed)}))
        return 0

    if _forked(work, 1200) != 0 or not result.exists():
        raise SystemExit(f"error: the tests {' '.join(tests)} do not run on the original; see {log}")
    content = json.loads(result.read_text())
    for name in content["failed"]:
        print(f"left out, as it fails on the original or is skipped: {name}")
    return [case for case in (Case(**item) for item in content["cases"]) if case.seconds <= _LONGEST_TEST]


def judge(root: Path, mutant: Mutant, cases: Sequence[Case]) -> Verdict:
    """Test one mutant in the tree at `root`, which is the original again afterwards."""
    chosen = chosen_tests(mutant, cases)
    if not chosen:
        return Verdict(mutant, "untested", 0.0)
    file, start = root / mutant.module, time.monotonic()
    original = file.read_text()
    killer_file = root / "killer.txt"
    killer_file.unlink(missing_ok=True)

    def work() -> int:
        _enter(root, root / "mutant.log")
        killer = _Killer()
        code = _pytest(root, ["-x", *(case.address for case in chosen)], [killer])
        killer_file.write_text(killer.name)
        return code

    file.write_text(mutated(mutant, root) or original)
    try:
        code = _forked(work, 20 + _SLOWER * sum(case.seconds for case in chosen))
    finally:
        file.write_text(original)
    outcome = "timeout" if code is None else "survived" if code == 0 else "killed"
    killer = killer_file.read_text() if killer_file.exists() else ""
    return Verdict(mutant, outcome, time.monotonic() - start, killer)


def _copy(number: int, folder: Path) -> Path:
    """A copy of the tree for one worker."""
    root = folder / str(number)
    shutil.rmtree(root, ignore_errors=True)
    ignored = shutil.ignore_patterns(".*", "build", "__pycache__", "*.egg-info", "site")
    shutil.copytree(ROOT, root, ignore=ignored)
    return root


def _work(number: int, folder: Path, jobs: Any, verdicts: Any) -> None:
    root = _copy(number, folder)
    _preload()
    while (job := jobs.get()) is not None:
        kind, *arguments = job
        if kind == "observe":
            verdicts.put((arguments[0], observe(root, *arguments[1:])))
        else:
            verdicts.put(judge(root, *arguments))


def _preload() -> None:
    from importlib import import_module

    os.environ |= {"MLFLOW_DISABLE_TELEMETRY": "true", "DO_NOT_TRACK": "1"}
    for name in _PRELOADED:
        import_module(name)


def selected(places: Sequence[str]) -> dict[str, list[str]]:
    """The modules of each suite that the command names: all, or those at or below the given places."""
    return {
        suite: modules
        for suite in SUITES
        if (
            modules := [
                module
                for module in modules_of(suite)
                if not places or any(fnmatchcase(module, pattern) for name in places for pattern in (name, f"{name}/*"))
            ]
        )
    }


def sampled(mutants: Sequence[Mutant], size: int | None, seed: int) -> list[Mutant]:
    """A sample of mutants in the order of their places, the same for the same seed; all without a size."""
    if size is None or size >= len(mutants):
        return list(mutants)
    indices = random.Random(seed).sample(range(len(mutants)), size)  # noqa: S311
    return [mutants[index] for index in sorted(indices)]


def table(verdicts: Sequence[Verdict]) -> Iterator[str]:
    """The lines of the table: mutants by module and outcome, and the share that is killed, timeouts included."""
    rows: dict[str, Counter[str]] = defaultdict(Counter)
    for verdict in verdicts:
        for name in (verdict.mutant.module, "all"):
            rows[name][verdict.outcome] += 1
    names = [*sorted(set(rows) - {"all"}), "all"]
    width = max(map(len, names))
    yield f"{'module':{width}}  mutants  killed  timeout  survived  untested  share"
    for name in names:
        row = rows[name]
        count = sum(row.values())
        share = (row["killed"] + row["timeout"]) / count if count else 0.0
        columns = f"{count:7}  {row['killed']:6}  {row['timeout']:7}  {row['survived']:8}  {row['untested']:8}"
        yield f"{name:{width}}  {columns}  {share:5.0%}"


def main() -> int:
    """Run the command; 0 unless `--least` is given and not reached."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("places", nargs="*", help="modules or folders; all of SUITES by default")
    parser.add_argument("--sample", type=int, default=160, help="the number of mutants (default 160)")
    parser.add_argument("--seed", type=int, default=0, help="chooses the sample (default 0)")
    parser.add_argument("--all", action="store_true", help="try every mutant")
    parser.add_argument("--least", type=float, default=0.0, help="fail below this share of killed mutants")
    parser.add_argument("--processes", type=int, default=len(os.sched_getaffinity(0)), help="default: one a core")
    parser.add_argument("--json", type=Path, help="write every verdict to this file")
    options = parser.parse_args()

    suites = selected(options.places)
    if not suites:
        parser.error(f"nothing of {', '.join(SUITES)} is at {', '.join(options.places)}")
    mutants = [mutant for modules in suites.values() for module in modules for mutant in mutants_of(module)]
    mutants = sampled(mutants, None if options.all else options.sample, options.seed)
    # Taken now: whoever waits for the verdicts may go on editing.
    changes = {mutant: difference(mutant) for mutant in mutants if mutated(mutant) is not None}
    mutants = list(changes)
    folder = ROOT / "build" / "mutants"
    folder.mkdir(parents=True, exist_ok=True)
    context = multiprocessing.get_context("spawn")
    jobs, verdicts = context.Queue(), context.Queue()
    count = min(options.processes, len(mutants))
    workers = [context.Process(target=_work, args=(number, folder, jobs, verdicts)) for number in range(count)]
    for worker in workers:
        worker.start()
    try:
        result = _judge_all(suites, mutants, jobs, verdicts)
        for _ in workers:
            jobs.put(None)
        for worker in workers:
            worker.join(30)
    finally:
        for worker in workers:
            worker.kill()
    for verdict in result:
        if verdict.outcome in ("survived", "untested"):
            mutant = verdict.mutant
            print(f"\n{verdict.outcome}: {mutant.module}:{mutant.line} ({mutant.operator})")
            print("\n".join(changes[mutant]))
    print()
    print("\n".join(table(result)))
    if options.json:
        options.json.write_text(json.dumps([asdict(verdict) for verdict in result], indent=1))
    killed = sum(verdict.outcome in ("killed", "timeout") for verdict in result)
    return 0 if killed >= options.least * len(result) else 1


def _judge_all(suites: dict[str, list[str]], mutants: Sequence[Mutant], jobs: Any, verdicts: Any) -> list[Verdict]:
    modules = {mutant.module for mutant in mutants}
    observed = {suite: modules for suite, modules in suites.items() if modules & set(modules)}
    for suite, modules in observed.items():
        jobs.put(("observe", suite, modules, SUITES[suite]))
    cases = dict(verdicts.get() for _ in observed)
    for suite in sorted(cases):
        seconds = sum(case.seconds for case in cases[suite])
        print(f"{suite}: {len(cases[suite])} tests, {seconds:.0f} s", flush=True)
    suite_of = {module: suite for suite, modules in suites.items() for module in modules}
    for mutant in mutants:
        jobs.put(("judge", mutant, cases[suite_of[mutant.module]]))
    result = []
    for number, _ in enumerate(mutants, 1):
        verdict = verdicts.get()
        result.append(verdict)
        mutant = verdict.mutant
        place = f"{mutant.module}:{mutant.line} {mutant.operator}"
        print(f"{number}/{len(mutants)} {verdict.outcome} {place} {verdict.seconds:.1f} s {verdict.killer}", flush=True)
    return sorted(result, key=lambda verdict: (verdict.mutant.module, verdict.mutant.line, verdict.mutant.operator))


if __name__ == "__main__":
    sys.exit(main())
