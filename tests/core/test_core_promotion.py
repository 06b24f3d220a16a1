"""Promotion: alias and pointer move together, one of several movers wins, an interrupted move is completed."""

import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest

from support.databases import Databases
from support.proxies import intercepting
from support.scale import choose
from support.servers import moto_server
from tvmflow import promotion
from tvmflow.errors import SpecError, StoreError
from tvmflow.registry import Registry, embedded_registry
from tvmflow.services import Services
from tvmflow.store import ReleaseStore, StoreConfig, channels
from tvmflow.store.embedded import embedded_s3

LIMIT_SECONDS = 120


@pytest.fixture(scope="module")
def registry(tmp_path_factory: pytest.TempPathFactory, databases: Databases) -> Registry:
    folder = tmp_path_factory.mktemp("mlflow")
    databases.mlflow(folder / "mlflow.db")
    return Registry(embedded_registry(folder))


@pytest.fixture(scope="module")
def rclone(tmp_path_factory: pytest.TempPathFactory) -> Iterator[StoreConfig]:
    with embedded_s3(tmp_path_factory.mktemp("s3"), bucket="releases") as config:
        yield config


@pytest.fixture(scope="module")
def moto() -> Iterator[StoreConfig]:
    with moto_server("releases") as config:
        yield config


@pytest.fixture
def services(request: pytest.FixtureRequest, registry: Registry) -> Services:
    """A registry, and a store on a server with conditional writes unless the test names another server."""
    server = getattr(request, "param", "moto")
    return Services(ReleaseStore(request.getfixturevalue(server)), registry)


on_both_servers = pytest.mark.parametrize("services", ["rclone", "moto"], indirect=True)
# Servers whose writes are arbitrated by claims alone; `--long` adds the server with conditional writes.
on_the_weaker_server = pytest.mark.parametrize("services", choose(["rclone"], ["rclone", "moto"]), indirect=True)


@pytest.fixture
def name(request: pytest.FixtureRequest) -> str:
    """A name of releases that only this test uses, so that all tests can share the servers."""
    return f"{'-'.join(request.node.name.replace('[', '-').replace(']', '').split('_'))}"


@pytest.fixture
def release(services: Services, name: str) -> Callable[..., None]:
    """Publishes a release of each version and registers the model version that belongs to it."""

    def make(*versions: str, **sections: Any) -> None:
        from mlflow import MlflowClient

        uri = services.registry.config.tracking_uri
        client = MlflowClient(uri, registry_uri=uri)
        client.create_registered_model(name)
        for version in versions:
            assert str(client.create_model_version(name, "file:///nowhere").version) == version
            document = {"name": name, "version": version, "model": f"models:/{name}/{version}", **sections}
            services.store.publish(name, version, document, [])

    return make


def _move(services: Services, name: str, version: str, expected: str | None, **changes: Any) -> channels.Pointer:
    return promotion.move_channel(
        services, name, version, "production", **{"who": "ann", "why": "test", **changes}, expected=expected
    )


def _where(services: Services, name: str) -> tuple[str | None, str | None]:
    """The version of alias and of pointer."""
    state = promotion.read_state(services, name, "production", name)
    return state.alias_version, state.current_version


def _rollback(services: Services, name: str, to: str | None = None) -> str:
    return promotion.roll_back(services, name, "production", who="bert", why="bad", to=to)[1].version


@on_both_servers
def test_alias_and_pointer_move_together(services: Services, name: str, release: Callable[..., None]) -> None:
    release("1", "2")
    assert _where(services, name) == (None, None)
    _move(services, name, "1", None)
    assert _where(services, name) == ("1", "1")
    _move(services, name, "2", "1")
    assert _where(services, name) == ("2", "2")
    assert promotion.read_state(services, name, "production") == promotion.read_state(
        services, name, "production", name
    )


@on_both_servers
def test_a_move_from_an_outdated_version_changes_neither(
    services: Services, name: str, release: Callable[..., None]
) -> None:
    release("1", "2", "3")
    _move(services, name, "1", None)
    _move(services, name, "2", "1", who="carla")
    with pytest.raises(StoreError, match="but carla moved it to 2"):
        _move(services, name, "3", "1")
    assert _where(services, name) == ("2", "2")


def test_moving_to_where_it_is_repairs_the_alias_and_writes_nothing(
    services: Services, name: str, release: Callable[..., None]
) -> None:
    release("1", "2")
    before = _move(services, name, "1", None)
    services.registry.set_alias(name, "production", "2")
    assert _move(services, name, "1", "1") == before
    assert _where(services, name) == ("1", "1")


