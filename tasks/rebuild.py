"""Rebuild: a bundle made again from what its provenance names, and compared."""

import json
import shutil
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from tasks import build, export, package, relax_import, train
from tasks.choose import untuned
from tasks.step import Context
from tasks.train import TrainResult
from tasks.tune import TuneResult
from tvmflow import settings as machine
from tvmflow import spec as release_file
from tvmflow.bundle import Manifest, extract, installed_versions, sha256_file
from tvmflow.errors import BundleError, VerdictError
from tvmflow.spec import Spec
from tvmflow.target import Target, resolve
from tvmflow.workspace import Artifact, Outcome, Workspace, code_digest

# What the provenance names, in the order in which it is made: the first that differs is where the two went apart.
_MADE = {"onnx": "ONNX file", "relax": "Relax module", "weights": "weights", "samples": "samples"}
_SAMPLE = "sample.npz"
_FILES = ("mod.json", "mod.params", "mod.so", _SAMPLE)


def rebuild(bundle: Path, source: Path, trusted: Sequence[Path] | None = None) -> tuple[str, ...]:
    """Make a bundle again from its release file or its ONNX file, in an empty workspace, and compare.

    Weights that were trained and records that were tuned are taken from this machine's workspace, and their digests
    compared. From an ONNX file, the golden sample of a model that was no ONNX file remains the bundle's own. Returns
    what was made again and is the same. Raises VerdictError, naming what differs first, and BundleError when it cannot
    be made again here. `trusted` is as for `tvmflow.bundle.extract`.
    """
    settings = machine.load()
    known = Workspace(settings.state)
    with known.scratch() as scratch:
        for name in ("former", "again"):
            (scratch / name).mkdir()
        former = extract(bundle, scratch / "former", trusted=trusted)
        said = _said(bundle, former)
        spec = _spec(bundle, source, former, said)
        # A signature is over the manifest, which is compared.
        unsigned = settings.model_copy(update={"signing_key": None})
        context = Context(spec, unsigned, Workspace(scratch / "home"))
        exported = export.export.fn(context, _trained(context, known))
        imported = relax_import.relax_import.fn(context, exported)
        borrowed = spec.model.onnx is not None and said["original"] != "onnx"
        kept = {"samples", _SAMPLE} if borrowed else set()
        made = {
            "onnx": exported.result.onnx.sha256,
            "relax": imported.result.ir.sha256,
            "weights": imported.result.params.sha256,
            "samples": exported.result.samples.sha256,
        }
        for name, label in _MADE.items():
            if name not in kept:
                _compare(bundle, label, former.provenance.get(name, "unknown"), made[name])
        target = _target(former)
        tuned = _tuned(bundle, former, context.workspace, known)
        built = build.build.fn(context, imported, tuned, target)
        packaged = package.package.fn(context, exported, imported, tuned, built, target).result.bundle
        again = extract(context.file(packaged), scratch / "again", trusted=())
    files = [name for name in _FILES if name in former.files and name not in kept]
    for name in files:
        _compare(bundle, name, former.files[name].sha256, again.files[name].sha256)
    same = [*(label for name, label in _MADE.items() if name not in kept), *files]
    if not borrowed:
        _compare_manifests(bundle, former, again)
        same.append("manifest")
    return tuple(same)


def _said(bundle: Path, manifest: Manifest) -> dict[str, Any]:
    """What the bundle's release file said, from its provenance; the tools must be those that made it."""
    running, built = installed_versions(), manifest.versions
    for package_name, was, now in (
        ("tvmflow", built.tvmflow, running.tvmflow),
        ("apache-tvm", built.tvm, running.tvm),
        ("apache-tvm-ffi", built.tvm_ffi, running.tvm_ffi),
    ):
        if was != now:
            raise BundleError(
                f"bundle {str(bundle)!r} was built with {package_name} {was}, installed is {now}; "
                f"install {package_name} {was} to build it again"
            )
    try:
        said = json.loads(manifest.provenance["options"])
        code = manifest.provenance["code"]
        if not isinstance(said, dict):
            raise TypeError("not a mapping")
    except (KeyError, ValueError, TypeError) as error:
        raise BundleError(
            f"bundle {str(bundle)!r} does not say with which options it was built, as older ones do not; "
            f"compile it anew to have one that does"
        ) from error
    if code != code_digest():
        raise BundleError(
            f"bundle {str(bundle)!r} was built by other source code of tvmflow ({code[:16]}) than is installed "
            f"({code_digest()[:16]}); install that to build it again"
        )
    return said


