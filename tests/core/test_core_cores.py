"""The cores of this process: physical ones, within affinity and quota."""

import os
from pathlib import Path

import pytest

from tvmflow.hardware import cores
from tvmflow.hardware.target import host


def _topology(folder: Path, siblings: dict[int, str]) -> Path:
    for cpu, text in siblings.items():
        (folder / f"cpu{cpu}" / "topology").mkdir(parents=True)
        (folder / f"cpu{cpu}" / "topology" / "thread_siblings_list").write_text(text + "\n")
    return folder


def test_hardware_threads_of_one_core_count_once(tmp_path: Path) -> None:
    folder = _topology(tmp_path, {0: "0,2", 1: "1,3", 2: "0,2", 3: "1,3"})
    assert cores.count_physical(range(4), folder) == 2
    assert cores.count_physical([0, 2], folder) == 1
    assert cores.count_physical([0, 1, 7, 8], folder) == 4
    assert cores.count_physical([], folder) == 1


@pytest.mark.parametrize(
    ("membership", "files", "quota"),
    [
        ("0::/a/b\n", {"a/b/cpu.max": "max 100000", "a/cpu.max": "250000 100000"}, 2.5),
        ("0::/a/b\n", {"a/b/cpu.max": "100000 100000", "a/cpu.max": "250000 100000"}, 1.0),
        ("0::/not/here\n", {"cpu.max": "400000 100000"}, 4.0),
        ("0::/\n", {"cpu.max": "max 100000"}, None),
        ("0::/\n", {"cpu.max": "nonsense"}, None),
        ("0::/\n", {}, None),
        (
            "4:memory:/x\n3:cpu,cpuacct:/x\n",
            {"cpu,cpuacct/x/cpu.cfs_quota_us": "150000\n", "cpu,cpuacct/x/cpu.cfs_period_us": "100000\n"},
            1.5,
        ),
        ("3:cpu:/x\n", {"cpu/x/cpu.cfs_quota_us": "-1\n", "cpu/x/cpu.cfs_period_us": "100000\n"}, None),
    ],
)
def test_the_smallest_quota_around_the_process_counts(
    tmp_path: Path, membership: str, files: dict[str, str], quota: float | None
) -> None:
    (tmp_path / "membership").write_text(membership)
    for name, text in files.items():
        (tmp_path / "groups" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "groups" / name).write_text(text)
    assert cores.read_quota(tmp_path / "membership", tmp_path / "groups") == quota
    assert cores.read_quota(tmp_path / "none", tmp_path / "groups") is None


def test_cores_are_bounded_by_the_quota_and_never_below_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cores, "count_physical", lambda _: 8)
    for quota, expected in ((None, 8), (2.9, 2), (0.5, 1), (64.0, 8)):
        monkeypatch.setattr(cores, "read_quota", lambda quota=quota: quota)
        assert cores.count() == expected
    assert cores.are_restricted() is ((os.cpu_count() or 1) > 8)


def test_this_process_has_at_most_the_cores_of_its_affinity() -> None:
    assert 1 <= cores.count() <= len(os.sched_getaffinity(0))
    assert host().cores == host.__wrapped__().cores
