"""The record of the local stack in the state folder: its processes, ports, settings and secrets."""

import contextlib
import secrets
from base64 import urlsafe_b64encode
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal, TypeVar

from pydantic import Field

from tvmflow.documents.encoding import Document, decode, encode
from tvmflow.errors import SettingsError, StoreError
from tvmflow.files import exclusive, write_whole
from tvmflow.workspace import Record

_RECORD = "stack.json"
_SECRETS = "secrets.json"
_LOCK = "lock"
# For damaged secrets.
_REMEDY = "remove it"


class ServerProcess(Record):
    """The process of a server, identified so that another process with the same id is not mistaken for it."""

    pid: int
    birth: str
    """The time at which the process began: another process may get the same id."""
    mark: str
    """A random text in the environment of every process of this server."""

    @property
    def is_alive(self) -> bool:
        """Whether exactly this process runs."""
        return birth(self.pid) == self.birth


class StackRecord(Document):
    """The last start of the stack of a state folder."""

    format: Literal[1] = 1
    servers: dict[str, ServerProcess] = Field(default={})
    ports: dict[str, int] = Field(default={})
    """The port of each server, remembered for the next start."""
    database: str | None = None
    """The address of the PostgreSQL server with the stack's state, without user and password; None with SQLite."""
    settings: dict[str, Any] = Field(default={})
    """Settings for commands that use this stack, without its secrets."""
    deployed: str = ""
    """The digest of the release files and addresses for which the deployments were registered."""

    @property
    def is_running(self) -> bool:
        """Whether any of the stack's servers runs."""
        return any(server.is_alive for server in self.servers.values())

    @property
    def label(self) -> str:
        """The words that name this document in messages."""
        return "record of the local stack"


class Secrets(Document):
    """Secrets that only the servers of a stack and its commands have; generated once for a state folder."""

    format: Literal[1] = 1
    s3_access_key: str
    s3_secret_key: str
    webhook_secret: str
    mlflow_webhook_key: str
    """The key with which MLflow encrypts the secrets of its webhooks: 32 bytes in base64."""

    @property
    def label(self) -> str:
        """The words that name this document in messages."""
        return "secrets of the local stack"


def folder(state: Path) -> Path:
    """Return the stack's own folder in the state folder, which only its owner can access."""
    return state / "stack"


def read(state: Path) -> StackRecord:
    """Read the record of a state folder.

    Returns an empty record where no stack was ever started, or where the stack belongs to another user. Raises
    SettingsError for a damaged record.
    """
    path = folder(state) / _RECORD
    try:
        return _read(StackRecord, path, "end its servers and remove the file") or StackRecord()
    except PermissionError:
        # Another user's stack: its secrets are not for this user either.
        return StackRecord()


def write(state: Path, record: StackRecord) -> None:
    """Replace the record in one step. Raises OSError when it cannot be written."""
    _write(folder(state) / _RECORD, record)


def make_secrets(state: Path) -> Secrets:
    """Return the secrets of this state folder; generate and keep them if there are none yet.

    Raises SettingsError when the file of secrets is damaged.
    """
    path = folder(state) / _SECRETS
    if (earlier := _read(Secrets, path, _REMEDY)) is not None:
        return earlier
    fresh = Secrets(
        s3_access_key=secrets.token_hex(10),
        s3_secret_key=secrets.token_hex(20),
        webhook_secret=secrets.token_urlsafe(32),
        mlflow_webhook_key=urlsafe_b64encode(secrets.token_bytes(32)).decode(),
    )
    _write(path, fresh)
    return fresh


def settings(state: Path) -> dict[str, Any]:
    """Return the settings for commands that use a running stack, with its secrets; empty while no server runs.

    Raises SettingsError for a damaged record.
    """
    record = read(state)
    if not record.is_running:
        return {}
    own_secrets = _read(Secrets, folder(state) / _SECRETS, _REMEDY)
    if own_secrets is None:
        return {}
    return {
        **record.settings,
        "s3_access_key": own_secrets.s3_access_key,
        "s3_secret_key": own_secrets.s3_secret_key,
        "webhook_secret": own_secrets.webhook_secret,
    }


@contextlib.contextmanager
def lock(state: Path) -> Iterator[None]:
    """Prevent other commands from starting or ending servers of this stack while the body runs.

    Raises SettingsError when another command is doing so.
    """
    place = folder(state)
    place.mkdir(parents=True, exist_ok=True, mode=0o700)
    (place / _LOCK).touch()
    busy = f"another tvmflow up or down is at work on the stack in {state}; wait until it is done"
    with exclusive(place / _LOCK, SettingsError(busy)):
        yield


def birth(pid: int) -> str | None:
    """Return the time at which a process began, as a text that identifies the process; None when it has ended.

    The text holds the id of the system's start and Linux's clock ticks since then. A process that has ended but has not
    been reaped counts as ended.
    """
    try:
        # The name, in parentheses, may hold any characters, also spaces and parentheses.
        values = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        system = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return None
    return None if values[0] in "ZX" else f"{system} {values[19]}"


D = TypeVar("D", bound=Document)


def _read(kind: type[D], path: Path, remedy: str) -> D | None:
    """A document of the stack; None without its file. Raises SettingsError for a damaged one."""
    try:
        return decode(kind, path.read_bytes(), str(path), remedy)
    except (FileNotFoundError, NotADirectoryError):
        return None
    except StoreError as error:
        raise SettingsError(str(error)) from error


def _write(path: Path, document: Document) -> None:
    path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    write_whole(path, encode(document).decode())
