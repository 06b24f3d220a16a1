"""Rebuild: make a bundle again from the inputs that its provenance names, and compare the two."""

import json
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tasks.build import BuildJob, build
from tasks.export import ExportJob, export
from tasks.original import find_original
from tasks.package import PackageJob, options, package
from tasks.relax_import import ImportJob, relax_import
from tasks.step import StepRunner
from tasks.train import TrainJob, train
from tasks.tune import TuneResult, skip_tuning
from tvmflow import spec as release_file
from tvmflow.bundle import Manifest, extract, installed_versions, sha256_file
from tvmflow.errors import BundleError, VerdictError
from tvmflow.hardware.profiles import Profile
from tvmflow.hardware.target import Target, resolve
from tvmflow.settings import Settings
from tvmflow.spec import Spec
from tvmflow.workspace import Artifact, Workspace

# The keys of the provenance in the order in which their artifacts are made: the first that differs is the cause.
_LABELS = {"onnx": "ONNX file", "relax": "Relax module", "weights": "weights", "samples": "samples"}
_SAMPLE = "sample.npz"
_FILES = ("mod.json", "mod.params", "mod.so", _SAMPLE)


def rebuild(bundle: Path, source: Path, trusted: Sequence[Path] | None = None) -> tuple[str, ...]:
    """Make a bundle again from its release file or its ONNX file, in a new, empty workspace, and compare the two.

    A `source` whose name ends in .yaml or .yml is a release file. Trained weights and tuning records alone are taken
    from this machine's own workspace, and their digests must be those of the bundle's provenance. If that workspace
    lacks the weights, the model is trained again, and the weights are kept there. If `source` is an ONNX file but the
    original was not, the golden sample and the manifest are not compared. `trusted` are files with public keys, of
    which one must have signed the bundle; None means the files that TVMFLOW_TRUSTED_KEYS names. Without such files,
    signatures are not checked. Returns the names of the parts that are the same. Raises VerdictError, which names the
    first part that differs. Raises BundleError for a damaged bundle, when no trusted key has signed the bundle, and
    when it cannot be made again here: with other versions or code of tvmflow, or without its tuning records. Raises
    SpecError for a release file that is not valid, and SettingsError for one that names a model of MLflow. Raises
    StepError or another error of a step when a step fails.
    """
    settings = Settings.load()
    workspace = Workspace(settings.state)
    with workspace.scratch() as scratch:
        for name in ("first", "second"):
            (scratch / name).mkdir()
        first = extract(bundle, scratch / "first", trusted=trusted)
        sections = _sections(bundle, first)
        spec = _spec(bundle, source, first, sections)
        runner = StepRunner.of(spec, settings, Workspace(scratch / "home", log_folder=workspace.log_folder))
        original = find_original(spec, runner.workspace, _trained_weights(spec, settings, workspace, runner))
        exported = export(runner, ExportJob.of(spec, original)).result
        imported = relax_import(runner, ImportJob.of(spec, exported)).result
        is_own_sample = spec.model.onnx is not None and sections["original"] != "onnx"
        skipped = {"samples", _SAMPLE} if is_own_sample else set()
        digests = {
            "onnx": exported.onnx.sha256,
            "relax": imported.ir.sha256,
            "weights": imported.params.sha256,
            "samples": exported.samples.sha256,
        }
        if first.provenance.get("onnx") != digests["onnx"] and not exported.is_repeatable:
            raise VerdictError(
                f"bundle {str(bundle)!r} cannot be rebuilt: the model's weights differ between two calls of its "
                f"factory {spec.model.factory!r}; seed it there, and release the model again"
            )
        for name, label in _LABELS.items():
            if name not in skipped:
                _compare(bundle, label, first.provenance.get(name, "unknown"), digests[name])
        target = _target(first)
        tuned = _copy_records(bundle, first, runner.workspace, workspace)
        build_result = build(runner, BuildJob.of(spec, imported, tuned, target)).result
        # A signature is over the manifest, which is compared: the second bundle needs none.
        job = PackageJob.of(spec, runner.workspace, exported, imported, tuned, build_result, target, signer=None)
        packaged = package(runner, job, None).result.bundle
        second = extract(runner.workspace.path(packaged), scratch / "second", trusted=())
    files = [name for name in _FILES if name in first.files and name not in skipped]
    for name in files:
        _compare(bundle, name, first.files[name].sha256, second.files[name].sha256)
    same = [*(label for name, label in _LABELS.items() if name not in skipped), *files]
    if not is_own_sample:
        _compare_manifests(bundle, first, second)
        same.append("manifest")
    return tuple(same)


