"""Advisories: known vulnerabilities of Python packages, read from files in OSV's format (https://ossf.github.io/osv-schema/)."""

import json
import zipfile
from collections.abc import Iterator, Mapping
from contextlib import suppress
from datetime import UTC, datetime, timedelta
from email.parser import HeaderParser
from importlib.metadata import distribution, distributions
from pathlib import Path
from typing import Any, NamedTuple

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name, canonicalize_version
from packaging.version import InvalidVersion, Version
from pydantic import AwareDatetime, BaseModel, ValidationError

from tvmflow.errors import SettingsError


class _Event(BaseModel):
    introduced: str | None = None
    fixed: str | None = None
    last_affected: str | None = None


class _Range(BaseModel):
    type: str
    events: tuple[_Event, ...]


class _Package(BaseModel):
    ecosystem: str
    name: str


class _Affected(BaseModel):
    """The versions of a package that a vulnerability affects: those listed, and those within a range."""

    package: _Package | None = None
    ranges: tuple[_Range, ...] = ()
    versions: tuple[str, ...] = ()

    def has(self, package: str, version: str) -> bool:
        if self.package is None or self.package.ecosystem.partition(":")[0] != "PyPI":
            return False
        if canonicalize_name(self.package.name) != package:
            return False
        if canonicalize_version(version) in map(canonicalize_version, self.versions):
            return True
        return any(_is_within(Version(version), each.events) for each in self.ranges if each.type != "GIT")


class _Advisory(BaseModel):
    id: str
    modified: AwareDatetime
    withdrawn: AwareDatetime | None = None
    aliases: tuple[str, ...] = ()
    summary: str = ""
    affected: tuple[_Affected, ...] = ()


def _is_within(version: Version, events: tuple[_Event, ...]) -> bool:
    """Whether a range has a version. Events that are no versions could mean any: they count."""
    try:
        entered = [Version(each.introduced) for each in events if each.introduced is not None]
        left = [Version(each.fixed) for each in events if each.fixed is not None]
        lasts = [Version(each.last_affected) for each in events if each.last_affected is not None]
    except InvalidVersion:
        return True
    begin = max((each for each in entered if each <= version), default=None)
    return begin is not None and not (
        any(begin < end <= version for end in left) or any(begin <= end < version for end in lasts)
    )


class Vulnerability(NamedTuple):
    """A vulnerability of a package in use: its identifier, the package and its version, and a summary."""

    id: str
    package: str
    version: str
    summary: str

    def __str__(self) -> str:
        return f"{self.package} {self.version} has {self.id}" + (f" ({self.summary})" if self.summary else "")


class Advisories(NamedTuple):
    """All advisories of a file or folder, and the time at which the newest of them was changed."""

    entries: tuple[_Advisory, ...]
    newest: datetime

    @classmethod
    def read(cls, path: Path, days: float) -> "Advisories":
        """Read advisories: a JSON file with one or a list, a ZIP archive of such files, or a folder of them.

        Raises SettingsError for a file that is missing or none of these, and where the newest advisory is older than
        `days`.
        """
        try:
            documents = [item for content in _contents(path) for item in _documents(json.loads(content))]
            entries = tuple(_Advisory.model_validate(item) for item in documents)
            newest = max(entry.modified for entry in entries)
        except OSError as error:
            raise SettingsError(f"the advisories {str(path)!r} cannot be read: {error.strerror or error}") from error
        except (ValueError, TypeError, ValidationError, zipfile.BadZipFile) as error:
            raise SettingsError(f"the file {str(path)!r} has no advisories in OSV's format") from error
        if newest < datetime.now(UTC) - timedelta(days=days):
            raise SettingsError(
                f"the newest of the advisories in {str(path)!r} is of {newest:%Y-%m-%d}, more than {days:g} days ago: "
                "fetch them again"
            )
        return cls(entries, newest)

    def find(self, packages: Mapping[str, str]) -> tuple[Vulnerability, ...]:
        """Return the known vulnerabilities of `packages`, which maps names to versions.

        Advisories that share an id or an alias describe the same vulnerability: only the first of them counts.
        Withdrawn advisories do not count.
        """
        vulnerabilities: list[Vulnerability] = []
        ids: set[str] = set()
        for entry in self.entries:
            if entry.withdrawn is not None or not ids.isdisjoint({entry.id, *entry.aliases}):
                continue
            for package, version in packages.items():
                if any(item.has(canonicalize_name(package), version) for item in entry.affected):
                    vulnerabilities.append(Vulnerability(entry.id, package, version, entry.summary))
                    ids |= {entry.id, *entry.aliases}
        return tuple(vulnerabilities)


def list_packages() -> dict[str, str]:
    """Return the installed versions, by package, of all that a bundle needs to run.

    These are tvmflow without its extras, the packages that it depends on, and those that they depend on. Names are
    normalised: lower case, with hyphens.
    """
    packages: dict[str, str] = {}
    names = ["tvmflow"]
    while names:
        name = canonicalize_name(names.pop())
        if name in packages:
            continue
        package = distribution(name)
        packages[name] = package.version
        requirements = map(Requirement, package.requires or ())
        names += [each.name for each in requirements if each.marker is None or each.marker.evaluate({"extra": ""})]
    return packages


def list_installed() -> dict[str, str]:
    """Return all installed packages with their versions, sorted; one without a readable name or version is left out.

    Of two versions the one that Python imports counts.
    """
    packages: dict[str, str] = {}
    for package in distributions():
        # A folder without METADATA has no text, or raises, by the library that reads it.
        with suppress(OSError, UnicodeDecodeError):
            # Their own reader parses what follows as well: long descriptions.
            text = package.read_text("METADATA") or package.read_text("PKG-INFO") or ""
            metadata = HeaderParser().parsestr(text.partition("\n\n")[0])
            if "Name" in metadata and "Version" in metadata:
                packages.setdefault(canonicalize_name(metadata["Name"]), metadata["Version"])
    return dict(sorted(packages.items()))


def _contents(path: Path) -> Iterator[bytes]:
    if path.is_dir():
        for file in sorted(path.rglob("*.json")):
            yield file.read_bytes()
    elif path.suffix == ".zip":
        with zipfile.ZipFile(path) as archive:
            for name in archive.namelist():
                if name.endswith(".json"):
                    yield archive.read(name)
    else:
        yield path.read_bytes()


def _documents(content: Any) -> list[Any]:
    if isinstance(content, dict):
        content = content.get("vulns", [content])
    if not isinstance(content, list):
        raise TypeError("neither an advisory nor a list of them")
    return content
