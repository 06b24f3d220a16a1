"""The guide for contributors names files that exist, and shows code that stands in them."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
GUIDE = (ROOT / "CONTRIBUTING.md").read_text()
# Code spans that are paths of the repository: they have a folder of its root in front.
FOLDERS = ("benchmarks", "cpp", "docs", "flows", "tasks", "tests", "tvmflow")
PATHS = sorted({span for span in re.findall(r"`([\w./-]+)`", GUIDE) if span.split("/")[0] in FOLDERS and "/" in span})
BLOCKS = re.findall(r"^```python\n(.*?)^```", GUIDE, re.MULTILINE | re.DOTALL)


@pytest.mark.parametrize("path", PATHS)
def test_a_file_that_the_guide_names_exists(path: str) -> None:
    assert (ROOT / path).exists()


@pytest.mark.parametrize("block", BLOCKS, ids=[block.split("\n")[0][:40] for block in BLOCKS])
def test_code_of_the_guide_stands_in_one_of_the_files_that_it_names(block: str) -> None:
    lines = [line for line in block.splitlines() if line.strip() not in ("", "...")]
    named = [text for path in PATHS for text in _texts(ROOT / path)]
    assert any(all(line in text for line in lines) for text in named)


def _texts(path: Path) -> list[str]:
    files = path.glob("*.py") if path.is_dir() else [path] if path.suffix == ".py" else []
    return [file.read_text() for file in files]