_MOVER = """
import json, sys
from tvmflow import promotion
from tvmflow.errors import StoreError
from tvmflow.registry import Registry, RegistryConfig
from tvmflow.services import Services
from tvmflow.store import ReleaseStore, StoreConfig

job = json.loads(sys.argv[1])

class Watched(Registry):
    def set_alias(self, name, alias, version):
        print("alias", version)
        super().set_alias(name, alias, version)

services = Services(ReleaseStore(StoreConfig(**job["store"])), Watched(RegistryConfig(**job["registry"])))
services.registry.get_alias_version(job["name"], "production")
print("ready", flush=True)
sys.stdin.readline()
try:
    promotion.move_channel(
        services, job["name"], job["version"], "production", who=job["who"], why="race", expected="1"
    )
    print("won")
except StoreError as error:
    print(error)
"""


def _mover(services: Services, name: str, version: str, who: str) -> "subprocess.Popen[str]":
    job = {
        "store": asdict(services.store.config),
        "registry": vars(services.registry.config),
        "name": name,
        "version": version,
        "who": who,
    }
    command = [sys.executable, "-c", _MOVER, json.dumps(job)]
    return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)


def _ready(mover: "subprocess.Popen[str]") -> None:
    assert mover.stdout is not None
    assert mover.stdout.readline() == "ready\n"


@on_the_weaker_server
def test_of_two_racing_processes_one_wins_and_the_other_never_touches_the_alias(
    services: Services, name: str, release: Callable[..., None]
) -> None:
    release("1", "2", "3")
    _move(services, name, "1", None)
    movers = {version: _mover(services, name, version, f"mover {version}") for version in ("2", "3")}
    for mover in movers.values():
        _ready(mover)
    outputs = {version: mover.communicate("\n", LIMIT_SECONDS)[0].splitlines() for version, mover in movers.items()}
    (winner,) = [version for version, lines in outputs.items() if lines[-1] == "won"]
    (loser,) = set(outputs) - {winner}
    assert outputs[winner] == [f"alias {winner}", "won"]
    assert len(outputs[loser]) == 1
    assert f"but mover {winner} moved it to {winner}" in outputs[loser][0]
    assert _where(services, name) == (winner, winner)
    assert len(channels.read(services.store, name, "production").history) == 2


@on_the_weaker_server
def test_a_move_that_is_killed_between_alias_and_pointer_is_completed_at_once(
    services: Services, name: str, release: Callable[..., None]
) -> None:
    release("1", "2")
    _move(services, name, "1", None)
    victim: list[int] = []
    endpoint = services.store.config.endpoint or ""
    with intercepting(endpoint, b"PUT /releases/channels/", lambda: os.kill(victim[0], signal.SIGKILL)) as endpoint:
        behind = Services(ReleaseStore(replace(services.store.config, endpoint=endpoint)), services.registry)
        mover = _mover(behind, name, "2", "killed")
        victim.append(mover.pid)
        _ready(mover)
        mover.communicate("\n", LIMIT_SECONDS)
    assert mover.returncode == -signal.SIGKILL
    state = promotion.read_state(services, name, "production")
    assert (state.alias_version, state.current_version, state.refusal, state.is_settled) == ("2", "1", None, False)

    _move(services, name, "2", "1", who="dora")
    assert promotion.read_state(services, name, "production").is_settled
    assert [move.who for move in channels.read(services.store, name, "production").history] == ["ann", "dora"]


def test_rollbacks_go_back_one_release_after_another(
    services: Services, name: str, release: Callable[..., None]
) -> None:
    release("1", "2", "3", "4")
    before = None
    for version in ("1", "2", "3"):
        _move(services, name, version, before)
        before = version
    assert [_rollback(services, name), _rollback(services, name)] == ["2", "1"]
    assert _where(services, name) == ("1", "1")
    with pytest.raises(StoreError, match="has held nothing before 1"):
        _rollback(services, name)
    _move(services, name, "4", "1")
    assert _rollback(services, name) == "1"
    last = channels.read(services.store, name, "production").last_move
    assert (last.who, last.from_version, last.to_version, last.why, last.rollback) == ("bert", "4", "1", "bad", True)


def test_a_rollback_after_promoting_an_older_release_gives_the_newer_one(
    services: Services, name: str, release: Callable[..., None]
) -> None:
    release("1", "2")
    for version, before in (("1", None), ("2", "1"), ("1", "2")):
        _move(services, name, version, before)
    assert _rollback(services, name) == "2"


def test_a_rollback_to_a_named_release_goes_to_one_that_was_held(
    services: Services, name: str, release: Callable[..., None]
) -> None:
    release("1", "2", "3", "4")
    for version, before in (("1", None), ("2", "1"), ("3", "2")):
        _move(services, name, version, before)
    with pytest.raises(StoreError, match="has never held 4, only 1, 2, 3"):
        _rollback(services, name, to="4")
    assert _rollback(services, name, to="1") == "1"
    assert _where(services, name) == ("1", "1")


