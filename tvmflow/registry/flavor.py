"""The MLflow model flavor `tvm`: a model with one bundle per target; a host loads the bundle that it can run."""

import re
import shutil
import sys
import tempfile
from collections.abc import Mapping, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any, Literal, TypeAlias

import mlflow.pyfunc
import numpy as np
import yaml
from mlflow.environment_variables import MLFLOW_LOCK_MODEL_DEPENDENCIES
from mlflow.models import Model, ModelSignature
from mlflow.models.model import MLMODEL_FILE_NAME
from mlflow.models.utils import _save_example
from mlflow.tracking._model_registry import DEFAULT_AWAIT_MAX_SLEEP_SECONDS
from mlflow.tracking.artifact_utils import _download_artifact_from_uri
from mlflow.utils.environment import (
    _CONDA_ENV_FILE_NAME,
    _CONSTRAINTS_FILE_NAME,
    _PYTHON_ENV_FILE_NAME,
    _REQUIREMENTS_FILE_NAME,
    _mlflow_conda_env,
    _process_conda_env,
    _process_pip_requirements,
    _PythonEnv,
    _validate_env_arguments,
)
from mlflow.utils.model_utils import (
    _get_flavor_configuration,
    _validate_and_copy_code_paths,
    _validate_and_prepare_target_save_path,
)

import tvmflow
from tvmflow import npz
from tvmflow.arrays import Array
from tvmflow.bundle import Manifest, extract, missing_weights, read_manifest, sha256_file
from tvmflow.errors import BundleError, InputError
from tvmflow.registry.signature import model_signature
from tvmflow.runtime import CompiledModel, load
from tvmflow.runtime.selection import select_runnable

Bundles: TypeAlias = str | Path | Mapping[str, Path]

FLAVOR_NAME = "tvm"
_BUNDLES = "bundles"
# The keys of `mlflow.pyfunc.load_model(..., model_config=...)`.
_CONFIG = ("target", "threads", "spin")
# MLflow writes an example as text, twice, and reads it with every load: a batch of 32 images takes 250 MB and 10 s.
_EXAMPLE_VALUES = 1 << 18


def get_default_pip_requirements() -> list[str]:
    """Return the packages that a host needs to serve the model, as `NAME==VERSION` with the versions installed here."""
    return [
        f"tvmflow=={tvmflow.__version__}",
        *(f"{package}=={version(package)}" for package in ("apache-tvm", "apache-tvm-ffi", "numpy")),
    ]


def get_default_conda_env() -> dict[str, Any]:
    """Return the conda environment, as a dictionary, of a model that is saved without one."""
    env: dict[str, Any] = _mlflow_conda_env(additional_pip_deps=get_default_pip_requirements())
    return env


def save_model(
    bundles: Bundles,
    path: str | Path,
    conda_env: str | dict[str, Any] | None = None,
    code_paths: Sequence[str] | None = None,
    mlflow_model: Model | None = None,
    signature: ModelSignature | None = None,
    input_example: Mapping[str, Array] | Literal[False] | None = None,
    pip_requirements: Sequence[str] | str | None = None,
    extra_pip_requirements: Sequence[str] | str | None = None,
    metadata: dict[str, Any] | None = None,
) -> None:
    """Write an MLflow model of flavors `tvm` and `python_function` to the new or empty folder `path`.

    `bundles` is the path of one bundle, or a path for each target's name. By default, the `signature` is that of the
    bundles, and the `input_example` is the golden sample of the first one; False means no example, and an example of
    more than 262144 values in all is left out.

    `conda_env`, a dictionary or the path of a file, replaces the environment that `get_default_conda_env` returns.
    `pip_requirements`, a list or the path of a file, replaces the packages of `get_default_pip_requirements`, and
    `extra_pip_requirements` adds some; only one of the three may be given. `code_paths` are files and folders of Python
    code to copy into the model. `mlflow_model` is the description to complete, by default a new one, and `metadata`
    is kept in it.

    Raises BundleError when a file is no bundle or takes other inputs than the rest, or when two targets' names give the
    same file name; ValueError for more than one of the three environments, MlflowException for a folder with content.
    """
    _validate_env_arguments(conda_env, pip_requirements, extra_pip_requirements)
    folder = Path(path)
    _validate_and_prepare_target_save_path(str(folder))
    code = _validate_and_copy_code_paths(code_paths, str(folder))
    manifests, entries = _copy_bundles(_by_target(bundles), folder)

    model = Model() if mlflow_model is None else mlflow_model
    if signature is not None:
        model.signature = signature
    elif model.signature is None:
        model.signature = model_signature(manifests[0].inputs, manifests[0].outputs)
    if metadata is not None:
        model.metadata = metadata
    if input_example is None:
        input_example = _golden_inputs(folder / entries[0]["file"])
    if input_example and sum(np.size(array) for array in input_example.values()) <= _EXAMPLE_VALUES:
        _save_example(model, dict(input_example), str(folder))
    model.add_flavor(FLAVOR_NAME, tvm_version=version("apache-tvm"), bundles=entries, code=code)
    mlflow.pyfunc.add_to_model(
        model,
        loader_module=__name__,
        conda_env=_CONDA_ENV_FILE_NAME,
        python_env=_PYTHON_ENV_FILE_NAME,
        code=code,
        # MLflow accepts at loading only the keys that were named at saving.
        model_config=dict.fromkeys(_CONFIG),
    )
    model.model_size_bytes = sum(file.stat().st_size for file in folder.rglob("*") if file.is_file())
    model.save(folder / MLMODEL_FILE_NAME)
    _save_environment(folder, conda_env, pip_requirements, extra_pip_requirements)


