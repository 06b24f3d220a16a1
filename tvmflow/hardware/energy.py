"""Energy: the joules that the processors have used, from the counters of the kernel (RAPL)."""

from collections.abc import Mapping
from pathlib import Path

_FOLDER = Path("/sys/class/powercap")


def read_counters() -> dict[str, int]:
    """Return the microjoules on the energy counter of each processor package by its folder; {} where none can be read.

    Only the difference of two readings has a meaning, see `joules_between`. Most machines let root alone read them.
    """
    try:
        return {
            str(folder): int((folder / "energy_uj").read_text())
            for folder in sorted(_FOLDER.glob("intel-rapl:*"))
            # Others are a part of a package, or the whole machine, which holds the packages.
            if (folder / "name").read_text().startswith("package")
        }
    except (OSError, ValueError):
        return {}


def joules_between(before: Mapping[str, int], after: Mapping[str, int]) -> float | None:
    """Return the joules used between two readings of `read_counters`; None where there are no counters.

    A counter begins again at 0 beyond the kernel's `max_energy_range_uj`, after minutes to hours; it may have done so
    once between the readings. The result is None where a counter has come or gone, or its range cannot be read.
    """
    if not before or before.keys() != after.keys():
        return None
    total = 0
    for folder, start in before.items():
        difference = after[folder] - start
        if difference < 0:
            try:
                difference += int((Path(folder) / "max_energy_range_uj").read_text())
            except (OSError, ValueError):
                return None
        total += difference
    return total * 1e-6
