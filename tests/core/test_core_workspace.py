"""The workspace: a step that ran is cached, and a step whose record or artifact is damaged runs again."""

import hashlib
import json
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from support.rclone import rclone_s3
from tvmflow.bundle import sha256_file
from tvmflow.errors import BuildError, StepError, StoreError
from tvmflow.progress import Status, reporting_to
from tvmflow.store import ReleaseStore
from tvmflow.store.work import WorkStore
from tvmflow.workspace import Artifact, Outcome, Record, Sources, StepResult, Workspace, run_step, step_key


class Inner(Record):
    weights: Artifact


class LibraryResult(StepResult):
    library: Artifact
    parts: tuple[Inner, ...] = ()
    seconds: float = 0.0


Run = Callable[..., Outcome[LibraryResult]]

SCRIPT = """
import os, pathlib, signal, sys
from tvmflow.errors import StepError
from tvmflow.store import ReleaseStore
from tvmflow.store.work import WorkStore
from tvmflow.workspace import Artifact, StepResult, Workspace, run_step

class LibraryResult(StepResult):
    library: Artifact

workspace = Workspace(pathlib.Path(sys.argv[1]))
content = sys.argv[2].encode()

def keep():
    with workspace.scratch() as folder:
        (folder / "mod.so").write_bytes(content)
        return LibraryResult(library=workspace.keep(folder / "mod.so"))
"""


@pytest.fixture
def workspace(tmp_path: Path) -> Workspace:
    return Workspace(tmp_path / "state")


@pytest.fixture
def run(workspace: Workspace) -> Run:
    """Run a step that keeps a library with the given content, and its weights."""

    def once(
        reads: dict[str, object] | None = None,
        content: bytes = b"library",
        sources: Sources | None = None,
        is_valid: Callable[[LibraryResult], bool] = lambda result: True,
        step: str = "build",
    ) -> Outcome[LibraryResult]:
        def work() -> LibraryResult:
            with workspace.scratch() as folder:
                (folder / "mod.so").write_bytes(content)
                (folder / "weights").write_bytes(content * 2)
                library, weights = workspace.keep(folder / "mod.so"), workspace.keep(folder / "weights")
            return LibraryResult(library=library, parts=(Inner(weights=weights),), sources=sources or Sources())

        return run_step(workspace, step, reads or {"onnx": "ab"}, LibraryResult, work, is_valid=is_valid)

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


def test_a_step_that_ran_is_cached(run: Run) -> None:
    first, second = run(), run()
    assert (first.status, second.status) == ("ran", "cached")
    assert first.result == second.result


def test_a_step_is_cached_for_another_process(run: Run, workspace: Workspace) -> None:
    process = python(
        "print(run_step(workspace, 'other', {'a': 1}, LibraryResult, keep).status)", workspace.folder, "library"
    )
    assert process.stdout == "ran\n", process.stderr
    outcome = run_step(workspace, "other", {"a": 1}, LibraryResult, lambda: pytest.fail("the step ran again"))
    assert outcome.status == "cached"


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
    assert run(is_valid=lambda result: False).status == "ran"


@pytest.mark.parametrize("text", ["", "{", "[]", "3", "{}", '{"result": 3}', '{"result": {"other": 1}}', "\0"])
def test_a_damaged_record_runs_the_step_again(run: Run, workspace: Workspace, text: str) -> None:
    run()
    (record,) = (workspace.folder / "steps" / "build").iterdir()
    record.write_text(text)
    assert run().status == "ran"
    assert run().status == "cached"


def test_figures_that_json_does_not_know_come_back(workspace: Workspace, run: Run) -> None:
    result = run().result.model_copy(update={"seconds": float("inf")})
    workspace.remember("build", "key", result, 1.0)
    assert workspace.find("build", "key", LibraryResult) == result


def test_a_failure_is_never_recorded(workspace: Workspace, run: Run) -> None:
    def fail() -> LibraryResult:
        raise BuildError("no linker")

    for _ in range(2):
        with pytest.raises(BuildError, match="no linker"):
            run_step(workspace, "build", {"onnx": "ab"}, LibraryResult, fail)
    assert run().status == "ran"


def test_a_listener_hears_of_runs_cache_hits_and_failures(workspace: Workspace, run: Run) -> None:
    events: list[tuple[str, str, str | None]] = []

    class Listener:
        def begin(self, step: str, target: str | None) -> None:
            events.append(("started", step, target))

        def advance(self, step: str, target: str | None, done: float, total: float, message: str) -> None:
            events.append(("progressed", step, target))

        def end(self, step: str, target: str | None, status: Status, seconds: float) -> None:
            events.append((status, step, target))

    def fail() -> LibraryResult:
        raise BuildError("no linker")

    with reporting_to(Listener()):
        run()
        run()
        with pytest.raises(BuildError):
            run_step(workspace, "tune", {}, LibraryResult, fail, target="native")
    run(content=b"unheard", reads={"other": 1})
    assert events == [
        ("started", "build", None),
        ("ran", "build", None),
        ("cached", "build", None),
        ("started", "tune", "native"),
        ("failed", "tune", "native"),
    ]


