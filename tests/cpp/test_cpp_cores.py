"""The cores that the C++ runner computes on: as many as Python counts for the same files of the kernel."""

import os
import subprocess
from pathlib import Path

import pytest

from support.cpp import ROOT
from support.skips import needs
from tvmflow.hardware import cores

_PROGRAM = """
#include <iostream>
#include "host.h"
int main(int, char** arguments) { std::cout << tvmflow::HostCores(arguments[1]); }
"""


@pytest.fixture(scope="module")
def program(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A program that prints the number of cores; its argument is the folder of /proc and /sys."""
    folder = tmp_path_factory.mktemp("cores")
    (folder / "main.cc").write_text(_PROGRAM)
    sources = [str(folder / "main.cc"), str(ROOT / "cpp" / "src" / "host.cc")]
    command = ["c++", "-std=c++17", "-Wall", "-Wextra", "-Werror", f"-I{ROOT / 'cpp' / 'src'}", *sources, "-pthread"]
    subprocess.run([*command, "-o", str(folder / "cores")], check=True)
    return folder / "cores"


@needs("c++")
@pytest.mark.parametrize("threads", [1, 2, 1000], ids=["one", "two", "all"])
@pytest.mark.parametrize(
    ("membership", "files"),
    [
        ("", {}),
        ("0::/a/b\n", {"a/b/cpu.max": "max 100000", "a/cpu.max": "150000 100000"}),
        ("0::/a/b\n", {"a/b/cpu.max": "50000 100000", "a/cpu.max": "150000 100000"}),
        ("0::/not/here\n", {"cpu.max": "100000 100000"}),
        ("0::/\n", {"cpu.max": "nonsense"}),
        (
            "4:memory:/x\n3:cpu,cpuacct:/x\n",
            {"cpu/x/cpu.cfs_quota_us": "100000\n", "cpu/x/cpu.cfs_period_us": "100000\n"},
        ),
        ("3:cpu:/x\n", {"cpu/x/cpu.cfs_quota_us": "-1\n", "cpu/x/cpu.cfs_period_us": "100000\n"}),
    ],
    ids=["no group", "outer", "inner", "root", "nonsense", "version 1", "no quota"],
)
def test_the_runner_counts_cores_as_python_does(
    threads: int, membership: str, files: dict[str, str], program: Path, tmp_path: Path
) -> None:
    cpus, groups = tmp_path / "sys/devices/system/cpu", tmp_path / "sys/fs/cgroup"
    processors = sorted(os.sched_getaffinity(0))
    for cpu in processors:
        # `threads` neighbours belong to one core.
        (cpus / f"cpu{cpu}" / "topology").mkdir(parents=True)
        (cpus / f"cpu{cpu}" / "topology" / "thread_siblings_list").write_text(f"{cpu // threads}\n")
    (tmp_path / "proc/self").mkdir(parents=True)
    (tmp_path / "proc/self/cgroup").write_text(membership)
    for name, text in files.items():
        (groups / name).parent.mkdir(parents=True, exist_ok=True)
        (groups / name).write_text(text)
    physical, quota = cores.count_physical(processors, cpus), cores.read_quota(tmp_path / "proc/self/cgroup", groups)
    printed = subprocess.run([str(program), str(tmp_path)], check=True, capture_output=True, text=True).stdout
    assert int(printed) == max(1, min(physical, int(quota or physical)))
