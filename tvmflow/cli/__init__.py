"""The command `tvmflow`, with all its subcommands."""

import json
import os
import signal
import sys
from collections.abc import Sequence
from typing import Any

import click

from tvmflow import __version__
from tvmflow.cli.approve import approve_command
from tvmflow.cli.bench import bench_command
from tvmflow.cli.bisect import bisect_command
from tvmflow.cli.calibrate import calibrate_command
from tvmflow.cli.channel import channel_command
from tvmflow.cli.compile import compile_command
from tvmflow.cli.deploy import deploy_command
from tvmflow.cli.devices import devices_command
from tvmflow.cli.doctor import doctor_command
from tvmflow.cli.down import down_command
from tvmflow.cli.gc import gc_command
from tvmflow.cli.history import history_command
from tvmflow.cli.init import init_command
from tvmflow.cli.list import list_command
from tvmflow.cli.promote import promote_command
from tvmflow.cli.receive import receive_command
from tvmflow.cli.reconcile import reconcile_command
from tvmflow.cli.records import records_command
from tvmflow.cli.release import release_command
from tvmflow.cli.report import diff_command, report_command
from tvmflow.cli.retrain import notify_command, retrain_command
from tvmflow.cli.retune import retune_command
from tvmflow.cli.rollback import rollback_command
from tvmflow.cli.run import run_command
from tvmflow.cli.serve import serve_command
from tvmflow.cli.sign import keygen_command, sign_command
from tvmflow.cli.status import status_command
from tvmflow.cli.tune import tune_command
from tvmflow.cli.up import up_command
from tvmflow.cli.verdict import verdict_command
from tvmflow.cli.verify import verify_command
from tvmflow.errors import TvmflowError
from tvmflow.processes.imports import end_quickly

__all__ = ["main"]

_INTERRUPTED = 130
_KEPT_STEPS = "finished steps are kept, and the same command continues after them"
_KEPT_RECORDS = "the measurements are kept, and the same command continues from them"
_UNFINISHED_MOVE = "the wish is kept and a channel's alias may lag behind it: the same command completes the move"
_UNFINISHED_ROLLBACK = (
    "a channel that has moved by now may be ahead of its alias: the same command then moves the alias alone"
)
# The state after an interrupt, by command. The other commands leave no work to continue.
_AFTER_INTERRUPT = {
    "bench": _KEPT_STEPS,
    "compile": _KEPT_STEPS,
    "release": _KEPT_STEPS,
    "retrain": _KEPT_STEPS,
    "tune": _KEPT_RECORDS,
    "retune": _KEPT_RECORDS,
    "promote": _UNFINISHED_MOVE,
    "rollback": _UNFINISHED_ROLLBACK,
    "reconcile": _UNFINISHED_MOVE,
    "up": "the servers that this command started are ended again",
}


@click.group(context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__, prog_name="tvmflow")
def cli() -> None:
    """Ship trained models: PyTorch or ONNX to verified Apache TVM bundles, measured and released."""


for command in (
    release_command,
    tune_command,
    devices_command,
    doctor_command,
    calibrate_command,
    compile_command,
    bench_command,
    bisect_command,
    run_command,
    verify_command,
    serve_command,
    keygen_command,
    sign_command,
    init_command,
    list_command,
    status_command,
    report_command,
    diff_command,
    up_command,
    down_command,
    deploy_command,
    receive_command,
    reconcile_command,
    retrain_command,
    notify_command,
    retune_command,
    records_command,
    promote_command,
    rollback_command,
    gc_command,
    verdict_command,
    history_command,
    channel_command,
    approve_command,
):
    cli.add_command(command)


def main() -> None:
    """Run the command line.

    A user's mistake prints one sentence and exits with a code other than 0, without a traceback.
    """
    signal.signal(signal.SIGTERM, _interrupt)
    end_quickly()
    try:
        cli.main(prog_name="tvmflow", standalone_mode=False)
    except TvmflowError as error:
        notes = getattr(error, "__notes__", [])
        _fail("; ".join([str(error), *notes]), type(error).__name__, error.exit_code)
    except click.exceptions.NoArgsIsHelpError as error:
        error.show()
        sys.exit(error.exit_code)
    except click.ClickException as error:
        _fail(_describe_usage_error(error), "UsageError", error.exit_code)
    except (KeyboardInterrupt, click.Abort):
        _end_children()
        _fail(_describe_interrupt(sys.argv[1:]), "Interrupted", _INTERRUPTED)
    except ModuleNotFoundError as error:
        missing = (error.name or "").partition(".")[0]
        if missing in ("tvmflow", "tasks", "flows"):
            raise
        _fail(f"this command needs {missing!r}; install it with `pip install tvmflow[pipeline]`", "Missing", 1)
    except OSError as error:
        place = f"{error.filename!r}: " if error.filename else ""
        _fail(f"{place}{error.strerror or error}; correct the path or free space, and run again", "OSError", 1)


def _describe_usage_error(error: click.ClickException) -> str:
    """Return one line: the message, and the command whose help lists what it takes."""
    message = " ".join(error.format_message().split()).removesuffix(".")
    context = error.ctx if isinstance(error, click.UsageError) else None
    if context is None:
        return message
    return f"{message}{' See' if message.endswith('?') else '; see'} `{context.command_path} --help`"


def _describe_interrupt(arguments: Sequence[str]) -> str:
    """Return the message after an interrupt of the command with these arguments."""
    command = next((word for word in arguments if word in cli.commands), "")
    return f"interrupted; {_AFTER_INTERRUPT[command]}" if command in _AFTER_INTERRUPT else "interrupted"


def _fail(message: str, kind: str, code: int) -> None:
    try:
        if "--json" in sys.argv:
            click.echo(json.dumps({"error": {"type": kind, "message": message}}))
        click.echo(f"tvmflow: {message}", err=True)
    except BrokenPipeError:
        # The reader of the output went away, as `head` does.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    sys.exit(code)


def _interrupt(*_: Any) -> None:
    raise KeyboardInterrupt


def _end_children() -> None:
    """End the processes of running steps, if any were started."""
    supervisor = sys.modules.get("tvmflow.processes.supervisor")
    if supervisor is not None:
        supervisor.kill_all()
