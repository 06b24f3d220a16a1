"""The registry in MLflow: a release as runs, artifacts, a model version and aliases, and the model flavor `tvm`."""

from tvmflow.registry.client import Registry
from tvmflow.registry.config import RegistryConfig, embedded_registry
from tvmflow.registry.models import LoggedModelRef, ModelSource
from tvmflow.registry.runs import RunStatus
from tvmflow.registry.versions import ModelVersion

__all__ = [
    "LoggedModelRef",
    "ModelSource",
    "ModelVersion",
    "Registry",
    "RegistryConfig",
    "RunStatus",
    "embedded_registry",
]