def test_two_processes_may_keep_the_same_artifact_at_once(workspace: Workspace) -> None:
    code = "print('ready', flush=True); sys.stdin.readline()\nfor _ in range(60): keep()\n"
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
    artifacts = [path for path in (workspace.folder / "artifacts").rglob("*") if path.is_file()]
    assert [path.read_text() for path in artifacts] == ["library" * 1000]
    assert not list((workspace.folder / "tmp").iterdir())


def test_a_crash_between_artifact_and_record_is_run_again(workspace: Workspace) -> None:
    code = """
def work():
    result = keep()
    os.kill(os.getpid(), signal.SIGKILL)
    return result
run_step(workspace, "build", {"onnx": "ab"}, LibraryResult, work)
"""
    assert python(code, workspace.folder, "library").returncode == -9
    artifacts = [path for path in (workspace.folder / "artifacts").rglob("*") if path.is_file()]
    assert [path.read_bytes() for path in artifacts] == [b"library"]

    class Crashed(StepResult):
        library: Artifact

    def work() -> Crashed:
        with workspace.scratch() as folder:
            (folder / "mod.so").write_bytes(b"library")
            return Crashed(library=workspace.keep(folder / "mod.so"))

    runs = [run_step(workspace, "build", {"onnx": "ab"}, Crashed, work) for _ in range(2)]
    assert [outcome.status for outcome in runs] == ["ran", "cached"]
    assert workspace.path(runs[1].result.library) == artifacts[0]


def test_a_full_disk_is_one_sentence_and_leaves_nothing_half_done(workspace: Workspace) -> None:
    code = """
import resource
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
resource.setrlimit(resource.RLIMIT_FSIZE, (1000, 1000))
content *= 1000
try:
    run_step(workspace, "build", {"onnx": "ab"}, LibraryResult, keep)
except StepError as error:
    print(error)
"""
    process = python(code, workspace.folder, "library")
    assert process.stdout.startswith("step build cannot write"), process.stderr
    assert process.stdout.endswith("(File too large); free space or set TVMFLOW_HOME to another folder\n")
    assert not [path for path in workspace.folder.rglob("*") if path.is_file()]


def test_a_disk_too_full_for_the_record_is_one_sentence(workspace: Workspace) -> None:
    code = """
import resource
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
resource.setrlimit(resource.RLIMIT_FSIZE, (50, 50))
try:
    run_step(workspace, "build", {"onnx": "ab"}, LibraryResult, keep)
except StepError as error:
    print(error)
"""
    process = python(code, workspace.folder, "library")
    assert "(File too large)" in process.stdout, process.stderr
    assert not list((workspace.folder / "tmp").iterdir())
    assert not list((workspace.folder / "steps").rglob("*.json"))


