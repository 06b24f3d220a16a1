"""The workspace: what was done is found again, and whatever went wrong in between is done again."""

import hashlib
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from tvmflow.bundle import sha256_file
from tvmflow.errors import BuildError, StepError
from tvmflow.progress import Status, reporting_to
from tvmflow.workspace import Artifact, Outcome, Record, Sources, StepResult, Workspace, run_step, step_key


class Inner(Record):
    weights: Artifact


class Made(StepResult):
    library: Artifact
    parts: tuple[Inner, ...] = ()
    seconds: float = 0.0


Run = Callable[..., Outcome[Made]]

SCRIPT = """
import os, pathlib, signal, sys
from tvmflow.errors import StepError
from tvmflow.workspace import Artifact, StepResult, Workspace, run_step

class Made(StepResult):
    library: Artifact

workspace = Workspace(pathlib.Path(sys.argv[1]))
content = sys.argv[2].encode()

def keep():
    with workspace.scratch() as folder:
        (folder / "mod.so").write_bytes(content)
        return Made(library=workspace.keep(folder / "mod.so"))
"""


@pytest.fixture
def workspace(tmp_path: Path) -> Workspace:
    return Workspace(tmp_path / "state")


@pytest.fixture
def run(workspace: Workspace) -> Run:
    """Run a step that keeps a library of the given content and weights beside it."""

    def once(reads: dict[str, object] | None = None, content: bytes = b"library", sources: Sources | None = None,
             valid: Callable[[Made], bool] = lambda made: True, step: str = "build") -> Outcome[Made]:  # fmt: skip
        def work() -> Made:
            with workspace.scratch() as folder:
                (folder / "mod.so").write_bytes(content)
                (folder / "weights").write_bytes(content * 2)
                library, weights = workspace.keep(folder / "mod.so"), workspace.keep(folder / "weights")
            return Made(library=library, parts=(Inner(weights=weights),), sources=sources or Sources())

        return run_step(workspace, step, reads or {"onnx": "ab"}, Made, work, valid=valid)

    return once


def python(code: str, *arguments: object) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", SCRIPT + code, *map(str, arguments)], capture_output=True, text=True, timeout=60
    )


def test_an_artifact_is_kept_under_its_digest(workspace: Workspace, tmp_path: Path) -> None:
    (tmp_path / "mod.so").write_bytes(b"library")
    artifact = workspace.keep(tmp_path / "mod.so")
    assert artifact == Artifact(sha256=hashlib.sha256(b"library").hexdigest(), size=7, name="mod.so")
    assert workspace.path(artifact).read_bytes() == b"library"
    assert not (tmp_path / "mod.so").exists()


def test_a_step_that_was_done_is_found(run: Run) -> None:
    first, second = run(), run()
    assert (first.status, second.status) == ("ran", "cached")
    assert first.result == second.result


def test_a_step_is_found_by_another_process(run: Run, workspace: Workspace) -> None:
    done = python("print(run_step(workspace, 'other', {'a': 1}, Made, keep).status)", workspace.folder, "library")
    assert done.stdout == "ran\n", done.stderr
    found = run_step(workspace, "other", {"a": 1}, Made, lambda: pytest.fail("it was done already"))
    assert found.status == "cached"


@pytest.mark.parametrize("reads", [{"onnx": "cd"}, {"onnx": "ab", "seed": 1}, {}])
def test_other_input_runs_the_step(run: Run, reads: dict[str, object]) -> None:
    run()
    assert run({"nothing": None, **reads}).status == "ran"


def test_another_step_with_the_same_input_runs(run: Run) -> None:
    run()
    assert run(step="package").status == "ran"


def test_the_order_of_what_is_read_does_not_matter() -> None:
    assert step_key("build", {"a": 1, "b": 2}) == step_key("build", {"b": 2, "a": 1})


def test_a_deleted_artifact_runs_the_step_again(run: Run, workspace: Workspace) -> None:
    workspace.path(run().result.library).unlink()
    assert run().status == "ran"
    assert run().status == "cached"


def test_a_truncated_artifact_runs_the_step_again(run: Run, workspace: Workspace) -> None:
    place = workspace.path(run().result.library)
    place.write_bytes(b"lib")
    assert run().status == "ran"
    assert place.read_bytes() == b"library"


def test_an_artifact_deep_in_the_result_counts_as_well(run: Run, workspace: Workspace) -> None:
    workspace.path(run().result.parts[0].weights).unlink()
    assert run().status == "ran"


def test_a_changed_source_of_the_user_runs_the_step_again(run: Run, tmp_path: Path) -> None:
    source = tmp_path / "model.py"
    source.write_text("width = 1\n")
    read = Sources(files={str(source): sha256_file(source)})
    assert run(sources=read).status == "ran"
    assert run(sources=read).status == "cached"
    source.write_text("width = 2\n")
    assert run(sources=read).status == "ran"


def test_a_removed_source_of_the_user_runs_the_step_again(run: Run, tmp_path: Path) -> None:
    source = tmp_path / "model.py"
    source.touch()
    read = Sources(files={str(source): sha256_file(source)})
    run(sources=read)
    source.unlink()
    assert run(sources=read).status == "ran"


def test_a_result_that_is_no_longer_valid_outside_runs_the_step_again(run: Run) -> None:
    run()
    assert run(valid=lambda made: False).status == "ran"


