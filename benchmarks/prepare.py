"""Exports models to ONNX and builds them, each in a child process, and caches the files."""

import contextlib
import hashlib
import io
import json
import shutil
import tempfile
import warnings
from collections.abc import Callable, Mapping
from dataclasses import replace
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
from catalogue import Model, find
from pydantic import Field

from tvmflow import samples
from tvmflow import spec as release_file
from tvmflow.arrays import Array
from tvmflow.bundle import WEIGHTS_IN_FILE, Manifest, installed_versions, pack, sha256_file
from tvmflow.errors import ExportError
from tvmflow.hardware.target import Precision, Target, resolve
from tvmflow.processes import children
from tvmflow.processes.children import Emit
from tvmflow.reach import code_digest
from tvmflow.source import Source, load_module
from tvmflow.workspace import Record

if TYPE_CHECKING:
    from tvmflow.compiler import CompiledModel

HERE = Path(__file__).parent
OPSET = 18
_TIMEOUT = 3600.0
_DIGITS = 16


class Completion(Record):
    """The empty result of a job of this module, which writes a file."""


class ExportJob(Record):
    """The job to export the factory's model with these example inputs, an `.npz`, to `output`.

    `free` are the axes of every input that get a symbolic size: by axis, the dimension's name and its largest size.
    """

    source: Source
    example: Path
    free: dict[int, tuple[str, int]]
    output: Path


class BuildJob(Record):
    """The job to build an ONNX file to a bundle at `output`, after `trials` of tuning.

    `shapes` are fixed shapes of inputs by name; an input without one keeps its free dimensions.
    """

    name: str
    onnx: Path
    sample: Path
    shapes: dict[str, tuple[int, ...]] = Field(default_factory=dict)
    target: Target
    trials: int = 0
    precision: Precision = "fp32"
    weights: Literal["inside", "apart"] = "inside"
    state: Path
    output: Path


def native(threads: int) -> Target:
    """Return this machine as a target with this many threads."""
    target = resolve("native")
    return replace(target, tvm={**target.tvm, "num-cores": threads})


def sample(model: Model, batch: int, state: Path) -> Path:
    """Write the inputs of the measurement as an `.npz` in `state`, and return its path."""
    return save(state / f"{model.name}-{batch}.npz", model.sample(batch))


def save(place: Path, arrays: Mapping[str, Array]) -> Path:
    """Write arrays to the `.npz` at `place` and return its path.

    An old file is replaced in one step, because another benchmark may be reading it.
    """
    with tempfile.NamedTemporaryFile(dir=place.parent, delete=False) as stream:
        np.savez(stream, **arrays)  # type: ignore[arg-type]
    return Path(stream.name).replace(place)


def file_and_sample(name: str, batch: int, state: Path) -> tuple[Path, Path]:
    """Return the ONNX file and the inputs, an `.npz`, of a model of the catalogue with this batch, or of an ONNX file.

    Raises InputError for an unknown name, and what `sample_for` raises.
    """
    if name.endswith(".onnx"):
        return Path(name), sample_for(Path(name), state)
    (model,) = find([name])
    return export(model, batch, state), sample(model, batch, state)


def sample_for(onnx: Path, state: Path, given: Mapping[str, int] | None = None) -> Path:
    """Write inputs of any ONNX file as an `.npz`, and return its path.

    Free dimensions have the `given` sizes, or sizes at which ONNX Runtime runs the model. Raises ExportError when
    `onnx` is missing or no ONNX file, when ONNX Runtime runs it at no size that is tried, and for a `given` size of
    another name.
    """
    from tvmflow.cli.sizes import find_inputs
    from tvmflow.onnx_model.reading import declared_inputs, read_onnx

    model = read_onnx(onnx)
    inputs, sizes = declared_inputs(model), {}
    if any(isinstance(size, str) for item in inputs for size in item.shape):
        inputs_and_ranges = find_inputs(onnx, model)
        if inputs_and_ranges is None:
            raise ExportError(f"ONNX Runtime runs {onnx} at none of the sizes that were tried; fix its free dimensions")
        inputs, ranges = inputs_and_ranges
        unknown = sorted((given or {}).keys() - ranges.keys())
        if unknown:
            raise ExportError(f"{onnx} has no free dimension {unknown[0]!r}; it has {', '.join(ranges) or 'none'}")
        sizes = {name: (given or {}).get(name, item.typical_size) for name, item in ranges.items()}
    return save(state / f"{onnx.stem}-sample.npz", samples.make_at_sizes(inputs, sizes, 0, onnx.parent))


def export(model: Model, batch: int, state: Path) -> Path:
    """Return the ONNX file of a model with a fixed batch and its free dimensions; it is exported once."""
    module = model.folder / f"{model.factory.partition(':')[0]}.py"
    key = [sha256_file(module), model.factory, dict(model.arguments), batch, OPSET, version("torch"), dict(model.free)]
    job = ExportJob(
        source=source(model),
        example=sample(model, batch, state),
        free=dict(model.free),
        output=_place(state, model, key, "onnx"),
    )
    return _once(job.output, lambda: _call("prepare:export_work", job, model, torch=True))


def source(model: Model) -> Source:
    """Return the model in the form that `tvmflow.source` loads."""
    section = release_file.Model(factory=model.factory, arguments=dict(model.arguments))
    return Source(kind="factory", model=section)


