"""The cores that this process may compute on: physical ones, within its affinity and the quota of its control group."""

import os
from collections.abc import Iterable, Iterator
from contextlib import suppress
from pathlib import Path

_CPUS = Path("/sys/devices/system/cpu")
_GROUPS = Path("/sys/fs/cgroup")
_MEMBERSHIP = Path("/proc/self/cgroup")


def count() -> int:
    """Return the number of cores for this process, at least 1.

    Hardware threads of one core count once, because they share its multiply-adds. A quota of 2.5 cores counts as 2.
    """
    processors = os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else range(os.cpu_count() or 1)
    cores = count_physical(processors)
    quota = read_quota()
    return cores if quota is None else max(1, min(cores, int(quota)))


def are_restricted() -> bool:
    """Whether this process has fewer cores than the machine has hardware threads.

    That is also so without any limit on a machine whose cores have several threads each.
    """
    return count() < (os.cpu_count() or 1)


def count_physical(cpus: Iterable[int], folder: Path = _CPUS) -> int:
    """Return the number of physical cores that hardware threads belong to; one each where the kernel does not tell."""
    cores = set()
    for cpu in cpus:
        siblings = str(cpu)
        with suppress(OSError):
            siblings = (folder / f"cpu{cpu}" / "topology" / "thread_siblings_list").read_text().strip() or siblings
        cores.add(siblings)
    return max(1, len(cores))


def read_quota(membership: Path = _MEMBERSHIP, groups: Path = _GROUPS) -> float | None:
    """Return the CPU quota of the process in cores, such as 2.5; None without a quota.

    It is the smallest quota of the process's control group and of the groups around it, by versions 1 and 2 of cgroups.
    """
    try:
        lines = membership.read_text().splitlines()
    except OSError:
        return None
    quotas = []
    for line in lines:
        _, _, rest = line.partition(":")
        controllers, _, path = rest.partition(":")
        names = controllers.split(",")
        if not controllers:
            quotas += list(_quotas(groups, path, ("cpu.max",)))
        elif "cpu" in names:
            for name in (controllers, "cpu"):
                quotas += list(_quotas(groups / name, path, ("cpu.cfs_quota_us", "cpu.cfs_period_us")))
    return min(quotas, default=None)


def _quotas(root: Path, path: str, files: tuple[str, ...]) -> Iterator[float]:
    """The quotas of a group and of the groups around it, up to `root`; a container sees its own group as `root`."""
    group = root / path.strip("/")
    for folder in (group, *group.parents):
        with suppress(OSError, ValueError):
            # One file holds quota and period, or two files hold one each; `max` and -1 mean no quota.
            quota, period = " ".join((folder / name).read_text() for name in files).split()
            if float(quota) > 0:
                yield float(quota) / float(period)
        if folder == root:
            return