@pytest.mark.parametrize("text", ["", "{", "[]", "3", "{}", '{"result": 3}', '{"result": {"other": 1}}', "\0"])
def test_a_damaged_record_runs_the_step_again(run: Run, workspace: Workspace, text: str) -> None:
    run()
    (record,) = (workspace.folder / "steps" / "build").iterdir()
    record.write_text(text)
    assert run().status == "ran"
    assert run().status == "cached"


def test_figures_that_json_does_not_know_come_back(workspace: Workspace, run: Run) -> None:
    made = run().result.model_copy(update={"seconds": float("inf")})
    workspace.remember("build", "key", made, 1.0)
    assert workspace.find("build", "key", Made) == made


def test_a_failure_is_never_recorded(workspace: Workspace, run: Run) -> None:
    def fail() -> Made:
        raise BuildError("no linker")

    for _ in range(2):
        with pytest.raises(BuildError, match="no linker"):
            run_step(workspace, "build", {"onnx": "ab"}, Made, fail)
    assert run().status == "ran"


def test_who_watches_hears_of_runs_finds_and_failures(workspace: Workspace, run: Run) -> None:
    heard: list[tuple[str, str, str | None]] = []

    class Listener:
        def started(self, step: str, target: str | None) -> None:
            heard.append(("started", step, target))

        def progressed(self, step: str, target: str | None, done: float, total: float, message: str) -> None:
            heard.append(("progressed", step, target))

        def ended(self, step: str, target: str | None, status: Status, seconds: float) -> None:
            heard.append((status, step, target))

    def fail() -> Made:
        raise BuildError("no linker")

    with reporting_to(Listener()):
        run()
        run()
        with pytest.raises(BuildError):
            run_step(workspace, "tune", {}, Made, fail, target="native")
    run(content=b"unheard", reads={"other": 1})
    assert heard == [
        ("started", "build", None),
        ("ran", "build", None),
        ("cached", "build", None),
        ("started", "tune", "native"),
        ("failed", "tune", "native"),
    ]


def test_two_processes_may_keep_the_same_artifact_at_once(workspace: Workspace) -> None:
    code = "print('ready', flush=True); sys.stdin.readline()\nfor _ in range(200): keep()\n"
    arguments = [sys.executable, "-c", SCRIPT + code, str(workspace.folder), "library" * 1000]
    workers = [
        subprocess.Popen(arguments, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        for _ in range(2)
    ]
    for worker in workers:
        assert worker.stdout is not None
        assert worker.stdout.readline() == "ready\n"
    for worker in workers:
        assert worker.stdin is not None
        worker.stdin.write("go\n")
        worker.stdin.flush()
    for worker in workers:
        _, errors = worker.communicate(timeout=60)
        assert worker.returncode == 0, errors
    kept = [path for path in (workspace.folder / "artifacts").rglob("*") if path.is_file()]
    assert [path.read_text() for path in kept] == ["library" * 1000]
    assert not list((workspace.folder / "tmp").iterdir())


def test_a_crash_between_artifact_and_record_is_run_again(workspace: Workspace) -> None:
    code = """
def work():
    made = keep()
    os.kill(os.getpid(), signal.SIGKILL)
    return made
run_step(workspace, "build", {"onnx": "ab"}, Made, work)
"""
    assert python(code, workspace.folder, "library").returncode == -9
    kept = [path for path in (workspace.folder / "artifacts").rglob("*") if path.is_file()]
    assert [path.read_bytes() for path in kept] == [b"library"]

    class Crashed(StepResult):
        library: Artifact

    def work() -> Crashed:
        with workspace.scratch() as folder:
            (folder / "mod.so").write_bytes(b"library")
            return Crashed(library=workspace.keep(folder / "mod.so"))

    runs = [run_step(workspace, "build", {"onnx": "ab"}, Crashed, work) for _ in range(2)]
    assert [outcome.status for outcome in runs] == ["ran", "cached"]
    assert workspace.path(runs[1].result.library) == kept[0]


def test_a_full_disk_is_one_sentence_and_leaves_nothing_half_done(workspace: Workspace) -> None:
    code = """
import resource
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
resource.setrlimit(resource.RLIMIT_FSIZE, (1000, 1000))
content *= 1000
try:
    run_step(workspace, "build", {"onnx": "ab"}, Made, keep)
except StepError as error:
    print(error)
"""
    done = python(code, workspace.folder, "library")
    assert done.stdout.startswith("step build cannot write"), done.stderr
    assert done.stdout.endswith("(File too large); free space or set TVMFLOW_HOME to another folder\n")
    assert not [path for path in workspace.folder.rglob("*") if path.is_file()]


def test_a_disk_too_full_for_the_record_is_one_sentence(workspace: Workspace) -> None:
    code = """
import resource
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
resource.setrlimit(resource.RLIMIT_FSIZE, (50, 50))
try:
    run_step(workspace, "build", {"onnx": "ab"}, Made, keep)
except StepError as error:
    print(error)
"""
    done = python(code, workspace.folder, "library")
    assert "(File too large)" in done.stdout, done.stderr
    assert not list((workspace.folder / "tmp").iterdir())
    assert not list((workspace.folder / "steps").rglob("*.json"))


def test_a_state_folder_that_cannot_be_made_is_told(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(StepError, match=r"cannot be written \(Not a directory\); set TVMFLOW_HOME to another"):
        Workspace(tmp_path / "file" / "state")


def test_scratch_is_gone_after_an_error(workspace: Workspace) -> None:
    def fail() -> None:
        with workspace.scratch() as folder:
            (folder / "half").touch()
            raise BuildError("no linker")

    with pytest.raises(BuildError):
        fail()
    assert not list((workspace.folder / "tmp").iterdir())
