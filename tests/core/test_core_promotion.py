"""Promotion: the alias follows the channel, the newest wish wins, policies are the channel's, moves are completed."""

import json
import os
import re
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest

from support import scale
from support.databases import Databases
from support.releases import make_release
from support.servers import moto_server
from tvmflow.bundle import keygen, public_key
from tvmflow.documents.encoding import encode
from tvmflow.documents.release import Blob
from tvmflow.documents.verdict import Verdict
from tvmflow.errors import RegistryUnavailableError, SpecError, StatementError, StoreError
from tvmflow.promotion import moves, people, policies, verdicts
from tvmflow.registry import Registry, embedded_registry
from tvmflow.services import Services
from tvmflow.spec import Policy
from tvmflow.store import ReleaseStore, StoreConfig, channels
from tvmflow.store.channel_document import Channel, WishEnd
from tvmflow.store.statements import Subject, sign


@pytest.fixture(scope="module")
def registry(tmp_path_factory: pytest.TempPathFactory, databases: Databases) -> Registry:
    folder = tmp_path_factory.mktemp("mlflow")
    databases.mlflow(folder / "mlflow.db")
    return Registry(embedded_registry(folder))


@pytest.fixture(scope="module")
def moto() -> Iterator[StoreConfig]:
    with moto_server("releases") as config:
        yield config


@pytest.fixture
def services(request: pytest.FixtureRequest, registry: Registry, tmp_path: Path) -> Services:
    """A registry, and a store in a folder unless the test names a server with conditional writes."""
    if getattr(request, "param", "folder") == "folder":
        return Services(ReleaseStore(StoreConfig("releases", folder=tmp_path / "releases")), registry)
    return Services(ReleaseStore(request.getfixturevalue("moto")), registry)


on_both_stores = pytest.mark.parametrize("services", ["folder", "moto"], indirect=True)
on_a_server = pytest.mark.parametrize("services", scale.choose(["moto"], ["folder", "moto"]), indirect=True)


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
            document = make_release(name, version, model=f"models:/{name}/{version}", **sections)
            services.store.publish(document, [])

    return make


def _wish(services: Services, name: str, version: str, who: str = "ann") -> Channel:
    return moves.make_wish(services, name, version, "production", who=who, why="test")


def _grant(services: Services, document: Channel) -> Channel:
    assert document.wish is not None
    policy = policies.EffectivePolicy(Policy())
    return moves.grant(services, document.name, "production", document.wish.id, why="test", policy=policy)


def _move(services: Services, name: str, version: str, who: str = "ann") -> Channel:
    return _grant(services, _wish(services, name, version, who))


def _where(services: Services, name: str) -> tuple[str | None, str | None]:
    """The version of the alias, and the one that the channel holds."""
    state = moves.read_state(services, name, "production", name)
    return state.alias_version, state.channel.version


def _rollback(services: Services, name: str, to: str | None = None) -> str | None:
    return moves.roll_back(services, name, "production", who="bert", why="bad", to=to)[1].version


@on_both_stores
def test_the_alias_follows_the_channel_and_not_the_wish(
    services: Services, name: str, release: Callable[..., None]
) -> None:
    release("1", "2")
    assert _where(services, name) == (None, None)
    document = _wish(services, name, "1")
    assert _where(services, name) == (None, None)
    _grant(services, document)
    assert _where(services, name) == ("1", "1")
    document = _wish(services, name, "2")
    assert _where(services, name) == ("1", "1")
    state = moves.read_state(services, name, "production")
    assert not state.is_settled
    moved = _grant(services, document)
    assert (_where(services, name), moved.shown) == (("2", "2"), "2")
    state = moves.read_state(services, name, "production")
    assert state.is_settled
    assert state == moves.read_state(services, name, "production", name)


