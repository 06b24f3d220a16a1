"""`tvmflow devices`: start, end and list the RPC servers that measure candidates, and list a tracker's servers."""

import json
import os
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

import click

from tvmflow.cli.options import json_option

if TYPE_CHECKING:
    from tvmflow.runtime.tracker import Address
    from tvmflow.tuning.devices import Server, Status

_MARKS = {"up": "green", "starting": "yellow", "dropped": "red"}


def tracker_address(text: str) -> "Address":
    """Return the address that --tracker gives. Raises click's BadParameter when it is not HOST:PORT."""
    from tvmflow.runtime.tracker import Address

    try:
        return Address.parse(text)
    except ValueError as error:
        raise click.BadParameter(str(error), param_hint="--tracker") from error


def own_tracker(state: Path) -> str:
    """Return the address of the tracker of the devices that were started with this state folder.

    Raises RemoteError when no such devices run, SettingsError when their status file is damaged.
    """
    from tvmflow.errors import RemoteError
    from tvmflow.tuning import devices

    running = devices.status(state)
    if running is None or running.tracker is None:
        raise RemoteError(
            "no devices run in this state folder; start some with `tvmflow devices up`, or name a tracker "
            "with --tracker HOST:PORT"
        )
    return running.tracker


@click.group("devices")
def devices_command() -> None:
    """Start, end and list devices for tuning: RPC servers of TVM that a tracker finds by their key."""


@devices_command.command("up")
@click.option("--key", default="local", show_default=True, help="The key by which the tracker finds the devices.")
@click.option("--count", type=click.IntRange(1, 64), default=1, show_default=True, help="Servers to start.")
@click.option("--threads", type=click.IntRange(min=1), help="Threads of each; the machine's cores shared among them.")
@click.option("--tracker", metavar="HOST:PORT", help="Join this tracker instead of starting one.")
@click.option("--host", default="127.0.0.1", show_default=True, help="Where tracker and servers listen.")
@click.option("--port", type=click.IntRange(1, 65535), help="The port of the tracker; the first free from 9190 on.")
@json_option
def up_command(
    key: str, count: int, threads: int | None, tracker: str | None, host: str, port: int | None, as_json: bool
) -> None:
    """Start RPC servers and their tracker on this machine, and keep them running until `tvmflow devices down`.

    A server that dies or leaves the tracker is started again. Anyone who reaches a server can run any code on this
    machine: listen on another address than 127.0.0.1 only in a network whose users may all do so.
    """
    from tvmflow.settings import Settings
    from tvmflow.tuning import devices

    if tracker is not None:
        if port is not None:
            raise click.UsageError("--port is the port of a tracker to start; leave it out with --tracker")
        if host == devices.LOOPBACK and tracker_address(tracker).host not in (devices.LOOPBACK, "localhost"):
            raise click.UsageError(
                f"nobody at the tracker {tracker} could reach servers that listen at {host}; say with --host where to "
                "listen"
            )
    if not key.strip() or any(letter.isspace() or letter == ":" for letter in key):
        raise click.BadParameter("a key has neither spaces nor colons", param_hint="--key")
    share = max(1, len(os.sched_getaffinity(0)) // count)
    config = devices.DeviceConfig(key, count, threads or share, host, port, tracker)
    status = devices.up(Settings.load().state, config)
    _show(status.tracker or "", status, as_json)


@devices_command.command("down")
@json_option
def down_command(as_json: bool) -> None:
    """End the devices that `tvmflow devices up` started, with their tracker and every session.

    Prints a sentence, or with --json an object whose `ended` says whether any were running. It is no error if none
    were.
    """
    from tvmflow.settings import Settings
    from tvmflow.tuning import devices

    was_running = devices.down(Settings.load().state)
    if as_json:
        click.echo(json.dumps({"ended": was_running}))
    else:
        click.echo("the devices are ended" if was_running else "no devices were running")


@devices_command.command("list")
@click.option("--tracker", metavar="HOST:PORT", help="The tracker to ask, by default the one of `tvmflow devices up`.")
@json_option
def list_command(tracker: str | None, as_json: bool) -> None:
    """List a tracker's keys and servers, and the state of this machine's servers."""
    from tvmflow.settings import Settings
    from tvmflow.tuning import devices

    state = Settings.load().state
    address = tracker or own_tracker(state)
    status = devices.status(state)
    _show(address, status if status is not None and status.tracker == address else None, as_json)


def _show(address: str, status: "Status | None", as_json: bool) -> None:
    from rich import box
    from rich.table import Table

    from tvmflow.cli.display import output_console
    from tvmflow.runtime.tracker import Tracker

    summary = Tracker(tracker_address(address)).summary()
    own = status.servers if status is not None else ()
    keys = {
        key: {
            "servers": [str(place) for name, place in summary.servers if name == key],
            "free": summary.queues[key].free if key in summary.queues else 0,
            "pending": summary.queues[key].pending if key in summary.queues else 0,
        }
        for key in summary.keys
    }
    if as_json:
        click.echo(json.dumps({"tracker": address, "keys": keys, "own": [_document(server) for server in own]}))
        return
    console = output_console(160)
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for column in ("key", "servers", "free", "waiting", "at"):
        table.add_column(column, no_wrap=True, justify="left" if column in ("key", "at") else "right")
    for key in summary.keys:
        places = [str(place) for name, place in summary.servers if name == key]
        queue = summary.queues.get(key)
        free, pending = (queue.free, queue.pending) if queue is not None else (0, 0)
        table.add_row(key, str(len(places)), str(free), str(pending), " ".join(places))
    console.print(f"tracker {address}", highlight=False)
    console.print(table)
    if own and status is not None:
        table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
        for column in ("server", "state", "port", "pid", "deaths", "last"):
            table.add_column(column, no_wrap=True)
        rows = [(f"server{number}", server) for number, server in enumerate(own)]
        for name, server in [*([("tracker", status.own_tracker)] if status.own_tracker else []), *rows]:
            mark = f"[{_MARKS[server.state]}]{server.state}[/]"
            table.add_row(name, mark, str(server.port or ""), str(server.pid or ""), str(server.deaths), server.message)
        console.print(table)


def _document(server: "Server") -> dict[str, object]:
    """A server as --json prints it: the message is `told` there."""
    document = asdict(server)
    document["told"] = document.pop("message")
    return document
