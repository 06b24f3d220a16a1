"""`benchmarks/mutants.py`: the mutants of a module, and whether its tests kill them."""

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest

Import = Callable[[str], ModuleType]

_MODULE = """
def larger(a: int | float, b: int | float = 0) -> int | float:
    if a > b:
        return a
    return b
"""
_TESTS = """
from package.module import larger
def test_larger():
    assert (larger(1, 2), larger(2, 1)) == (2, 2)
"""


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    for name, text in {"package/__init__.py": "", "package/module.py": _MODULE, "tests/test_module.py": _TESTS}.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    return tmp_path


def test_conditions_and_numbers_are_changed_and_annotations_are_not(tree: Path, module: Import) -> None:
    mutants = module("mutants").mutants_of("package/module.py", tree)
    assert {(mutant.line, mutant.operator) for mutant in mutants} == {
        (2, "NumberReplacer"),
        (3, "AddNot"),
        (3, "ReplaceComparisonOperator_Gt_GtE"),
    }


_HANDLER = """
import json
from dataclasses import dataclass

@dataclass(frozen=True)
class Reader:
    def read(self, text: str) -> int:
        try:
            return json.loads(text)
        except (json.JSONDecodeError, KeyError) as error:
            raise ValueError(f"{len(text) // 2} pairs") from error
"""


def test_each_exception_of_a_handler_is_taken_out_and_messages_and_declarations_are_left_alone(
    tree: Path, module: Import
) -> None:
    (tree / "package/module.py").write_text(_HANDLER)
    mutants = module("mutants")
    changed = mutants.mutants_of("package/module.py", tree)
    assert [(mutant.line, mutant.operator, mutant.scope) for mutant in changed] == [
        (10, "ExceptionReplacer", (7, 11)),
        (10, "ExceptionReplacer", (7, 11)),
    ]
    lines = [mutants.difference(_HANDLER, mutants.mutated(mutant, tree)) for mutant in changed]
    assert [line.strip() for _, line in lines] == [
        "+        except (StopAsyncIteration, KeyError) as error:",
        "+        except (json.JSONDecodeError, StopAsyncIteration) as error:",
    ]


def test_the_tests_of_a_line_run_first_and_those_of_its_function_where_it_has_none(tree: Path, module: Import) -> None:
    mutants = module("mutants")
    mutant = next(mutant for mutant in mutants.mutants_of("package/module.py", tree) if mutant.line == 3)

    def case(name: str, seconds: float, *lines: int) -> object:
        return mutants.Case(name, seconds, {"package/module.py": list(lines)} if lines else {})

    cases = [case("other", 0.1), case("slow", 2, 3, 4), case("fast", 1, 3), case("near", 3, 5)]
    assert [each.address for each in mutants.chosen_tests(mutant, cases)] == ["fast", "slow"]
    assert [each.address for each in mutants.chosen_tests(mutant, [cases[0], cases[3]])] == ["near", "other"]


def test_a_mutant_that_is_listed_as_equivalent_counts_in_no_share(module: Import) -> None:
    mutants = module("mutants")
    assert mutants.share_of(["killed", "timeout", "survived", "untested", "equivalent"]) == 0.5
    assert mutants.share_of(["equivalent"]) == 1.0


def test_every_mutant_that_is_listed_as_equivalent_is_one_of_a_line_that_exists(module: Import) -> None:
    mutants = module("mutants")
    for entry in mutants.equivalents():
        lines = ["".join(line.split()) for line in (mutants.ROOT / entry.module).read_text().splitlines()]
        assert "".join(entry.before.split()) in lines, entry
        assert entry.reason
        assert "".join(entry.after.split()) not in lines, entry


def test_the_same_seed_gives_the_same_sample(module: Import) -> None:
    mutants = module("mutants")
    every = mutants.mutants_of("tvmflow/documents/verdict.py")
    first = mutants.sampled(every, 5, 1)
    assert first == mutants.sampled(every, 5, 1) != mutants.sampled(every, 5, 2)


def test_a_mutant_that_changes_the_result_is_killed_and_one_that_does_not_survives(tree: Path, module: Import) -> None:
    code = """
import json, sys
from pathlib import Path
from mutants import judge, mutants_of, observe
root = Path(sys.argv[1])
cases = observe(root, ["package/module.py"], ["tests"])
mutants = [mutant for mutant in mutants_of("package/module.py", root) if mutant.line == 3]
verdicts = [judge(root, mutant, cases) for mutant in mutants]
print(json.dumps({verdict.mutant.operator: [verdict.outcome, verdict.killer] for verdict in verdicts}))
"""
    folder = Path(module("mutants").__file__ or "").parent
    process = subprocess.run(
        [sys.executable, "-c", code, tree], cwd=folder, capture_output=True, text=True, timeout=120
    )
    assert process.returncode == 0, process.stderr
    assert json.loads(process.stdout) == {
        "AddNot": ["killed", "tests/test_module.py::test_larger"],
        "ReplaceComparisonOperator_Gt_GtE": ["survived", ""],
    }
    assert (tree / "package/module.py").read_text() == _MODULE
