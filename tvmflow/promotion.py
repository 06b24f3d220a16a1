"""Promotion: a channel's policy for a release, and moves of a channel together with the registry's alias of its name.

The alias is the desired state, the pointer in the release store the state that devices read. Both move under the
channel's claim, the alias first: an interrupted move leaves the alias ahead, and a second promotion completes it.
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
from typing import Any, NamedTuple

from pydantic import ValidationError

from tvmflow.errors import SpecError, StoreError
from tvmflow.services import Services
from tvmflow.spec import Channel
from tvmflow.store import channels
from tvmflow.store.channels import Pointer

_MODEL_URI = re.compile(r"models:/(?P<model>[^/@]+)/(?P<version>[1-9][0-9]*)")
# Characters; MLflow's servers refuse much longer tags.
_LONGEST_TAG = 4000


class RegisteredVersion(NamedTuple):
    """A version of a registered model in MLflow."""

    model: str
    version: str


@dataclass(frozen=True)
class ChannelState:
    """The state of a channel: the version that the registry's alias asks for, and the version that devices see.

    `alias_version` is the version that the alias of the registered model `model` names, `current_version` the one that
    the channel's pointer holds; None where there is none. `refusal` is the reason why the channel refused
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
    from the latest release. Raises StoreError or RegistryError when a server fails.
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
    """Read a channel's policy from a release's document; a document without channels has an empty policy.

    Raises SpecError for a channel that is not among those of the document, StoreError for a document that is damaged or
    was written by a newer tvmflow.
    """
    sections = release.get("channels") or {}
    if not isinstance(sections, Mapping):
        raise StoreError(
            f"The release {release.get('name')} {release.get('version')} is damaged, its `channels` are not a section: "
            "publish it again."
        )
    if not sections:
        return Channel()
    if channel not in sections:
        close = get_close_matches(channel, sections, n=1, cutoff=0.4)
        hint = f"; did you mean {close[0]!r}?" if close else ""
        raise SpecError(
            f"{release.get('name')} {release.get('version')} is released for the channels "
            f"{', '.join(sorted(sections))}: {channel!r} is not among them{hint}"
        )
    try:
        return Channel.model_validate(sections[channel])
    except ValidationError as error:
        raise StoreError(
            f"The release {release.get('name')} {release.get('version')} asks for something of the channel {channel!r} "
            "that this tvmflow does not know: upgrade tvmflow."
        ) from error


def get_registered_version(release: Mapping[str, Any]) -> RegisteredVersion:
    """Return the registered version that belongs to a release. Raises StoreError when its document names none."""
    match = _MODEL_URI.fullmatch(str(release.get("model")))
    if match is None:
        raise StoreError(
            f"The release {release.get('name')} {release.get('version')} is damaged, its document names no registered "
            "model: publish it again."
        )
    return RegisteredVersion(match["model"], match["version"])


def hash_release(release: Mapping[str, Any]) -> str:
    """Return the SHA-256, in hexadecimal, of a release's document, which names all its blobs by their digests."""
    return hashlib.sha256(json.dumps(release, sort_keys=True).encode()).hexdigest()


def identify_user() -> str:
    """Return the user of this process, as USER@HOST."""
    try:
        user = getpass.getuser()
    except (KeyError, OSError):  # a container's user may have no name
        user = str(os.getuid())
    return f"{user}@{socket.gethostname()}"


def format_refusal_tag(channel: str) -> str:
    """Return the name of the tag that says why a channel refused a registered version."""
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

    `who` moves it, `why`, and whether it is a `rollback` become part of the channel's history. `expected` is the
    version that the caller saw in the channel, None for a new channel. When the channel holds another version by now,
    neither is changed, and the StoreError says who moved it. When it holds `version` already, only an alias that
    differs is written. Raises StoreError and RegistryError when a server fails.
    """
    model, number = get_registered_version(services.store.get_release(name, version))

    def set_alias() -> None:
        if services.registry.get_alias_version(model, channel) != number:
            services.registry.set_alias(model, channel, number)

    pointer = channels.move(
        services.store,
        name,
        channel,
        version,
        who=who,
        why=why,
        expected=expected,
        rollback=rollback,
        prepare=set_alias,
    )
    if format_refusal_tag(channel) in services.registry.get_version_tags(model, number):
        services.registry.delete_version_tag(model, number, format_refusal_tag(channel))
    return pointer


def refuse(services: Services, release: Mapping[str, Any], channel: str, *, who: str, reason: str) -> None:
    """Tag the registered version with the reason why a channel refused it, and restore the channel's alias.

    `who` refused it, for the claim on the channel. Raises StoreError and RegistryError.
    """
    model, number = get_registered_version(release)
    services.registry.set_version_tag(model, number, format_refusal_tag(channel), reason[:_LONGEST_TAG])
    restore_alias(services, release, channel, who=who)


def restore_alias(services: Services, release: Mapping[str, Any], channel: str, *, who: str) -> None:
    """Point an alias that asks for this release at the version that the channel holds; delete it if there is none.

    An alias that asks for another version stays as it is. Raises StoreError and RegistryError.
    """
    model, number = get_registered_version(release)
    if services.registry.get_alias_version(model, channel) != number:
        return
    name = str(release["name"])
    with channels.claim(services.store, name, channel, who):
        pointer = channels.find(services.store, name, channel)
        # Under the claim nobody else promotes; a person may still have set the alias elsewhere, which stays.
        if services.registry.get_alias_version(model, channel) != number:
            return
        if pointer is None:
            services.registry.delete_alias(model, channel)
        elif pointer.version != str(release["version"]):
            current_version = get_registered_version(services.store.get_release(name, pointer.version)).version
            services.registry.set_alias(model, channel, current_version)


def roll_back(
    services: Services, name: str, channel: str, *, who: str, why: str, to: str | None = None
) -> tuple[Pointer, Pointer]:
    """Move a channel back to the release before, or to the version `to`; return the old pointer and the new.

    `who` moves it and `why` are kept in the channel's history. Every digest of that release is checked. No gates run,
    because the release has passed them. Raises StoreError when the channel has never held such a version, when a file
    of the release is missing or damaged, or when someone else moves the channel meanwhile; RegistryError when MLflow
    fails.
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
    """Log the verdict on a promotion as a run in MLflow, inside the run of the release; return the run's id.

    `verdict` becomes verdict.json and `report`, in Markdown, report.md. `done` ends the run. A flow run that waits for
    approval leaves its MLflow run open, and uses it again when it logs the next time. Raises RegistryError.
    """
    name, version = str(release["name"]), str(release["version"])
    all_tags = {
        "tvmflow.kind": "promotion",
        "tvmflow.name": name,
        "tvmflow.version": version,
        "tvmflow.channel": channel,
        **tags,
    }
    registry = services.registry
    run = registry.open_promotion_run(
        str(release["mlflow_run_id"]), f"promote {name} {version} to {channel}", all_tags, flow_run
    )
    with tempfile.TemporaryDirectory(prefix="tvmflow-") as scratch:
        files = {"verdict.json": json.dumps(verdict, indent=2), "report.md": report}
        for file, content in files.items():
            Path(scratch, file).write_text(content)
        registry.log_artifacts(run, {file: Path(scratch, file) for file in files})
    if done:
        registry.finish_run(run, "FINISHED")
    return run