@on_both_stores
def test_an_older_wish_does_not_overwrite_a_newer_one(
    services: Services, name: str, release: Callable[..., None]
) -> None:
    release("1", "2", "3")
    _move(services, name, "1")
    older = _wish(services, name, "2")
    newer = _wish(services, name, "3", "bert")
    after = _grant(services, older)
    assert _where(services, name) == ("1", "1")
    assert older.wish is not None
    end = after.find_end(older.wish.id)
    assert isinstance(end, WishEnd)
    assert end.outcome == "superseded"
    _grant(services, newer)
    _grant(services, older)
    assert _where(services, name) == ("3", "3")


def test_an_alias_that_is_set_by_hand_goes_back_and_one_that_lags_is_completed(
    services: Services, name: str, release: Callable[..., None]
) -> None:
    release("1", "2")
    services.registry.set_alias(name, "production", "1")
    assert moves.read_state(services, name, "production").hand_set_version == "1"
    document = _wish(services, name, "1")
    assert _where(services, name) == (None, None)
    _grant(services, document)
    services.registry.set_alias(name, "production", "2")
    assert moves.read_state(services, name, "production").hand_set_version == "2"
    moves.update_alias(services, name, "production", name)
    assert _where(services, name) == ("1", "1")
    # A mover that died between the channel and the alias.
    wish = channels.wish(services.store, name, "production", "2", who="ann", why="").wish
    assert wish is not None
    channels.grant(services.store, name, "production", wish.id, why="", policy=Policy())
    state = moves.read_state(services, name, "production")
    assert (state.alias_version, state.channel.version, state.hand_set_version) == ("1", "2", None)
    moves.update_alias(services, name, "production", name)
    assert moves.read_state(services, name, "production").is_settled
    services.registry.delete_alias(name, "production")
    assert moves.read_state(services, name, "production").hand_set_version is None


def test_an_alias_that_asks_is_deleted_once_it_is_granted_or_older(
    services: Services, name: str, release: Callable[..., None]
) -> None:
    release("1", "2")

    def asked() -> str | None:
        return moves.read_state(services, name, "production").wanted_version

    services.registry.set_alias(name, "production-wanted", "1")
    assert asked() == "1"
    document = _wish(services, name, "1")
    assert asked() == "1"
    _grant(services, document)
    assert asked() is None
    services.registry.set_alias(name, "production-wanted", "1")
    _wish(services, name, "2")
    assert asked() is None
    services.registry.set_alias(name, "production-wanted", "2")
    _rollback(services, name, "1")
    assert asked() is None


_MOVERS = """
import json, os, signal, sys, traceback
from pathlib import Path
from tvmflow.promotion import moves, people, policies, verdicts
from tvmflow.registry import Registry, RegistryConfig
from tvmflow.documents.release import Blob
from tvmflow.services import Services
from tvmflow.spec import Policy
from tvmflow.store import ReleaseStore, StoreConfig
import boto3, mlflow.store.model_registry.sqlalchemy_store, mlflow.store.tracking.sqlalchemy_store

def move(job, ready, go):
    if job["store"]["folder"]:
        job["store"]["folder"] = Path(job["store"]["folder"])

    class Watched(Registry):
        def set_alias(self, name, alias, version):
            if job["who"] == "killed":
                os.kill(os.getpid(), signal.SIGKILL)
            super().set_alias(name, alias, version)

    services = Services(ReleaseStore(StoreConfig(**job["store"])), Watched(RegistryConfig(**job["registry"])))
    services.registry.get_alias_version(job["name"], "production")
    os.write(ready, b".")
    os.close(ready)
    os.read(go, 1)
    wished = moves.make_wish(services, job["name"], job["version"], "production", who=job["who"], why="race")
    policy = policies.EffectivePolicy(Policy())
    if wished.wish:
        moves.grant(services, job["name"], "production", wished.wish.id, why="race", policy=policy)

for line in sys.stdin:
    jobs, (waiting, ready), (go, start), movers = json.loads(line), os.pipe(), os.pipe(), []
    for job in jobs:
        movers.append(os.fork())
        if movers[-1] == 0:
            signal.alarm(120)
            code = 1
            try:
                move(job, ready, go)
                code = 0
            except BaseException:
                traceback.print_exc()
            os._exit(code)
    # Whoever has died is not waited for.
    os.close(ready)
    arrived = sum(len(os.read(waiting, 1)) for _ in jobs)
    os.write(start, b"." * len(jobs))
    codes = [os.waitstatus_to_exitcode(os.waitpid(mover, 0)[1]) for mover in movers]
    for end in (waiting, go, start):
        os.close(end)
    print(json.dumps([arrived, codes]), flush=True)
"""

