"""How many faults the tests notice: mutants of modules, and the share of them that a test kills.

Each mutant changes one operator, number, condition or exception handler of one module (Cosmic Ray's operators make the
changes). Only the tests that execute the changed line run, the fastest first, and the first failure kills the mutant; a
mutant that no test kills survived and is printed with its place and its change. Left out, because no test can or should
notice them, are mutants of

- annotations, which nothing executes, and `frozen` of a dataclass: mypy refuses what it forbids;
- the expressions within the f-string of a `raise`, which word a message: a unit, a rounding, a plural;
- what `mutants.toml` lists as equivalent to the original, each with the reason. Such a mutant counts in no share.

By default a seeded sample is tried:

    python benchmarks/mutants.py                          a sample of all modules
    python benchmarks/mutants.py --sample 40 --seed 7     a smaller one, and another
    python benchmarks/mutants.py tvmflow/hardware/target.py --all  every mutant of one module
    python benchmarks/mutants.py --each 60                60 of each part in SUITES, or all of a smaller one
"""

import argparse
import ast
import difflib
import gc
import hashlib
import json
import multiprocessing
import os
import random
import shutil
import signal
import sys
import threading
import time
import tomllib
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from fnmatch import fnmatchcase
from functools import cache
from importlib import import_module
from importlib.util import cache_from_source
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]


@dataclass(frozen=True)
class Suite:
    """The tests that must kill the mutants of some modules, and the libraries that all of these tests import.

    The libraries are imported once for all mutants. List no library that only some of the tests need: pydantic searches
    all imported modules for each class, and more modules make the tests slower.
    """

    tests: tuple[str, ...]
    libraries: tuple[str, ...] = ()


