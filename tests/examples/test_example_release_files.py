"""The examples' release files fit the schema."""

from pathlib import Path

import pytest

from tvmflow.spec import load

EXAMPLES = Path(__file__).parents[2] / "examples"
RELEASE_FILES = sorted(EXAMPLES.glob("*/*.yaml"))


@pytest.mark.parametrize("path", RELEASE_FILES, ids=lambda path: f"{path.parent.name}/{path.name}")
def test_the_release_file_is_valid(path: Path) -> None:
    spec = load(path)
    assert spec.resolve_targets()


def test_every_example_has_a_release_file_and_a_readme() -> None:
    folders = {path.parent.name for path in EXAMPLES.glob("*/model.py")}
    assert folders == {"digits", "encoder", "vision"}
    assert {path.parent.name for path in RELEASE_FILES} == folders
    assert {path.parent.name for path in EXAMPLES.glob("*/README.md")} == folders
