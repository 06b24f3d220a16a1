"""The MLflow model flavor `tvm`: one model, a bundle per target, loaded as the one that the serving host can run."""

import re
import shutil
from collections.abc import Mapping, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

import mlflow.pyfunc
import numpy as np
import numpy.typing as npt
import yaml
from mlflow.models import Model, ModelSignature
from mlflow.models.model import MLMODEL_FILE_NAME
from mlflow.models.utils import _save_example
from mlflow.utils.environment import (
    _CONDA_ENV_FILE_NAME,
    _CONSTRAINTS_FILE_NAME,
    _PYTHON_ENV_FILE_NAME,
    _REQUIREMENTS_FILE_NAME,
    _process_pip_requirements,
    _PythonEnv,
)
from mlflow.utils.model_utils import _get_flavor_configuration, _validate_and_prepare_target_save_path

import tvmflow
from tvmflow.bundle import Manifest, read_manifest, sha256_file
from tvmflow.errors import BundleError, InputError
from tvmflow.runtime import CompiledModel, load

Array = npt.NDArray[Any]

FLAVOR_NAME = "tvm"
_BUNDLES = "bundles"
# MLflow writes an example as text, twice, and reads it with every load: a batch of 32 images takes 250 MB and 10 s.
_EXAMPLE_VALUES = 1 << 18


def get_default_pip_requirements() -> list[str]:
    """What a host needs to serve the model, in the versions that run here."""
    return [
        f"tvmflow=={tvmflow.__version__}",
        *(f"{package}=={version(package)}" for package in ("apache-tvm", "apache-tvm-ffi", "numpy")),
    ]


def save_model(
    path: str | Path,
    bundles: Mapping[str, Path],
    signature: ModelSignature | None = None,
    input_example: Mapping[str, Array] | None = None,
    pip_requirements: Sequence[str] | None = None,
    metadata: dict[str, Any] | None = None,
    mlflow_model: Model | None = None,
) -> None:
    """Write an MLflow model of flavors `tvm` and `python_function` to the new or empty folder `path`.

    `bundles` holds one bundle by target name. `pip_requirements` replaces the default ones. An `input_example` of
    more than 262144 values in all is left out. Raises BundleError when one of the files is no bundle, or two targets'
    names differ in nothing that a file name may hold.
    """
    folder = Path(path)
    _validate_and_prepare_target_save_path(str(folder))
    (folder / _BUNDLES).mkdir()
    entries: list[dict[str, str]] = []
    for target, bundle in bundles.items():
        manifest = read_manifest(bundle)
        file = f"{_BUNDLES}/{_file_name(target)}.tar.gz"
        if (folder / file).exists():
            raise BundleError(f"two targets share the file name {file!r}; rename the target {target!r}")
        shutil.copyfile(bundle, folder / file)
        entries.append({"target": target, "arch": manifest.arch, "file": file, "sha256": sha256_file(folder / file)})

    model = Model() if mlflow_model is None else mlflow_model
    if signature is not None:
        model.signature = signature
    if metadata is not None:
        model.metadata = metadata
    if input_example is not None and sum(array.size for array in input_example.values()) <= _EXAMPLE_VALUES:
        _save_example(model, dict(input_example), str(folder))
    model.add_flavor(FLAVOR_NAME, tvm_version=version("apache-tvm"), bundles=entries)
    mlflow.pyfunc.add_to_model(
        model, loader_module=__name__, conda_env=_CONDA_ENV_FILE_NAME, python_env=_PYTHON_ENV_FILE_NAME
    )
    model.model_size_bytes = sum(file.stat().st_size for file in folder.rglob("*") if file.is_file())
    model.save(folder / MLMODEL_FILE_NAME)
    _save_environment(folder, pip_requirements)