def build(
    name: str,
    onnx: Path,
    sample: Path,
    target: Target,
    state: Path,
    trials: int = 0,
    precision: Precision = "fp32",
    weights: Literal["inside", "apart"] = "inside",
) -> Path:
    """Return the bundle of an ONNX file for `target`, which must be this machine.

    It is built once for each version of the compiler's code; older bundles of the same `name` are removed. `weights`
    are those of `build.weights` in a release file.
    """
    key = [sha256_file(onnx), target.canonical, trials, precision, weights, code_digest("tasks.package")]
    job = BuildJob(
        name=name,
        onnx=onnx,
        sample=sample,
        target=target,
        trials=trials,
        precision=precision,
        weights=weights,
        state=state,
        output=state / f"{name}-{_digest(key)}.tar.gz",
    )
    bundle = _once(job.output, lambda: _call("prepare:build_work", job))
    for older in state.glob(f"{name}-{'?' * _DIGITS}.tar.gz"):
        if older != bundle:
            older.unlink(missing_ok=True)
    return bundle


def export_work(job: ExportJob, emit: Emit) -> Completion:
    """Export a model in a child process."""
    import torch

    torch.manual_seed(0)
    module = load_module(job.source)
    with np.load(job.example) as archive:
        inputs = {name: torch.from_numpy(archive[name]) for name in archive.files}
    free = {place: torch.export.Dim(name, min=2, max=most) for place, (name, most) in job.free.items()}
    with warnings.catch_warnings(), contextlib.redirect_stdout(io.StringIO()):
        warnings.simplefilter("ignore")
        partial = job.output.with_suffix(".partial")
        torch.onnx.export(
            module,
            tuple(inputs.values()),
            str(partial),
            input_names=list(inputs),
            dynamic_shapes=tuple(free for _ in inputs) if free else None,
            opset_version=OPSET,
            dynamo=True,
            optimize=True,
            external_data=False,
            verbose=False,
        )
    partial.replace(job.output)
    return Completion()


def build_work(job: BuildJob, emit: Emit) -> Completion:
    """Build and pack a bundle in a child process."""
    build_bundle(job)
    return Completion()


def build_bundle(job: BuildJob) -> "CompiledModel":
    """Tune for the trials of the job, build, and pack the bundle; return the build."""
    from tvm_ffi import get_global_func

    from tvmflow import compiler

    imported = compiler.import_onnx(job.onnx, job.shapes or None)
    tuned = _tuned(imported, job) if job.trials else None
    options = compiler.BuildOptions(precision=job.precision, weights=job.weights)
    model = compiler.build(imported, job.target, options, tuned)
    manifest = Manifest(
        name=job.name,
        target=job.target.name,
        tvm_target=job.target.tvm,
        arch=job.target.arch,
        cpu_features=job.target.features,
        threads=job.target.threads,
        inputs=imported.inputs,
        outputs=imported.outputs,
        dimensions={dim: (1, None) for item in imported.inputs for dim in item.shape if isinstance(dim, str)},
        weights=model.weights,
        fresh_outputs=model.fresh_outputs,
        versions=installed_versions(str(get_global_func("target.llvm_version_major")())),
    )
    with tempfile.TemporaryDirectory(dir=job.output.parent) as folder:
        files = {name: Path(folder) / name for name in ("mod.so", "mod.json", "sample.npz")}
        model.export(files["mod.so"])
        files["mod.json"].write_text(model.ir_json)
        shutil.copyfile(job.sample, files["sample.npz"])
        if model.weights in WEIGHTS_IN_FILE:
            files["mod.params"] = Path(folder) / "mod.params"
            compiler.save_params(model.params, files["mod.params"])
        pack(job.output, manifest, files)
    return model


def _tuned(imported: Any, job: BuildJob) -> Callable[[Any], Any]:
    from tvmflow import compiler, tuning
    from tvmflow.compiler.machine import machine
    from tvmflow.compiler.schedules import schedule

    lowered = compiler.lower(imported, job.target)
    tasks = [tuning.Task(item.name, item.func, item.calls) for item in compiler.workloads(lowered)]
    store = tuning.RecordStore(job.state / "records")
    cpu = machine(job.target)
    tuning.tune(
        tasks,
        job.target,
        tuning.Budget(trials=job.trials),
        store,
        baseline=lambda func: schedule(func, cpu)[0],
        threads=job.target.threads,
    )

    def best(func: Any) -> Any:
        record = store.best(func, job.target)
        return None if record is None else tuning.apply(record, func)

    return best


def _call(function: str, job: Any, model: Model | None = None, torch: bool = False) -> None:
    log = job.output.parent / f"{function.partition(':')[2]}.log"
    paths = (HERE, model.folder) if model else (HERE,)
    children.call(function, job, Completion, log=log, timeout=_TIMEOUT, paths=paths, torch=torch)


def _once(output: Path, make: Callable[[], None]) -> Path:
    if not output.is_file():
        make()
    return output


def _place(state: Path, model: Model, key: list[Any], suffix: str) -> Path:
    return state / f"{model.name}-{_digest(key)}.{suffix}"


def _digest(key: list[Any] | Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(key, sort_keys=True).encode()).hexdigest()[:_DIGITS]
