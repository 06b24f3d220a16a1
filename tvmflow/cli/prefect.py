"""The Prefect server of a command: the one that the settings name, or an embedded one that ends with the command."""

import http.client
import os
import socket
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from http import HTTPStatus
from pathlib import Path
from typing import IO, TYPE_CHECKING

from tvmflow.errors import PrefectError, PrefectUnavailableError, SettingsError, StepError, TvmflowError
from tvmflow.processes.imports import end_quickly, importing
from tvmflow.processes.launch import die_with_parent
from tvmflow.registry.config import without_secrets

if TYPE_CHECKING:
    from tvmflow.settings import Settings

# How long a server that has work to do may take to answer.
ANSWER_SECONDS = 60.0
_START_SECONDS = 120.0
_PAUSE_SECONDS = 0.5
_STOP_SECONDS = 5.0
_MOST_RESTARTS = 3
_ENVIRONMENT = {
    "PREFECT_SERVER_ANALYTICS_ENABLED": "false",
    "DO_NOT_TRACK": "1",
    # Each attempt waits twice as long as the one before: four minutes in all.
    "PREFECT_CLIENT_MAX_RETRIES": "7",
    # A command prints an error once, in a sentence; Prefect would print its traceback as well. A server gets every log.
    "PREFECT_LOGGING_HANDLERS_CONSOLE_LEVEL": "CRITICAL",
    "PREFECT_LOGGING_INTERNAL_LEVEL": "CRITICAL",
}


def prepare_environment() -> None:
    """Set the variables that Prefect reads at its import, except those that the user has set."""
    for name, value in _ENVIRONMENT.items():
        os.environ.setdefault(name, value)


def point_at_server(settings: "Settings") -> None:
    """Point Prefect at the server that settings name, even if it is down; call this before Prefect is imported.

    Raises SettingsError when they name none.
    """
    if settings.prefect_api_url is None:
        raise SettingsError(
            "this command needs a Prefect server that stays; start one with `tvmflow up`, or set prefect_api_url "
            "(TVMFLOW_PREFECT_API_URL, an address that ends in /api)"
        )
    prepare_environment()
    os.environ["PREFECT_API_URL"] = settings.prefect_api_url


def require_server(settings: "Settings") -> None:
    """Point Prefect at the server that settings name; call this before Prefect is imported.

    Raises SettingsError when they name none, and PrefectUnavailableError when it does not answer.
    """
    point_at_server(settings)
    address = settings.prefect_api_url or ""
    if not answers(address, ANSWER_SECONDS):
        raise PrefectUnavailableError(
            f"Prefect's server at {without_secrets(address)} does not answer; start it, or correct the setting "
            "prefect_api_url (an address that ends in /api)"
        )


@contextmanager
def prefect_server(settings: "Settings") -> Iterator[Callable[[], None]]:
    """Point Prefect at its server, and keep an embedded one running while the body runs; enter this once per process.

    Enter it before Prefect is imported. The server is the one that settings name or, if they name none, an embedded
    one. The environment variables that this sets, such as PREFECT_API_URL, stay set afterwards. Yields a function that
    waits until the server answers. The body imports modules while an embedded server starts, and calls the function
    before it runs a flow. Before the body runs, raises PrefectUnavailableError when the server that settings name does
    not answer, and StepError when the folder of the embedded server cannot be written. The function raises StepError
    when the embedded server does not start. If a request ends the body, because the server that settings name refuses
    its login or a server answers no more, PrefectError is raised in the place of the request's error.
    """
    if settings.prefect_api_url is not None:
        require_server(settings)
        with _one_sentence_for_failed_requests(settings.prefect_api_url):
            yield lambda: None
        return
    prepare_environment()
    with _run_server(settings.state / "prefect") as (address, await_start):
        os.environ["PREFECT_API_URL"] = address
        with _one_sentence_for_failed_requests(address):
            yield await_start


@contextmanager
def _one_sentence_for_failed_requests(address: str) -> Iterator[None]:
    """Raise PrefectError where the body ends because the server at `address` refuses its login or answers no more."""
    try:
        yield
    except TvmflowError:
        raise
    except Exception as error:
        import httpx

        from flows.runs import LOGIN_REFUSED, is_login_refused

        if is_login_refused(error):
            raise PrefectError(f"Prefect at {without_secrets(address)} takes no flow runs: {LOGIN_REFUSED}") from error
        if isinstance(error, httpx.TransportError):
            raise PrefectUnavailableError(
                f"Prefect's server at {without_secrets(address)} answered no more before the end of the run; what is "
                "finished is kept, and the same command continues after it"
            ) from error
        raise


