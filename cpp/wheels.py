"""Print the folder that holds TVM's wheels, or download those of another platform into a folder.

CMake runs `python cpp/wheels.py`, which prints the folder of the installed wheels. `python cpp/wheels.py --platform
manylinux_2_28_aarch64 FOLDER` downloads the wheels of the same versions for that platform and unpacks their headers and
runtime libraries into FOLDER.
"""

import argparse
import subprocess
import sys
import tempfile
import zipfile
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path

_WHEELS = ("apache-tvm", "apache-tvm-ffi")
_NEEDED = ("tvm/lib/libtvm_runtime", "tvm_ffi/lib/libtvm_ffi.so", "tvm_ffi/include/")


def installed() -> Path:
    """Return the folder of the installed wheels. Raises SystemExit where apache-tvm is not installed."""
    spec = find_spec("tvm")
    if spec is None or spec.origin is None:
        raise SystemExit("apache-tvm is not installed for this Python; give CMake another by -DPython3_EXECUTABLE")
    return Path(spec.origin).parents[1]


def fetch(platform: str, folder: Path) -> None:
    """Download the wheels for a platform and unpack them; `folder` appears whole or not at all.

    `platform` is pip's name, for example manylinux_2_28_aarch64. Raises CalledProcessError when pip fails.
    """
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder.parent) as scratch:
        pip = [sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check", "--no-deps"]
        names = [f"{name}=={version(name)}" for name in _WHEELS]
        subprocess.run(
            [*pip, "--platform", platform, "--only-binary=:all:", "--dest", scratch, *names],
            check=True,
            stdout=sys.stderr,
        )
        for wheel in sorted(Path(scratch).glob("*.whl")):
            with zipfile.ZipFile(wheel) as archive:
                for name in archive.namelist():
                    if name.startswith(_NEEDED) or name.endswith(".dist-info/METADATA"):
                        archive.extract(name, f"{scratch}/unpacked")
        Path(scratch, "unpacked").rename(folder)


def main() -> None:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--platform", help="as pip names it, for example manylinux_2_28_aarch64")
    parser.add_argument("folder", type=Path, nargs="?", help="where to unpack them")
    arguments = parser.parse_args()
    if (arguments.platform is None) != (arguments.folder is None):
        parser.error("a platform and a folder go together")
    if arguments.platform is not None:
        try:
            fetch(arguments.platform, arguments.folder)
        except subprocess.CalledProcessError as error:
            raise SystemExit(f"the wheels for {arguments.platform} cannot be fetched; pip says above why") from error
    sys.stdout.write(f"{(arguments.folder or installed()).absolute()}\n")


if __name__ == "__main__":
    main()
