"""The record of the local stack in the state folder: what was started, where it answers, and whether it still runs."""

import contextlib
import fcntl
import json
import os
import secrets
import tempfile
from base64 import urlsafe_b64encode
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from tvmflow.errors import SettingsError

_RECORD = "stack.json"
_SECRETS = "secrets.json"
_LOCK = "lock"


@dataclass(frozen=True)
class Started:
    """A server that was started, and how its processes are known."""

    pid: int
    birth: str
    """When the process began, so that another one with the same id is not taken for it."""
    mark: str
    """What the environment of every process of this server holds."""

    @property
    def alive(self) -> bool:
        """Whether that very process runs."""
        return birth(self.pid) == self.birth


@dataclass(frozen=True)
class Record:
    """The stack of a state folder as it was last started."""

    servers: dict[str, Started] = field(default_factory=dict)
    ports: dict[str, int] = field(default_factory=dict)
    """Remembered for the next start, by server."""
    database: str | None = None
    """Where PostgreSQL keeps the stack's state, without user and password; None with SQLite."""
    settings: dict[str, Any] = field(default_factory=dict)
    """What commands beside the stack take for settings, secrets apart."""
    deployed: str = ""
    """The digest of what the deployments were registered from."""

    @property
    def running(self) -> bool:
        """Whether any of its servers runs."""
        return any(server.alive for server in self.servers.values())


@dataclass(frozen=True)
class Secrets:
    """What the servers of a stack share with its commands and nobody else; made once for a state folder."""

    s3_access_key: str
    s3_secret_key: str
    webhook_secret: str
    mlflow_webhook_key: str
    """What MLflow encrypts the secrets of its webhooks with: 32 bytes in base64."""


def folder(state: Path) -> Path:
    """The stack's own folder in the state folder, readable by nobody else once it is made."""
    return state / "stack"


def read(state: Path) -> Record:
    """The record; an empty one where no stack was ever started. Raises SettingsError when it is damaged."""
    path = folder(state) / _RECORD
    try:
        document = json.loads(path.read_text())
        servers = {name: Started(**server) for name, server in document.pop("servers").items()}
        return Record(servers, **document)
    except (FileNotFoundError, NotADirectoryError):
        return Record()
    except PermissionError:
        # Somebody else's stack, whose secrets are not ours either.
        return Record()
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise SettingsError(
            f"the local stack's record {str(path)!r} is damaged; end the servers it names and remove it"
        ) from error


def write(state: Path, record: Record) -> None:
    """Put the record in the place of the one before, in one step."""
    _write(folder(state) / _RECORD, asdict(record))


def make_secrets(state: Path) -> Secrets:
    """The secrets of this state folder, made up where there are none yet."""
    path = folder(state) / _SECRETS
    if (found := _read_secrets(path)) is not None:
        return found
    made = Secrets(
        s3_access_key=secrets.token_hex(10),
        s3_secret_key=secrets.token_hex(20),
        webhook_secret=secrets.token_urlsafe(32),
        mlflow_webhook_key=urlsafe_b64encode(secrets.token_bytes(32)).decode(),
    )
    _write(path, asdict(made))
    return made


def settings(state: Path) -> dict[str, Any]:
    """What a running stack says for settings, by their names; nothing while no server of it runs."""
    record = read(state)
    if not record.running:
        return {}
    found = _read_secrets(folder(state) / _SECRETS)
    if found is None:
        return {}
    return {
        **record.settings,
        "s3_access_key": found.s3_access_key,
        "s3_secret_key": found.s3_secret_key,
        "webhook_secret": found.webhook_secret,
    }


@contextlib.contextmanager
def locked(state: Path) -> Iterator[None]:
    """Keep other commands from starting or ending servers of this stack while the body runs. Raises SettingsError."""
    place = folder(state)
    place.mkdir(parents=True, exist_ok=True, mode=0o700)
    with (place / _LOCK).open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise SettingsError(
                f"another tvmflow up or down is at work on the stack in {state}; wait until it is done"
            ) from error
        yield


def birth(pid: int) -> str | None:
    """When the process began, as a text that no other process shares; None when it is gone or only waits to be reaped.

    Linux's clock ticks since the start of the system, and which start that was.
    """
    try:
        # The name, in parentheses, may hold anything, spaces and parentheses too.
        values = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        system = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return None
    return None if values[0] in "ZX" else f"{system} {values[19]}"


def _read_secrets(path: Path) -> Secrets | None:
    try:
        return Secrets(**json.loads(path.read_text()))
    except FileNotFoundError:
        return None
    except (ValueError, TypeError) as error:
        raise SettingsError(f"the local stack's secrets {str(path)!r} are damaged; remove the file") from error


def _write(path: Path, document: dict[str, object]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    # A temporary file is its owner's alone, mode 0600, and keeps that under its new name.
    descriptor, partial = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with os.fdopen(descriptor, "w") as file:
            json.dump(document, file, indent=1)
            file.flush()
            os.fsync(file.fileno())
        Path(partial).replace(path)
    except BaseException:
        Path(partial).unlink(missing_ok=True)
        raise