@contextmanager
def _run_server(folder: Path) -> Iterator[tuple[str, Callable[[], None]]]:
    """Run a server on a SQLite file in `folder`; yield its address on 127.0.0.1, and a function that waits for it.

    Prefect's own ephemeral server outlives a command that is killed, and holds the command's output open.
    """
    log = folder / "server.log"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        output = log.open("wb")
    except OSError as error:
        raise StepError(
            f"state folder {str(folder)!r} cannot be written ({error.strerror}); set TVMFLOW_HOME to another"
        ) from error
    os.environ["PREFECT_HOME"] = str(folder)
    # The server keeps only the state of the runs: the state folder has the logs already.
    os.environ["PREFECT_LOGGING_TO_API_ENABLED"] = "false"
    # Connections wait in this socket until a server is up, so that no port has to be guessed and nothing polled.
    with output, socket.create_server(("127.0.0.1", 0), backlog=128) as listening:
        address = f"http://127.0.0.1:{listening.getsockname()[1]}/api"

        def await_start() -> None:
            if not answers(address, _START_SECONDS):
                raise StepError(f"Prefect's embedded server does not start; its log is {log}")

        with _keep_server(listening, output):
            yield address, await_start


@contextmanager
def _keep_server(listening: socket.socket, output: IO[bytes]) -> Iterator[None]:
    """Run a server at a listening socket while the body runs, and start it again, a few times, where it ends earlier.

    The server's runs are in a file, so that the client notices nothing but a pause. When it has ended too often, the
    socket is closed: connections would wait in it for ever.
    """

    def start() -> "subprocess.Popen[bytes]":
        return subprocess.Popen(
            _server_command(os.getpid(), listening.fileno()),
            pass_fds=(listening.fileno(),),
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            # Ctrl-C in a terminal reaches the whole group: the flow run still has to be marked as interrupted.
            start_new_session=True,
        )

    server, is_over, lock = start(), threading.Event(), threading.Lock()

    def watch() -> None:
        nonlocal server
        for _ in range(_MOST_RESTARTS):
            server.wait()
            with lock:
                if is_over.is_set():
                    return
                server = start()
        server.wait()
        listening.close()

    # A server ends with the thread that started it.
    threading.Thread(target=watch, daemon=True, name="prefect-server").start()
    try:
        yield
    finally:
        with lock:
            is_over.set()
        server.terminate()
        with suppress(subprocess.TimeoutExpired):
            server.wait(_STOP_SECONDS)
        server.kill()
        server.wait()


def _server_command(parent: int, listening: int) -> list[str]:
    return [sys.executable, "-P", "-m", __name__, str(parent), str(listening)]


def answers(address: str, seconds: float) -> bool:
    """Whether a Prefect server answers at `address`, which ends in /api, within `seconds`.

    A server that sends an error of its own or drops the connection is busy, and is asked again. A server that refuses
    the connection does not run: the answer is False at once.
    """
    end = time.monotonic() + seconds
    while (rest := end - time.monotonic()) > 0:
        try:
            with urllib.request.urlopen(f"{address.rstrip('/')}/health", timeout=rest) as response:  # noqa: S310
                return bool(response.read().strip() == b"true")
        except urllib.error.HTTPError as error:
            if error.code < HTTPStatus.INTERNAL_SERVER_ERROR:
                # A server that asks for a login answers as well.
                return error.code in (HTTPStatus.UNAUTHORIZED, HTTPStatus.FORBIDDEN)
        except OSError as error:
            if not isinstance(getattr(error, "reason", error), ConnectionResetError):
                return False
        except (ValueError, http.client.HTTPException):
            return False
        time.sleep(min(max(end - time.monotonic(), 0.0), _PAUSE_SECONDS))
    return False


def _serve(parent: int, listening: int) -> None:
    """Run the server, in the child process."""
    die_with_parent(parent)
    os.environ["PREFECT_UI_ENABLED"] = "0"
    end_quickly()
    with importing():
        import uvicorn
        from prefect.server.api.server import create_app

        app = create_app(ephemeral=True, final=True)
    config = uvicorn.Config(app, log_level="error", lifespan="on")
    uvicorn.Server(config).run(sockets=[socket.socket(fileno=listening)])


if __name__ == "__main__":
    _serve(*map(int, sys.argv[1:]))
