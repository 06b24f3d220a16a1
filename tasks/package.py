"""Package: library, IR, weights, manifest and golden sample in one bundle, loaded from then on as a device would."""

import json
from pathlib import Path

import numpy as np

from tasks.build import Algorithm, BuildResult
from tasks.export import ExportResult
from tasks.relax_import import ImportResult
from tasks.step import Context, step
from tasks.tune import TuneResult
from tvmflow import samples
from tvmflow.bundle import Manifest, Variant, installed_versions, pack, public_key
from tvmflow.spec import Spec
from tvmflow.target import Target, needed_features
from tvmflow.tuning.best_records import read_threads
from tvmflow.workspace import Artifact, Outcome, Record, StepResult, code_digest, run_step


class Apart(Record):
    """The same bundle without its weights, and the weights: what a release keeps, so that bundles share them."""

    bundle: Artifact
    weights: Artifact


class PackageResult(StepResult):
    """The bundle, its size unpacked, in bytes, and what it computes by Algorithm's algorithm."""

    bundle: Artifact
    apart: Apart | None = None
    unpacked: int
    algorithms: dict[str, Algorithm]


@step
def package(
    context: Context,
    exported: Outcome[ExportResult],
    imported: Outcome[ImportResult],
    tuned: Outcome[TuneResult],
    built: Outcome[BuildResult],
    target: Target,
) -> Outcome[PackageResult]:
    """Pack the bundle of one target, signed where the settings name a key; the same inputs give the same bytes."""
    spec, made, key = context.spec, built.result, context.settings.signing_key
    manifest = Manifest(
        name=spec.name,
        target=target.name,
        tvm_target=target.tvm,
        arch=target.arch,
        cpu_features=needed_features(target, spec.build.precision),
        threads=read_threads(context.file(tuned.result.records), target.threads),
        inputs=imported.result.inputs,
        outputs=imported.result.outputs,
        dimensions={
            name: (spec.dimension(name).min, spec.dimension(name).max)
            for name in sorted({dim for item in imported.result.inputs for dim in item.shape if isinstance(dim, str)})
        },
        weights=spec.build.weights,
        variants=tuple(Variant(function, sizes) for function, sizes in sorted(made.variants.items())),
        versions=installed_versions(made.llvm),
        provenance={
            "onnx": exported.result.onnx.sha256,
            "relax": imported.result.ir.sha256,
            "weights": imported.result.params.sha256,
            "records": tuned.result.records.sha256,
            "samples": exported.result.samples.sha256,
            "options": options(spec),
            "code": code_digest(),
        },
    )

    def work() -> PackageResult:
        with context.workspace.scratch() as folder:
            sample = folder / "sample.npz"
            _golden_sample(context.file(exported.result.samples), sample)
            files = {"mod.so": context.file(made.library), "mod.json": context.file(made.ir), "sample.npz": sample}
            if made.params is not None:
                files["mod.params"] = context.file(made.params)
            bundle = folder / f"{spec.name}.tar.gz"
            complete = pack(bundle, manifest, files, key=key)
            apart = None
            if made.params is not None:
                pack(folder / "without-weights.tar.gz", manifest, files, key=key, leave_weights_out=True)
                apart = Apart(bundle=context.workspace.keep(folder / "without-weights.tar.gz"), weights=made.params)
            unpacked = sum(entry.size for entry in complete.files.values())
            return PackageResult(
                bundle=context.workspace.keep(bundle), apart=apart, unpacked=unpacked, algorithms=made.algorithms
            )

    library = made.model_dump(mode="json", exclude={"pass_timings", "inspected"})
    signer = None if key is None else public_key(key)
    reads = {"manifest": manifest.to_json().decode(), "build": library, "signer": signer}
    return run_step(context.workspace, "package", reads, PackageResult, work, target=target.name)


def options(spec: Spec) -> str:
    """What a release file says that decides a bundle's content beside the model itself, as one line of JSON."""
    sections = {"inputs", "dimensions", "outputs", "export", "build"}
    said = spec.model_dump(mode="json", include=sections)
    said["validate"] = spec.validation.model_dump(mode="json", include={"samples", "seed"})
    said["original"] = "onnx" if spec.model.onnx is not None else "other"
    return json.dumps(said, sort_keys=True)


def _golden_sample(kept: Path, path: Path) -> None:
    inputs, outputs = samples.load(kept)[0]
    named = {f"input:{name}": array for name, array in inputs.items()}
    named.update({f"output:{name}": array for name, array in outputs.items()})
    with path.open("wb") as stream:
        np.savez(stream, **named)  # type: ignore[arg-type]
