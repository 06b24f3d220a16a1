"""Download what the C++ runner is linked with, for another architecture: `python cpp/sysroot.py arm64 FOLDER`.

The development packages of Debian or Ubuntu (zlib, OpenSSL, libarchive, JSON for Modern C++) are unpacked into FOLDER,
from the same package sources that this machine uses. Nothing is installed and no rights of root are needed. Give the
folder to CMake by -DTVMFLOW_SYSROOT.
"""

import argparse
import subprocess
import sys
import tempfile
from pathlib import Path

_PACKAGES = ("libarchive-dev", "libssl-dev", "nlohmann-json3-dev", "zlib1g-dev")


def fetch(architecture: str, folder: Path) -> None:
    """Download and unpack the packages; `folder` appears whole or not at all.

    `architecture` is Debian's name, for example arm64. Raises CalledProcessError when apt or dpkg-deb fails.
    """
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder.parent, prefix=".sysroot-") as scratch:
        for name in ("lists/partial", "cache/archives/partial", "packages", "unpacked"):
            Path(scratch, name).mkdir(parents=True)
        # apt keeps its state in the scratch folder, so this machine's own lists of packages are left alone.
        options = {
            "APT::Architecture": architecture,
            "APT::Architectures::": architecture,
            "APT::Sandbox::User": "root",
            "Dir::State::Lists": f"{scratch}/lists",
            "Dir::State::Status": "/dev/null",
            "Dir::Cache": f"{scratch}/cache",
            "Debug::NoLocking": "1",
        }
        apt = ["apt-get", "-qq", *(f"-o{name}={value}" for name, value in options.items())]
        _run([*apt, "update"])
        _run([*apt, "download", *_PACKAGES], Path(scratch, "packages"))
        for package in sorted(Path(scratch, "packages").glob("*.deb")):
            _run(["dpkg-deb", "--extract", str(package), f"{scratch}/unpacked"])
        Path(scratch, "unpacked").rename(folder)


def _run(command: list[str], folder: Path | None = None) -> None:
    subprocess.run(command, cwd=folder, check=True, stdout=sys.stderr)


def main() -> None:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("architecture", help="Debian's name, for example arm64")
    parser.add_argument("folder", type=Path, help="where to unpack the packages")
    arguments = parser.parse_args()
    try:
        fetch(arguments.architecture, arguments.folder.absolute())
    except FileNotFoundError as error:
        raise SystemExit(f"{error.filename} is not installed; this command needs Debian or Ubuntu") from error
    except subprocess.CalledProcessError as error:
        raise SystemExit(f"the packages for {arguments.architecture} cannot be fetched; the cause is above") from error


if __name__ == "__main__":
    main()
