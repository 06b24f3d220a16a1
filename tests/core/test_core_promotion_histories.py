"""Any history of a channel: wishes and their ends, rollbacks, aliases set by people, reconciling, and kills between."""

import itertools
import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import yaml

import flows.reconcile
from mlflow import MlflowClient
from support import scale
from support.databases import Databases
from support.releases import make_release
from tvmflow.promotion import moves, policies
from tvmflow.registry import Registry, RegistryConfig, embedded_registry
from tvmflow.services import Services
from tvmflow.spec import Policy
from tvmflow.store import ReleaseStore, StoreConfig
from tvmflow.triggers import load

VERSIONS = ("1", "2", "3")
CHANNEL = "production"
STEPS = (
    "make_wish",
    "make_wish",
    "grant",
    "grant",
    "refuse",
    "roll_back",
    "set_the_alias",
    "ask_by_the_alias",
    "reconcile",
)


class Kill(BaseException):
    """The end of a process: no code handles it, as none handles SIGKILL."""


class Life:
    """Counts the writes of a process to the store and to MLflow, and ends it before one of them."""

    def __init__(self) -> None:
        self.writes: int | None = None

    def mortal(self, write: Callable[..., Any]) -> Callable[..., Any]:
        """The same write, before which the process may end."""

        def write_or_end(*arguments: Any, **options: Any) -> Any:
            if self.writes is not None:
                if self.writes == 0:
                    raise Kill
                self.writes -= 1
            return write(*arguments, **options)

        return write_or_end

    @contextmanager
    def of(self, writes: int | None) -> Iterator[None]:
        """Let the process end after so many writes; None lets it live."""
        self.writes = writes
        try:
            yield
        finally:
            self.writes = None


