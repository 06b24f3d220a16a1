"""The C++ runner, the programs built with its library, and the folders in which CMake builds them.

Each is built once, in build/tests, for all processes of a run; a later run builds what has changed.
"""

import fcntl
import os
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path

import pytest

from support import scale
from support.processes import is_foreign
from support.skips import require, without_packages
from tvmflow import npz
from tvmflow.arrays import NamedArrays
from tvmflow.hardware.target import host

ROOT = Path(__file__).parents[2]
CPP = ROOT / "cpp"
BUILDS = ROOT / "build" / "tests"
PROGRAM = Path(__file__).parents[1] / "cpp" / "program"
# What is downloaded for other platforms is kept for all checkouts of this user.
DOWNLOADS = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "tvmflow"

# The checks for null, alignment and the types of objects take a third of the compiler's time; without them the address
# sanitiser still ends a program that follows a null pointer.
_SANITISERS = scale.choose(
    normal="address,bounds,shift,signed-integer-overflow,integer-divide-by-zero,float-cast-overflow,bool,enum,"
    "object-size,pointer-overflow,return,unreachable,nonnull-attribute,returns-nonnull-attribute,builtin,vla-bound",
    long="address,undefined",
)
# As one source the library compiles in half of the time. The build for ARM compiles each source by itself.
_AS_ONE = scale.choose(normal=("-DCMAKE_UNITY_BUILD=ON", "-DCMAKE_UNITY_BUILD_BATCH_SIZE=0"), long=())

# The Debian packages of the libraries that the runner is linked with.
LIBRARIES = ("libarchive-dev", "libssl-dev", "nlohmann-json3-dev", "zlib1g-dev")


@dataclass(frozen=True)
class Runner:
    """A command, `tvmflow-run` or another: how it is started, and in which environment."""

    command: tuple[str, ...]
    environment: Mapping[str, str]

    def __call__(
        self, *arguments: object, env: Mapping[str, str] | None = None, text: str = ""
    ) -> subprocess.CompletedProcess[str]:
        """Run the command with `text` as its standard input."""
        return subprocess.run(
            [*self.command, *map(str, arguments)],
            env={**self.environment, **(env or {})},
            input=text,
            capture_output=True,
            text=True,
            timeout=120,
        )

    def outputs(self, bundle: Path, inputs: NamedArrays, folder: Path) -> NamedArrays:
        """The arrays that the bundle computes."""
        npz.write(folder / "in.npz", inputs)
        process = self(bundle, "--inputs", folder / "in.npz", "--output", folder / "out.npz")
        assert process.returncode == 0, process.stderr
        return npz.read(folder / "out.npz")

    def refusal(self, *arguments: object, code: int = 1, env: Mapping[str, str] | None = None) -> str:
        """The one sentence with which the command refuses. It must have ended by itself with that exit code."""
        process = self(*arguments, env=env)
        assert process.returncode == code, (process.returncode, process.stdout, process.stderr[-2000:])
        assert process.stdout == ""
        assert process.stderr.startswith("tvmflow-run: ")
        assert process.stderr.count("\n") == 1
        return process.stderr.removeprefix("tvmflow-run: ").rstrip("\n")


def build_runner() -> Runner:
    """Build `tvmflow-run` with the sanitisers, which report what a damaged file makes it read or write."""
    require("cmake", "c++")
    with _build_folder("cpp") as folder:
        build(folder, CPP, f"-DPython3_EXECUTABLE={sys.executable}", f"-DTVMFLOW_SANITIZE={_SANITISERS}", *_AS_ONE)
    return Runner((str(folder / "tvmflow-run"),), _environment())


def build_program() -> Runner:
    """Build the program in tests/cpp/program with the installed library, which has the sanitisers."""
    library = Path(build_runner().command[0]).parent
    with _build_folder("cpp-program") as folder:
        prefix = folder / "installed"
        _run("cmake", "--install", str(library), "--component", "development", "--prefix", str(prefix))
        build(folder, PROGRAM, f"-DCMAKE_PREFIX_PATH={prefix}")
    return Runner((str(folder / "program"),), _environment())


def build_aarch64_runner() -> Runner:
    """Build `tvmflow-run` for 64-bit ARM with the cross compiler; it runs emulated."""
    require("cmake", "aarch64-linux-gnu-g++", "qemu-aarch64")
    wheels = DOWNLOADS / f"aarch64-tvm-{version('apache-tvm')}-ffi-{version('apache-tvm-ffi')}"
    sysroot = DOWNLOADS / "aarch64-sysroot"
    with _build_folder("cpp-aarch64") as folder:
        if not wheels.is_dir():
            _run(sys.executable, str(CPP / "wheels.py"), "--platform", "manylinux_2_28_aarch64", str(wheels))
        if not sysroot.is_dir():
            _run(sys.executable, str(CPP / "sysroot.py"), "arm64", str(sysroot))
        toolchain = f"-DCMAKE_TOOLCHAIN_FILE={CPP / 'aarch64-linux-gnu.cmake'}"
        build(folder, CPP, toolchain, f"-DTVMFLOW_WHEELS={wheels}", f"-DTVMFLOW_SYSROOT={sysroot}")
    return Runner(("qemu-aarch64", "-L", "/usr/aarch64-linux-gnu", str(folder / "tvmflow-run")), _environment())


@contextmanager
def _build_folder(name: str) -> Iterator[Path]:
    """A folder in which no other process builds meanwhile."""
    folder = BUILDS / name
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield folder


def build(folder: Path, source: Path, *options: str) -> None:
    """Configure and build a project of CMake."""
    # Without optimisation the compiler needs half of the time; line numbers are what a sanitiser's report needs.
    debug = ("-DCMAKE_BUILD_TYPE=Debug", "-DCMAKE_CXX_FLAGS_DEBUG=-g1")
    process = _execute("cmake", "-S", str(source), "-B", str(folder), *debug, *options)
    if process.returncode != 0 and "could not find" in process.stderr.lower():
        pytest.skip(without_packages(["the libraries of cpp/"], LIBRARIES))
    _check(process)
    _run("cmake", "--build", str(folder), "--parallel", str(host().cores))


def _execute(*command: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(command, capture_output=True, text=True, timeout=900)


def _run(*command: str) -> None:
    _check(_execute(*command))


def _check(process: subprocess.CompletedProcess[str]) -> None:
    assert process.returncode == 0, process.stdout[-4000:] + process.stderr[-4000:]


def _environment() -> dict[str, str]:
    environment = {name: value for name, value in os.environ.items() if not is_foreign(name)}
    # TVM keeps what it registers until the process has ended.
    return {**environment, "ASAN_OPTIONS": "detect_leaks=0"}
