"""Promotion: what a channel asks of a release, and moving a channel together with the registry's alias of its name.

The alias is what is wanted, the pointer in the release store is what devices read. Both move under the channel's claim,
the alias first: interrupted in between, the alias is ahead, and promoting again completes the move.
"""

import getpass
import hashlib
import json
import os
import re
import socket
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from tvmflow.errors import SpecError, StoreError
from tvmflow.services import Services
from tvmflow.spec import Channel
from tvmflow.store import channels
from tvmflow.store.channels import Pointer

_MODEL = re.compile(r"models:/(?P<model>[^/@]+)/(?P<version>[1-9][0-9]*)")
_LONGEST_TAG = 4000


@dataclass(frozen=True)
class ChannelState:
    """A channel as the registry's alias asks for it and as devices see it.

    `alias_version` is the version that the alias of the registered model `model` points at, `current_version` the one
    that the channel's pointer holds; None where there is none. `refusal` is the reason why the channel refused
    `alias_version`, None if it did not.
    """

    name: str
    channel: str
    model: str
    alias_version: str | None
    current_version: str | None
    refusal: str | None

    @property
    def is_settled(self) -> bool:
        """Whether devices see the version that the alias asks for."""
        return self.alias_version == self.current_version


def read_state(services: Services, name: str, channel: str, model: str | None = None) -> ChannelState:
    """Read the version that a channel's alias asks for and the version that the channel holds.

    `model` is the registered model of the releases. By default it is taken from the release that the channel holds, or
    from the latest release. Raises StoreError or RegistryError.
    """
    pointer = channels.find(services.store, name, channel)
    if model is None:
        versions = [pointer.version] if pointer is not None else services.store.list_versions(name)
        model = get_registered_version(services.store.get_release(name, versions[-1]))[0] if versions else name
    alias_version = services.registry.get_alias_version(model, channel)
    refusal = None
    if alias_version is not None:
        refusal = services.registry.get_version_tags(model, alias_version).get(format_refusal_tag(channel))
    current_version = pointer.version if pointer is not None else None
    return ChannelState(name, channel, model, alias_version, current_version, refusal)


def read_policy(release: Mapping[str, Any], channel: str) -> Channel:
    """What a channel asks of a release, as the file that it was released from says; anything, where that says nothing.

    Raises SpecError for a channel that is not among those of the file.
    """
    named = release.get("channels") or {}
    if not named:
        return Channel()
    if channel not in named:
        close = get_close_matches(channel, named, n=1, cutoff=0.4)
        hint = f"; did you mean {close[0]!r}?" if close else ""
        raise SpecError(
            f"{release['name']} {release['version']} is released for the channels {', '.join(sorted(named))}: "
            f"{channel!r} is not among them{hint}"
        )
    try:
        return Channel.model_validate(named[channel])
    except ValidationError as error:
        raise StoreError(
            f"The release {release['name']} {release['version']} asks for something of the channel {channel!r} that "
            "this tvmflow does not know: upgrade tvmflow."
        ) from error


def get_registered_version(release: Mapping[str, Any]) -> tuple[str, str]:
    """The registered model of a release's document, and its version there."""
    found = _MODEL.fullmatch(str(release.get("model")))
    if found is None:
        raise StoreError(
            f"The release {release.get('name')} {release.get('version')} is damaged, its document names no registered "
            "model: publish it again."
        )
    return found["model"], found["version"]


def hash_release(release: Mapping[str, Any]) -> str:
    """The SHA-256 of a release's document, which names all its blobs by their digests."""
    return hashlib.sha256(json.dumps(release, sort_keys=True).encode()).hexdigest()


def identify_user() -> str:
    """Who runs this process, as USER@HOST."""
    try:
        user = getpass.getuser()
    except (KeyError, OSError):  # a container's user may have no name
        user = str(os.getuid())
    return f"{user}@{socket.gethostname()}"


def format_refusal_tag(channel: str) -> str:
    """The tag of a registered version that says why it was refused on a channel."""
    return f"tvmflow.refused.{channel}"


