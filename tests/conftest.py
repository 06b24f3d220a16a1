"""How the tests run: their scale, their order on several processes, and the servers that folders share."""

import gc
import os
import signal
from collections import defaultdict
from collections.abc import Callable, Generator, Iterator
from contextlib import ExitStack
from math import inf
from pathlib import Path
from typing import Any

import pytest
from xdist.scheduler import LoadFileScheduling

from support import durations, scale, servers, skips
from support.command_server import CommandServer, command_of_fork, command_server
from support.databases import Databases
from support.processes import clean_environment
from tvmflow.bundle import keygen

# How long the cases of a test may take together in a run that is not long.
_CASES_SECONDS = 1.0

# What a run has started for all of its processes.
_commands: CommandServer | None = None
_ends = ExitStack()

# A shell starts what runs in the background with SIGINT ignored, and every process of the tests would inherit that.
signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add the options that choose the scale of a run."""
    group = parser.getgroup("tvmflow")
    group.addoption("--long", action="store_true", help="try more cases per test, and run the tests marked `long`")
    group.addoption("--quick", action="store_true", help="run only tests that take no server and little time")
    group.addoption("--no-skips", action="store_true", help="a skip that tests/skips.toml does not permit is a failure")
    group.addoption("--record", type=Path, help="write what every test and fixture costs to this file")


def pytest_configure(config: pytest.Config) -> None:
    """Set the scale before any test file is imported: parameters and decorators depend on it."""
    # Nothing of what the collection imports becomes garbage.
    gc.disable()
    if config.option.long and config.option.quick:
        raise pytest.UsageError("--long and --quick exclude each other")
    scale.set_mode("long" if config.option.long else "quick" if config.option.quick else "normal")
    if config.option.record:
        config.pluginmanager.register(durations.Recorder(config.option.record, hasattr(config, "workerinput")))


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave out tests that the scale excludes, and put the files that take longest first, after those not recorded.

    A long file that came last would keep one process busy while the others are done.
    """
    others = _left_out_cases(items) | {item for item in items if not _is_selected(item)}
    if others:
        config.hook.pytest_deselected(items=[item for item in items if item in others])
    selected = [item for item in items if item not in others]
    files, seconds = durations.seconds_of_files(), defaultdict[str, float](float)
    for file in {durations.file_of(item.nodeid) for item in selected}:
        seconds[_unit(file)] += files.get(file, inf)
    items[:] = sorted(selected, key=lambda item: -seconds[_unit(item.nodeid)])


def pytest_collection_finish() -> None:
    """Let garbage collections pass over the imported modules, which took a twentieth of the tests' time."""
    gc.collect()
    gc.freeze()
    gc.enable()
    gc.set_threshold(20_000, 20, 20)


def _is_selected(item: pytest.Item) -> bool:
    if item.get_closest_marker("long") and not scale.is_long():
        return False
    return not scale.is_quick() or durations.is_quick(item)


def _left_out_cases(items: list[pytest.Item]) -> set[pytest.Item]:
    """The cases of tests with parameters that a run leaves out; none in a long run.

    A run takes as many cases of a test as its mark `few` says, and as are recorded to take `_CASES_SECONDS` together.
    """
    if scale.is_long():
        return set()
    recorded = durations.recorded()["tests"]
    few, tests = defaultdict[tuple[str, int], list[pytest.Item]](list), defaultdict[str, list[pytest.Item]](list)
    for item in items:
        if mark := item.get_closest_marker("few"):
            few[durations.function_of(item.nodeid), mark.args[0]].append(item)
    others = {item for (_, count), alike in few.items() for item in {*alike}.difference(scale.spread(alike, count))}
    for item in items:
        if item not in others and _is_selected(item):
            tests[durations.function_of(item.nodeid)].append(item)
    for name, alike in tests.items():
        if seconds := recorded[name]["seconds"] if name in recorded else 0.0:
            count = min(len(alike), max(1, int(_CASES_SECONDS / seconds)))
            others.update({*alike}.difference(scale.spread(alike, count)))
    return others


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """With `--no-skips`, make a failure of every skip that is not permitted."""
    report = yield
    if item.config.option.no_skips:
        skips.refuse_skip(report)
    return report


