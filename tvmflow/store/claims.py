"""Claims: short-lived objects that show writers to each other, on servers that ignore conditional writes.

A writer leaves a claim below a prefix that all rivals share, waits until every server shows it, and lists the prefix.
Listings are consistent: of two writers the one whose claim came later sees the other's. A writer that sees a rival
withdraws its claim and tries again after a random pause; a writer that sees none is alone. A claim that a crash left
behind is void after `LIFETIME`.
"""

import contextlib
import datetime
import os
import random
import time
from collections.abc import Collection
from pathlib import Path

from tvmflow.errors import StoreError
from tvmflow.store.objects import SETTLE_SECONDS, ObjectStore

PATIENCE_SECONDS = 15.0
"""How long a writer tries to be alone."""
LIFETIME = datetime.timedelta(minutes=15)
"""Far longer than the few small requests under a claim take: an older claim was left by a writer that died."""
_LONGEST_PID = 10


def leave_claim(objects: ObjectStore, claim: str, content: bytes, action: str) -> None:
    """Write an object as a claim and wait until every server on the same storage shows it.

    `action` completes "while ..." in the message. Raises StoreError.
    """
    objects.put(claim, content, action)
    time.sleep(SETTLE_SECONDS)


def list_claims(objects: ObjectStore, prefix: str) -> list[str]:
    """Return the keys of the claims below a prefix that are not void. Raises StoreError."""
    claims = {entry.key: entry.last_modified for entry in objects.list_objects(prefix)}
    # The age is the difference of two of the server's times, so that this machine's clock does not matter.
    newest = max(claims.values(), default=datetime.datetime.max)
    return [claim for claim, last_modified in claims.items() if newest - last_modified < LIFETIME]


def withdraw_claims(objects: ObjectStore, claims: Collection[str]) -> None:
    """Delete claims by their keys; a claim that cannot be deleted stays until it is void."""
    for claim in claims:
        # A claim that stays only makes others wait, and a publisher may lack the right to delete.
        with contextlib.suppress(StoreError):
            objects.delete(claim, "withdrawing a claim")


def pause_before_retry() -> None:
    """Wait for a random time, 0.05 to 0.5 seconds, so that two rivals do not meet again."""
    time.sleep(random.uniform(0.05, 0.5))  # noqa: S311 - not for secrets, only to part the rivals


def describe_process(pid: int) -> str:
    """Return a text that identifies one process of this machine for all time; empty when no process has the id."""
    try:
        machine = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        namespace = Path("/proc/self/ns/pid").readlink()
        state, *rest = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return ""
    return "" if state in "ZX" else f"{machine} {namespace} {pid} {rest[18]}"


def is_abandoned(claim: bytes) -> bool:
    """Whether the process that wrote a claim ran on this machine and has ended.

    `claim` is the content of the object; its last line describes the process. An empty or malformed claim, and a claim
    from another machine, is not abandoned.
    """
    _, _, claimant = claim.decode(errors="replace").strip().rpartition("\n")
    words, own_words = claimant.split(), describe_process(os.getpid()).split()
    if len(words) != 4 or words[:2] != own_words[:2]:
        return False
    pid = words[2]
    return pid.isdecimal() and len(pid) <= _LONGEST_PID and describe_process(int(pid)) != claimant