Movers = Callable[..., list[int]]


@pytest.fixture(scope="module")
def _movers() -> Iterator["subprocess.Popen[str]"]:
    """A process that forks for each mover, since importing takes longer than to move."""
    command = [sys.executable, "-c", _MOVERS]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        yield process


@pytest.fixture
def race(_movers: "subprocess.Popen[str]", services: Services, name: str) -> Movers:
    """Promote versions at once, each in a process of its own: `race({who: version})` returns their exit codes."""

    def run(versions: dict[str, str]) -> list[int]:
        configs = {"store": asdict(services.store.config), "registry": vars(services.registry.config), "name": name}
        jobs = [{**configs, "version": version, "who": who} for who, version in versions.items()]
        assert _movers.stdin is not None
        assert _movers.stdout is not None
        _movers.stdin.write(json.dumps(jobs, default=str) + "\n")
        _movers.stdin.flush()
        arrived, codes = json.loads(_movers.stdout.readline())
        assert arrived == len(jobs)
        return list(codes)

    return run


@pytest.mark.long
@on_a_server
def test_after_racing_processes_the_alias_names_what_the_channel_holds(
    services: Services, name: str, release: Callable[..., None], race: Movers
) -> None:
    release("1", "2", "3")
    _move(services, name, "1")
    assert race({f"mover {version}": version for version in ("2", "3")}) == [0, 0]
    alias, holds = _where(services, name)
    assert alias == holds != "1"
    document = channels.read(services.store, name, "production")
    # Each wish was granted or superseded.
    assert len(document.history) == 3


def test_a_move_that_is_killed_before_the_alias_is_completed_by_the_next_promotion(
    services: Services, name: str, release: Callable[..., None], race: Movers
) -> None:
    release("1", "2")
    _move(services, name, "1")
    assert race({"killed": "2"}) == [-signal.SIGKILL]
    state = moves.read_state(services, name, "production")
    assert (state.alias_version, state.channel.version, state.hand_set_version) == ("1", "2", None)
    _wish(services, name, "2", "dora")
    assert moves.read_state(services, name, "production").is_settled
    assert [move.who for move in channels.read(services.store, name, "production").moves] == ["ann", "killed"]


def test_rollbacks_go_back_one_release_after_another(
    services: Services, name: str, release: Callable[..., None]
) -> None:
    release("1", "2", "3", "4")
    for version in ("1", "2", "3"):
        _move(services, name, version)
    assert [_rollback(services, name), _rollback(services, name)] == ["2", "1"]
    assert _where(services, name) == ("1", "1")
    with pytest.raises(StoreError, match="has held nothing before 1"):
        _rollback(services, name)
    _move(services, name, "4")
    assert _rollback(services, name) == "1"
    last = channels.read(services.store, name, "production").moves[-1]
    assert (last.who, last.from_version, last.to_version, last.why, last.rollback) == ("bert", "4", "1", "bad", True)


