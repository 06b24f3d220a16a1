"""Examples whose models a wheel holds: fetched, released and asked in a folder of their own."""

import json
import shutil
import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path

from support.processes import clean_environment

EXAMPLES = Path(__file__).parents[2] / "examples"
_TIMEOUT = 1800


@dataclass
class ExampleFolder:
    """A copy of an example with its models, and a state folder."""

    folder: Path
    state: Path
    bundles: dict[str, Path] = field(default_factory=dict)

    def run(self, *arguments: str | Path) -> str:
        """Run Python with these arguments in the folder and return what it printed."""
        process = subprocess.run(
            [sys.executable, *map(str, arguments)],
            cwd=self.folder,
            env=clean_environment(TVMFLOW_HOME=str(self.state)),
            capture_output=True,
            text=True,
            timeout=_TIMEOUT,
            check=False,
        )
        assert process.returncode == 0, process.stdout + process.stderr
        return process.stdout

    def release(self, file: str) -> None:
        """Release a release file of the folder."""
        printed = self.run("-c", "from tvmflow.cli import main; main()", "release", file, "--json")
        document = json.loads(printed.splitlines()[-1])
        (target,) = document["targets"]
        self.bundles[document["name"]] = Path(target["bundle_path"])

    def bundle(self, name: str) -> Path:
        """The bundle of a release by its name."""
        return self.folder / self.bundles[name]

    def predict(self, *arguments: str | Path) -> str:
        """Run `predict.py` and return what it printed."""
        return self.run("predict.py", *arguments)


def release_of(example: str, place: Path) -> ExampleFolder:
    """Copy an example beside the module that fetches wheels, and fetch its models; fails where pip cannot."""
    folder = shutil.copytree(EXAMPLES / example, place / "examples" / example)
    shutil.copy(EXAMPLES / "wheels.py", folder.parent)
    copy = ExampleFolder(folder, place / "state")
    copy.run("fetch.py")
    return copy