def test_a_rollback_does_not_go_to_a_release_that_is_not_whole(
    services: Services, name: str, release: Callable[..., None]
) -> None:
    release("1", "2")
    for version, before in (("1", None), ("2", "1")):
        _move(services, name, version, before)
    key = f"releases/{name}/1/release.json"
    document = {**services.store.get_release(name, "1"), "report": {"sha256": "f" * 64}}
    services.store.objects.put(key, json.dumps(document).encode(), "damaging it")
    with pytest.raises(StoreError, match=r"is not whole: .* is missing"):
        _rollback(services, name)
    assert _where(services, name) == ("2", "2")


def test_a_refused_release_is_marked_and_its_alias_put_back(
    services: Services, name: str, release: Callable[..., None]
) -> None:
    release("1", "2")
    second = services.store.get_release(name, "2")
    services.registry.set_alias(name, "production", "2")
    promotion.refuse(services, second, "production", who="ann", reason="too slow")
    assert _where(services, name) == (None, None)
    _move(services, name, "1", None)
    services.registry.set_alias(name, "production", "2")
    assert promotion.read_state(services, name, "production").refusal == "too slow"
    promotion.restore_alias(services, second, "production", who="ann")
    assert _where(services, name) == ("1", "1")


def test_an_alias_that_is_wanted_elsewhere_by_now_stays(
    services: Services, name: str, release: Callable[..., None]
) -> None:
    release("1", "2", "3")
    _move(services, name, "1", None)
    services.registry.set_alias(name, "production", "3")
    promotion.refuse(services, services.store.get_release(name, "2"), "production", who="ann", reason="too slow")
    assert _where(services, name) == ("3", "1")


