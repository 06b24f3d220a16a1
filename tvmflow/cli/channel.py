"""`tvmflow channel`: show channels and change their policies."""

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from tvmflow.cli.options import file_argument, json_option
from tvmflow.errors import SpecError

if TYPE_CHECKING:
    from tvmflow.spec import Policy
    from tvmflow.store.channel_document import Channel

_why_option = click.option("--why", default="", help="Kept in the channel's history.")


@click.group("channel")
def channel_command() -> None:
    """Show channels, and change what they require of a release."""


@channel_command.command("show")
@click.argument("name")
@click.argument("channel", required=False)
@json_option
def show_command(name: str, channel: str | None, as_json: bool) -> None:
    """Show what the channels of NAME hold and require, and what somebody wishes for; of one CHANNEL or of all."""
    from tvmflow.services import open_store_of
    from tvmflow.settings import Settings
    from tvmflow.store import channels

    with open_store_of(Settings.load(), name) as store:
        documents = [channels.read(store, name, channel)] if channel else channels.list_all(store, name)
        if not documents:
            raise store.explain_missing("channel", name)
    _show(documents, as_json)


@channel_command.command("set")
@click.argument("name")
@click.argument("channel")
@click.argument("values", nargs=-1, required=True, metavar="KEY=VALUE...")
@_why_option
@json_option
def set_command(name: str, channel: str, values: tuple[str, ...], why: str, as_json: bool) -> None:
    """Change parts of the policy of a CHANNEL of NAME, e.g. approval=required gates.max_latency_ms=5 after=null.

    A channel without a policy of its own gets the one that its release proposes, or else the newest one, with the
    changes.
    """
    from tvmflow.promotion.people import identify_user
    from tvmflow.promotion.policies import check_order, proposed_policy
    from tvmflow.services import open_store_of
    from tvmflow.settings import Settings
    from tvmflow.spec.fields import explain_channel
    from tvmflow.store import channels

    reason = explain_channel(channel)
    if reason is not None:
        raise SpecError(f"channel {channel!r} {reason}")
    _change(None, values)  # A mistake in them is said before any server is asked.
    with open_store_of(Settings.load(), name) as store:
        if not store.list_versions(name) and not channels.list_all(store, name):
            raise store.explain_missing("release", name)

        def revise(current: "Channel") -> "Policy":
            policy = _change(current.policy or proposed_policy(store, current), values)
            check_order(store, name, channel, policy)
            return policy

        _show([channels.change_policy(store, name, channel, revise, who=identify_user(), why=why)], as_json)


@channel_command.command("apply")
@file_argument
@click.option("--channel", help="One channel of the file; all of them unless given.")
@_why_option
@json_option
def apply_command(file: Path, channel: str | None, why: str, as_json: bool) -> None:
    """Give the channels of a release FILE the policies that it proposes."""
    from tvmflow import spec as release_file
    from tvmflow.promotion.people import identify_user
    from tvmflow.services import open_store
    from tvmflow.settings import Settings
    from tvmflow.store import channels

    spec = release_file.load(file)
    sections = {key: section for key, section in spec.channels.items() if channel in (None, key)}
    if not sections:
        what = "no channels" if channel is None else f"no channel {channel!r}"
        raise SpecError(f"{str(file)!r} proposes {what}; add a section `channels`, or name one that it has")
    who = identify_user()
    with open_store(Settings.load(), spec.store) as store:
        changed = [
            channels.set_policy(store, spec.name, key, section.policy, who=who, why=why or f"applied from {file.name}")
            for key, section in sections.items()
        ]
    _show(changed, as_json)


def _change(before: "Policy | None", values: tuple[str, ...]) -> "Policy":
    """Return a policy with some values changed, each as KEY=VALUE in YAML. Raises SpecError."""
    import yaml
    from pydantic import ValidationError

    from tvmflow.spec import Policy
    from tvmflow.spec.fields import likely_name
    from tvmflow.spec.reading import read_yaml

    document: dict[str, Any] = (before or Policy()).model_dump()
    for text in values:
        key, equals, value = text.partition("=")
        *path, last = key.split(".")
        part: Any = document
        for step in path:
            part = part.get(step) if isinstance(part, dict) else None
        if not equals or not isinstance(part, dict) or last not in part:
            keys = _keys()
            advice = likely_name(key, keys) if equals else ""
            advice = advice or f"; write KEY=VALUE with a key of {', '.join(keys)}"
            raise SpecError(f"{text!r} sets nothing of a policy{advice}")
        try:
            part[last] = read_yaml(value)
        except yaml.YAMLError as error:
            raise SpecError(f"{text!r} has a value that is not YAML") from error
    try:
        return Policy.model_validate(document)
    except ValidationError as error:
        problem = error.errors()[0]
        where = ".".join(map(str, problem["loc"]))
        raise SpecError(f"the policy's {where} is wrong: {problem['msg']}") from error


def _keys() -> list[str]:
    """The keys of a policy, those of its gates with a dot."""
    from tvmflow.spec import ChannelGates, Policy

    gates = (f"gates.{key}" for key in ChannelGates.model_fields)
    return [*(key for key in Policy.model_fields if key != "gates"), *gates]


def describe_policy(policy: "Policy | None") -> str:
    """Return the conditions of a policy in one line, without those that it leaves open."""
    from tvmflow.spec import ChannelGates, Policy

    if policy is None or policy == Policy():
        return "no conditions"
    parts = policy.model_dump(exclude_defaults=True, exclude={"gates"})
    gates = policy.gates.model_dump(exclude_defaults=True) if policy.gates != ChannelGates() else {}
    return ", ".join(f"{key}: {value}" for key, value in {**parts, **gates}.items())


def _show(documents: "list[Channel]", as_json: bool) -> None:
    from rich import box
    from rich.table import Table

    from tvmflow.cli.display import output_console

    if as_json:
        click.echo(json.dumps([document.model_dump(mode="json") for document in documents]))
        return
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for column in ("channel", "holds", "policy", "wish"):
        table.add_column(column, no_wrap=column in ("channel", "holds"))
    for document in documents:
        wish = document.wish
        wish_text = f"{wish.version} of {wish.who}, {wish.when[:19].replace('T', ' ')}" if wish is not None else "-"
        table.add_row(document.channel, document.version or "-", describe_policy(document.policy), wish_text)
    output_console().print(table)
