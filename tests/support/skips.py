"""Skips: what a test needs from the machine, and which skips `--no-skips` permits."""

import re
import shutil
import tomllib
from collections.abc import Iterable
from functools import cache
from pathlib import Path
from typing import Any

import pytest

PERMITTED = Path(__file__).parents[1] / "skips.toml"
# The Debian package of each program or file that tests need.
_PACKAGES = {
    "c++": "g++",
    "aarch64-linux-gnu-g++": "g++-aarch64-linux-gnu",
    "qemu-aarch64": "qemu-user",
    "initdb": "postgresql",
    "postgres": "postgresql",
    "createdb": "postgresql",
    "pg_ctl": "postgresql",
    "openssl": "openssl",
}
_ABSENT = re.compile(r"(?P<programs>.+) not installed: `apt-get install (?P<packages>.+)`")


def absent(*programs: str) -> str:
    """The sentence that says which of these programs are not on PATH and how to install them; empty if none is."""
    missing = [program for program in programs if shutil.which(program) is None]
    return without_packages(missing, [_PACKAGES.get(program, program) for program in missing]) if missing else ""


def without_packages(missing: Iterable[str], packages: Iterable[str]) -> str:
    """The sentence that says what is missing and which Debian packages bring it."""
    return f"{', '.join(missing)} not installed: `apt-get install {' '.join(sorted(set(packages)))}`"


def needs(*programs: str) -> pytest.MarkDecorator:
    """Mark a test that needs these programs."""
    return pytest.mark.skipif(bool(absent(*programs)), reason=absent(*programs) or "all are installed")


def require(*programs: str) -> None:
    """Skip the test that runs unless these programs are on PATH."""
    if sentence := absent(*programs):
        pytest.skip(sentence)


@cache
def _permitted() -> tuple[re.Pattern[str], ...]:
    return tuple(re.compile(entry["reason"]) for entry in tomllib.loads(PERMITTED.read_text())["skip"])


def reason_of(report: Any) -> str:
    """The reason of a skipped report."""
    return str(report.longrepr[2]).removeprefix("Skipped: ") if isinstance(report.longrepr, tuple) else ""


def is_permitted(reason: str) -> bool:
    """Whether tests/skips.toml permits a skip for this reason."""
    return any(pattern.fullmatch(reason) for pattern in _permitted())


def refuse_skip(report: Any) -> None:
    """Make a skip that tests/skips.toml does not permit a failure."""
    if report.skipped and not hasattr(report, "wasxfail") and not is_permitted(reason := reason_of(report)):
        report.outcome = "failed"
        report.longrepr = f"skipped, which {PERMITTED.name} does not permit: {reason}"


def packages_to_install(reports: Iterable[Any]) -> list[str]:
    """The Debian packages for want of which tests were skipped."""
    reasons = (_ABSENT.fullmatch(reason_of(report)) for report in reports)
    return sorted({package for match in reasons if match for package in match["packages"].split()})