@pytest.mark.parametrize(
    "end", [KeyboardInterrupt, RegistryUnavailableError("MLflow does not answer")], ids=["interrupt", "server"]
)
def test_a_rollback_that_ended_before_the_alias_was_moved_is_completed_by_the_next(
    services: Services,
    name: str,
    release: Callable[..., None],
    end: Any,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    release("1", "2", "3")
    for version in ("1", "2", "3"):
        _move(services, name, version)

    def fail(*_arguments: object) -> None:
        raise end

    with monkeypatch.context() as patch:
        patch.setattr(Registry, "set_alias", fail)
        with pytest.raises((KeyboardInterrupt, RegistryUnavailableError)) as caught:
            _rollback(services, name)
    assert end is KeyboardInterrupt or "production holds 2 by now" in str(caught.value)
    assert _where(services, name) == ("3", "2")
    assert _rollback(services, name) == "2"
    assert _where(services, name) == ("2", "2")
    assert _rollback(services, name) == "1"


def test_a_change_of_a_policy_begins_with_what_others_have_changed_meanwhile(services: Services, name: str) -> None:
    store, calls = services.store, []

    def revise(current: Channel) -> Policy:
        calls.append(current.policy)
        if len(calls) == 1:
            channels.set_policy(store, name, "production", Policy(signature="required"), who="bert", why="")
        return (current.policy or Policy()).model_copy(update={"approval": "required"})

    after = channels.change_policy(store, name, "production", revise, who="ann", why="")
    assert calls == [None, Policy(signature="required")]
    assert after.policy == Policy(signature="required", approval="required")


def test_a_channel_without_a_policy_would_adopt_that_of_its_release_or_else_of_the_newest(
    services: Services, name: str, release: Callable[..., None]
) -> None:
    empty = Channel(name=name, channel="production")
    assert policies.proposed_policy(services.store, empty) is None
    release("1", channels={"production": Policy(approval="required")})
    services.store.publish(make_release(name, "2", channels={"production": Policy(signature="required")}), [])
    assert policies.proposed_policy(services.store, empty) == Policy(signature="required")
    _move(services, name, "1")
    held = channels.read(services.store, name, "production")
    assert policies.proposed_policy(services.store, held) == Policy(approval="required")


@pytest.mark.parametrize(
    ("after", "reason"),
    [
        ("production", "reach 'production' before itself"),
        ("stagin", "no such channel; its others: beta, staging; did you mean 'staging'?"),
        ("beta", "reach 'production' before itself"),
    ],
    ids=["itself", "unknown", "circle"],
)
def test_an_order_of_channels_that_no_release_can_meet_is_refused(
    services: Services, name: str, release: Callable[..., None], after: str, reason: str
) -> None:
    release("1", channels={"staging": Policy(), "beta": Policy(after="production"), "production": Policy()})
    with pytest.raises(SpecError, match=re.escape(reason)):
        policies.check_order(services.store, name, "production", Policy(after=after))
    policies.check_order(services.store, name, "production", Policy(after="staging"))


def test_a_rollback_after_promoting_an_older_release_gives_the_newer_one(
    services: Services, name: str, release: Callable[..., None]
) -> None:
    release("1", "2")
    for version in ("1", "2", "1"):
        _move(services, name, version)
    assert _rollback(services, name) == "2"


def test_a_rollback_to_a_named_release_goes_to_one_that_was_held(
    services: Services, name: str, release: Callable[..., None]
) -> None:
    release("1", "2", "3", "4")
    for version in ("1", "2", "3"):
        _move(services, name, version)
    with pytest.raises(StoreError, match="has never held 4, only 1, 2, 3"):
        _rollback(services, name, to="4")
    assert _rollback(services, name, to="1") == "1"
    assert _where(services, name) == ("1", "1")


def test_a_rollback_does_not_go_to_a_release_that_is_not_whole(
    services: Services, name: str, release: Callable[..., None]
) -> None:
    release("1", "2")
    for version in ("1", "2"):
        _move(services, name, version)
    document = services.store.get_release(name, "1")
    damaged = document.model_copy(update={"report": Blob(sha256="f" * 64, size=8)})
    services.store.objects.put(f"releases/{name}/1/release.json", encode(damaged), "damaging it")
    with pytest.raises(StoreError, match=r"is not whole: .* is missing"):
        _rollback(services, name)
    assert _where(services, name) == ("2", "2")


def test_a_refused_release_is_marked_and_its_wish_ends(
    services: Services, name: str, release: Callable[..., None]
) -> None:
    release("1", "2")
    _move(services, name, "1")
    services.registry.set_alias(name, "production-wanted", "2")
    _refuse(services, _wish(services, name, "2"), "too slow")
    assert _where(services, name) == ("1", "1")
    state = moves.read_state(services, name, "production")
    assert (state.wanted_version, state.channel.wish, state.is_settled) == (None, None, True)
    assert moves.read_refusal(services, name, "2", "production") == "too slow"
    end = state.channel.history[-1]
    assert isinstance(end, WishEnd)
    assert (end.outcome, end.why, end.who) == ("refused", "too slow", "ann")


def _refuse(services: Services, waiting: Channel, reason: str) -> None:
    assert waiting.wish is not None
    document = services.store.get_release(waiting.name, waiting.wish.version)
    moves.refuse(services, document, "production", waiting.wish.id, who="ann", reason=reason)


def test_a_release_that_passes_is_no_longer_marked_as_refused(
    services: Services, name: str, release: Callable[..., None]
) -> None:
    release("1")
    _refuse(services, _wish(services, name, "1"), "too slow")
    _move(services, name, "1")
    assert services.registry.get_version_tags(name, "1") == {}


NEW = Channel(name="m", channel="production")
USED = Channel(name="m", channel="production", number=1)
STRICT = Policy(after="staging", approval="required")


def _find_policy(channel: Channel, sections: Any, current: Any = None) -> policies.EffectivePolicy:
    release = make_release("m", "2", channels=_policies(sections))
    before = None if current is None else make_release("m", "1", channels=_policies(current))
    return policies.find_policy(channel, release, before, who="ann")


def _policies(sections: Any) -> dict[str, Policy]:
    return {name: Policy.model_validate(section) for name, section in (sections or {}).items()}


@pytest.mark.parametrize("sections", [{}, {"production": {}}, {"staging": {}}])
def test_a_release_meets_the_channels_policy_whatever_it_says(sections: Any) -> None:
    effective = _find_policy(USED.model_copy(update={"policy": STRICT}), sections)
    assert (effective.policy, effective.adoption) == (STRICT, None)
    assert effective.proposal == (Policy() if sections == {"production": {}} else None)


def test_a_channel_without_a_policy_takes_the_first_that_is_proposed() -> None:
    sections = {"production": {"after": "staging", "approval": "required"}}
    first = _find_policy(NEW, sections)
    assert (first.policy, first.proposal) == (STRICT, None)
    assert first.adoption is not None
    assert (first.adoption.who, first.adoption.why, first.adoption.after) == (
        "ann",
        "proposed by m 2",
        STRICT,
    )
    # A channel of an older tvmflow has the policy of the release that it holds.
    for proposal in ({}, {"production": {}}):
        first = _find_policy(USED, proposal, sections)
        assert first.policy == STRICT
        assert first.adoption is not None
        assert first.adoption.why == "proposed by m 1"
    assert _find_policy(USED, {}, {}) == policies.EffectivePolicy(Policy())


def test_a_channel_that_nobody_has_used_or_named_is_refused_with_the_likely_one() -> None:
    sections = {"staging": {}, "production": {"after": "staging"}}
    typo = Channel(name="m", channel="prod")
    with pytest.raises(SpecError, match=r"the channels production, staging: 'prod' is not .*; did you mean 'product"):
        _find_policy(typo, sections)
    assert _find_policy(typo.model_copy(update={"number": 1}), sections).policy == Policy()
    for proposals in ({}, {"prod": {}}):
        assert _find_policy(typo, proposals) == policies.EffectivePolicy(Policy())
    with pytest.raises(SpecError) as refusal:
        _find_policy(Channel(name="m", channel="zzz"), {"staging": {}})
    assert "did you mean" not in str(refusal.value)


@pytest.mark.parametrize(("one", "other", "same"), [("ann@a", "ann@b", True), ("ann@a", "bert@a", False)])
def test_a_person_is_the_same_on_every_machine(one: str, other: str, same: bool) -> None:
    assert people.is_same_person(one, other) is same


def test_a_channel_whose_model_is_not_named_is_read_by_its_releases(
    services: Services, name: str, release: Callable[..., None]
) -> None:
    assert moves.read_state(services, name, "production").model == name
    release("1")
    other = f"{name}-tvm"
    services.store.publish(make_release(name, "2", model=f"models:/{other}/1"), [])
    # While the channel holds no release, the latest release decides.
    assert moves.read_state(services, name, "production").model == other
    _move(services, name, "1")
    state = moves.read_state(services, name, "production")
    assert (state.channel.name, state.channel.channel, state.model) == (name, "production", name)
    assert state.is_settled


def test_the_reason_of_a_refusal_is_cut_to_what_a_tag_holds(
    services: Services, name: str, release: Callable[..., None]
) -> None:
    release("1")
    _refuse(services, _wish(services, name, "1"), "x" * 5000)
    tags = services.registry.get_version_tags(name, "1")
    assert tags == {moves.format_refusal_tag("production"): "x" * 4000}
    assert moves.format_refusal_tag("production") == "tvmflow.refused.production"


def test_a_rollback_is_recorded_as_one(services: Services, name: str, release: Callable[..., None]) -> None:
    release("1", "2")
    _move(services, name, "1")
    _move(services, name, "2")
    before, after = moves.roll_back(services, name, "production", who="bert", why="bad")
    assert (before.version, after.version) == ("2", "1")
    assert [move.rollback for move in after.moves] == [False, False, True]
    assert (after.moves[-1].who, after.moves[-1].why) == ("bert", "bad")


def _verdict(name: str, version: str, outcome: Any) -> Verdict:
    """A verdict on a promotion to staging; each outcome is that of a flow run of its own."""
    return Verdict(
        name=name, version=version, channel="staging", from_version="2", verdict=outcome, reasons=(), checks=(),
        policy=Policy(), approval=None, who="ann", why="", flow_run=f"{outcome}-{name}",
    )  # fmt: skip


def test_a_verdict_is_a_run_inside_that_of_its_release(services: Services, name: str, tmp_path: Path) -> None:
    from mlflow import MlflowClient

    uri = services.registry.config.tracking_uri
    client = MlflowClient(uri, registry_uri=uri)
    parent = services.registry.start_run(name, {}, {})
    release = make_release(name, "3", mlflow_run_id=parent)
    samples = tmp_path / "kept"
    samples.write_text("times")
    waiting = _verdict(name, "3", "waiting")

    def log(verdict: Verdict) -> str:
        return verdicts.log_verdict(services, release, verdict, report="# why", files={"samples/a.npz": samples})

    assert verdicts.read_verdict(services.registry, name, "staging") is None
    run = log(waiting)
    logged = client.get_run(run)
    assert logged.info.run_name == f"promote {name} 3 to staging"
    assert logged.info.status == "RUNNING"
    expected = {
        "mlflow.parentRunId": parent,
        "tvmflow.kind": "promotion",
        "tvmflow.name": name,
        "tvmflow.version": "3",
        "tvmflow.channel": "staging",
        "tvmflow.verdict": "waiting",
        "tvmflow.who": "ann",
    }
    assert expected.items() <= logged.data.tags.items()
    # The same flow run logs into the same run again.
    passed = waiting.model_copy(update={"verdict": "passed"})
    assert log(passed) == run
    assert client.get_run(run).data.tags["tvmflow.verdict"] == "passed"
    assert client.get_run(run).info.status == "FINISHED"
    files = ("verdict.json", "report.md", "samples/a.npz")
    contents = [
        path and path.read_bytes() for path in (services.registry.fetch_artifact(run, file, tmp_path) for file in files)
    ]
    assert contents == [encode(passed), b"# why", b"times"]
    for version in (None, "3"):
        assert verdicts.read_verdict(services.registry, name, "staging", version) == (run, passed, None)
    assert verdicts.read_verdict(services.registry, name, "staging", "2") is None


def test_the_last_verdict_is_read_with_the_statement_beside_it(
    services: Services, name: str, release: Callable[..., None], tmp_path: Path
) -> None:
    public = keygen(tmp_path / "key")
    services = Services(ReleaseStore(replace(services.store.config, signing_key=tmp_path / "key")), services.registry)
    release("1")
    document = services.store.get_release(name, "1")
    for outcome in ("refused", "passed"):
        verdict = _verdict(name, "1", outcome)
        run = verdicts.log_verdict(services, document, verdict, report="", files={})
    last = verdicts.read_verdict(services.registry, name, "staging", trusted=[public])
    assert last == (run, verdict, public_key(public))
    (tmp_path / verdicts.VERDICT).write_text("{")
    services.registry.log_artifacts(run, {verdicts.VERDICT: tmp_path / verdicts.VERDICT})
    with pytest.raises(StoreError, match=run):
        verdicts.read_verdict(services.registry, name, "staging")


@pytest.mark.parametrize("error", [KeyError("uid not found"), OSError("no username set")])
def test_a_user_without_a_name_is_identified_by_number(monkeypatch: pytest.MonkeyPatch, error: Exception) -> None:
    def nameless() -> str:
        raise error

    assert people.identify_user().endswith(f"@{socket.gethostname()}")
    monkeypatch.setattr(people.getpass, "getuser", nameless)
    assert people.identify_user() == f"{os.getuid()}@{socket.gethostname()}"


def _sign_verdict(content: bytes, key: Path, **changes: str) -> bytes:
    claim = {"name": "tiny", "version": "1", "channel": "production", "verdict": "passed", **changes}
    subjects = [Subject.of(verdicts.VERDICT, content)]
    return sign(verdicts.VerdictClaim(**claim), subjects, key).to_bytes()


def test_a_verdict_counts_with_the_statement_of_a_trusted_key(tmp_path: Path) -> None:
    public = keygen(tmp_path / "key")
    promotion_of = ("tiny", "1", "production")
    signed = _sign_verdict(b"{}", tmp_path / "key")
    assert verdicts.check_verdict(b"{}", signed, *promotion_of, [public]) == public_key(public)
    for content, statement, message in (
        (b"{}", None, "The verdict on tiny 1 for production is not signed"),
        (b"{ }", signed, "was changed after it was signed"),
        (b"{}", _sign_verdict(b"{}", tmp_path / "key", version="2"), "or is another one"),
        (
            b"{}",
            _sign_verdict(b"{}", tmp_path / "key", channel="any"),
            "or is another one",
        ),
    ):
        with pytest.raises(StatementError, match=message):
            verdicts.check_verdict(content, statement, *promotion_of, [public])
    assert verdicts.check_verdict(b"{ }", None, *promotion_of, []) is None


def test_the_alias_does_not_follow_a_channel_that_was_moved_without_a_key(
    services: Services, name: str, release: Callable[..., None], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    public = keygen(tmp_path / "key")
    monkeypatch.setenv("TVMFLOW_TRUSTED_KEYS", str(public))
    config = replace(services.store.config, signing_key=tmp_path / "key")
    services = Services(ReleaseStore(config), services.registry)
    release("1", "2")
    for version in ("1", "2"):
        services.store.sign_release(name, version, tmp_path / "key")
    before = _move(services, name, "1")
    with monkeypatch.context() as elsewhere:
        elsewhere.delenv("TVMFLOW_TRUSTED_KEYS")
        planted = before.model_copy(update={"version": "2", "history": _move(services, name, "2").history})
        services.registry.set_alias(name, "production", "1")
    services.store.objects.put(f"channels/{name}/production.json", encode(planted), "planting a channel")
    with pytest.raises(StatementError, match="was changed after it was signed"):
        moves.update_alias(services, name, "production", name)
    assert _where(services, name) == ("1", "2")
