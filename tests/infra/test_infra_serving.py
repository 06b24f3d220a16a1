"""infra/kubernetes/serving: manifests of served models fit the API's schema, the server's options and its endpoints."""

import asyncio
from copy import deepcopy
from pathlib import Path
from typing import Any, cast

import httpx
import jsonschema
import kubernetes_validate
import pytest
import yaml

from tvmflow.cli.serve import serve_command
from tvmflow.serving.app import Service, application
from tvmflow.serving.batching import Batcher
from tvmflow.serving.limits import Limits
from tvmflow.serving.metrics import Metrics
from tvmflow.serving.server import DRAIN_SECONDS
from tvmflow.serving.source import ServedModel

FOLDER = Path(__file__).parents[2] / "infra/kubernetes/serving"
VERSIONS = ("1.34", "1.37")
_INT32 = {"type": "integer", "minimum": -(2**31), "maximum": 2**31 - 1}
# The fields that the predictor of the manifest adds to a pod's specification, by KServe's CustomResourceDefinition
# (serving.kserve.io/v1beta1, commit aaac4e2 of August 2026), which no package ships: `tests/infra/kserve.py` compares
# with all of it.
PREDICTOR: dict[str, dict[str, Any]] = {
    "minReplicas": _INT32,
    "maxReplicas": _INT32,
    "scaleMetric": {"type": "string", "enum": ["cpu", "memory", "concurrency", "rps"]},
    "scaleTarget": _INT32,
    "timeout": {"type": "integer"},
}


def read(name: str) -> list[dict[str, Any]]:
    return list(yaml.safe_load_all((FOLDER / name).read_text()))


def of_kind(kind: str) -> dict[str, Any]:
    (document,) = (item for item in read("deployment.yaml") if item["kind"] == kind)
    return dict(document)


def predictor() -> dict[str, Any]:
    (document,) = read("inferenceservice.yaml")
    return dict(document["spec"]["predictor"])


def pods() -> dict[str, dict[str, Any]]:
    """The specifications of the pods, by the kind of what makes them."""
    specification = {key: value for key, value in predictor().items() if key not in PREDICTOR}
    return {"Deployment": of_kind("Deployment")["spec"]["template"]["spec"], "InferenceService": specification}


@pytest.mark.parametrize("version", VERSIONS)
def test_the_manifests_fit_the_schema_of_the_api(version: str) -> None:
    for document in read("deployment.yaml"):
        kubernetes_validate.validate(document, version, strict=True)
    for name, pod in pods().items():
        document = {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": name.lower()}, "spec": pod}
        kubernetes_validate.validate(document, version, strict=True)


def test_the_schema_refuses_a_misspelt_key_of_the_predictor() -> None:
    pod = deepcopy(pods()["InferenceService"])
    pod["containers"][0]["readynessProbe"] = {}
    document = {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "digits"}, "spec": pod}
    with pytest.raises(kubernetes_validate.ValidationError):
        kubernetes_validate.validate(document, VERSIONS[-1], strict=True)


def test_the_inference_service_says_what_kserve_reads() -> None:
    (document,) = read("inferenceservice.yaml")
    assert (document["apiVersion"], document["kind"]) == ("serving.kserve.io/v1beta1", "InferenceService")
    assert set(document["spec"]) == {"predictor"}
    config_map = {"apiVersion": "v1", "kind": "ConfigMap", "metadata": document["metadata"]}
    kubernetes_validate.validate(config_map, VERSIONS[-1], strict=True)
    jsonschema.validate(predictor(), {"type": "object", "properties": PREDICTOR, "required": list(PREDICTOR)})
    # KServe's controller looks for the container by this name.
    assert [item["name"] for item in predictor()["containers"]] == ["kserve-container"]
    assert predictor()["minReplicas"] <= predictor()["maxReplicas"]


def answer(path: str) -> dict[str, Any]:
    """What a server of the model answers to a probe."""
    batcher = Batcher(max_batch=1, max_delay=0, on_batch=lambda rows: None)
    # Probes do not reach the model itself.
    service = Service([ServedModel("digits", "1", cast(Any, None))], batcher, Metrics(), Limits())

    async def get() -> httpx.Response:
        transport = httpx.ASGITransport(application(service))
        async with httpx.AsyncClient(transport=transport, base_url="http://server") as client:
            return await client.get(path)

    response = asyncio.run(get())
    batcher.close()
    assert response.status_code == 200, path
    return dict(response.json())


@pytest.mark.parametrize("kind", ["Deployment", "InferenceService"])
def test_the_server_has_the_options_ports_and_endpoints_that_a_pod_uses(kind: str) -> None:
    (container,) = pods()[kind]["containers"]
    options = serve_command.make_context("serve", list(container["args"])).params
    ports = {port["name"]: port["containerPort"] for port in container["ports"]}
    assert set(ports.values()) == {options["port"], options["grpc_port"]} - {None}
    assert options["models"] == ("digits@production",)
    for probe, key in (("startupProbe", "ready"), ("readinessProbe", "ready"), ("livenessProbe", "live")):
        get = container[probe]["httpGet"]
        assert ports.get(get["port"], get["port"]) == options["port"]
        assert answer(get["path"])[key] is True


@pytest.mark.parametrize("kind", ["Deployment", "InferenceService"])
def test_a_pod_keeps_to_the_restricted_standard_and_ends_in_time(kind: str) -> None:
    pod = pods()[kind]
    (container,) = pod["containers"]
    assert pod["automountServiceAccountToken"] is False
    assert pod["securityContext"]["runAsNonRoot"] is True
    assert container["securityContext"]["readOnlyRootFilesystem"] is True
    assert "memory" in container["resources"]["limits"]
    # Services send new connections to a pod for some time after it has begun to end, and the grace period includes it.
    pause = container["lifecycle"]["preStop"]["sleep"]["seconds"]
    assert pause > 0
    assert pod["terminationGracePeriodSeconds"] > pause + DRAIN_SECONDS


def test_the_autoscaler_the_service_and_the_budget_find_the_deployment() -> None:
    deployment = of_kind("Deployment")
    labels = deployment["spec"]["template"]["metadata"]["labels"]
    assert "replicas" not in deployment["spec"]
    scaler = of_kind("HorizontalPodAutoscaler")["spec"]
    target = {"apiVersion": "apps/v1", "kind": "Deployment", "name": deployment["metadata"]["name"]}
    assert scaler["scaleTargetRef"] == target
    assert scaler["minReplicas"] < scaler["maxReplicas"]
    assert of_kind("Service")["spec"]["selector"].items() <= labels.items()
    assert of_kind("PodDisruptionBudget")["spec"]["selector"]["matchLabels"].items() <= labels.items()


def test_settings_are_known(known_variables: set[str]) -> None:
    assert set(of_kind("ConfigMap")["data"]) <= known_variables