@pytest.hookimpl(wrapper=True)
def pytest_make_collect_report(
    collector: pytest.Collector,
) -> Generator[None, pytest.CollectReport, pytest.CollectReport]:
    """The same for a whole file that is skipped."""
    report = yield
    if collector.config.option.no_skips:
        skips.refuse_skip(report)
    return report


def pytest_terminal_summary(terminalreporter: Any) -> None:
    """Say which packages would let the skipped tests run."""
    if packages := skips.packages_to_install(terminalreporter.stats.get("skipped", [])):
        terminalreporter.section("not everything was tested")
        terminalreporter.write_line(f"Some tests were skipped. To run them: `apt-get install {' '.join(packages)}`.")


def _unit(nodeid: str) -> str:
    """The tests that one process runs together: a file, which shares fixtures; those that share servers or more."""
    file = Path(durations.file_of(nodeid))
    if file.parent.name in ("cli", "cpp", "registry", "stack"):
        return file.parent.name
    if file.parent.name != "flows" or file.name == "test_flow_workers.py":
        return str(file)
    return "releases" if file.name.startswith(("test_flow_release", "test_flow_bad")) else "flows"


class _ByUnit(LoadFileScheduling):
    def _split_scope(self, nodeid: str) -> str:
        return _unit(nodeid)


def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> LoadFileScheduling:
    """Give each process one unit of tests after the other."""
    return _ByUnit(config, log)


@pytest.hookimpl(optionalhook=True)
def pytest_configure_node(node: Any) -> None:
    """Name the run's command server to a process of tests, before that process starts."""
    global _commands
    if _commands is None:
        _commands = _ends.enter_context(command_server(clean_environment()))
    node.workerinput["commands"] = _commands.address


def pytest_unconfigure() -> None:
    """End the run's command server."""
    _ends.close()


@pytest.fixture
def key(tmp_path: Path) -> Path:
    """A new private key; the public one lies beside it, in `key.pub`."""
    keygen(tmp_path / "key")
    return tmp_path / "key"


@pytest.fixture(scope="session")
def databases(tmp_path_factory: pytest.TempPathFactory) -> Databases:
    """Empty databases of MLflow and Prefect, to start state folders and servers from."""
    return Databases(tmp_path_factory)


@pytest.fixture(scope="session")
def commands(pytestconfig: pytest.Config) -> Iterator[CommandServer]:
    """What runs commands that need not start cold: one server for all processes of a run."""
    if hasattr(pytestconfig, "workerinput"):
        yield CommandServer(pytestconfig.workerinput["commands"])
    else:
        with command_server(clean_environment()) as server:
            yield server


@pytest.fixture(scope="session")
def children_in_forks(commands: CommandServer) -> Iterator[None]:
    """Let this process start the children of steps and of tuning as forks of processes that have imported TVM."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("tvmflow.processes.supervisor.module_command", command_of_fork(Path(commands.address)))
        yield


@pytest.fixture(scope="session")
def prefect_server(
    tmp_path_factory: pytest.TempPathFactory, databases: Databases, commands: CommandServer
) -> Iterator[str]:
    """The address of the API of a Prefect server without background services.

    It is a fork as well: most of what it imports, commands import too.
    """
    folder = tmp_path_factory.mktemp("prefect")
    databases.prefect(folder / "prefect.db")
    with servers.prefect_server(folder, python=[*commands.stand_in, str(os.getpid())]) as address:
        yield address


@pytest.fixture(scope="session")
def mlflow_server(tmp_path_factory: pytest.TempPathFactory, databases: Databases) -> Iterator[str]:
    """The address of an MLflow server."""
    folder = tmp_path_factory.mktemp("mlflow")
    databases.mlflow(folder / "mlflow.db")
    with servers.mlflow_server(folder) as address:
        yield address


@pytest.fixture(scope="session")
def postgres() -> Iterator[Callable[[str], str]]:
    """A PostgreSQL server on 127.0.0.1: a function that creates an empty database and returns its address."""
    with servers.postgres_server() as create_database:
        yield create_database
