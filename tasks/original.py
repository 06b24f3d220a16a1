"""The original: the model that a release is made of, as a file or a factory, before it is exported."""

import os
from pathlib import Path
from typing import Any

import yaml

from tvmflow.bundle import sha256_file
from tvmflow.errors import ExportError, SettingsError
from tvmflow.onnx_model.external_data import data_digests
from tvmflow.registry import Registry
from tvmflow.source import Source
from tvmflow.spec import Spec
from tvmflow.usercode import describe
from tvmflow.workspace import Artifact, Record, Workspace


class Original(Record):
    """The place of the original on this machine, and `identity`, which represents the original in cache keys.

    `registered` is its version in the registry, as MODEL/3; None for an original that is no registered model.
    """

    source: Source
    identity: dict[str, Any]
    registered: str | None = None


def find_original(
    spec: Spec,
    workspace: Workspace,
    weights: Artifact | None = None,
    registry: Registry | None = None,
    *,
    trusts_pickle: bool = False,
) -> Original:
    """Find the original of a release file; `weights` are the weights that its training made, None without training.

    A registered model is downloaded into the workspace once per version. It may be unpickled only with `trusts_pickle`,
    or if the release file says `trust: pickle`. When the release file names a registered model, raises SettingsError if
    `registry` is None, ExportError if the model is neither PyTorch nor ONNX or is a pickle without trust, and
    RegistryError if the registry cannot be read.
    """
    model = spec.model
    if model.factory is not None:
        path, digest = None, None
        if weights is not None:
            path, digest = workspace.path(weights), weights.sha256
        elif model.weights is not None:
            path = spec.path(model.weights)
            digest = sha256_file(path)
        identity = {**model.model_dump(mode="json"), "weights": digest}
        return Original(source=Source(kind="factory", model=model, path=path), identity=identity)
    if model.mlflow is not None:
        if registry is None:
            raise SettingsError(f"{model.mlflow!r} is in the registry, which this command does not use; release it")
        trusts_pickle = trusts_pickle or model.trust == "pickle"
        return _load_registered(spec, workspace, registry, model.mlflow, trusts_pickle)
    kind, path = ("pt2", model.pt2) if model.pt2 is not None else ("onnx", model.onnx)
    path = spec.path(path or Path())
    source = Source.model_validate({"kind": kind, "model": model, "path": path})
    data = data_digests(path) if kind == "onnx" else {}
    return Original(
        source=source, identity={"kind": kind, "sha256": sha256_file(path), **({"data": data} if data else {})}
    )


def _load_registered(spec: Spec, workspace: Workspace, registry: Registry, uri: str, trusts_pickle: bool) -> Original:
    """Return a model of the MLflow registry; download it unless the workspace has it."""
    version = registry.resolve_source(uri)
    folder = workspace.folder / "sources" / version.identity
    if folder.is_dir():
        os.utime(folder)
    else:
        with workspace.scratch() as scratch:
            # An alias may name another version by now.
            fixed = f"models:/{version.name}/{version.version}"
            downloaded = registry.download_source(fixed, scratch / "model")
            folder.parent.mkdir(parents=True, exist_ok=True)
            try:
                downloaded.rename(folder)
            except OSError:
                # Another run may have downloaded it meanwhile.
                if not folder.is_dir():
                    raise
    flavor = next((name for name in ("pytorch", "onnx") if name in version.flavors), None)
    if flavor is None:
        raise ExportError(f"model {uri!r} has the flavors {', '.join(version.flavors)}; pytorch or onnx is needed")
    description = _read_flavor(folder, uri, flavor)
    if flavor == "onnx":
        source = Source(kind="onnx", model=spec.model, path=_path_within(folder, uri, description["data"]))
    else:
        if not trusts_pickle:
            _refuse_code(folder, uri, description)
        source = Source(kind="mlflow-pytorch", model=spec.model, path=folder, trusts_pickle=trusts_pickle)
    return Original(source=source, identity={"mlflow": version.identity}, registered=version.identity.partition("@")[0])


def _read_flavor(folder: Path, uri: str, name: str) -> dict[str, Any]:
    """Return what the file MLmodel of a downloaded model says about one of its flavors."""
    try:
        flavor = yaml.safe_load((folder / "MLmodel").read_text())["flavors"][name]
        return {"code": None, **flavor, "data": str(flavor["model_data" if name == "pytorch" else "data"])}
    except (OSError, ValueError, yaml.YAMLError, KeyError, TypeError) as error:
        raise ExportError(f"model {uri!r} has no MLmodel that can be read ({describe(error)}); log it again") from error


def _path_within(folder: Path, uri: str, name: str) -> Path:
    """Return the path of a file of a downloaded model; raise ExportError for one outside of the model's folder."""
    path = folder / name
    if not path.resolve().is_relative_to(folder.resolve()):
        raise ExportError(f"model {uri!r} names the file {name!r} outside of its folder; log it again")
    return path


def _refuse_code(folder: Path, uri: str, flavor: dict[str, Any]) -> None:
    """Raise ExportError for a PyTorch model that can run code when MLflow loads it: a pickle, or modules of its own.

    MLflow loads `model.pt2` of the folder of the data, after a check that it has no pickles, unless `model.pth` is
    beside it, and puts the folder of the model's own modules before all others.
    """
    data = _path_within(folder, uri, flavor["data"])
    if not (data / "model.pt2").is_file() or (data / "model.pth").exists():
        raise ExportError(
            f"model {uri!r} is a pickle, which can run any code when it is loaded; log it with "
            'serialization_format="pt2", or set model.trust: pickle in the release file'
        )
    if flavor["code"] is not None:
        raise ExportError(
            f"model {uri!r} has Python modules of its own, which can run any code when it is loaded; log it without "
            "code_paths, or set model.trust: pickle in the release file"
        )