class ChannelHistory:
    """A channel in a store and a registry of its own, beside a model of what it holds: a stack and one open wish.

    The process of a step with `writes` is killed after so many of its writes; with None it ends by itself.
    """

    numbers = itertools.count()

    def __init__(self, config: RegistryConfig, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.name = f"history-{next(self.numbers)}"
        self.life = Life()
        registry, store = Registry(config), ReleaseStore(StoreConfig("releases", folder=folder / self.name))
        for owner, writes in (
            (registry, ("set_alias", "delete_alias", "set_version_tag", "delete_version_tag")),
            (store.objects, ("create", "replace")),
        ):
            for write in writes:
                setattr(owner, write, self.life.mortal(getattr(owner, write)))
        self.services = Services(store, registry)
        client = MlflowClient(config.tracking_uri, registry_uri=config.tracking_uri)
        client.create_registered_model(self.name)
        for version in VERSIONS:
            client.create_model_version(self.name, "file:///nowhere")
            store.publish(make_release(self.name, version, model=f"models:/{self.name}/{version}"), [])
        file = folder / f"{self.name}.yaml"
        sections = {"model": {"factory": "model:create"}, "inputs": [{"name": "x", "shape": [1, 4]}]}
        file.write_text(yaml.safe_dump({"name": self.name, **sections, "channels": {CHANNEL: {}}}))
        (self.entry,) = load([file]).entries
        # Without Prefect: a promotion that reconciling starts is made at once.
        monkeypatch.setattr(flows.reconcile, "_start", self._promote_at_once)
        self.stack: tuple[str, ...] = ()
        self.wish: str | None = None

    @property
    def version(self) -> str | None:
        return self.stack[-1] if self.stack else None

    def state(self) -> moves.ChannelState:
        return moves.read_state(self.services, self.name, CHANNEL, self.name)

    def do(self, work: Callable[[], object], stack: tuple[str, ...], wish: str | None, writes: int | None) -> None:
        """Do something that leads to a stack and a wish; if it is killed, the channel is as before or as after it."""
        try:
            with self.life.of(writes):
                work()
        except Kill:
            channel = self.state().channel
            actual = channel.rollback_stack, channel.wish and channel.wish.version
            assert actual in ((self.stack, self.wish), (stack, wish))
            self.stack, self.wish = actual
        else:
            self.stack, self.wish = stack, wish
            assert self.state().alias_version == self.version

    def make_wish(self, version: str, writes: int | None) -> None:
        self.do(
            lambda: moves.make_wish(self.services, self.name, version, CHANNEL, who="ann", why="newer"),
            self.stack,
            None if version == self.version else version,
            writes,
        )

    def grant(self, version: str, writes: int | None) -> None:
        self.do(self._grant, (*self.stack, self.wish or ""), None, writes)

    def refuse(self, version: str, writes: int | None) -> None:
        wish = self.state().channel.wish
        release = self.services.store.get_release(self.name, self.wish or "")
        moves.update_alias(self.services, self.name, CHANNEL, self.name)
        self.do(
            lambda: moves.refuse(self.services, release, CHANNEL, wish.id, who="gates", reason="slow"),
            self.stack,
            None,
            writes,
        )

    def roll_back(self, version: str, writes: int | None) -> None:
        self.do(
            lambda: moves.roll_back(self.services, self.name, CHANNEL, who="bert", why="bad"),
            self.stack[:-1],
            None,
            writes,
        )

    def set_the_alias(self, version: str, writes: int | None) -> None:
        self.services.registry.set_alias(self.name, CHANNEL, version)

    def ask_by_the_alias(self, version: str, writes: int | None) -> None:
        self.services.registry.set_alias(self.name, f"{CHANNEL}-wanted", version)

    def reconcile(self, version: str, writes: int | None) -> None:
        state = self.state()
        requests = [version for version in (state.wanted_version, state.hand_set_version) if self._may_hold(version)]
        target = next((version for version in requests if version != self.version), self.wish)
        for _ in range(4):
            flows.reconcile._reconcile_channel(self.services, self.entry, CHANNEL)
        state = self.state()
        assert state.is_settled
        assert state.channel.version == (target or self.version)
        self.stack, self.wish = state.channel.rollback_stack, None

    def can(self, step: str) -> bool:
        """Whether a step is possible now: it may need an open wish, or an earlier release to go back to."""
        return self.wish is not None if step in ("grant", "refuse") else step != "roll_back" or len(self.stack) > 1

    def check(self) -> None:
        channel = self.state().channel
        assert (channel.rollback_stack, channel.version) == (self.stack, self.version)
        assert (channel.wish and channel.wish.version) == self.wish

    def _may_hold(self, version: str | None) -> bool:
        return version is not None and moves.read_refusal(self.services, self.name, version, CHANNEL) is None

    def _grant(self) -> None:
        wish = self.state().channel.wish
        policy = policies.EffectivePolicy(Policy())
        moves.grant(self.services, self.name, CHANNEL, wish.id, why="gates", policy=policy)

    def _promote_at_once(self, *_: object) -> None:
        self._grant()


@pytest.fixture(scope="module")
def registry_config(tmp_path_factory: pytest.TempPathFactory, databases: Databases) -> RegistryConfig:
    folder = tmp_path_factory.mktemp("mlflow")
    databases.mlflow(folder / "mlflow.db")
    return embedded_registry(folder)


@pytest.mark.few(2)
@pytest.mark.parametrize("seed", range(scale.count(normal=4, long=60)))
def test_after_any_history_the_channel_holds_what_was_granted_and_reconciling_settles_it(
    registry_config: RegistryConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, seed: int
) -> None:
    history, chance = ChannelHistory(registry_config, tmp_path, monkeypatch), random.Random(seed)  # noqa: S311
    for _ in range(scale.count(normal=18, long=30)):
        step = chance.choice([step for step in STEPS if history.can(step)])
        getattr(history, step)(chance.choice(VERSIONS), chance.choice([None, None, None, 0, 1, 2]))
        history.check()
    history.reconcile("", None)
    history.check()
