"""Child processes of steps: however a child ends, the parent gets a result or an error of one sentence."""

import os
import selectors
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from contextvars import copy_context
from pathlib import Path

import psutil
import pytest

from support.processes import SECRETS, mentioned_secrets
from support.waits import wait_until
from tvmflow.errors import BuildError, StepError, TvmflowError
from tvmflow.processes import children, supervisor
from tvmflow.processes.children import Child
from tvmflow.workspace import Record

JOBS = '''
"""Work that goes well and work that does not."""
import os, signal, subprocess, sys, tempfile
from tvmflow.errors import BuildError, TvmflowError
from tvmflow.workspace import Record

class Job(Record):
    value: float = 0
    text: str = ""

class Result(Record):
    value: float
    text: str = ""

class OwnError(TvmflowError):
    pass

def double(job: Job, emit) -> Result:
    return Result(value=2 * job.value, text=job.text)

def says_where(job: Job, emit) -> Result:
    return Result(value=os.getpid(), text=" ".join(torch_and_scipy()))

def torch_and_scipy():
    # SciPy looks for torch among the modules that are imported.
    from importlib.util import find_spec
    from scipy import special
    yield "free" if find_spec("torch") else "kept out"
    yield f"{special.expit(0.0)}"

def reports(job: Job, emit) -> Result:
    for index in range(3):
        emit(index, 3, f"part {index}\\n")
    return Result(value=3)

def prints_for_ever(job: Job, emit) -> Result:
    while True:
        print("x" * 1000)

def chatters(job: Job, emit) -> Result:
    print('{"result": {"value": 666}}')
    os.write(1, b"\\xff\\x00 garbage {\\n" * 1000)
    os.write(2, b"{}\\n")
    subprocess.run(["echo", "more"], check=True)
    return Result(value=1)

def raises_ours(job: Job, emit) -> Result:
    raise BuildError("no linker is installed; install g++")

def raises_own(job: Job, emit) -> Result:
    raise OwnError("a kind that the parent does not know")

def raises_other(job: Job, emit) -> Result:
    raise KeyError("several\\nlines\\n" + "long " * 1000)

def runs_out_of_memory(job: Job, emit) -> Result:
    raise MemoryError

def opens_nothing(job: Job, emit) -> Result:
    return Result(value=len(open("/absent/file").read()))

def kills_itself(job: Job, emit) -> Result:
    os.kill(os.getpid(), signal.SIGKILL)

def crashes(job: Job, emit) -> Result:
    os.kill(os.getpid(), signal.SIGSEGV)

def exits(job: Job, emit) -> Result:
    print("these are my last words")
    sys.exit(7)

def exits_in_words(job: Job, emit) -> Result:
    sys.exit("no more of this")

def goes_silently(job: Job, emit) -> Result:
    os._exit(0)

def asks(job: Job, emit) -> Result:
    return Result(value=float(input("a number, please: ")))

def hangs(job: Job, emit) -> Result:
    emit(os.getpid(), 0, "")
    signal.pause()

def hangs_with_another(job: Job, emit) -> Result:
    emit(os.getpid(), 0, "")
    emit(subprocess.Popen(["sleep", "600"]).pid, 0, "")
    signal.pause()

def reports_for_ever(job: Job, emit) -> Result:
    while True:
        emit(0, 0, "again")

def dies_before_its_fork(job: Job, emit) -> Result:
    if os.fork() == 0:
        signal.pause()
    os.kill(os.getpid(), signal.SIGKILL)

def prints_variables(job: Job, emit) -> Result:
    return Result(value=len(os.environ), text="\\n".join(f"{name}={value}" for name, value in os.environ.items()))

calls = []

def counts(job: Job, emit) -> Result:
    calls.append(job)
    return Result(value=len(calls), text=f"{os.getppid()} {os.environ.get('TMPDIR')} {tempfile.gettempdir()}")
'''


