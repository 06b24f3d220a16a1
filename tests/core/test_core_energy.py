"""Energy from the kernel's counters, which wrap, and of which some are a part of others."""

from pathlib import Path

import pytest

from tvmflow.hardware import energy

_RANGE = 262_143_328_850


@pytest.fixture
def counters(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The kernel's folder of a machine with two packages, a core domain and the whole machine."""
    for folder, name, value in (
        ("intel-rapl:0", "package-0", _RANGE - 1_000_000),
        ("intel-rapl:0:0", "core", 5),
        ("intel-rapl:1", "package-1", 2_000_000),
        ("intel-rapl:2", "psys", 7),
    ):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "name").write_text(f"{name}\n")
        (tmp_path / folder / "energy_uj").write_text(f"{value}\n")
        (tmp_path / folder / "max_energy_range_uj").write_text(f"{_RANGE}\n")
    monkeypatch.setattr(energy, "_FOLDER", tmp_path)
    return tmp_path


def test_packages_count_once_and_a_counter_may_begin_again(counters: Path) -> None:
    before = energy.read_counters()
    assert sorted(Path(folder).name for folder in before) == ["intel-rapl:0", "intel-rapl:1"]
    assert energy.joules_between(before, before) == 0.0
    (counters / "intel-rapl:0" / "energy_uj").write_text("3000000\n")
    (counters / "intel-rapl:1" / "energy_uj").write_text("2500000\n")
    assert energy.joules_between(before, energy.read_counters()) == pytest.approx(4.5)


def test_a_machine_without_counters_tells_no_energy(counters: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before = energy.read_counters()
    (counters / "intel-rapl:1" / "energy_uj").unlink()
    assert energy.read_counters() == {}
    assert energy.joules_between(before, {}) is None
    assert energy.joules_between({}, {}) is None
    monkeypatch.setattr(energy, "_FOLDER", counters / "absent")
    assert energy.read_counters() == {}


def test_a_wrapped_counter_without_its_range_tells_no_energy(counters: Path) -> None:
    before = energy.read_counters()
    (counters / "intel-rapl:0" / "energy_uj").write_text("1")
    (counters / "intel-rapl:0" / "max_energy_range_uj").unlink()
    assert energy.joules_between(before, energy.read_counters()) is None