def log_model(
    bundles: Bundles,
    name: str | None = None,
    *,
    conda_env: str | dict[str, Any] | None = None,
    code_paths: Sequence[str] | None = None,
    registered_model_name: str | None = None,
    signature: ModelSignature | None = None,
    input_example: Mapping[str, Array] | Literal[False] | None = None,
    await_registration_for: int | None = DEFAULT_AWAIT_MAX_SLEEP_SECONDS,
    pip_requirements: Sequence[str] | str | None = None,
    extra_pip_requirements: Sequence[str] | str | None = None,
    metadata: dict[str, Any] | None = None,
    run_id: str | None = None,
    params: Mapping[str, object] | None = None,
    tags: Mapping[str, object] | None = None,
    model_type: str | None = None,
    step: int = 0,
    model_id: str | None = None,
) -> Any:
    """Log bundles as a model of the active run, or of `run_id`, and return MLflow's `ModelInfo`.

    `bundles` is the path of one bundle, or a path for each target's name; `name` is the logged model's name. With
    `registered_model_name` the model becomes a version of that registered model; the call waits up to
    `await_registration_for` seconds for it, and with None not at all. By default, the `signature` is that of the
    bundles, and the `input_example` is the golden sample of the first one; False means no example.

    Only one of `conda_env` (a dictionary or the path of a file), `pip_requirements` and `extra_pip_requirements` (lists
    or paths of files) may be given: the first two replace what the flavor requires by default, the third adds to it.
    `code_paths` are files and folders of Python code to copy into the model, and `metadata` is kept in its description.
    MLflow keeps `params`, `tags` and `model_type` with the logged model; `step` is the run's step at which it is
    logged. `model_id` is the id of a logged model that exists, to which the files are added; with None there is a new
    one.

    Raises BundleError when a file is no bundle or takes other inputs than the rest, or when two targets' names give the
    same file name; ValueError for more than one of the three environments, MlflowException when MLflow fails.
    """
    return Model.log(
        artifact_path=None,
        name=name,
        flavor=sys.modules[__name__],
        flavor_name=FLAVOR_NAME,
        registered_model_name=registered_model_name,
        await_registration_for=await_registration_for,
        metadata=metadata,
        run_id=run_id,
        params=None if params is None else dict(params),
        tags=None if tags is None else dict(tags),
        model_type=model_type,
        step=step,
        model_id=model_id,
        bundles=bundles,
        conda_env=conda_env,
        code_paths=code_paths,
        signature=signature,
        input_example=input_example,
        pip_requirements=pip_requirements,
        extra_pip_requirements=extra_pip_requirements,
    )


