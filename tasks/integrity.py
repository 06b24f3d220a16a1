"""Integrity: whether a release is complete, and is signed and free of known vulnerabilities as its channel demands."""

from collections.abc import Iterator
from pathlib import Path

from tasks.gate import GateJob, GateResult
from tasks.step import Step, StepRunner
from tvmflow.advisories import Advisories, Vulnerability, list_packages
from tvmflow.bundle import extract, read_manifest
from tvmflow.bundle.signature import trusted_keys
from tvmflow.documents.verdict import Check
from tvmflow.errors import BundleError, SettingsError, StatementError
from tvmflow.settings import Settings
from tvmflow.store import ReleaseStore, channels
from tvmflow.store.channel_statements import check_statement
from tvmflow.store.resolve import TargetEntry, fetch_target


def integrity_work(
    job: GateJob, runner: StepRunner, store: ReleaseStore, cache: Path, settings: Settings
) -> GateResult:
    """Check that a release is complete, may come to this channel now, and is signed as the policy demands.

    The checks: every blob has the digest that the release names; the channel that the policy names in `after` has held
    the release; statements and bundles are signed; every bundle is one of the release's model; the packages that the
    bundles need have no more known vulnerabilities than the policy allows, by the advisories that `settings` name. Each
    fault gives a check that has not passed. `runner` reports the progress. Bundles are fetched into the folder `cache`.
    Raises StoreError when the store fails.
    """
    checks = [_digests(job, runner, store), *_order(job, store), *_statements(job, store)]
    if all(check.passed for check in checks):
        checks += _names(job, store, cache)
    if all(check.passed for check in checks):
        checks += _signatures(job, runner, store, cache)
    if all(check.passed for check in checks):
        checks += _vulnerabilities(job, store, cache, settings)
    return GateResult(checks=tuple(checks), compared=job.current_version)


# A complete release may be damaged later, and a vulnerability of what it needs be found: both are always checked.
integrity = Step("integrity", GateResult, integrity_work, cached=False)


def _digests(job: GateJob, runner: StepRunner, store: ReleaseStore) -> Check:
    runner.emit(0, 0, "reading")
    fault = store.find_fault(job.release)
    if fault is not None:
        return Check(name="whole", message=f"the release is not whole: {fault.rstrip('.')}", passed=False)
    return Check(name="whole", message="every blob is there and has the digest that the release says", passed=True)


def _order(job: GateJob, store: ReleaseStore) -> Iterator[Check]:
    """Check that the channel that the policy names in `after` has held the release."""
    before = job.policy.policy.after
    if before is None:
        return
    try:
        passed = channels.find_checked(store, job.name, before).has_held(job.version)
        message = f"{before} has {'' if passed else 'never '}held it" + ("" if passed else ": promote it there first")
    except StatementError as error:
        passed, message = False, str(error).rstrip(".")
    yield Check(name="after", message=message, passed=passed)


def _statements(job: GateJob, store: ReleaseStore) -> Iterator[Check]:
    """Check, where this machine trusts keys, that one has signed the statements on the channel and on both releases."""
    keys = trusted_keys()
    if store.config.signing_key is None and (keys or job.destination.statement is not None):
        message = f"what {job.channel} holds is signed, and this machine has no key for it: set TVMFLOW_SIGNING_KEY"
        yield Check(name="statement", message=message, passed=False)
    if not keys:
        return
    try:
        check_statement(store, job.destination, keys)
    except StatementError as error:
        yield Check(name="statement", message=str(error).rstrip("."), passed=False)
    for release in (job.release, job.current):
        if release is None:
            continue
        version = release.version
        try:
            signed = store.get_release(job.name, version, trusted=keys)
        except StatementError as error:
            yield Check(name="statement", message=str(error).rstrip("."), passed=False)
        else:
            message = f"a trusted key has signed the statement on {job.name} {version}"
            if signed != release:
                message = f"{job.name} {version} has changed since it was read: promote it again"
            yield Check(name="statement", message=message, passed=signed == release)


def _names(job: GateJob, store: ReleaseStore, cache: Path) -> Iterator[Check]:
    """Check that every bundle is one of the release's model."""
    try:
        for entry in TargetEntry.read_all(job.release):
            fetch_target(store, entry, cache)
    except BundleError as error:
        yield Check(name="name", message=str(error), passed=False)
    else:
        yield Check(name="name", message=f"every bundle is one of {job.name}", passed=True)


def _signatures(job: GateJob, runner: StepRunner, store: ReleaseStore, cache: Path) -> Iterator[Check]:
    """Check that a trusted key has signed every bundle, where the channel or this machine requires it."""
    keys = trusted_keys()
    if job.policy.policy.signature != "required" and not keys:
        return
    if not keys:
        message = f"{job.channel} takes signed releases only and no key is trusted here: set TVMFLOW_TRUSTED_KEYS"
        yield Check(name="signature", message=message, passed=False)
        return
    for entry in TargetEntry.read_all(job.release):
        target = f"target {entry.target!r}"
        try:
            with runner.workspace.scratch() as folder:
                extract(fetch_target(store, entry, cache), folder, trusted=keys)
        except BundleError as error:
            yield Check(name="signature", message=f"{target}: {error}", passed=False)
        else:
            yield Check(name="signature", message=f"{target} is signed with a trusted key", passed=True)


def _vulnerabilities(job: GateJob, store: ReleaseStore, cache: Path, settings: Settings) -> Iterator[Check]:
    """Look up the packages that the bundles need at run time in the advisories of this machine.

    TVM, tvm-ffi and tvmflow count in the versions that each bundle was built with, the others as they are installed.
    """
    name, bound = "max_vulnerabilities", job.policy.policy.gates.max_vulnerabilities
    if bound is None:
        return
    try:
        if settings.advisories is None:
            raise SettingsError("this machine has no advisories: set TVMFLOW_ADVISORIES")
        advisories = Advisories.read(settings.advisories, settings.advisories_days)
    except SettingsError as error:
        message = f"gate {name} cannot be checked: {error}"
        yield Check(name=name, message=message, passed=False, bound=bound)
        return
    packages: dict[str, str] = {}
    vulnerabilities: set[Vulnerability] = set()
    for entry in TargetEntry.read_all(job.release):
        versions = read_manifest(fetch_target(store, entry, cache)).versions
        packages = list_packages() | {
            "tvmflow": versions.tvmflow,
            "apache-tvm": versions.tvm,
            "apache-tvm-ffi": versions.tvm_ffi,
        }
        vulnerabilities.update(advisories.find(packages))
    what = (
        "; ".join(map(str, sorted(vulnerabilities))) or f"the {len(packages)} packages that it needs have no known one"
    )
    message = (
        f"{what}, by {len(advisories.entries)} advisories up to {advisories.newest:%Y-%m-%d}, "
        f"gate {name} allows {bound}"
    )
    yield Check(
        name=name, message=message, passed=len(vulnerabilities) <= bound, value=len(vulnerabilities), bound=bound
    )
