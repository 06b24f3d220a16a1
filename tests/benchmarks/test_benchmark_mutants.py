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


def test_the_same_seed_gives_the_same_sample(module: Import) -> None:
    mutants = module("mutants")
    every = mutants.mutants_of("tvmflow/promotion.py")
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
