"""The worker threads of a library: `tvmflow/compiler/threads.c`, run by a program of its own."""

import subprocess
from pathlib import Path

import pytest

import tvmflow.compiler
from support import scale
from support.skips import needs

_SOURCES = Path(tvmflow.compiler.__file__).parent
_PROGRAM = Path(__file__).with_name("threads.cc")
_LOOPS = str(scale.count(normal=300, long=10000))


def run(folder: Path, compiler: list[str], emulator: list[str], *arguments: str) -> str:
    program = folder / "threads"
    subprocess.run(
        [*compiler, "-Wall", "-Wextra", "-Werror", f"-I{_SOURCES}", str(_PROGRAM), "-o", str(program), "-pthread"],
        check=True,
        timeout=120,
    )
    process = subprocess.run(
        [*emulator, str(program), _LOOPS, *arguments], capture_output=True, text=True, timeout=600, check=False
    )
    return process.stdout + process.stderr


@pytest.mark.parametrize(
    "options",
    [
        pytest.param(["-O2"], id="optimised"),
        pytest.param(["-O1", "-g", "-fsanitize=address,undefined", "-fno-sanitize-recover"], id="sanitised"),
    ],
)
def test_callers_errors_users_and_children_of_threads(tmp_path: Path, options: list[str]) -> None:
    assert run(tmp_path, ["c++", *options], []) == "ok\n"


@pytest.mark.long  # Libraries with these threads run on that architecture in tests/cpp.
@needs("aarch64-linux-gnu-g++", "qemu-aarch64")
def test_threads_run_on_another_architecture(tmp_path: Path) -> None:
    # The emulator itself fails where a child of a process with threads starts threads.
    compiler = ["aarch64-linux-gnu-g++", "-O2", "-static"]
    assert run(tmp_path, compiler, ["qemu-aarch64"], "childless") == "ok\n"


def test_the_source_is_c_too(tmp_path: Path) -> None:
    source = str(_SOURCES / "threads.c")
    command = ["cc", "-x", "c", "-Wall", "-Wextra", "-Werror", "-shared", "-fPIC", source, "-o", str(tmp_path / "t.so")]
    subprocess.run(command, check=True, timeout=60)
    command = ["nm", "-D", str(tmp_path / "t.so")]
    symbols = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    # A library that refers to these has to run with the C library of its builder or a newer one.
    assert "pthread" not in symbols
    assert "__tvm_ffi_tvmflow_start_threads" in symbols