def _sections(bundle: Path, manifest: Manifest) -> dict[str, Any]:
    """Return the sections of the release file in the bundle's provenance.

    Raises BundleError when there are none, or when the bundle was made with other versions or other code than is
    installed.
    """
    own_versions, bundle_versions = installed_versions(), manifest.versions
    for name, built_with, current in (
        ("tvmflow", bundle_versions.tvmflow, own_versions.tvmflow),
        ("apache-tvm", bundle_versions.tvm, own_versions.tvm),
        ("apache-tvm-ffi", bundle_versions.tvm_ffi, own_versions.tvm_ffi),
    ):
        if built_with != current:
            raise BundleError(
                f"bundle {str(bundle)!r} was built with {name} {built_with}, installed is {current}; "
                f"install {name} {built_with} to build it again"
            )
    try:
        sections = json.loads(manifest.provenance["options"])
        code = manifest.provenance["code"]
        if not isinstance(sections, dict):
            raise TypeError("not a mapping")
    except (KeyError, ValueError, TypeError) as error:
        raise BundleError(
            f"bundle {str(bundle)!r} does not say with which options it was built, as older ones do not; "
            f"compile it anew to have one that does"
        ) from error
    if code != package.code:
        raise BundleError(
            f"bundle {str(bundle)!r} was built by other source code of tvmflow ({code[:16]}) than is installed "
            f"({package.code[:16]}); install that to build it again"
        )
    return sections


def _spec(bundle: Path, source: Path, manifest: Manifest, sections: dict[str, Any]) -> Spec:
    """Return the release file `source`; for an ONNX file, a release file with the sections of the bundle's provenance.

    Raises VerdictError for a release file whose sections differ from those that the bundle was built from.
    """
    if source.suffix in (".yaml", ".yml"):
        spec = release_file.load(source)
        current = json.loads(options(spec))
        for section in sorted(sections.keys() | current.keys()):
            if sections.get(section) != current.get(section):
                raise VerdictError(
                    f"bundle {str(bundle)!r} was not built from {str(source)!r} as it is now: {section} differs"
                )
        return spec
    document = {name: value for name, value in sections.items() if name not in ("original", "operators")}
    if sections["original"] != "onnx":
        # The bundle keeps its own golden sample, so that any inputs will do.
        document["inputs"] = [{**item, "samples": {"kind": "ones"}} for item in sections["inputs"]]
    document |= {
        "name": manifest.name,
        "model": {"onnx": str(source.absolute()), "operators": sections.get("operators", [])},
        "targets": [manifest.tvm_target],
    }
    return release_file.parse(document, source.absolute().parent, str(source))


def _target(manifest: Manifest) -> Target:
    """Return the target from the bundle's manifest; the name `native` would mean another target on another machine."""
    linker = resolve(manifest.tvm_target).cross_compiler
    text = manifest.provenance.get("machine")
    profile = None if text is None else Profile.from_json(text)
    return Target(manifest.target, manifest.tvm_target, manifest.arch, manifest.cpu_features, linker, profile)


def _trained_weights(spec: Spec, settings: Settings, workspace: Workspace, runner: StepRunner) -> Artifact | None:
    """Return the trained weights from this machine's workspace; train the model again where it lacks them."""
    if spec.train is None:
        return None
    weights = train(StepRunner.of(spec, settings, workspace), TrainJob.of(spec)).result.weights
    return _keep_copy(workspace.path(weights), runner.workspace, weights.name)


def _copy_records(bundle: Path, manifest: Manifest, workspace: Workspace, source: Workspace) -> TuneResult:
    """Return the tuning records that the bundle was built with, copied from the workspace `source`.

    Raises BundleError when that workspace lacks them.
    """
    digest = manifest.provenance.get("records", "")
    path = source.path(Artifact(sha256=digest, size=0, name="records.jsonl"))
    nothing = skip_tuning(workspace)
    if nothing.records.sha256 == digest:
        return nothing
    if not path.is_file() or sha256_file(path) != digest:
        raise BundleError(
            f"bundle {str(bundle)!r} was built with the tuning records {digest[:16]}, which are not in "
            f"{str(source.folder)!r}; build it again where it was tuned"
        )
    return nothing.model_copy(update={"records": _keep_copy(path, workspace, "records.jsonl")})


def _keep_copy(path: Path, workspace: Workspace, name: str) -> Artifact:
    with workspace.scratch() as folder:
        return workspace.keep(Path(shutil.copyfile(path, folder / name)))


def _compare(bundle: Path, part: str, first: str, second: str) -> None:
    if first != second:
        raise VerdictError(
            f"bundle {str(bundle)!r} is not what its provenance gives: the first that differs is {part} "
            f"(SHA-256 {first[:16]} in the bundle, {second[:16]} when made again)"
        )


def _compare_manifests(bundle: Path, first: Manifest, second: Manifest) -> None:
    one, other = (json.loads(manifest.to_json()) for manifest in (first, second))
    for key in sorted(one.keys() | other.keys()):
        if one.get(key) != other.get(key):
            raise VerdictError(
                f"bundle {str(bundle)!r} is not what its provenance gives: its manifest says another {key!r}"
            )
