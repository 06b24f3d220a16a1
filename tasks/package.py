"""Package: pack library, IR, weights, manifest and golden sample into one bundle."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from tasks.build import BuildResult
from tasks.export import ExportResult
from tasks.relax_import import ImportResult
from tasks.step import Step, StepRunner, TargetJob
from tasks.tune import TuneResult
from tvmflow import npz, samples
from tvmflow.arrays import NamedArrays
from tvmflow.bundle import Manifest, Variant, installed_versions, pack
from tvmflow.documents.figures import Algorithm
from tvmflow.hardware.target import Target, needed_features
from tvmflow.reach import code_digest
from tvmflow.spec import Dimension, Spec
from tvmflow.tuning.best_records import read_threads
from tvmflow.verification import ROUNDED
from tvmflow.workspace import Artifact, Record, StepResult, Workspace


class PackageJob(TargetJob):
    """The manifest, the build, and the samples, of which the one at the place `golden` becomes the golden sample.

    `undecided` has masks of that sample's outputs, as in the result of the export. `signer` is the public key that
    belongs to the signing key, or None.
    """

    manifest: Manifest
    build: BuildResult
    samples: Artifact
    undecided: Artifact
    golden: int
    signer: str | None

    def cache_key(self) -> Mapping[str, Any]:
        """Return the manifest, which names every other input by its digest, the build, and the signer."""
        build = self.build.model_dump(mode="json", exclude={"pass_timings", "inspected"})
        return {
            "manifest": self.manifest.to_json().decode(),
            "build": build,
            "signer": self.signer,
            "golden": self.golden,
            "undecided": self.undecided.sha256,
        }

    @classmethod
    def of(
        cls,
        spec: Spec,
        workspace: Workspace,
        exported: ExportResult,
        imported: ImportResult,
        tuned: TuneResult,
        build: BuildResult,
        target: Target,
        signer: str | None,
    ) -> "PackageJob":
        """Return the job that packages one target from the results of the steps before.

        The golden sample comes from the samples of `exported`. `signer` is the public key, in hexadecimal digits, that
        belongs to the signing key; None for a bundle without a signature.
        """
        threads = read_threads(workspace.path(tuned.records), target.threads)
        threads = min(threads, spec.build.threads or threads)
        manifest = Manifest(
            name=spec.name,
            target=target.name,
            tvm_target=target.tvm,
            arch=target.arch,
            cpu_features=needed_features(target, spec.build.precision),
            threads=threads,
            # The release file bounds them, or tuning found fewer faster; else all cores of the machine that runs it.
            max_threads=spec.build.threads or (threads if threads < target.threads else None),
            inputs=imported.inputs,
            outputs=imported.outputs,
            dimensions=limit_sizes(imported, exported.dimensions),
            weights=build.weights,
            variants=tuple(Variant(function, sizes) for function, sizes in sorted(build.variants.items())),
            versions=installed_versions(build.llvm),
            fresh_outputs=build.fresh_outputs,
            indices=exported.indices,
            labels=exported.labels,
            unaligned_inputs=target.arch != "cuda",
            provenance={
                "onnx": exported.onnx.sha256,
                "relax": imported.ir.sha256,
                "weights": imported.params.sha256,
                "records": tuned.records.sha256,
                "samples": exported.samples.sha256,
                "options": options(spec),
                "code": code_digest(__name__),
                # The numbers of the processor by which the compiler chose.
                **({} if target.profile is None else {"machine": target.profile.to_json()}),
                **({"activations": ROUNDED} if exported.rounds_activations else {}),
                # The modules of the user's operators, with their digests.
                **({"operators": json.dumps(imported.sources.portable)} if spec.model.operators else {}),
            },
        )
        return cls(
            manifest=manifest,
            build=build,
            samples=exported.samples,
            undecided=exported.undecided,
            golden=exported.golden,
            target=target,
            signer=signer,
        )


def limit_sizes(imported: ImportResult, ranges: Mapping[str, Dimension]) -> dict[str, tuple[int, int | None]]:
    """Return the smallest and the largest size of each symbolic dimension, by its name.

    The smallest size is the larger one of the limit in `ranges` and the model's own limit. The largest size is the
    limit in `ranges`; None means no limit.
    """
    names = sorted({dim for item in imported.inputs for dim in item.shape if isinstance(dim, str)})
    items = {name: ranges.get(name, Dimension()) for name in names}
    return {name: (max(item.min, imported.smallest.get(name, 1)), item.max) for name, item in items.items()}


class WeightsApart(Record):
    """A bundle without its weights, and the weights: the store keeps both, so that bundles can share their weights."""

    bundle: Artifact
    weights: Artifact


class PackageResult(StepResult):
    """The bundle, and the algorithms that its functions use, by name.

    `apart` is None for a bundle whose weights are inside its library.
    """

    bundle: Artifact
    apart: WeightsApart | None = None
    algorithms: dict[str, Algorithm]


def work(job: PackageJob, runner: StepRunner, key: Path | None) -> PackageResult:
    """Pack the bundle and sign it with the private key in the file `key`, if there is one.

    The same job gives the same bytes. Raises BundleError for a key that cannot be read.
    """
    workspace, build = runner.workspace, job.build
    with workspace.scratch() as folder:
        sample = folder / "sample.npz"
        pairs = samples.load(workspace.path(job.samples))
        _write_golden_sample(*pairs[job.golden], pairs[0][0], workspace.path(job.undecided), sample)
        files = {"mod.so": workspace.path(build.library), "mod.json": workspace.path(build.ir), "sample.npz": sample}
        if build.params is not None:
            files["mod.params"] = workspace.path(build.params)
        bundle = folder / f"{job.manifest.name}.tar.gz"
        pack(bundle, job.manifest, files, key=key)
        apart = None
        if build.params is not None:
            pack(folder / "without-weights.tar.gz", job.manifest, files, key=key, leave_weights_out=True)
            apart = WeightsApart(bundle=workspace.keep(folder / "without-weights.tar.gz"), weights=build.params)
        return PackageResult(
            bundle=workspace.keep(bundle),
            apart=apart,
            algorithms=build.algorithms,
        )


package = Step("package", PackageResult, work)


def options(spec: Spec) -> str:
    """Return the sections of a release file that decide a bundle's content, except the model, as one line of JSON."""
    sections = spec.model_dump(mode="json", include={"inputs", "dimensions", "outputs", "export", "build"})
    sections["validate"] = spec.validation.model_dump(mode="json", include={"samples", "seed"})
    sections["original"] = "onnx" if spec.model.onnx is not None else "other"
    if spec.model.operators:
        sections["operators"] = list(spec.model.operators)
    return json.dumps(sections, sort_keys=True)


def _write_golden_sample(
    inputs: NamedArrays, outputs: NamedArrays, typical: NamedArrays, masks: Path, path: Path
) -> None:
    """Write a sample, with the masks of its outputs, into `path` in the bundle's own form.

    Where the inputs `typical` of the first sample are others, they are added if they are not larger than the sample.
    """
    arrays = {f"input:{name}": array for name, array in inputs.items()}
    arrays.update({f"output:{name}": array for name, array in outputs.items()})
    if inputs is not typical and _bytes(typical) <= _bytes(arrays):
        arrays.update({f"typical:{name}": array for name, array in typical.items()})
    arrays.update({f"undecided:{name}": mask for name, mask in npz.read(masks).items()})
    with path.open("wb") as stream:
        np.savez(stream, **arrays)  # type: ignore[arg-type]


def _bytes(arrays: NamedArrays) -> int:
    return sum(array.nbytes for array in arrays.values())
