"""infra/compose.yaml: valid, closed to other machines, healthy in the right order, configured by its example."""

import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
FILE = ROOT / "infra/compose.yaml"
# Containers that do one job and exit.
JOBS = {"databases", "deploy"}


def _schema(path: Path) -> "subprocess.CompletedProcess[str]":
    command = [sys.executable, "-m", "check_jsonschema", "--builtin-schema", "vendor.compose-spec", str(path)]
    return subprocess.run(command, capture_output=True, text=True, check=False)


def test_the_file_fits_the_schema_of_compose() -> None:
    process = _schema(FILE)

    assert process.returncode == 0, process.stdout


def test_the_schema_refuses_a_misspelt_key(tmp_path: Path) -> None:
    wrong = tmp_path / "compose.yaml"
    wrong.write_text(FILE.read_text().replace("healthcheck:", "health_check:", 1))

    assert _schema(wrong).returncode != 0


def test_ports_are_open_to_this_machine_only(compose: dict[str, Any]) -> None:
    ports = [port for service in compose["services"].values() for port in service.get("ports", [])]

    assert len(ports) == 3
    assert all(port.startswith("127.0.0.1:") for port in ports)


def test_every_service_that_stays_has_a_health_check(compose: dict[str, Any]) -> None:
    for name, service in compose["services"].items():
        assert ("healthcheck" in service) == (name not in JOBS), name


def test_services_wait_until_others_are_healthy_or_have_ended(compose: dict[str, Any]) -> None:
    for name, service in compose["services"].items():
        for other, how in service.get("depends_on", {}).items():
            condition = "service_completed_successfully" if other in JOBS else "service_healthy"
            assert how["condition"] == condition, f"{name} on {other}"


def test_nothing_runs_with_more_rights_than_it_needs(compose: dict[str, Any]) -> None:
    for name, service in compose["services"].items():
        assert service["cap_drop"] == ["ALL"], name
        assert service["security_opt"] == ["no-new-privileges:true"], name
        if service["image"].startswith("tvmflow/"):
            assert service["read_only"], name
            assert any(place.startswith("/tmp:exec") for place in service["tmpfs"]), name  # noqa: S108
        else:
            assert service["user"] not in ("root", "0"), name


def test_the_example_makes_every_variable_that_is_needed_and_no_other() -> None:
    referenced = {name for name, _ in re.findall(r"\$\{([A-Z_0-9]+)(:[-?])", FILE.read_text())}
    example = (ROOT / "infra/compose.env.example").read_text()
    names = set(re.findall(r"^([A-Z_0-9]+)=", example, re.MULTILINE))
    names |= set(re.findall(r'echo "([A-Z_0-9]+)=', example))
    looped = re.search(r"for name in ([^;]+);", example)
    assert looped is not None
    names |= set(looped[1].split())

    assert names == referenced


def test_programs_accept_the_values_of_the_example(monkeypatch: pytest.MonkeyPatch) -> None:
    from tvmflow.settings import Settings

    example = (ROOT / "infra/compose.env.example").read_text()
    (models,) = re.findall(r"^TVMFLOW_MODELS=(.*)$", example, re.MULTILINE)
    monkeypatch.setenv("TVMFLOW_MODELS", models)

    assert Settings.load().models == (Path("/models/digits/release.yaml"),)
    assert (ROOT / "examples/digits/release.yaml").is_file()


def test_git_ignores_the_secrets() -> None:
    ignored = (ROOT / ".gitignore").read_text().splitlines()

    assert {"infra/.env", "infra/kubernetes/*.env"} <= set(ignored)


def test_images_are_built_from_targets_of_the_dockerfile(compose: dict[str, Any]) -> None:
    targets = set(re.findall(r"^FROM \S+ AS (\w+)$", (ROOT / "Dockerfile").read_text(), re.MULTILINE))

    for name, service in compose["services"].items():
        if service["image"].startswith("tvmflow/"):
            target = service["build"]["target"]
            assert target in targets, name
            assert service["image"].startswith(f"tvmflow/{target}:"), name
            assert (FILE.parent / service["build"]["context"]).resolve() == ROOT