def _save_environment(folder: Path, pip_requirements: Sequence[str] | None) -> None:
    given = None if pip_requirements is None else list(pip_requirements)
    conda, requirements, constraints = _process_pip_requirements(get_default_pip_requirements(), given)
    (folder / _CONDA_ENV_FILE_NAME).write_text(yaml.safe_dump(conda, default_flow_style=False))
    (folder / _REQUIREMENTS_FILE_NAME).write_text("\n".join(requirements))
    if constraints:
        (folder / _CONSTRAINTS_FILE_NAME).write_text("\n".join(constraints))
    _PythonEnv.current().to_yaml(str(folder / _PYTHON_ENV_FILE_NAME))


def _file_name(target: str) -> str:
    return re.sub(r"[^A-Za-z0-9._-]+", "-", target).strip("-.") or "target"


def _load_pyfunc(path: str, model_config: Mapping[str, Any] | None = None) -> "TvmModel":
    """Load the bundle that this host can run; called by `mlflow.pyfunc.load_model`.

    Of several the one that asks most of the host: CUDA before CPU, more CPU features before fewer.
    `model_config={"target": NAME}` takes that one. Raises BundleError when no bundle runs here, or the one chosen is
    not the file that was logged.
    """
    entries = _get_flavor_configuration(model_path=path, flavor_name=FLAVOR_NAME)["bundles"]
    wanted = (model_config or {}).get("target")
    if wanted is not None:
        entries = [entry for entry in entries if entry["target"] == wanted]
        if not entries:
            raise BundleError(f"the model has no bundle for the target {wanted!r}; leave the target out")
    refusals: list[str] = []
    candidates: list[tuple[Manifest, dict[str, str]]] = []
    for entry in entries:
        manifest = read_manifest(Path(path, entry["file"]))
        try:
            manifest.check_host()
        except BundleError as error:
            refusals.append(str(error))
        else:
            candidates.append((manifest, entry))
    candidates.sort(key=lambda item: (item[0].arch == "cuda", len(item[0].cpu_features)), reverse=True)
    for _, entry in candidates:
        file = Path(path, entry["file"])
        if sha256_file(file) != entry["sha256"]:
            raise BundleError(f"{entry['file']} is not the file that was logged for {entry['target']!r}; log it again")
        try:
            return TvmModel(load(file), entry["target"])
        except BundleError as error:
            refusals.append(str(error))
    raise BundleError(f"no bundle of the model runs on this machine: {'; '.join(refusals) or 'it holds none'}")


class TvmModel:
    """What `mlflow.pyfunc` calls: a compiled model that takes and returns arrays by name."""

    def __init__(self, model: CompiledModel, target: str) -> None:
        self._model = model
        self.target = target

    def get_raw_model(self) -> CompiledModel:
        """The compiled model itself, for what pyfunc has no words for."""
        return self._model

    def predict(self, model_input: Any, params: Mapping[str, Any] | None = None) -> dict[str, Array] | Array:
        """Run the model once on arrays by name, on one array if it has one input, or on a pandas frame's columns.

        A column holds one sample per row: numbers, or the sample's values in C order. Returns the outputs by name; the
        array itself when there is one. Raises InputError for an input of the wrong name, shape or dtype.
        """
        outputs = self._model(**self._by_name(model_input))
        return next(iter(outputs.values())) if len(outputs) == 1 else outputs

    def _by_name(self, given: Any) -> dict[str, Array]:
        if isinstance(given, Mapping):
            return {str(name): array for name, array in given.items()}
        if isinstance(given, np.ndarray):
            if len(self._model.inputs) != 1:
                names = ", ".join(spec.name for spec in self._model.inputs)
                raise InputError(f"one array is given, the model takes {names}; pass a dictionary of arrays")
            return {self._model.inputs[0].name: given}
        return {str(name): self._column(str(name), column) for name, column in given.items()}

    def _column(self, name: str, column: Any) -> Array:
        rows = np.stack([np.asarray(row) for row in column])
        for spec in self._model.inputs:
            sample = spec.shape[1:]
            if spec.name == name and all(isinstance(size, int) for size in sample):
                return rows.astype(spec.dtype, copy=False).reshape(len(column), *(int(size) for size in sample))
        return rows