class Job(Record):
    value: float = 0
    text: str = ""


class Result(Record):
    value: float
    text: str = ""


Call = Callable[..., Result]


@pytest.fixture
def jobs(tmp_path: Path) -> Path:
    """The folder of the module with the jobs above."""
    (tmp_path / "jobs.py").write_text(JOBS)
    return tmp_path


@pytest.fixture(params=["interpreter", "fork"])
def call(jobs: Path, request: pytest.FixtureRequest) -> Iterator[Call]:
    """Call a function of the jobs above in a child: a new interpreter, or a fork of one that has imported the jobs."""
    imports = ("jobs",) if request.param == "fork" else ()

    def run(function: str, job: Job | None = None, timeout: float = 60, emit: children.Emit = lambda *_: None,
            torch: bool = False) -> Result:  # fmt: skip
        log = jobs / "logs" / "child.log"
        return children.call(f"jobs:{function}", job or Job(), Result, log=log, timeout=timeout, emit=emit,
                            paths=(jobs,), torch=torch, imports=imports)  # fmt: skip

    with children.shared_imports():
        yield run


def refusal(call: Call, function: str, kind: type[TvmflowError] = StepError, **options: object) -> str:
    with pytest.raises(TvmflowError) as caught:
        call(function, **options)
    assert type(caught.value) is kind
    assert "\n" not in str(caught.value)
    return str(caught.value)


@contextmanager
def ends(pid: int) -> Iterator[None]:
    """Assert that a process, whichever parent started it, ends soon after the body."""
    descriptor = os.pidfd_open(pid)
    try:
        yield
        with selectors.DefaultSelector() as selector:
            selector.register(descriptor, selectors.EVENT_READ)
            assert selector.select(30), f"process {pid} is still there"
    finally:
        os.close(descriptor)


def _assert_ends(descriptor: int) -> None:
    """Assert that the process of a descriptor of `os.pidfd_open` ends soon, and close the descriptor."""
    with selectors.DefaultSelector() as selector:
        selector.register(descriptor, selectors.EVENT_READ)
        assert selector.select(30), "the process is still there"
    os.close(descriptor)


def test_a_result_comes_back(call: Call) -> None:
    assert call("double", Job(value=1.5, text="grüße\n")) == Result(value=3.0, text="grüße\n")


def test_figures_that_json_does_not_know_come_back(call: Call) -> None:
    assert call("double", Job(value=float("inf"))).value == float("inf")