def move_channel(
    services: Services,
    name: str,
    version: str,
    channel: str,
    *,
    who: str,
    why: str,
    expected: str | None,
    rollback: bool = False,
) -> Pointer:
    """Move alias and pointer of a channel to a release; return the new pointer.

    `expected` is the version that the mover saw the channel at, None for a new channel. Where it has moved since,
    neither is touched, and the StoreError says who moved it. Where it is at `version` already, nothing is written but
    an alias that differs.
    """
    model, number = get_registered_version(services.store.get_release(name, version))

    def want() -> None:
        if services.registry.get_alias_version(model, channel) != number:
            services.registry.set_alias(model, channel, number)

    pointer = channels.move(
        services.store, name, channel, version, who=who, why=why, expected=expected, rollback=rollback, prepare=want
    )
    if format_refusal_tag(channel) in services.registry.get_version_tags(model, number):
        services.registry.delete_version_tag(model, number, format_refusal_tag(channel))
    return pointer


def refuse(services: Services, release: Mapping[str, Any], channel: str, *, who: str, reason: str) -> None:
    """Keep with the registered version why a channel refused it, and put the alias back to what the channel holds."""
    model, number = get_registered_version(release)
    services.registry.set_version_tag(model, number, format_refusal_tag(channel), reason[:_LONGEST_TAG])
    restore_alias(services, release, channel, who=who)


def restore_alias(services: Services, release: Mapping[str, Any], channel: str, *, who: str) -> None:
    """Point an alias that wants this release at what the channel holds, or delete it if the channel holds nothing."""
    model, number = get_registered_version(release)
    if services.registry.get_alias_version(model, channel) != number:
        return
    name = str(release["name"])
    with channels.claim(services.store, name, channel, who):
        held = channels.find(services.store, name, channel)
        # Under the claim nobody else promotes; a person may still have set the alias elsewhere, which stays.
        if services.registry.get_alias_version(model, channel) != number:
            return
        if held is None:
            services.registry.delete_alias(model, channel)
        elif held.version != str(release["version"]):
            services.registry.set_alias(
                model, channel, get_registered_version(services.store.get_release(name, held.version))[1]
            )


def roll_back(
    services: Services, name: str, channel: str, *, who: str, why: str, to: str | None = None
) -> tuple[Pointer, Pointer]:
    """Move a channel back to the release that it held before, or to an earlier one; return the old pointer and the new.

    Every digest of that release is checked, no gates are run: it has passed them. Raises StoreError.
    """
    before = channels.read(services.store, name, channel)
    if to is None:
        if len(before.rollback_stack) < 2:
            raise StoreError(
                f"The channel {name}@{channel} has held nothing before {before.version}: promote another release to it."
            )
        to = before.rollback_stack[-2]
    elif not before.has_held(to):
        earlier = ", ".join(dict.fromkeys(move.to_version for move in before.history))
        raise StoreError(
            f"The channel {name}@{channel} has never held {to}, only {earlier}: promote it with `tvmflow promote`."
        )
    services.store.verify_release(name, to)
    after = move_channel(services, name, to, channel, who=who, why=why, expected=before.version, rollback=True)
    return before, after


def log_verdict(
    services: Services,
    release: Mapping[str, Any],
    channel: str,
    verdict: Mapping[str, Any],
    *,
    tags: Mapping[str, str],
    report: str,
    flow_run: str | None,
    done: bool,
) -> str:
    """Keep what was found about a promotion as a run in MLflow, inside the run of the release; return its id.

    `verdict` becomes verdict.json and `report`, in Markdown, report.md. `done` closes the run; a flow run that waits
    for approval leaves it open and finds it again.
    """
    name, version = str(release["name"]), str(release["version"])
    told = {
        "tvmflow.kind": "promotion",
        "tvmflow.name": name,
        "tvmflow.version": version,
        "tvmflow.channel": channel,
        **tags,
    }
    registry = services.registry
    run = registry.open_promotion_run(
        str(release["mlflow_run_id"]), f"promote {name} {version} to {channel}", told, flow_run
    )
    with tempfile.TemporaryDirectory(prefix="tvmflow-") as scratch:
        files = {"verdict.json": json.dumps(verdict, indent=2), "report.md": report}
        for file, content in files.items():
            Path(scratch, file).write_text(content)
        registry.log_artifacts(run, {file: Path(scratch, file) for file in files})
    if done:
        registry.finish_run(run, "FINISHED")
    return run
