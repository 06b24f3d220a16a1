"""Containers as compose.yaml and the Kubernetes manifests describe them, and the variables that programs read."""

import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import yaml

ROOT = Path(__file__).parents[2]
MANIFESTS = ROOT / "infra/kubernetes"
# Variables of programs that do not list theirs: PostgreSQL, libpq, boto3, SeaweedFS, the shell, Python, uv, GitPython.
ELSEWHERE = {
    *("POSTGRES_USER", "POSTGRES_DB", "POSTGRES_PASSWORD", "PGHOST", "PGUSER", "PGDATABASE", "PGPASSWORD"),
    *("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_DEFAULT_REGION"),
    *("PATH", "HOME", "VIRTUAL_ENV", "PYTHONUNBUFFERED", "PYTHONDONTWRITEBYTECODE", "GIT_PYTHON_REFRESH"),
    *("UV_COMPILE_BYTECODE", "UV_NO_CACHE", "UV_PYTHON_DOWNLOADS"),
    # Settings of prefect-kubernetes, which is installed in the image `worker` but not here.
    *("PREFECT_INTEGRATIONS_KUBERNETES_OBSERVER_NAMESPACES", "PREFECT_INTEGRATIONS_KUBERNETES_CLUSTER_UID"),
}


@dataclass(frozen=True)
class Container:
    """A container: where it is described, its image, command line and environment (None: a value from elsewhere)."""

    place: str
    image: str
    command: list[str]
    environment: dict[str, str | None] = field(default_factory=dict)


@cache
def _compose() -> dict[str, Any]:
    document: dict[str, Any] = yaml.safe_load((ROOT / "infra/compose.yaml").read_text())
    return document


@cache
def _manifests() -> tuple[tuple[str, dict[str, Any]], ...]:
    files = yaml.safe_load((MANIFESTS / "kustomization.yaml").read_text())["resources"]
    return tuple((name, document) for name in files for document in yaml.safe_load_all((MANIFESTS / name).read_text()))


@pytest.fixture(scope="session")
def compose() -> dict[str, Any]:
    return _compose()


@pytest.fixture(scope="session")
def manifests() -> tuple[tuple[str, dict[str, Any]], ...]:
    return _manifests()


@pytest.fixture(scope="session")
def pods() -> dict[str, dict[str, Any]]:
    """The pods of the manifests by name, with the pod of the jobs that run flows, from `job-template.json`."""
    documents = {
        document["metadata"]["name"]: document["spec"]["template"]
        for _, document in _manifests()
        if document["kind"] in ("Deployment", "Job")
    }
    template = yaml.safe_load((MANIFESTS / "job-template.json").read_text())
    (container,) = template["job_configuration"]["job_manifest"]["spec"]["template"]["spec"]["containers"]
    container["image"] = template["variables"]["properties"]["image"]["default"]
    return {**documents, "a flow run": template["job_configuration"]["job_manifest"]["spec"]["template"]}


@pytest.fixture(scope="session")
def containers(pods: dict[str, dict[str, Any]]) -> list[Container]:
    """Every container of compose.yaml and of the manifests."""
    maps = {
        (document["kind"], document["metadata"]["name"]): document["data"]
        for _, document in _manifests()
        if document["kind"] == "ConfigMap"
    }
    documents = [
        Container(f"compose.yaml, {name}", service["image"], service.get("command", []), service["environment"])
        for name, service in _compose()["services"].items()
    ]
    for name, pod in pods.items():
        for container in pod["spec"].get("initContainers", []) + pod["spec"]["containers"]:
            environment: dict[str, str | None] = {}
            for source in container.get("envFrom", []):
                if "configMapRef" in source:
                    environment |= maps["ConfigMap", source["configMapRef"]["name"]]
                else:
                    environment |= dict.fromkeys(secret_keys(source["secretRef"]["name"]))
            if isinstance(container.get("env"), list):
                environment |= {item["name"]: item.get("value") for item in container["env"]}
            arguments = container.get("args", [])
            command = arguments if isinstance(arguments, list) else []
            documents.append(Container(f"kubernetes, {name}", container["image"], command, environment))
    return documents


def secret_keys(name: str) -> set[str]:
    """The keys of a Kubernetes secret, as its example lists them."""
    return set(re.findall(r"^([A-Z_0-9]+)=", (MANIFESTS / f"{name}.env.example").read_text(), re.MULTILINE))


@pytest.fixture(scope="session")
def known_variables() -> set[str]:
    """The environment variables that tvmflow, Prefect and MLflow say they read, and the variables of ELSEWHERE."""
    import mlflow.environment_variables
    from mlflow.cli import cli
    from prefect.settings import Settings as Prefect

    from tvmflow.settings import Settings

    names = {f"TVMFLOW_{name.upper()}" for name in Settings.model_fields} | set(_of_settings(Prefect))
    names |= {
        variable.name
        for variable in vars(mlflow.environment_variables).values()
        if isinstance(variable, mlflow.environment_variables._EnvironmentVariable)
    }
    names |= {option.envvar for option in cli.commands["server"].params if getattr(option, "envvar", None)}
    return names | ELSEWHERE


def _of_settings(model: Any) -> Iterator[str]:
    from pydantic import AliasChoices
    from pydantic_settings import BaseSettings

    prefix = model.model_config.get("env_prefix", "")
    for name, item in model.model_fields.items():
        yield f"{prefix}{name}".upper()
        if isinstance(item.annotation, type) and issubclass(item.annotation, BaseSettings):
            yield from _of_settings(item.annotation)
        if isinstance(item.validation_alias, AliasChoices):
            yield from (choice.upper() for choice in item.validation_alias.choices if isinstance(choice, str))