def test_a_state_folder_that_cannot_be_made_is_reported(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(StepError, match=r"cannot be written \(Not a directory\); set TVMFLOW_HOME to another"):
        Workspace(tmp_path / "file" / "state")


def test_what_a_killed_run_left_goes_when_nobody_works_in_the_folder(tmp_path: Path) -> None:
    first = Workspace(tmp_path)
    with first.scratch() as folder:
        (folder / "mod.so").touch()
        left = tmp_path / "tmp" / "killed"
        left.mkdir()
        Workspace(tmp_path)
        assert (folder.exists(), left.exists()) == (True, True)
    del first
    Workspace(tmp_path)
    assert not left.exists()


def test_scratch_is_gone_after_an_error(workspace: Workspace) -> None:
    def fail() -> None:
        with workspace.scratch() as folder:
            (folder / "half").touch()
            raise BuildError("no linker")

    with pytest.raises(BuildError):
        fail()
    assert not list((workspace.folder / "tmp").iterdir())


# -- Shared by several machines ----------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ReleaseStore]:
    with rclone_s3(tmp_path_factory.mktemp("s3"), bucket="tvmflow") as config:
        yield ReleaseStore(config)


@pytest.fixture
def store(server: ReleaseStore, request: pytest.FixtureRequest) -> WorkStore:
    name = hashlib.sha256(request.node.name.encode()).hexdigest()
    return WorkStore(ReleaseStore(replace(server.config, prefix=name)))


@pytest.fixture
def machines(tmp_path: Path, store: WorkStore) -> tuple[Workspace, Workspace]:
    return Workspace(tmp_path / "one", store), Workspace(tmp_path / "home" / "of" / "another", store)


def build(workspace: Workspace, content: bytes = b"library", folder: Path = Path(), read: Path | None = None) -> str:
    """Run the step that keeps a library, or read its cached result; return its status."""

    def work() -> LibraryResult:
        with workspace.scratch() as scratch:
            (scratch / "mod.so").write_bytes(content)
            sources = Sources(files={} if read is None else {read.name: sha256_file(read)})
            return LibraryResult(library=workspace.keep(scratch / "mod.so"), sources=sources)

    return run_step(workspace, "build", {"onnx": "ab"}, LibraryResult, work, folder=folder).status


def test_a_step_that_ran_on_one_machine_is_cached_on_another(machines: tuple[Workspace, Workspace]) -> None:
    one, other = machines
    assert (build(one), build(other), build(other)) == ("ran", "cached", "cached")
    (artifact,) = (path for path in (other.folder / "artifacts").rglob("*") if path.is_file())
    assert artifact.read_bytes() == b"library"


def test_a_cached_step_is_shared_when_the_workspace_gets_a_store(tmp_path: Path, store: WorkStore) -> None:
    alone = tmp_path / "alone"
    assert build(Workspace(alone)) == "ran"
    assert build(Workspace(alone, store)) == "cached"
    assert build(Workspace(tmp_path / "other", store)) == "cached"


def test_the_users_own_modules_must_be_the_same_on_both_machines(
    machines: tuple[Workspace, Workspace], tmp_path: Path
) -> None:
    for name, text in (("a", "width = 1"), ("b", "width = 1"), ("c", "width = 2")):
        (tmp_path / name).mkdir()
        (tmp_path / name / "model.py").write_text(text)
    one, other = machines
    assert build(one, folder=tmp_path / "a", read=tmp_path / "a" / "model.py") == "ran"
    assert build(other, folder=tmp_path / "b") == "cached"
    assert build(Workspace(tmp_path / "third", other.shared), folder=tmp_path / "c") == "ran"


@pytest.mark.parametrize("damage", [b"LIBRARY", b"", b"library and more", None])
def test_a_shared_artifact_that_is_not_whole_is_made_again_and_repaired(
    machines: tuple[Workspace, Workspace], store: WorkStore, tmp_path: Path, damage: bytes | None
) -> None:
    one, other = machines
    build(one)
    key = f"blobs/sha256/{hashlib.sha256(b'library').hexdigest()}"
    if damage is None:
        store.objects.delete(key, "losing an artifact")
    else:
        store.objects.put(key, damage, "damaging an artifact")
    assert build(other) == "ran"
    assert build(Workspace(tmp_path / "third", store)) == "cached"


@pytest.mark.parametrize("text", ["", "{", "[]", '{"result": 3}', '{"result": {"other": 1}}'])
def test_a_damaged_shared_record_runs_the_step(
    machines: tuple[Workspace, Workspace], store: WorkStore, text: str
) -> None:
    one, other = machines
    build(one)
    store.write_record("build", step_key("build", {"onnx": "ab"}), text.encode())
    assert build(other) == "ran"


@pytest.mark.parametrize(
    "field", [{"sha256": "../../../outside"}, {"sha256": "/etc/hostname"}, {"name": "../../outside"}]
)
def test_a_shared_record_that_leads_out_of_the_workspace_is_not_followed(
    machines: tuple[Workspace, Workspace], store: WorkStore, field: dict[str, str], tmp_path: Path
) -> None:
    (tmp_path / "outside").write_bytes(b"private")
    result = LibraryResult(library=Artifact(sha256="0" * 64, size=7, name="mod.so").model_copy(update=field))
    record = json.dumps({"result": result.model_dump(mode="json")}).encode()
    store.write_record("build", step_key("build", {"onnx": "ab"}), record)
    assert build(machines[1]) == "ran"
    assert (tmp_path / "outside").read_bytes() == b"private"


def test_a_store_that_is_away_is_one_sentence_and_the_work_is_kept(tmp_path: Path, store: WorkStore) -> None:
    away = Workspace(
        tmp_path / "state", WorkStore(ReleaseStore(replace(store.objects.config, endpoint="http://127.0.0.1:1")))
    )
    with pytest.raises(StoreError, match="Cannot reach"):
        away.remember("build", step_key("build", {"onnx": "ab"}), LibraryResult(library=_keep_library(away)), 1.0)
    assert build(Workspace(tmp_path / "state")) == "cached"


def test_a_listener_hears_of_uploads_and_downloads(machines: tuple[Workspace, Workspace]) -> None:
    events: list[tuple[str, str]] = []

    class Listener:
        def begin(self, step: str, target: str | None) -> None:
            events.append(("started", step))

        def advance(self, step: str, target: str | None, done: float, total: float, message: str) -> None:
            events.append((message, f"{done:g} of {total:g}"))

        def end(self, step: str, target: str | None, status: Status, seconds: float) -> None:
            events.append((status, step))

    with reporting_to(Listener()):
        for machine in machines:
            build(machine)
    assert events == [
        ("started", "build"),
        ("sharing", "7 of 7"),
        ("ran", "build"),
        ("started", "build"),
        ("fetching", "0 of 7"),
        ("cached", "build"),
    ]


def _keep_library(workspace: Workspace) -> Artifact:
    with workspace.scratch() as folder:
        (folder / "mod.so").write_bytes(b"library")
        return workspace.keep(folder / "mod.so")
