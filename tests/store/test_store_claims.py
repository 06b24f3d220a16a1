"""Claims: a claim expires, is void once its process has ended, and harms nobody if it cannot be withdrawn."""

import datetime
import os
import subprocess
import sys
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import psutil
import pytest

from support.waits import wait_until
from tvmflow.store import ReleaseStore, StoreConfig, claims
from tvmflow.store.objects import ObjectEntry

NEWEST = datetime.datetime(2026, 1, 1, 12, tzinfo=datetime.UTC)


def _listing(*ages: datetime.timedelta) -> Any:
    """Objects whose listing has a claim of each age."""
    entries = [ObjectEntry(f"claims/{number}", 0, NEWEST - age) for number, age in enumerate(ages)]
    return SimpleNamespace(list_objects=lambda prefix: iter(entries if prefix == "claims/" else []))


def test_a_claim_is_void_after_fifteen_minutes_by_the_servers_clock() -> None:
    minutes = datetime.timedelta(minutes=15)
    second = datetime.timedelta(seconds=1)
    listing = _listing(datetime.timedelta(), minutes - second, minutes, minutes + second)
    assert claims.list_claims(listing, "claims/") == ["claims/0", "claims/1"]
    assert claims.list_claims(listing, "other/") == []
    assert claims.list_claims(_listing(), "claims/") == []


def test_a_writer_tries_for_fifteen_seconds() -> None:
    assert claims.PATIENCE_SECONDS == 15


def test_a_process_is_described_by_machine_namespace_id_and_birth() -> None:
    words = claims.describe_process(os.getpid()).split()
    assert len(words) == 4
    assert words[2] == str(os.getpid())
    assert claims.describe_process(2**22 + 1) == ""


def test_the_birth_of_a_process_is_what_the_kernel_says() -> None:
    # Another process may get the same id, but not at the same time.
    ticks = int(claims.describe_process(os.getpid()).split()[3])
    process = psutil.Process()
    assert abs(psutil.boot_time() + ticks / os.sysconf("SC_CLK_TCK") - process.create_time()) < 1


def test_a_claim_is_abandoned_when_its_process_of_this_machine_has_ended() -> None:
    with subprocess.Popen([sys.executable, "-S", "-c", "input()"], stdin=subprocess.PIPE) as process:
        description = claims.describe_process(process.pid)
        claim = f"ann\n{description}\n".encode()
        assert not claims.is_abandoned(claim)
        process.communicate(b"\n")
    assert claims.is_abandoned(claim)
    machine, *rest = description.split()
    assert not claims.is_abandoned(f"ann\n{'0' * len(machine)} {' '.join(rest)}\n".encode())
    assert not claims.is_abandoned(f"ann\n{machine} pid:[0] {' '.join(rest[1:])}\n".encode())


def test_a_process_that_waits_to_be_reaped_has_ended() -> None:
    with subprocess.Popen([sys.executable, "-S", "-c", "input()"], stdin=subprocess.PIPE) as process:
        assert claims.describe_process(process.pid)
        assert process.stdin is not None
        process.stdin.close()
        wait_until(lambda: claims.describe_process(process.pid) == "", 30)


@pytest.mark.parametrize("text", ["", "ann", "ann\n", "ann\na b c", "ann\na b c d e"])
def test_a_claim_without_a_process_is_nobodys(text: str) -> None:
    assert not claims.is_abandoned(text.encode())


def test_the_id_of_another_processs_birth_is_abandoned() -> None:
    *words, birth = claims.describe_process(os.getpid()).split()
    assert claims.is_abandoned(f"ann\n{' '.join(words)} {int(birth) + 1}\n".encode())
    assert not claims.is_abandoned(f"ann\n{' '.join(words[:2])} {'1' * 11} {birth}\n".encode())
    assert claims.is_abandoned(f"ann\n{' '.join(words[:2])} {'1' * 10} {birth}\n".encode())


def test_claims_are_withdrawn_as_far_as_that_succeeds(moto_server: StoreConfig) -> None:
    objects = ReleaseStore(replace(moto_server, prefix="withdrawn")).objects
    claims.leave_claim(objects, "claims/a", b"x", "claiming")
    assert objects.get("claims/a") == b"x"
    claims.withdraw_claims(objects, ["claims/absent", "claims/a"])
    assert objects.get("claims/a") is None
    away = ReleaseStore(replace(moto_server, endpoint="http://127.0.0.1:1", attempts=1)).objects
    claims.withdraw_claims(away, ["claims/a"])
