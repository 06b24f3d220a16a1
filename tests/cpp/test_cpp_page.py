"""The commands of docs/how-to/run-from-cpp.md run as they stand there."""

import os
import sys
from pathlib import Path

import pytest

from support.cpp import ROOT
from support.pages import Session, blocks
from support.processes import clean_environment
from support.skips import needs


@pytest.mark.long
@needs("cmake", "c++", "aarch64-linux-gnu-g++", "qemu-aarch64")
@pytest.mark.timeout(1800)
def test_the_commands_of_the_page_run(tmp_path: Path) -> None:
    folder = tmp_path / "work"
    folder.mkdir()
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    shell = Session(folder, clean_environment(PATH=path, REPOSITORY=str(ROOT), TVMFLOW_HOME=str(tmp_path / "state")))
    try:
        for block in blocks(ROOT / "docs" / "how-to" / "run-from-cpp.md"):
            if block.key == "file":
                (folder / block.value).parent.mkdir(exist_ok=True)
                (folder / block.value).write_text(block.text)
            elif block.is_shell and block.key != "not run":
                code, printed = shell.run(f"set -e; {block.text}")
                assert code == 0, f"line {block.line}: {printed}"
    finally:
        shell.close()
