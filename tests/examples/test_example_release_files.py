"""The examples' release files fit the schema."""

import shutil
from pathlib import Path

import pytest
import yaml

from tvmflow.spec import load

EXAMPLES = Path(__file__).parents[2] / "examples"
RELEASE_FILES = sorted(EXAMPLES.glob("*/*.yaml"))


@pytest.mark.parametrize("path", RELEASE_FILES, ids=lambda path: f"{path.parent.name}/{path.name}")
def test_the_release_file_is_valid(path: Path, tmp_path: Path) -> None:
    model = yaml.safe_load(path.read_text())["model"]
    file = Path(shutil.copy(path, tmp_path))
    for name in {"onnx", "weights"} & model.keys():  # what fetch.py brings
        (tmp_path / model[name]).parent.mkdir(exist_ok=True)
        (tmp_path / model[name]).touch()
    assert load(file).resolve_targets()


def test_every_example_has_a_release_file_and_a_readme() -> None:
    folders = {path.parent.name for path in EXAMPLES.glob("*/data.py")}
    assert folders == {"digits", "embeddings", "encoder", "ocr", "vision", "voice"}
    assert {path.parent.name for path in RELEASE_FILES} == folders
    assert {path.parent.name for path in EXAMPLES.glob("*/README.md")} == folders
