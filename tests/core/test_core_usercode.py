"""The user's own functions: imported, called, and refused in one sentence when they cannot be."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tvmflow import usercode
from tvmflow.bundle import sha256_file
from tvmflow.errors import ExportError, TrainError
from tvmflow.workspace import Sources

MODULES = {
    "whole": "import helping\nclass Nested:\n    pass\ndef create(width=1): return helping.double(width)\nvalue = 3\n",
    "helping": "import json\nimport numpy\ndef double(number): return 2 * number\n",
    "needs": "import not_installed_anywhere\n",
    "broken": "1 / 0\n",
    "unfinished": "def create(:\n",
}
LIST_SOURCES = """
import sys
sys.path.insert(0, sys.argv[1])
from tvmflow import usercode
from tvmflow.errors import ExportError
usercode.call("whole:create", "model factory", ExportError)
print(usercode.imported_sources().model_dump_json())
"""


@pytest.fixture
def modules(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.syspath_prepend(str(tmp_path))
    for name, text in MODULES.items():
        (tmp_path / f"{name}.py").write_text(text)
        monkeypatch.delitem(sys.modules, name, raising=False)
    return tmp_path


def test_a_function_is_called_with_its_arguments(modules: Path) -> None:
    assert usercode.call("whole:create", "model factory", ExportError, width=4) == 8


REFUSED = [
    ("absent:create", "'absent'"),
    ("absent.inner:create", "'absent.inner'"),
    ("whole:creat", "'creat'"),
    ("whole:value", "int"),
    ("needs:create", "'not_installed_anywhere'"),
    ("broken:create", "ZeroDivisionError: division by zero"),
    ("unfinished:create", "SyntaxError"),
]


@pytest.mark.parametrize(("path", "cause"), REFUSED)
def test_a_function_that_cannot_be_imported_is_refused_with_the_cause(modules: Path, path: str, cause: str) -> None:
    with pytest.raises(TrainError) as caught:
        usercode.find(path, "training function", TrainError)
    assert str(caught.value).startswith(f"training function {path!r}")
    assert cause in str(caught.value)
    assert "\n" not in str(caught.value)


def test_an_error_within_is_one_sentence(modules: Path) -> None:
    with pytest.raises(ExportError, match=r"^model factory 'whole:create' raised TypeError: "):
        usercode.call("whole:create", "model factory", ExportError, heigth=3)


def test_the_sources_are_the_users_own_modules_with_their_digests(modules: Path) -> None:
    process = subprocess.run(
        [sys.executable, "-c", LIST_SOURCES, str(modules)], capture_output=True, text=True, timeout=60, check=True
    )
    paths = [(modules / name).resolve() for name in ("helping.py", "whole.py")]
    files = json.loads(process.stdout)["files"]
    assert files == {str(path): sha256_file(path) for path in paths}
    assert Sources(files=files).unchanged()
    paths[0].write_text("changed = True\n")
    assert not Sources(files=files).unchanged()
