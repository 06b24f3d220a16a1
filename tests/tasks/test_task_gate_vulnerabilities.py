"""The gate on vulnerabilities of what a release's bundles need: found, not found, and not to be looked up."""

import json
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from support.mutants import ORIGINAL_FILE
from support.releases import describe_bundle, make_release
from tasks.gate import GateJob
from tasks.integrity import integrity_work
from tasks.step import StepRunner
from tvmflow.bundle import read_manifest, sha256_file
from tvmflow.documents.verdict import Check
from tvmflow.settings import Settings
from tvmflow.spec import Policy
from tvmflow.store import ReleaseStore, StoreConfig, channels
from tvmflow.workspace import Workspace

Judge = Callable[..., list[Check]]


@pytest.fixture
def judge(tmp_path: Path, workspace: Workspace) -> Judge:
    """The gate's checks of a release by `settings`, where a channel allows `most` vulnerabilities."""
    store = ReleaseStore(StoreConfig("releases", folder=tmp_path / "releases"))
    release = make_release("tiny", "1", describe_bundle(ORIGINAL_FILE))
    store.publish(release, [(ORIGINAL_FILE, sha256_file(ORIGINAL_FILE))])
    runner = StepRunner(workspace, "tiny", tmp_path, timeout=60)

    def judge(most: int | None, **settings: Any) -> list[Check]:
        policy = Policy.model_validate({"gates": {"max_vulnerabilities": most}})
        channels.set_policy(store, "tiny", "production", policy, who="ann", why="test")
        job = GateJob.of(store, channels.find(store, "tiny", "production"), "1", who="ann")
        result = integrity_work(job, runner, store, tmp_path / "cache", Settings(**settings))
        return [check for check in result.checks if check.name == "max_vulnerabilities"]

    return judge


def write_advisories(path: Path, *packages: str, before: str = "9999") -> Path:
    """A file with an advisory on each package in all versions before one."""
    events = [{"introduced": "0"}, {"fixed": before}]
    documents = [
        {
            "id": f"PYSEC-{package}",
            "modified": datetime.now(UTC).isoformat(),
            "affected": [
                {
                    "package": {"ecosystem": "PyPI", "name": package},
                    "ranges": [{"type": "ECOSYSTEM", "events": events}],
                }
            ],
        }
        for package in packages
    ]
    path.write_text(json.dumps(documents))
    return path


def test_a_channel_that_does_not_ask_looks_nothing_up(judge: Judge, tmp_path: Path) -> None:
    assert judge(None, advisories=tmp_path / "missing.json") == []


def test_a_package_with_a_vulnerability_is_named_and_does_not_pass(judge: Judge, tmp_path: Path) -> None:
    file = write_advisories(tmp_path / "osv.json", "numpy", "torch")
    (check,) = judge(0, advisories=file)
    assert (check.passed, check.value, check.bound) == (False, 1, 0)
    assert check.message.startswith(f"numpy {np.__version__} has PYSEC-numpy, by 2 advisories up to ")
    (check,) = judge(1, advisories=file)
    assert (check.passed, check.value, check.bound) == (True, 1, 1)


def test_a_release_whose_packages_have_none_passes(judge: Judge, tmp_path: Path) -> None:
    (check,) = judge(0, advisories=write_advisories(tmp_path / "osv.json", "numpy", before="0.1"))
    assert (check.passed, check.value) == (True, 0)


def test_tvm_counts_in_the_version_that_the_bundle_was_built_with(judge: Judge, tmp_path: Path) -> None:
    version = read_manifest(ORIGINAL_FILE).versions.tvm
    (check,) = judge(0, advisories=write_advisories(tmp_path / "osv.json", "apache-tvm"))
    assert check.message.startswith(f"apache-tvm {version} has PYSEC-apache-tvm")


def test_what_cannot_be_looked_up_does_not_pass(judge: Judge, tmp_path: Path) -> None:
    (tmp_path / "damaged.json").write_text("{")
    for settings, reason in [
        ({}, "set TVMFLOW_ADVISORIES"),
        ({"advisories": tmp_path / "missing.json"}, "missing.json"),
        ({"advisories": tmp_path / "damaged.json"}, "damaged.json"),
    ]:
        (check,) = judge(9, **settings)
        assert not check.passed
        assert check.message.startswith("gate max_vulnerabilities cannot be checked: ")
        assert reason in check.message
