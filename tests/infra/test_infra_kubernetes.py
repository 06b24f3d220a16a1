"""infra/kubernetes: the manifests fit the cluster's API, pods run without rights and have limits and probes."""

import json
import re
from copy import deepcopy
from pathlib import Path
from typing import Any

import kubernetes_validate
import pytest
import yaml

FOLDER = Path(__file__).parents[2] / "infra/kubernetes"
# The oldest Kubernetes release that is still maintained, and the newest whose schema is at hand.
VERSIONS = ("1.34", "1.37")


@pytest.mark.parametrize("version", VERSIONS)
def test_manifests_fit_the_schema_of_the_api(manifests: Any, version: str) -> None:
    for name, document in manifests:
        try:
            kubernetes_validate.validate(document, version, strict=True)
        except kubernetes_validate.ValidationError as error:
            pytest.fail(f"{name}: {error.message}")


def test_the_schema_refuses_a_misspelt_key(manifests: Any) -> None:
    document = deepcopy(next(document for _, document in manifests if document["kind"] == "Deployment"))
    document["spec"]["template"]["spec"]["containers"][0]["readynessProbe"] = {}

    with pytest.raises(kubernetes_validate.ValidationError):
        kubernetes_validate.validate(document, VERSIONS[-1], strict=True)


def test_the_template_of_the_work_pool_makes_a_valid_job() -> None:
    """Prefect's own code fills in the variables' defaults."""
    from prefect.utilities.templating import apply_values

    template = json.loads((FOLDER / "job-template.json").read_text())
    properties = template["variables"]["properties"]
    fixed = {"name": "release", "command": ["prefect"], "env": [], "labels": {}, "annotations": {}}
    values = {
        name: item["default"] for name, item in properties.items() if "default" in item and item["default"] is not None
    }
    job = apply_values(template["job_configuration"]["job_manifest"], values | fixed, remove_notset=True)

    kubernetes_validate.validate(job, VERSIONS[-1], strict=True)
    assert job["metadata"]["namespace"] == "tvmflow"
    assert job["spec"]["template"]["spec"]["containers"][0]["resources"]["requests"]["memory"]


def test_kustomize_lists_every_manifest() -> None:
    listing = yaml.safe_load((FOLDER / "kustomization.yaml").read_text())

    assert set(listing["resources"]) == {path.name for path in FOLDER.glob("*.yaml")} - {"kustomization.yaml"}
    assert all((FOLDER / file).is_file() for maker in listing["configMapGenerator"] for file in maker["files"])


def test_pods_keep_to_the_restricted_security_standard(pods: dict[str, Any]) -> None:
    for name, pod in pods.items():
        context = pod["spec"]["securityContext"]
        assert context["runAsNonRoot"], name
        assert context["runAsUser"] > 0, name
        assert context["seccompProfile"] == {"type": "RuntimeDefault"}, name
        for container in pod["spec"].get("initContainers", []) + pod["spec"]["containers"]:
            context = container["securityContext"]
            assert context["allowPrivilegeEscalation"] is False, name
            assert context["readOnlyRootFilesystem"] is True, name
            assert context["capabilities"] == {"drop": ["ALL"]}, name


def test_only_the_worker_speaks_to_the_cluster(pods: dict[str, Any]) -> None:
    speaking = {name for name, pod in pods.items() if pod["spec"].get("automountServiceAccountToken") is not False}

    assert speaking == {"worker"}


def test_containers_ask_for_what_they_need_and_have_a_limit(pods: dict[str, Any]) -> None:
    for name, pod in pods.items():
        for container in pod["spec"].get("initContainers", []) + pod["spec"]["containers"]:
            assert {"cpu", "memory"} <= set(container["resources"]["requests"]), name
            assert "memory" in container["resources"]["limits"], name


def test_servers_are_probed_on_the_port_that_they_open(manifests: Any) -> None:
    deployments = [document for _, document in manifests if document["kind"] == "Deployment"]
    assert len(deployments) == 4
    for deployment in deployments:
        (container,) = deployment["spec"]["template"]["spec"]["containers"]
        ports = {port["name"] for port in container["ports"]}
        for probe in ("startupProbe", "readinessProbe", "livenessProbe"):
            assert container[probe]["httpGet"]["port"] in ports, container["name"]
        (port,) = [str(port["containerPort"]) for port in container["ports"]]
        if "--port" in container.get("args", []):
            assert container["args"][container["args"].index("--port") + 1] == port


def test_selectors_find_their_pods(manifests: Any, pods: dict[str, Any]) -> None:
    labels = [pod["metadata"]["labels"] for name, pod in pods.items() if name != "a flow run"]
    selectors = []
    for _, document in manifests:
        match document:
            case {"kind": "Deployment", "spec": {"selector": {"matchLabels": selector}}}:
                selectors.append(selector)
            case {"kind": "Service", "spec": {"selector": selector}}:
                selectors.append(selector)
            case {"kind": "NetworkPolicy", "spec": {"podSelector": {"matchLabels": selector}}}:
                selectors.append(selector)
    assert len(selectors) == 10
    for selector in selectors:
        assert any(selector.items() <= label.items() for label in labels), selector


def test_what_is_not_allowed_in_is_refused(manifests: Any) -> None:
    policies = {
        document["metadata"]["name"]: document for _, document in manifests if document["kind"] == "NetworkPolicy"
    }
    servers = {document["metadata"]["name"] for _, document in manifests if document["kind"] == "Service"} - {
        "postgres"
    }

    assert policies["closed"]["spec"] == {"podSelector": {}, "policyTypes": ["Ingress"]}
    assert set(policies) == {"closed", *servers}


def test_secrets_come_by_reference_to_keys_that_the_examples_name(manifests: Any, pods: dict[str, Any]) -> None:
    assert not [document for _, document in manifests if document["kind"] == "Secret"]
    examples = {
        path.name.partition(".")[0]: set(re.findall(r"^([A-Z_0-9]+)=$", path.read_text(), re.MULTILINE))
        for path in FOLDER.glob("*.env.example")
    }
    references: dict[str, set[str]] = {name: set() for name in examples}
    for pod in pods.values():
        for container in pod["spec"].get("initContainers", []) + pod["spec"]["containers"]:
            for item in container["env"] if isinstance(container.get("env"), list) else []:
                if reference := item.get("valueFrom", {}).get("secretKeyRef"):
                    assert reference["key"] in examples[reference["name"]], reference
                    references[reference["name"]].add(reference["key"])
            for source in container.get("envFrom", []):
                if "secretRef" in source:
                    references[source["secretRef"]["name"]] |= examples[source["secretRef"]["name"]]
    assert references == examples