def test_an_alias_that_somebody_sets_before_the_channel_is_claimed_stays(
    services: Services, name: str, release: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    release("1", "2", "3")
    _move(services, name, "1", None)
    services.registry.set_alias(name, "production", "2")
    claim = channels.claim

    @contextmanager
    def claim_after_another(*arguments: Any) -> Iterator[None]:
        services.registry.set_alias(name, "production", "3")
        with claim(*arguments):
            yield

    monkeypatch.setattr(channels, "claim", claim_after_another)
    promotion.restore_alias(services, services.store.get_release(name, "2"), "production", who="ann")
    assert _where(services, name) == ("3", "1")


def test_a_release_that_passes_is_no_longer_marked_as_refused(
    services: Services, name: str, release: Callable[..., None]
) -> None:
    release("1")
    promotion.refuse(services, services.store.get_release(name, "1"), "production", who="ann", reason="too slow")
    _move(services, name, "1", None)
    assert services.registry.get_version_tags(name, "1") == {}


def test_a_release_without_channels_may_go_anywhere() -> None:
    policy = promotion.read_policy({"name": "m", "version": "1"}, "anything")
    assert (policy.approval, policy.after, policy.gates.max_latency_ms) == ("none", None, None)


def test_a_channel_that_the_release_file_does_not_name_is_refused_with_the_likely_one() -> None:
    release = {"name": "m", "version": "1", "channels": {"staging": {}, "production": {"after": "staging"}}}
    assert promotion.read_policy(release, "production").after == "staging"
    with pytest.raises(SpecError, match=r"the channels production, staging: 'prod' is not .*; did you mean 'product"):
        promotion.read_policy(release, "prod")


def test_what_a_newer_tvmflow_asks_of_a_channel_is_refused() -> None:
    release = {"name": "m", "version": "1", "channels": {"staging": {"moon": "full"}}}
    with pytest.raises(StoreError, match="that this tvmflow does not know: upgrade"):
        promotion.read_policy(release, "staging")


@pytest.mark.parametrize("model", [None, "models:/m@production", "m"])
def test_a_release_that_names_no_registered_model_is_damaged(model: str | None) -> None:
    with pytest.raises(StoreError, match="names no registered model"):
        promotion.get_registered_version({"name": "m", "version": "1", "model": model})


def test_a_channel_whose_model_is_not_named_is_read_by_its_releases(
    services: Services, name: str, release: Callable[..., None]
) -> None:
    assert promotion.read_state(services, name, "production").model == name
    release("1")
    other = f"{name}-tvm"
    services.store.publish(name, "2", {"name": name, "version": "2", "model": f"models:/{other}/1"}, [])
    # While the channel holds no release, the latest release decides.
    assert promotion.read_state(services, name, "production").model == other
    _move(services, name, "1", None)
    state = promotion.read_state(services, name, "production")
    assert (state.name, state.channel, state.model, state.refusal) == (name, "production", name, None)
    assert state.is_settled


def test_the_reason_of_a_refusal_is_cut_to_what_a_tag_holds(
    services: Services, name: str, release: Callable[..., None]
) -> None:
    release("1")
    document = services.store.get_release(name, "1")
    promotion.refuse(services, document, "production", who="ann", reason="x" * 5000)
    tags = services.registry.get_version_tags(name, "1")
    assert tags == {promotion.format_refusal_tag("production"): "x" * 4000}
    assert promotion.format_refusal_tag("production") == "tvmflow.refused.production"


def test_an_alias_of_the_release_that_the_channel_holds_stays(
    services: Services, name: str, release: Callable[..., None]
) -> None:
    release("1", "2")
    _move(services, name, "1", None)
    promotion.restore_alias(services, services.store.get_release(name, "1"), "production", who="ann")
    promotion.restore_alias(services, services.store.get_release(name, "2"), "production", who="ann")
    assert _where(services, name) == ("1", "1")


def test_a_rollback_is_recorded_as_one(services: Services, name: str, release: Callable[..., None]) -> None:
    release("1", "2")
    _move(services, name, "1", None)
    _move(services, name, "2", "1")
    before, after = promotion.roll_back(services, name, "production", who="bert", why="bad")
    assert (before.version, after.version) == ("2", "1")
    assert [move.rollback for move in after.history] == [False, False, True]
    assert (after.last_move.who, after.last_move.why) == ("bert", "bad")


@pytest.mark.parametrize("done", [True, False])
def test_a_verdict_is_a_run_inside_that_of_its_release(
    services: Services, name: str, tmp_path: Path, done: bool
) -> None:
    from mlflow import MlflowClient

    uri = services.registry.config.tracking_uri
    client = MlflowClient(uri, registry_uri=uri)
    parent = services.registry.start_run(name, {}, {})
    release = {"name": name, "version": "3", "mlflow_run_id": parent}

    def log(verdict: str) -> str:
        return promotion.log_verdict(
            services,
            release,
            "staging",
            {"verdict": verdict},
            tags={"tvmflow.verdict": verdict},
            report="# why",
            flow_run=f"flow-{name}",
            done=done,
        )

    run = log("waiting")
    logged = client.get_run(run)
    assert logged.info.run_name == f"promote {name} 3 to staging"
    assert logged.info.status == ("FINISHED" if done else "RUNNING")
    expected = {
        "mlflow.parentRunId": parent,
        "tvmflow.kind": "promotion",
        "tvmflow.name": name,
        "tvmflow.version": "3",
        "tvmflow.channel": "staging",
        "tvmflow.verdict": "waiting",
    }
    assert expected.items() <= logged.data.tags.items()
    # The same flow run logs into the same run again.
    assert log("passed") == run
    assert client.get_run(run).data.tags["tvmflow.verdict"] == "passed"
    verdict, report = (services.registry.fetch_artifact(run, file, tmp_path) for file in ("verdict.json", "report.md"))
    assert verdict is not None
    assert report is not None
    assert json.loads(verdict.read_text()) == {"verdict": "passed"}
    assert report.read_text() == "# why"


def test_a_releases_hash_follows_its_content_and_not_its_order() -> None:
    first = promotion.hash_release({"a": 1, "b": [2]})
    assert first == promotion.hash_release({"b": [2], "a": 1})
    assert first != promotion.hash_release({"a": 1, "b": [3]})
    assert len(first) == 64


@pytest.mark.parametrize("error", [KeyError("uid not found"), OSError("no username set")])
def test_a_user_without_a_name_is_identified_by_number(monkeypatch: pytest.MonkeyPatch, error: Exception) -> None:
    def nameless() -> str:
        raise error

    assert promotion.identify_user().endswith(f"@{socket.gethostname()}")
    monkeypatch.setattr(promotion.getpass, "getuser", nameless)
    assert promotion.identify_user() == f"{os.getuid()}@{socket.gethostname()}"


def test_a_registered_version_is_read_from_the_document() -> None:
    assert promotion.get_registered_version({"model": "models:/digits-tvm/12"}) == ("digits-tvm", "12")
    for model in ("models:/m/0", "models:/m/1x", "xmodels:/m/1", "models:/a@b/1", None):
        with pytest.raises(StoreError):
            promotion.get_registered_version({"name": "m", "version": "1", "model": model})


@pytest.mark.parametrize("sections", [["staging"], "staging", 7])
def test_channels_that_are_no_section_are_damage(sections: Any) -> None:
    with pytest.raises(StoreError, match="m 1 is damaged"):
        promotion.read_policy({"name": "m", "version": "1", "channels": sections}, "staging")


def test_an_unlike_channel_gets_no_hint() -> None:
    with pytest.raises(SpecError) as refusal:
        promotion.read_policy({"name": "m", "version": "1", "channels": {"staging": {}}}, "zzz")
    assert "did you mean" not in str(refusal.value)
    assert promotion.read_policy({"name": "m", "version": "1", "channels": {}}, "any").after is None