def load_model(
    model_uri: str,
    dst_path: str | None = None,
    *,
    target: str | None = None,
    threads: int | None = None,
    spin: int | None = None,
) -> CompiledModel:
    """Load the bundle of a model for `target`, by default the best one that this host can run, after checking it.

    `model_uri` is a model URI of MLflow, `dst_path` a folder that keeps the download, None a temporary one. `threads`
    is the number of worker threads of a call, by default TVM_NUM_THREADS; without that variable, one for each physical
    core, at most the bundle's `max_threads`. `spin` is how many times an idle worker looks for work before it sleeps,
    by default TVM_THREAD_POOL_SPIN_COUNT, else 4000. Raises BundleError when no bundle runs here, or a file differs
    from the one that was logged; InputError for a number of threads below 1 or a spin below 0.
    """
    path = _download_artifact_from_uri(artifact_uri=model_uri, output_path=dst_path)
    return _load(path, target, threads, spin)[0]


def _by_target(bundles: Bundles) -> Mapping[str, Path]:
    if isinstance(bundles, str | Path):
        return {read_manifest(Path(bundles)).target: Path(bundles)}
    if not bundles:
        raise BundleError("a model needs at least one bundle; give one per target")
    return {target: Path(bundle) for target, bundle in bundles.items()}


def _copy_bundles(bundles: Mapping[str, Path], folder: Path) -> tuple[list[Manifest], list[dict[str, str]]]:
    (folder / _BUNDLES).mkdir()
    manifests: list[Manifest] = []
    entries: list[dict[str, str]] = []
    for target, bundle in bundles.items():
        manifest = read_manifest(bundle)
        if manifests and (manifest.inputs, manifest.outputs) != (manifests[0].inputs, manifests[0].outputs):
            raise BundleError(
                f"the bundles of {entries[0]['target']!r} and {target!r} have different inputs or outputs; "
                "give bundles of one model"
            )
        file = f"{_BUNDLES}/{_file_name(target)}.tar.gz"
        if (folder / file).exists():
            raise BundleError(f"two targets share the file name {file!r}; rename the target {target!r}")
        shutil.copyfile(bundle, folder / file)
        weights = missing_weights(bundle)
        if weights is not None:
            # A file beside the bundle, named by its digest; several bundles may share it.
            shutil.copyfile(bundle.with_name(weights.sha256), folder / _BUNDLES / weights.sha256)
        manifests.append(manifest)
        entries.append({"target": target, "arch": manifest.arch, "file": file, "sha256": sha256_file(folder / file)})
    return manifests, entries


def _golden_inputs(bundle: Path) -> dict[str, Array]:
    with tempfile.TemporaryDirectory(prefix="tvmflow-") as folder:
        extract(bundle, Path(folder))
        return npz.part(npz.read(Path(folder, "sample.npz")), "input:")


def _save_environment(
    folder: Path,
    conda_env: str | dict[str, Any] | None,
    pip_requirements: Sequence[str] | str | None,
    extra_pip_requirements: Sequence[str] | str | None,
) -> None:
    if conda_env is not None:
        conda, requirements, constraints = _process_conda_env(conda_env)
    elif pip_requirements is None and extra_pip_requirements is None and not MLFLOW_LOCK_MODEL_DEPENDENCIES.get():
        # MLflow would read all installed packages and compare them with these requirements, which come from them.
        requirements, constraints = [f"mlflow=={mlflow.__version__}", *get_default_pip_requirements()], []
        conda = _mlflow_conda_env(additional_pip_deps=requirements, install_mlflow=False)
    else:
        defaults = get_default_pip_requirements() if pip_requirements is None else None
        conda, requirements, constraints = _process_pip_requirements(
            defaults, _as_list(pip_requirements), _as_list(extra_pip_requirements)
        )
    (folder / _CONDA_ENV_FILE_NAME).write_text(yaml.safe_dump(conda, default_flow_style=False))
    (folder / _REQUIREMENTS_FILE_NAME).write_text("\n".join(requirements))
    if constraints:
        (folder / _CONSTRAINTS_FILE_NAME).write_text("\n".join(constraints))
    _PythonEnv.current().to_yaml(str(folder / _PYTHON_ENV_FILE_NAME))


def _as_list(requirements: Sequence[str] | str | None) -> list[str] | str | None:
    """Requirements as MLflow takes them: a list, or the path of a requirements file."""
    return requirements if requirements is None or isinstance(requirements, str) else list(requirements)


def _file_name(target: str) -> str:
    return re.sub(r"[^A-Za-z0-9._-]+", "-", target).strip("-.") or "target"