_STORE = ("boto3", "botocore.session", "moto.server", "psutil", "requests")
# By the modules of which mutants are made.
SUITES: dict[str, Suite] = {
    "tvmflow/bundle": Suite(
        ("tests/bundle", "tests/core/test_core_verification.py"),
        ("numpy", "onnx", "cryptography.hazmat.primitives.asymmetric.ed25519"),
    ),
    "tvmflow/store": Suite(("tests/store", "tests/runtime/test_runtime_uri.py"), _STORE),
    "tvmflow/documents/encoding.py": Suite(("tests/core/test_core_documents.py",), ("pydantic",)),
    "tvmflow/documents/release.py": Suite(("tests/core/test_core_documents.py",), ("pydantic",)),
    "tvmflow/documents/verdict.py": Suite(("tests/core/test_core_documents.py",), ("pydantic",)),
    "tvmflow/promotion": Suite(("tests/core/test_core_promotion.py",), ("mlflow", *_STORE)),
    "tvmflow/spec": Suite(("tests/core/test_core_spec.py",), ("pydantic", "yaml")),
    "tvmflow/hardware/target.py": Suite(
        (
            *("tests/core/test_core_target.py", "tests/core/test_core_target_exact.py"),
            *("tests/core/test_core_profiles.py", "tests/bundle/test_bundle_host.py"),
        ),
        ("numpy", "tvm"),
    ),
    "tvmflow/compiler/choices.py": Suite(("tests/compiler/test_compiler_decisions.py",), ("numpy", "onnx", "tvm")),
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
# What replaces an exception that a handler names: nothing raises it here, so that the handler is as good as gone.
_NEVER_RAISED = "StopAsyncIteration"
_MODULE_SCOPE = (1, sys.maxsize)
# Seconds as observed, which takes longer than a plain run: of the tests for one mutant, and of a test that is worth
# running; and how many times as long as on the original a mutant's tests may take.
_BUDGET, _LONGEST_TEST, _SLOWER = 90.0, 20.0, 1.0


@dataclass(frozen=True)
class Mutant:
    """One change: `operator`'s match number `occurrence` in `module`, at `line`.

    `scope` is the first and the last line of the function around it, of the whole module where there is none.
    """

    module: str
    line: int
    operator: str
    occurrence: int
    scope: tuple[int, int]


@dataclass(frozen=True)
class Case:
    """A test that passes: its address, seconds, and the lines of the modules that it executes."""

    address: str
    seconds: float
    lines: dict[str, list[int]]


@dataclass(frozen=True)
class Verdict:
    """The outcome of a mutant, and the lines that it removes and adds.

    The outcome is `killed`, `survived`, `timeout`, `untested` when no test reaches its line, `equivalent` when the list
    of equivalent mutants has it, or `none` when the change gives the same program or no program.
    """

    mutant: Mutant
    outcome: str
    seconds: float = 0.0
    killer: str = ""
    change: tuple[str, ...] = ()


@dataclass(frozen=True)
class Equivalent:
    """A change of one line of `module` that no test can notice, and the reason."""

    module: str
    before: str
    after: str
    reason: str


def modules_of(place: str, root: Path = ROOT) -> list[str]:
    """Return the modules at a place of SUITES, as paths relative to the root."""
    path = root / place
    files = sorted(path.rglob("*.py")) if path.is_dir() else [path]
    return [str(file.relative_to(root)) for file in files]


def mutants_of(module: str, root: Path = ROOT) -> list[Mutant]:
    """Return all mutants of a module, except in annotations and in the wording of messages."""
    from cosmic_ray.ast import ast_nodes, get_ast

    source = (root / module).read_text()
    tree = ast.parse(source)
    excluded = _excluded(tree)
    nodes = list(ast_nodes(get_ast(source)))
    mutants = []
    for name in OPERATORS:
        operator = _operator(name)
        positions = [position for node in nodes for position in operator.mutation_positions(node)]
        mutants += [
            Mutant(module, start[0], name.removeprefix("core/"), occurrence, _scope(tree, start[0]))
            for occurrence, (start, _) in enumerate(positions)
            if not any(first <= start <= last for first, last in excluded)
        ]
    return sorted(mutants, key=lambda mutant: (mutant.line, mutant.operator, mutant.occurrence))


@cache
def _operator(name: str) -> Any:
    """Cosmic Ray's operator of a name; in the place of its ExceptionReplacer one that knows `module.Error` as well.

    Cosmic Ray's puts an undefined name into the handler: then any exception that reaches it fails the test, also one
    that the handler still names.
    """
    from cosmic_ray.operators.operator import Operator
    from cosmic_ray.plugins import get_operator
    from parso.python.tree import Name

    class ExceptionReplacer(Operator):  # type: ignore[misc]
        def mutation_positions(self, node: Any) -> Iterator[Any]:
            for item in self._types(node):
                yield item.start_pos, item.end_pos

        def mutate(self, node: Any, index: int) -> Any:
            item = self._types(node)[index]
            siblings = item.parent.children
            siblings[siblings.index(item)] = Name(_NEVER_RAISED, item.start_pos, item.get_first_leaf().prefix)
            return node

        @staticmethod
        def _types(node: Any) -> list[Any]:
            if node.type != "except_clause":
                return []
            types = node.children[1]
            if types.type == "atom":
                types = types.children[1]
            return list(types.children[::2]) if types.type == "testlist_comp" else [types]

        @classmethod
        def examples(cls) -> tuple[Any, ...]:
            return ()

    return ExceptionReplacer() if name == "core/ExceptionReplacer" else get_operator(name)()


def mutated(mutant: Mutant, root: Path = ROOT) -> str | None:
    """Return the source of a mutant; None where the change gives the same program or no program."""
    from cosmic_ray.mutating import mutate_code

    original = (root / mutant.module).read_text()
    code = mutate_code(original, _operator(f"core/{mutant.operator}"), mutant.occurrence)
    try:
        return code if code and ast.dump(ast.parse(code)) != ast.dump(ast.parse(original)) else None
    except SyntaxError:
        return None


def _scope(tree: ast.Module, line: int) -> tuple[int, int]:
    """The first and the last line of the innermost function around a line, of the module where there is none."""
    functions = [
        (node.lineno, node.end_lineno or node.lineno)
        for node in ast.walk(tree)
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
    ]
    around = [(first, last) for first, last in functions if first <= line <= last]
    return max(around, default=_MODULE_SCOPE)


def _excluded(tree: ast.Module) -> list[tuple[tuple[int, int], tuple[int, int]]]:
    """Return the parts of a source in which no mutant is made: (line, column) of their starts and ends."""
    excluded = []
    for node in ast.walk(tree):
        values = [getattr(node, name, None) for name in ("annotation", "returns")]
        if isinstance(node, ast.keyword) and node.arg == "frozen":
            values.append(node.value)
        if isinstance(node, ast.Raise):
            values += [part for part in ast.walk(node) if isinstance(part, ast.JoinedStr)]
        for value in values:
            if isinstance(value, ast.expr):
                end = (value.end_lineno or value.lineno, value.end_col_offset or value.col_offset)
                excluded.append(((value.lineno, value.col_offset), end))
    return excluded


def difference(original: str, code: str) -> tuple[str, ...]:
    """Return the lines that a mutant removes and adds, each with its sign."""
    lines = difflib.unified_diff(original.splitlines(), code.splitlines(), n=0, lineterm="")
    return tuple(line for line in lines if line[:1] in "+-" and line[:3] not in ("+++", "---"))


def equivalents(root: Path = ROOT) -> list[Equivalent]:
    """Return the mutants that no test can notice, from `mutants.toml`."""
    document = tomllib.loads((root / "benchmarks/mutants.toml").read_text())
    return [
        Equivalent(module, entry["before"], after, entry["reason"])
        for module, entries in document.items()
        for entry in entries
        for after in entry["after"]
    ]


def is_equivalent(mutant: Mutant, change: Sequence[str], entries: Sequence[Equivalent]) -> bool:
    """Whether the list of equivalent mutants has a change; spaces do not count."""
    lines = ["".join(line[1:].split()) for line in change]
    return any(
        entry.module == mutant.module and lines == ["".join(line.split()) for line in (entry.before, entry.after)]
        for entry in entries
    )


def chosen_tests(mutant: Mutant, cases: Sequence[Case]) -> list[Case]:
    """Return the tests to run for a mutant: those that execute its line, the fastest first, within the budget.

    A line that runs only when its module is imported, or in another process, is in no test's lines: then all tests are
    returned, those that execute the function around it first.
    """
    first, last = mutant.scope

    def is_near(case: Case) -> bool:
        return any(first <= line <= last for line in case.lines.get(mutant.module, ()))

    # A module is imported once, in whatever test happens to be the first.
    is_imported = mutant.scope == _MODULE_SCOPE
    reaching = [] if is_imported else [case for case in cases if mutant.line in case.lines.get(mutant.module, ())]
    reaching = reaching or list(cases)
    tests, seconds = [], 0.0
    for case in sorted(reaching, key=lambda case: (not is_imported and not is_near(case), case.seconds)):
        seconds += case.seconds
        if tests and seconds > _BUDGET:
            break
        tests.append(case)
    return tests


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
    """A pytest plugin that runs tests in the given order and remembers the first that fails, or cannot be imported."""

    def __init__(self, addresses: Sequence[str]) -> None:
        self.name = ""
        self.places = {address: place for place, address in enumerate(addresses)}

    def pytest_collection_modifyitems(self, items: list[Any]) -> None:
        items.sort(key=lambda item: self.places.get(item.nodeid, len(self.places)))

    def pytest_collectreport(self, report: Any) -> None:
        if report.failed and not self.name:
            self.name = report.nodeid

    pytest_runtest_logreport = pytest_collectreport


def _enter(root: Path, output: Path) -> None:
    """Make this process, just forked, one that tests the tree at `root` and prints to a file."""
    os.setsid()
    descriptor = os.open(output, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.dup2(descriptor, 1)
    os.dup2(descriptor, 2)
    os.chdir(root)
    sys.path.insert(0, str(root))
    os.environ["PYTHONPATH"] = str(root)
    sys.dont_write_bytecode = False


def _pytest(root: Path, arguments: Sequence[str], plugins: Sequence[Any]) -> int:
    import pytest

    # Two of these collect all garbage at the end, which takes longer than most tests.
    omitted = ("anyio", "cacheprovider", "threadexception", "unraisableexception")
    fixed = ["-q", "-n", "0", "--assert=plain", "--hypothesis-seed=0", "--rootdir", str(root)]
    fixed += [option for name in omitted for option in ("-p", f"no:{name}")]
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


def judge(root: Path, mutant: Mutant, cases: Sequence[Case], entries: Sequence[Equivalent] = ()) -> Verdict:
    """Test one mutant in the tree at `root` and return the verdict; the tree is the original again afterwards."""
    file, start = root / mutant.module, time.monotonic()
    original, code = file.read_text(), mutated(mutant, root)
    if code is None:
        return Verdict(mutant, "none")
    change = difference(original, code)
    if is_equivalent(mutant, change, entries):
        return Verdict(mutant, "equivalent", change=change)
    tests = chosen_tests(mutant, cases)
    if not tests:
        return Verdict(mutant, "untested", change=change)
    addresses = [case.address for case in tests]
    killer_file = root / "killer.txt"
    killer_file.unlink(missing_ok=True)

    def work() -> int:
        _enter(root, root / "mutant.log")
        killer = _Killer(addresses)
        status = _pytest(root, ["-x", *addresses], [killer])
        killer_file.write_text(killer.name)
        return status

    _replace(file, code)
    try:
        status = _forked(work, 30 + _SLOWER * sum(case.seconds for case in tests))
    finally:
        _replace(file, original)
    outcome = "timeout" if status is None else "survived" if status == 0 else "killed"
    killer = killer_file.read_text() if killer_file.exists() else ""
    return Verdict(mutant, outcome, time.monotonic() - start, killer, change)


def _replace(file: Path, source: str) -> None:
    """Write a module, and remove its bytecode: Python would take that for new where size and second are the same."""
    file.write_text(source)
    Path(cache_from_source(str(file))).unlink(missing_ok=True)


def _copy(number: int, folder: Path) -> Path:
    """A copy of the tree for one worker."""
    root = folder / str(number)
    shutil.rmtree(root, ignore_errors=True)
    ignored = shutil.ignore_patterns(".*", "build", "__pycache__", "*.egg-info", "site")
    shutil.copytree(ROOT, root, ignore=ignored)
    return root


def _work(number: int, suite: str, folder: Path, jobs: Any, verdicts: Any) -> None:
    root = _copy(number, folder)
    entries = equivalents(root)
    os.environ |= {"MLFLOW_DISABLE_TELEMETRY": "true", "DO_NOT_TRACK": "1"}
    for name in ("hypothesis.strategies", "pytest", "xdist.scheduler", *SUITES[suite].libraries):
        import_module(name)
    gc.freeze()  # Else every test would pay for the garbage collection of what is imported here.
    while (job := jobs.get()) is not None:
        kind, *arguments = job
        try:
            if kind == "observe":
                *place, record = arguments
                _write(record, json.dumps([asdict(case) for case in observe(root, *place)]))
                verdicts.put(None)
            else:
                verdicts.put(judge(root, *arguments, entries))
        except BaseException as error:
            verdicts.put(error)
            raise


def _write(path: Path, text: str) -> None:
    partial = path.with_suffix(".part")
    partial.write_text(text)
    partial.replace(path)


def _received(verdicts: Any) -> Any:
    """What a worker sends next; an error that ended it is raised here."""
    answer = verdicts.get()
    if isinstance(answer, BaseException):
        raise answer
    return answer


def _test_files(tests: Sequence[str]) -> list[str]:
    places = [ROOT / test for test in tests]
    files = [file for place in places for file in (sorted(place.glob("test_*.py")) if place.is_dir() else [place])]
    return [str(file.relative_to(ROOT)) for file in files]


def _digest(file: str, modules: Sequence[str]) -> str:
    """A name for what a test file executes in modules: it changes with either, and with what test files share."""
    shared = [*(ROOT / "tests/support").glob("*.py"), *(ROOT / "tests").glob("conftest.py")]
    sources = [ROOT / file, (ROOT / file).with_name("conftest.py"), *(ROOT / module for module in modules), *shared]
    digest = hashlib.sha256(file.encode())
    for source in sorted(source for source in sources if source.exists()):
        digest.update(source.read_bytes())
    return digest.hexdigest()


def judge_all(suite: str, mutants: Sequence[Mutant], processes: int) -> list[Verdict]:
    """Test mutants of a suite's modules in several processes, print each verdict, and return all verdicts.

    Each process has a copy of the tree. The lines that a test file executes are kept in a folder until the file or a
    module changes.
    """
    modules = modules_of(suite)
    folder = ROOT / "build" / "mutants"
    folder.mkdir(parents=True, exist_ok=True)
    context = multiprocessing.get_context("spawn")
    jobs, verdicts = context.Queue(), context.Queue()
    count = min(processes, len(mutants))
    workers = [context.Process(target=_work, args=(number, suite, folder, jobs, verdicts)) for number in range(count)]
    for worker in workers:
        worker.start()
    try:
        files = _test_files(SUITES[suite].tests)
        records = {file: folder / f"{_digest(file, modules)}.json" for file in files}
        unknown = [file for file, record in records.items() if not record.exists()]
        for file in unknown:
            jobs.put(("observe", modules, [file], records[file]))
        for _ in unknown:
            _received(verdicts)
        cases = [Case(**item) for record in records.values() for item in json.loads(record.read_text())]
        print(f"{suite}: {len(cases)} tests, {sum(case.seconds for case in cases):.0f} s", flush=True)
        for mutant in mutants:
            jobs.put(("judge", mutant, cases))
        result = []
        for number, _ in enumerate(mutants, 1):
            verdict = _received(verdicts)
            mutant = verdict.mutant
            place = f"{mutant.module}:{mutant.line} {mutant.operator}"
            seconds = f"{verdict.seconds:.1f} s"
            print(f"{number}/{len(mutants)} {verdict.outcome} {place} {seconds} {verdict.killer}", flush=True)
            if verdict.outcome != "none":
                result.append(verdict)
        for _ in workers:
            jobs.put(None)
        for worker in workers:
            worker.join(30)
    finally:
        for worker in workers:
            worker.kill()
    return sorted(result, key=lambda verdict: (verdict.mutant.module, verdict.mutant.line, verdict.mutant.operator))


def selected(places: Sequence[str]) -> dict[str, list[str]]:
    """Return the modules of each suite at or below the given places; all modules without places."""
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


def sampled(mutants: Sequence[Mutant], size: int, seed: int) -> list[Mutant]:
    """Return a sample of mutants in the order of their places; equal seeds give equal samples."""
    if size >= len(mutants):
        return list(mutants)
    indices = random.Random(seed).sample(range(len(mutants)), size)  # noqa: S311
    return [mutants[index] for index in sorted(indices)]


def share_of(outcomes: Sequence[str]) -> float:
    """Return the share, 0 to 1, of mutants that were killed, timeouts included, among those that are not equivalent.

    Without any such mutant it is 1.
    """
    counts = Counter(outcomes)
    total = len(outcomes) - counts["equivalent"]
    return (counts["killed"] + counts["timeout"]) / total if total else 1.0


def table(verdicts: Sequence[Verdict]) -> Iterator[str]:
    """Yield the lines of the table: for each part and module the mutants, their outcomes, and the share killed."""
    rows = []
    for suite in SUITES:
        outcomes = {
            module: [verdict.outcome for verdict in verdicts if verdict.mutant.module == module]
            for module in modules_of(suite)
        }
        rows.append((suite, [outcome for each in outcomes.values() for outcome in each]))
        rows += [(f"  {Path(module).name}", each) for module, each in outcomes.items() if module != suite]
    rows = [(name, outcomes) for name, outcomes in rows if outcomes]
    rows.append(("all", [verdict.outcome for verdict in verdicts]))
    width = max(len(name) for name, _ in rows)
    columns = ("killed", "timeout", "survived", "untested", "equivalent")
    yield f"{'module':{width}}  mutants  {'  '.join(columns)}  share"
    for name, outcomes in rows:
        counts = "  ".join(f"{outcomes.count(column):{len(column)}}" for column in columns)
        yield f"{name:{width}}  {len(outcomes):7}  {counts}  {share_of(outcomes):5.0%}"


def main() -> int:
    """Run the command; return 0 unless the share is below `--least`."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("places", nargs="*", help="modules or folders; all of SUITES by default")
    parser.add_argument("--sample", type=int, default=160, help="the number of mutants (default 160)")
    parser.add_argument("--each", type=int, help="the number of mutants of each part, instead of --sample")
    parser.add_argument("--seed", type=int, default=0, help="chooses the sample (default 0)")
    parser.add_argument("--all", action="store_true", help="try every mutant")
    parser.add_argument("--least", type=float, default=0.0, help="fail below this share of killed mutants")
    parser.add_argument("--processes", type=int, default=len(os.sched_getaffinity(0)), help="default: one a core")
    parser.add_argument("--json", type=Path, help="write every verdict to this file")
    options = parser.parse_args()

    suites = selected(options.places)
    if not suites:
        parser.error(f"nothing of {', '.join(SUITES)} is at {', '.join(options.places)}")
    mutants = {
        suite: [mutant for module in modules for mutant in mutants_of(module)] for suite, modules in suites.items()
    }
    if options.each is not None:
        mutants = {suite: sampled(group, options.each, options.seed) for suite, group in mutants.items()}
    elif not options.all:
        every = [mutant for group in mutants.values() for mutant in group]
        sample = set(sampled(every, options.sample, options.seed))
        mutants = {suite: [mutant for mutant in group if mutant in sample] for suite, group in mutants.items()}
    result = [
        verdict for suite, group in mutants.items() if group for verdict in judge_all(suite, group, options.processes)
    ]
    for verdict in result:
        if verdict.outcome in ("survived", "untested"):
            mutant = verdict.mutant
            print(f"\n{verdict.outcome}: {mutant.module}:{mutant.line} ({mutant.operator})")
            print("\n".join(verdict.change))
    print()
    print("\n".join(table(result)))
    if options.json:
        options.json.write_text(json.dumps([asdict(verdict) for verdict in result], indent=1))
    return 0 if share_of([verdict.outcome for verdict in result]) >= options.least else 1


if __name__ == "__main__":
    sys.exit(main())