def test_a_child_sees_no_credentials(jobs: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {**SECRETS, "OMP_NUM_THREADS": "3", "LC_TIME": "C"}.items():
        monkeypatch.setenv(name, value)
    with children.shared_imports():
        for imports in ((), ("jobs",)):
            answer = children.call("jobs:prints_variables", Job(), Result, log=jobs / "log", timeout=60, paths=(jobs,),
                                  environment={"ADDED": "yes"}, imports=imports)  # fmt: skip
            assert mentioned_secrets(answer.text) == []
            assert {"OMP_NUM_THREADS=3", "LC_TIME=C", "ADDED=yes"} <= set(answer.text.splitlines())


def test_one_child_takes_several_jobs(jobs: Path) -> None:
    with Child("jobs:says_where", log=jobs / "log", paths=(jobs,)) as child:
        pids = {child.call(Job(), Result, timeout=60).value for _ in range(3)}
    assert len(pids) == 1
    assert pids != {os.getpid()}


def test_a_child_goes_on_after_an_error(jobs: Path) -> None:
    with Child("jobs:asks", log=jobs / "log", paths=(jobs,)) as child:
        for _ in range(2):
            with pytest.raises(StepError, match="EOF"):
                child.call(Job(), Result, timeout=60)


def test_torch_is_kept_out_where_it_is_not_needed(call: Call) -> None:
    assert call("says_where", torch=False).text == "kept out 0.5"
    assert call("says_where", torch=True).text == "free 0.5"


def test_progress_is_passed_on(call: Call) -> None:
    events: list[tuple[float, float, str]] = []
    call("reports", emit=lambda *event: events.append(event))
    assert events == [(0, 3, "part 0\n"), (1, 3, "part 1\n"), (2, 3, "part 2\n")]


def test_what_the_child_prints_goes_to_the_log_and_is_no_result(call: Call, tmp_path: Path) -> None:
    assert call("chatters").value == 1
    log = (tmp_path / "logs" / "child.log").read_bytes()
    assert b"666" in log
    assert b"garbage" in log
    assert b"more" in log


def test_an_error_of_ours_comes_back_as_it_was(call: Call) -> None:
    assert refusal(call, "raises_ours", BuildError) == "no linker is installed; install g++"


def test_an_error_of_a_class_of_the_child_comes_back_as_its_base_class(call: Call) -> None:
    assert refusal(call, "raises_own", TvmflowError) == "a kind that the parent does not know"


def test_any_other_error_is_one_short_sentence(call: Call) -> None:
    message = refusal(call, "raises_other")
    assert "step jobs" in message
    assert "KeyError: 'several" in message
    assert len(message) < 600


def test_the_whole_traceback_is_in_the_log(call: Call, tmp_path: Path) -> None:
    refusal(call, "raises_ours", BuildError)
    assert "Traceback" in (tmp_path / "logs" / "child.log").read_text()


def test_a_lack_of_memory_is_named(call: Call) -> None:
    assert "out of memory" in refusal(call, "runs_out_of_memory")


def test_a_missing_file_is_named(call: Call) -> None:
    assert "/absent/file" in refusal(call, "opens_nothing")


def test_a_killed_child_is_reported_with_its_signal_and_its_log(call: Call, tmp_path: Path) -> None:
    message = refusal(call, "kills_itself")
    assert "SIGKILL (out of memory, perhaps)" in message
    assert str(tmp_path / "logs" / "child.log") in message


def test_a_crash_is_reported_with_its_signal(call: Call) -> None:
    assert "SIGSEGV" in refusal(call, "crashes")


def test_a_child_that_exits_is_reported_with_its_code_and_last_output(call: Call) -> None:
    message = refusal(call, "exits")
    assert "exit code 7" in message
    assert "'these are my last words'" in message
    with pytest.raises(StepError) as caught:
        call("exits")
    assert caught.value.end == "ended with exit code 7"
    message = refusal(call, "exits_in_words")
    assert "exit code 1" in message
    assert "'no more of this'" in message


def test_a_question_to_the_user_ends_at_once(call: Call) -> None:
    assert "EOFError" in refusal(call, "asks")


def test_a_child_that_hangs_is_ended_with_what_it_started(call: Call) -> None:
    descriptors: list[int] = []
    message = refusal(
        call, "hangs_with_another", timeout=2.4, emit=lambda pid, *_: descriptors.append(os.pidfd_open(int(pid)))
    )
    assert "0.04 minutes" in message
    assert "TVMFLOW_STEP_TIMEOUT_MINUTES" in message
    assert len(descriptors) == 2
    for descriptor in descriptors:
        _assert_ends(descriptor)


def test_a_child_that_reports_for_ever_is_ended_as_well(call: Call) -> None:
    assert "took longer than" in refusal(call, "reports_for_ever", timeout=1)


def test_a_child_that_prints_for_ever_is_ended(call: Call, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(supervisor, "LARGEST_LOG", 1 << 20)
    message = refusal(call, "prints_for_ever")
    assert "printed more than" in message
    assert "let it print less" in message


def test_a_child_whose_fork_outlives_it_is_noticed(call: Call) -> None:
    assert "was killed by SIGKILL" in refusal(call, "dies_before_its_fork")


def test_a_missing_function_is_named(call: Call) -> None:
    assert "AttributeError" in refusal(call, "absent")


def test_forks_share_imports_and_nothing_else(jobs: Path) -> None:
    def count(**environment: str) -> list[str]:
        result = children.call("jobs:counts", Job(), Result, log=jobs / "log", timeout=60, paths=(jobs,),
                              environment=environment, imports=("jobs",))  # fmt: skip
        assert result.value == 1
        return result.text.split()

    with children.shared_imports():
        first, second = count(), count(TMPDIR=str(jobs))
        assert (first[0], second[1:]) == (second[0], [str(jobs), str(jobs)])
        with ThreadPoolExecutor(1) as executor:
            assert executor.submit(copy_context().run, count).result()[0] != first[0]
        assert count()[0] == first[0]
    assert count()[0] == str(os.getpid())


def test_imports_may_begin_before_the_call_that_needs_them(jobs: Path) -> None:
    pids = jobs / "pids"
    (jobs / "early.py").write_text(f"import os\nwith open({str(pids)!r}, 'a') as file: print(os.getpid(), file=file)\n")
    imports = ("jobs", "early")
    with children.shared_imports():
        for _ in range(2):
            children.start_imports(imports, log=jobs / "log", paths=(jobs,))
        wait_until(pids.exists)
        called = children.call(
            "jobs:counts", Job(), Result, log=jobs / "log", timeout=60, paths=(jobs,), imports=imports
        )
    assert [called.text.split()[0]] == pids.read_text().split()
    # Nothing is shared here, and nothing begins.
    others = {child.pid for child in psutil.Process().children()}
    children.start_imports(imports, log=jobs / "log", paths=(jobs,))
    assert {child.pid for child in psutil.Process().children()} <= others


def test_a_fork_that_crashes_is_replaced(jobs: Path) -> None:
    def run(function: str) -> Result:
        return children.call(f"jobs:{function}", Job(value=1), Result, log=jobs / f"{function}.log", timeout=60,
                            paths=(jobs,), imports=("jobs",))  # fmt: skip

    with children.shared_imports():
        for _ in range(2):
            with pytest.raises(StepError, match="exit code 7, last output 'these are my last words'"):
                run("exits")
            assert run("double").value == 2


def test_a_fork_that_ends_without_a_reply_is_not_waited_for(jobs: Path) -> None:
    with children.shared_imports(), pytest.raises(StepError, match="ended with exit code 0; its log is") as caught:
        children.call(
            "jobs:goes_silently", Job(), Result, log=jobs / "log", timeout=30, paths=(jobs,), imports=("jobs",)
        )
    assert caught.value.end == "ended with exit code 0"


def test_all_children_can_be_ended(call: Call) -> None:
    started = threading.Semaphore(0)
    messages: list[str] = []

    def run() -> None:
        try:
            call("hangs", emit=lambda *_: started.release())
        except StepError as error:
            messages.append(str(error))

    threads = [threading.Thread(target=run) for _ in range(2)]
    for thread in threads:
        thread.start()
    for _ in threads:
        assert started.acquire(timeout=60)
    supervisor.kill_all()
    for thread in threads:
        thread.join(60)
    assert len(messages) == 2
    assert all("SIGKILL" in message for message in messages)


def test_a_killed_parent_takes_its_child_with_it(jobs: Path) -> None:
    code = """
import pathlib, sys
from tvmflow.processes import children, supervisor
from tvmflow.workspace import Record
class Job(Record):
    value: float = 0
folder = pathlib.Path(sys.argv[1])
children.call("jobs:hangs", Job(), Job, log=folder / "log", timeout=60, paths=(folder,),
             emit=lambda pid, *_: print(int(pid), flush=True))
"""
    parent = subprocess.Popen([sys.executable, "-c", code, str(jobs)], stdout=subprocess.PIPE, text=True)
    assert parent.stdout is not None
    with ends(int(parent.stdout.readline())):
        parent.kill()
        parent.wait(30)
    parent.stdout.close()
