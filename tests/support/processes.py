"""Commands in processes of their own, with no setting from the developer's shell."""

import json
import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

TVMFLOW = Path(sys.executable).with_name("tvmflow")
# A developer's own settings must not decide what the tests talk to.
_FOREIGN = ("TVMFLOW_", "TVM_", "MLFLOW_", "PREFECT_", "AWS_", "RCLONE_")

SECRETS = {
    "TVMFLOW_S3_SECRET_KEY": "hidden-1",
    "AWS_SECRET_ACCESS_KEY": "hidden-2",
    "MLFLOW_TRACKING_PASSWORD": "hidden-3",
    "PREFECT_API_AUTH_STRING": "hidden-4",
    "TVMFLOW_DATABASE_URL": "hidden-5",
    "SOMEBODYS_TOKEN": "hidden-6",
}
"""A machine's credentials, as environment variables."""


def mentioned_secrets(text: str) -> list[str]:
    """Return the names of those SECRETS whose name or value is in a text."""
    return [name for name, value in SECRETS.items() if name in text or value in text]


def refusal(process: subprocess.CompletedProcess[str]) -> str:
    """Return the sentence with which a program of benchmarks/ refused, which begins with "error: ".

    Checks that it is the only line on stderr and that the exit code is 1.
    """
    assert process.returncode == 1, process.stdout + process.stderr
    (line,) = process.stderr.splitlines()
    assert line.startswith("error: ")
    return line.removeprefix("error: ")


def is_foreign(name: str) -> bool:
    """Whether an environment variable configures tvmflow or one of the servers."""
    return name.startswith(_FOREIGN)


def clean_environment(**settings: str) -> dict[str, str]:
    """This process's environment without foreign settings, with these ones."""
    return {**{name: value for name, value in os.environ.items() if not is_foreign(name)}, **settings}


@dataclass(frozen=True)
class CommandResult:
    """The exit code of a command, and what it wrote."""

    code: int
    stdout: str
    stderr: str

    @property
    def document(self) -> Any:
        """The one JSON document on stdout."""
        return json.loads(self.stdout)

    @property
    def steps(self) -> dict[str, str]:
        """Whether each step of a release's first target ran or was cached."""
        return {name: step["status"] for name, step in self.document["targets"][0]["steps"].items()}

    @property
    def sentence(self) -> str:
        """The one sentence of a failed command, without `tvmflow: `; only lines of steps may be beside it."""
        assert self.code != 0, self.stdout
        assert "Traceback" not in self.stderr, self.stderr
        lines = [line for line in self.stderr.splitlines() if line.strip()]
        (sentence,) = [line for line in lines if line.startswith("tvmflow: ")] or [self.stderr]
        assert all(line.startswith(("✓ ", "= ", "✗ ", "tvmflow: ")) for line in lines), self.stderr
        return sentence.removeprefix("tvmflow: ")