def _spec(bundle: Path, source: Path, manifest: Manifest, said: dict[str, Any]) -> Spec:
    """The release file to build from, as given, or put together for an ONNX file from what the bundle says."""
    if source.suffix in (".yaml", ".yml"):
        spec = release_file.load(source)
        given = json.loads(package.options(spec))
        for section in sorted(said.keys() | given.keys()):
            if said.get(section) != given.get(section):
                raise VerdictError(
                    f"bundle {str(bundle)!r} was not built from {str(source)!r} as it is now: {section} differs"
                )
        return spec
    document = {name: value for name, value in said.items() if name != "original"}
    if said["original"] != "onnx":
        # Its sample stays the bundle's own: only the model's outputs are needed, whatever the inputs hold.
        document["inputs"] = [{**item, "samples": {"kind": "ones"}} for item in said["inputs"]]
    document |= {
        "name": manifest.name,
        "model": {"onnx": str(source.absolute())},
        "targets": [manifest.tvm_target],
    }
    return release_file.parse(document, source.absolute().parent, str(source))


def _target(manifest: Manifest) -> Target:
    """The target, as it was: `native` on another machine is another."""
    linker = resolve(manifest.tvm_target).cross_compiler
    return Target(manifest.target, manifest.tvm_target, manifest.arch, manifest.cpu_features, linker)


def _trained(context: Context, known: Workspace) -> Outcome[TrainResult] | None:
    """The trained weights: those of this machine's workspace if they are there, else trained again."""
    if context.spec.train is None:
        return None
    found = train.train.fn(Context(context.spec, context.settings, known))
    weights = found.result.weights
    copied = _copied(known.path(weights), context.workspace, weights.name)
    return Outcome(found.result.model_copy(update={"weights": copied}), found.status, found.seconds)


def _tuned(bundle: Path, manifest: Manifest, workspace: Workspace, known: Workspace) -> Outcome[TuneResult]:
    """The tuning records that the bundle was built with."""
    digest = manifest.provenance.get("records", "")
    path = known.path(Artifact(sha256=digest, size=0, name="records.jsonl"))
    nothing = untuned(workspace)
    if nothing.result.records.sha256 == digest:
        return nothing
    if not path.is_file() or sha256_file(path) != digest:
        raise BundleError(
            f"bundle {str(bundle)!r} was built with the tuning records {digest[:16]}, which are not in "
            f"{str(known.folder)!r}; build it again where it was tuned"
        )
    records = _copied(path, workspace, "records.jsonl")
    return replace(nothing, result=nothing.result.model_copy(update={"records": records}))


def _copied(path: Path, workspace: Workspace, name: str) -> Artifact:
    with workspace.scratch() as folder:
        return workspace.keep(Path(shutil.copyfile(path, folder / name)))


def _compare(bundle: Path, what: str, was: str, now: str) -> None:
    if was != now:
        raise VerdictError(
            f"bundle {str(bundle)!r} is not what its provenance gives: the first that differs is {what} "
            f"(SHA-256 {was[:16]} in the bundle, {now[:16]} when made again)"
        )


def _compare_manifests(bundle: Path, former: Manifest, again: Manifest) -> None:
    was, now = (json.loads(manifest.to_json()) for manifest in (former, again))
    for key in sorted(was.keys() | now.keys()):
        if was.get(key) != now.get(key):
            raise VerdictError(
                f"bundle {str(bundle)!r} is not what its provenance gives: its manifest says another {key!r}"
            )
