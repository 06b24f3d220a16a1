"""MLflow: a release as runs, artifacts, a model version and aliases, and the model flavor `tvm`."""

from tvmflow.registry.client import (
    LoggedModelRef,
    ModelSource,
    ModelVersion,
    Registry,
    RunStatus,
)
from tvmflow.registry.config import RegistryConfig, embedded_registry

__all__ = [
    "LoggedModelRef",
    "ModelSource",
    "ModelVersion",
    "Registry",
    "RegistryConfig",
    "RunStatus",
    "embedded_registry",
]
