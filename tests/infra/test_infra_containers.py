"""Rules for every container, whether compose.yaml or Kubernetes runs it."""

import re
import subprocess
import sys
from typing import Any

import click
import pytest

from support import scale
from tvmflow import __version__

SECRET = re.compile(r"PASSWORD|SECRET|TOKEN|ACCESS_KEY|AUTH_STRING|ENCRYPTION_KEY")


def test_every_image_is_pinned_to_an_exact_version(containers: list[Any]) -> None:
    assert containers
    for container in containers:
        tag = container.image.rpartition(":")[2]
        assert re.fullmatch(r"\d+\.\d+(\.\d+)?(-bookworm)?", tag), f"{container.place}: {container.image}"


def test_our_images_have_the_version_of_the_package(containers: list[Any]) -> None:
    images = {container.image for container in containers if container.image.startswith("tvmflow/")}

    assert images == {f"tvmflow/worker:{__version__}", f"tvmflow/mlflow:{__version__}"}


def test_every_variable_is_one_that_its_program_reads(containers: list[Any], known_variables: set[str]) -> None:
    unknown = {
        (container.place, name)
        for container in containers
        for name in container.environment
        if name not in known_variables
    }

    assert not unknown


def test_no_secret_is_written_down(containers: list[Any]) -> None:
    secret_count = 0
    for container in containers:
        for name, value in container.environment.items():
            if SECRET.search(name):
                secret_count += 1
                assert value is None or re.fullmatch(r"\$\{[A-Z_0-9]+:\?[^}]+\}", value), f"{container.place}: {name}"
    assert secret_count > 10


def test_the_commands_of_tvmflow_exist(containers: list[Any]) -> None:
    from tvmflow.cli import cli

    lines = [container.command for container in containers if container.command[:1] == ["tvmflow"]]
    assert {line[1] for line in lines} == {"receive", "deploy"}
    for _, name, *arguments in lines:
        command = cli.get_command(click.Context(cli), name)
        assert command is not None, name
        command.make_context(name, list(arguments))


@pytest.mark.long
@pytest.mark.parametrize(
    "words",
    scale.choose(
        normal=[("server", "start")], long=[("server", "start"), ("worker", "start"), ("work-pool", "create")]
    ),
    ids=" ".join,
)
def test_the_commands_of_prefect_exist(containers: list[Any], words: tuple[str, str]) -> None:
    lines = [container.command for container in containers if container.command[:3] == ["prefect", *words]]
    assert lines
    usage = subprocess.run(
        [sys.executable, "-m", "prefect", *words, "--help"], capture_output=True, text=True, check=True
    ).stdout
    for line in lines:
        for option in line[3:]:
            if option.startswith("--"):
                assert option.replace("--no-create-pool-if-not-found", "--create-pool-if-not-found") in usage, option


def test_addresses_have_the_names_and_ports_of_services(containers: list[Any]) -> None:
    """An address in a container's settings has the name and the port of a service."""
    ports = {"prefect": "4200", "mlflow": "5000", "receiver": "8085", "s3": "8333", "postgres": "5432"}
    hosts = set()
    for container in containers:
        for text in [*container.command, *(value or "" for value in container.environment.values())]:
            for host, port in re.findall(r"//(?:\w+@)?([a-z0-9]+):(\d+)", str(text)):
                if host != "127":
                    hosts.add(host)
                    assert ports[host] == port, f"{container.place}: {text}"
    assert hosts == {"prefect", "mlflow", "receiver", "s3"}