def _load_pyfunc(path: str, model_config: Mapping[str, Any] | None = None) -> "TvmModel":
    """Load the bundle that this host can run; `mlflow.pyfunc.load_model` calls this.

    Of several bundles it takes the most demanding: CUDA before CPU, more CPU features before fewer.
    `model_config={"target": NAME}` chooses another; its keys `threads` and `spin` are arguments of
    `tvmflow.runtime.load`. None means no configuration. Raises BundleError when no bundle runs here, or a file differs
    from the one that was logged.
    """
    config = model_config or {}
    unknown_keys = sorted(set(config) - set(_CONFIG))
    if unknown_keys:
        raise InputError(f"model_config has the unknown key {unknown_keys[0]!r}; its keys are {', '.join(_CONFIG)}")
    return TvmModel(*_load(path, *(config.get(key) for key in _CONFIG)))


def _load(path: str, target: str | None, threads: int | None, spin: int | None) -> tuple[CompiledModel, str]:
    """Load a model's bundle for the named target, else the best one for this host; return it and its target's name."""
    entries = _get_flavor_configuration(model_path=path, flavor_name=FLAVOR_NAME)["bundles"]
    if target is not None:
        targets = ", ".join(repr(entry["target"]) for entry in entries)
        entries = [entry for entry in entries if entry["target"] == target]
        if not entries:
            raise BundleError(f"the model has no bundle for the target {target!r}; it has {targets}")
    fitting, refusals = select_runnable((read_manifest(Path(path, entry["file"])), entry) for entry in entries)
    for entry in fitting:
        file = Path(path, entry["file"])
        if sha256_file(file) != entry["sha256"]:
            raise BundleError(f"{entry['file']} is not the file that was logged for {entry['target']!r}; log it again")
        try:
            return load(file, threads=threads, spin=spin), entry["target"]
        except BundleError as error:
            refusals.append(str(error))
    raise BundleError(f"no bundle of the model runs on this machine: {'; '.join(refusals) or 'it holds none'}")


class TvmModel:
    """A compiled model with the interface that `mlflow.pyfunc` calls; it takes and returns arrays by name."""

    def __init__(self, model: CompiledModel, target: str) -> None:
        self._model = model
        self.target = target

    def get_raw_model(self) -> CompiledModel:
        """Return the compiled model itself, which has methods that pyfunc lacks."""
        return self._model

    def predict(self, model_input: Any, params: Mapping[str, Any] | None = None) -> dict[str, Array] | Array:
        """Run the model once on arrays by name, on one array if it has one input, or on a pandas frame.

        Each column of a frame holds an input, one sample per row: numbers, or the sample's values in C order. If the
        model has one input and the frame has no column of its name, the rows of the frame are the samples. Returns the
        outputs by name, or the array alone when there is one output. `params` is ignored. Raises InputError for an
        input of the wrong name, shape or dtype.
        """
        outputs = self._model(**self._by_name(model_input))
        return next(iter(outputs.values())) if len(outputs) == 1 else outputs

    def _by_name(self, model_input: Any) -> dict[str, Any]:
        """The inputs by name, from any of the forms that `predict` takes."""
        if isinstance(model_input, Mapping):
            return {str(name): array for name, array in model_input.items()}
        names = [spec.name for spec in self._model.inputs]
        if not hasattr(model_input, "columns"):
            # An array, a tensor, nested lists.
            if len(names) != 1:
                raise InputError(
                    f"the model takes several inputs ({', '.join(names)}); pass a dictionary of arrays by name"
                )
            return {names[0]: model_input}
        if len(names) == 1 and names[0] not in model_input.columns:
            return {names[0]: self._rows(names[0], model_input.to_numpy(), len(model_input))}
        return {str(name): self._column(str(name), column) for name, column in model_input.items()}

    def _column(self, name: str, column: Any) -> Array:
        values = column.to_numpy()
        if values.dtype == object:
            try:
                values = np.stack([np.asarray(row) for row in values])
            except ValueError as error:
                raise InputError(f"column {name!r} has rows of different sizes ({error})") from error
        return self._rows(name, values, len(column))

    def _rows(self, name: str, values: Array, count: int) -> Array:
        """Values, a sample per row, in the dtype and shape of the input of that name."""
        for spec in self._model.inputs:
            sample = spec.shape[1:]
            if spec.name == name and all(isinstance(size, int) for size in sample):
                try:
                    return values.astype(spec.dtype, copy=False).reshape(count, *(int(size) for size in sample))
                except ValueError as error:
                    raise InputError(f"input {name!r}: rows of {list(sample)} are expected ({error})") from error
        return values
