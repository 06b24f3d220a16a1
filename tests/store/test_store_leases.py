"""Leases: one holder at a time, freed by its end, by its death, or by its silence; who has lost one learns that."""

import json
import os
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

from support.waits import wait_until
from tvmflow.errors import StoreError
from tvmflow.store import ReleaseStore, StoreConfig, leases

KEY = "leases/resnet.json"


@pytest.fixture
def local_store(local: StoreConfig) -> ReleaseStore:
    return ReleaseStore(local)


def _read(store: ReleaseStore) -> dict[str, Any]:
    content = store.objects.get(KEY)
    assert content is not None
    return dict(json.loads(content))


def _plant(store: ReleaseStore, **changes: Any) -> None:
    """A lease that another machine holds."""
    lease = {
        "format": 1, "name": "resnet", "number": 7, "beat": 3, "holder": "carl@elsewhere",
        "process": "other-start pid:[1] 12 34", "seconds": 600.0, "is_held": True,
    }  # fmt: skip
    store.objects.put(KEY, json.dumps({**lease, **changes}).encode(), "planting a lease")


def test_a_lease_is_held_and_given_back_and_its_number_grows(store: ReleaseStore) -> None:
    for number in (1, 2):
        with leases.hold(store, "resnet", "ann@host") as lease:
            lease.require()
            assert (_read(store)["holder"], _read(store)["number"], _read(store)["is_held"]) == (
                "ann@host",
                number,
                True,
            )
        assert not _read(store)["is_held"]
    with pytest.raises(StoreError, match="has lost the lease on the releases of resnet"):
        lease.require()
    with leases.hold(store, "other", "ann@host"), leases.hold(store, "resnet", "ann@host"):
        pass


def test_holders_take_turns(store: ReleaseStore) -> None:
    inside: list[str] = []
    most = []

    def work(name: str) -> None:
        with leases.hold(store, "resnet", name):
            inside.append(name)
            most.append(len(inside))
            _read(store)
            inside.remove(name)

    with ThreadPoolExecutor(3) as pool:
        list(pool.map(work, "abc"))
    assert most == [1, 1, 1]


def test_the_lease_of_a_process_that_died_here_is_free_at_once(local_store: ReleaseStore) -> None:
    config = json.dumps(asdict(local_store.config), default=str)
    script = (
        "import json, os, signal, sys\n"
        "from pathlib import Path\n"
        "from tvmflow.store import ReleaseStore, StoreConfig, leases\n"
        "config = json.loads(sys.argv[1])\n"
        "store = ReleaseStore(StoreConfig(**{**config, 'folder': Path(config['folder'])}))\n"
        "with leases.hold(store, 'resnet', 'killed@host', 3600.0):\n"
        "    os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    assert subprocess.run([sys.executable, "-c", script, config], check=False).returncode < 0
    assert _read(local_store)["is_held"]
    with leases.hold(local_store, "resnet", "ann@host") as lease:
        lease.require()
        assert _read(local_store)["number"] == 2


def test_a_lease_that_nobody_renews_runs_out_and_its_holder_learns_it(local_store: ReleaseStore) -> None:
    _plant(local_store, seconds=0.2)
    with leases.hold(local_store, "resnet", "ann@host") as lease:
        assert _read(local_store)["number"] == 8
        _plant(local_store, number=9)
        with pytest.raises(StoreError, match="to carl@elsewhere"):
            lease.require()
    # What another holds by now is not given back.
    assert (_read(local_store)["number"], _read(local_store)["is_held"]) == (9, True)


def test_a_living_holder_renews_its_lease_and_is_waited_for(
    local_store: ReleaseStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(leases, "_RENEWALS", 3000)
    has_waited = threading.Event()
    with leases.hold(local_store, "resnet", "ann@host", 300.0) as lease, ThreadPoolExecutor(1) as pool:

        def wait() -> int:
            has_waited.set()
            with leases.hold(local_store, "resnet", "bert@host"):
                return int(_read(local_store)["number"])

        waiting = pool.submit(wait)
        has_waited.wait()
        wait_until(lambda: _read(local_store)["beat"] >= 3, 60)
        lease.require()
        assert not waiting.done()
        lease.end()
        assert waiting.result() == 2


@pytest.mark.parametrize("content", [b"", b"{", b"[]", b'{"format": 1}', b'{"format": "2"}'])
def test_a_damaged_lease_is_named(local_store: ReleaseStore, content: bytes) -> None:
    local_store.objects.put(KEY, content, "planting a lease")
    with (
        pytest.raises(StoreError, match=r"leases/resnet\.json is damaged .*: remove it when no"),
        leases.hold(local_store, "resnet", "ann"),
    ):
        pytest.fail("the body must not run")


@pytest.mark.parametrize("process", ["", "a b c", "a b c d e", "{start} pid:[0] 1 2", "{start} {space} x 2"])
def test_only_a_process_of_this_machine_is_known_to_live_or_to_have_died(process: str) -> None:
    start = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    space = Path("/proc/self/ns/pid").readlink()
    unknown, dead = process.format(start=start, space=space), f"{start} {space} {2**22 + 1} 1"
    assert (leases._is_dead(unknown), leases._is_living(unknown)) == (False, False)
    assert (leases._is_dead(dead), leases._is_living(dead)) == (True, False)


def test_a_process_is_told_by_its_birth_from_a_later_one_with_its_id() -> None:
    with subprocess.Popen([sys.executable, "-c", "import sys; sys.stdin.read()"], stdin=subprocess.PIPE) as child:
        own, later = (leases._describe_process(pid).split() for pid in (os.getpid(), child.pid))
    assert int(own[3]) < int(later[3])
    assert leases._is_living(" ".join(own))
    assert leases._is_dead(" ".join([*own[:3], later[3]]))
