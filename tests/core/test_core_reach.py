"""The code of a step: its cache key changes with the modules that the step can reach, and with no others."""

import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from tvmflow.reach import code_digest, reachable_modules

ROOT = Path(__file__).parents[2]
PACKAGES = ("tvmflow", "tasks", "flows")
KEYS = """
import importlib, json, os, pathlib, sys
from tasks.step import Step
steps = {}
for path in sorted(pathlib.Path("tasks").glob("*.py")):
    module = importlib.import_module(f"tasks.{path.stem}")
    steps |= {step.name: step for step in vars(module).values() if isinstance(step, Step)}
for _ in sys.stdin:
    # A child has read no source yet.
    if os.fork() == 0:
        print(json.dumps({name: step.code for name, step in steps.items()}), flush=True)
        os._exit(0)
    os.wait()
"""


@dataclass
class Tree:
    """A copy of the project's packages, to be changed, and a process that has imported its steps."""

    folder: Path
    process: "subprocess.Popen[str]"

    def codes(self) -> dict[str, str]:
        """Return the digest of every step's code by the step's name, as a new process in this tree has it."""
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.write("\n")
        self.process.stdin.flush()
        digests: dict[str, str] = json.loads(self.process.stdout.readline())
        return digests


@pytest.fixture(scope="module")
def tree(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Tree]:
    folder = tmp_path_factory.mktemp("tree")
    for package in PACKAGES:
        shutil.copytree(ROOT / package, folder / package, ignore=shutil.ignore_patterns("__pycache__"))
    command, environment = [sys.executable, "-c", KEYS], {**os.environ, "PYTHONPATH": str(folder)}
    with subprocess.Popen(
        command, cwd=folder, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        yield Tree(folder, process)


def steps_after_a_change(tree: Tree, digests: dict[str, str], path: str) -> set[str]:
    """Append a comment to a file of the tree, update the digests, and return the names of the steps that change."""
    with (tree.folder / path).open("a") as file:
        file.write("# a change\n")
    before = dict(digests)
    digests.update(tree.codes())
    assert digests.keys() == before.keys()
    return {name for name in digests if digests[name] != before[name]}


@pytest.mark.long
def test_a_change_in_the_server_runs_no_step_again_and_a_change_in_a_schedule_builds_again(tree: Tree) -> None:
    digests = tree.codes()
    steps = {"train", "export", "relax_import", "tune", "build", "package", "validate", "track", "publish"}
    assert steps <= set(digests)
    assert steps_after_a_change(tree, digests, "tvmflow/serving/app.py") == set()
    changed = steps_after_a_change(tree, digests, "tvmflow/compiler/schedules/pooling.py")
    assert {"relax_import", "tune", "build", "package"} <= changed
    assert changed.isdisjoint({"train", "export", "gate"})
    linked = steps_after_a_change(tree, digests, "tvmflow/compiler/threads.c")
    assert {"build", "package"} <= linked
    assert linked.isdisjoint({"train", "export", "gate"})


@pytest.mark.parametrize(
    ("step", "module"),
    [
        ("tasks.build", "tvmflow.compiler.schedules.pooling"),  # through a package's __init__
        ("tasks.tune", "tvmflow.tuning.worker"),  # runs in a process of its own
        ("tasks.gate", "tvmflow.verification"),
        ("tasks.publish", "tvmflow.store"),
        ("tasks.train", "tvmflow.bundle"),  # imported from a package
        ("flows.make", "tasks.build"),
    ],
)
def test_a_step_reaches_what_it_imports(step: str, module: str) -> None:
    assert module in reachable_modules(step)


@pytest.mark.parametrize("module", ["tvmflow.serving.app", "tvmflow.cli", "tvmflow.triggers.receiver", "flows.release"])
def test_no_step_reaches_servers_and_commands(module: str) -> None:
    for path in (ROOT / "tasks").glob("*.py"):
        assert module not in reachable_modules(f"tasks.{path.stem}"), path.stem


def test_a_module_of_the_user_reaches_nothing_of_this_project() -> None:
    assert reachable_modules("model") == frozenset()
    assert code_digest("model") == code_digest("another")


# What modules name as text without a need for it: lists of early imports, the loader of addresses on devices, and the
# servers of measuring devices, which no step starts.
OTHER_REFERENCES = {"tasks.step", "tvmflow.runtime.uri", "tvmflow.tuning.devices", "tvmflow.tuning.devicesupervisor"}
# A tag of runs in MLflow that is spelled as a module is.
TAGS = {"tvmflow.verdict"}


def test_a_module_that_is_named_as_text_is_also_imported_by_whoever_names_it() -> None:
    names = {
        ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__"): path
        for package in PACKAGES
        for path in (ROOT / package).rglob("*.py")
    }
    for module, path in names.items():
        references = set(re.findall(r'"((?:tvmflow|tasks|flows)\.[\w.]+)[":]', path.read_text())) & (
            names.keys() - TAGS
        )
        if references and module not in OTHER_REFERENCES and not module.startswith("tvmflow.cli"):
            assert references <= reachable_modules(module), module
