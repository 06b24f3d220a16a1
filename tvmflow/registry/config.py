"""The address of the registry, and its form without the password that it may hold."""

import re
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlsplit

from tvmflow.errors import SettingsError

# A password may have a slash or an @, where nobody has escaped it. A third slash begins a path.
_USER_INFO = re.compile(r"(?<=://)(?!/)\S*@")


def without_secrets(text: str) -> str:
    """Return the text with `user:password@` removed from the addresses in it, up to the last `@` of each."""
    return _USER_INFO.sub("", text)


@dataclass(frozen=True, repr=False)
class RegistryConfig:
    """The address of an MLflow server, or of the SQLite file that takes the place of one.

    `tracking_uri` and `registry_uri` are `http(s)://...` or `sqlite:///...`; without `registry_uri` models are
    registered where runs are tracked. `artifact_root` is the URI of the artifact folder of a new experiment; when it is
    None a server chooses its own, and a SQLite file gets the folder `artifacts` beside it. User name and password come
    from MLflow's environment variables (MLFLOW_TRACKING_USERNAME and MLFLOW_TRACKING_PASSWORD, or
    MLFLOW_TRACKING_TOKEN). Raises SettingsError for an address of any other kind.
    """

    tracking_uri: str
    registry_uri: str | None = None
    artifact_root: str | None = None
    experiment: str = "tvmflow"

    def __post_init__(self) -> None:
        for uri in self.uris:
            if not _names_server(uri) and not _sqlite_path(uri):
                raise SettingsError(
                    f"the registry's address {without_secrets(''.join(uri.split()))!r} is not one of http://..., "
                    "https://... or sqlite:///FILE; name the MLflow server's address, with special characters of its "
                    "password as %XX"
                )

    @property
    def uris(self) -> tuple[str, ...]:
        """The distinct addresses, one or two, the tracking address first; they may hold a password."""
        return tuple(dict.fromkeys((self.tracking_uri, self.registry_uri or self.tracking_uri)))

    @property
    def artifact_location(self) -> str | None:
        """The URI of a new experiment's artifact folder; None where the server chooses."""
        file = sqlite_file(self.tracking_uri)
        if self.artifact_root is not None or file is None:
            return self.artifact_root
        return (file.absolute().parent / "artifacts").as_uri()

    @property
    def address(self) -> str:
        """The addresses without passwords, for messages; two are joined by "and"."""
        return " and ".join(map(without_secrets, self.uris))

    def __repr__(self) -> str:
        registry = self.registry_uri and without_secrets(self.registry_uri)
        root = self.artifact_root and without_secrets(self.artifact_root)
        return (
            f"RegistryConfig(tracking_uri={without_secrets(self.tracking_uri)!r}, registry_uri={registry!r}, "
            f"artifact_root={root!r}, experiment={self.experiment!r})"
        )


def embedded_registry(folder: Path) -> RegistryConfig:
    """Return the configuration of a registry in `folder`: a SQLite file and an artifact folder, which is created."""
    folder = folder.resolve()
    artifacts = folder / "artifacts"
    artifacts.mkdir(parents=True, exist_ok=True)
    return RegistryConfig(tracking_uri=f"sqlite:///{folder / 'mlflow.db'}", artifact_root=artifacts.as_uri())


def _names_server(uri: str) -> bool:
    """Whether an address is of an HTTP server, and a password in it ends where the host begins."""
    try:
        parts = urlsplit(uri)
        parts.port  # noqa: B018 - it raises for one that is no number
    except ValueError:
        return False
    is_whole = not re.search(r"\s", uri) and ("@" in parts.netloc or "@" not in uri)
    return parts.scheme in ("http", "https") and bool(parts.hostname) and is_whole


def sqlite_file(uri: str) -> Path | None:
    """Return the path of the file of a `sqlite:///` address; None for another address."""
    path = _sqlite_path(uri)
    return Path(path) if path else None


def _sqlite_path(uri: str) -> str:
    path = uri.removeprefix("sqlite:///")
    return "" if path in (uri, ":memory:") else path.partition("?")[0]
