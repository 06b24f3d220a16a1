"""The user's own functions: imported, called, and refused in one sentence when they cannot be."""

import json
import os
import subprocess
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace

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
from pathlib import Path
sys.path.insert(0, sys.argv[1])
from tvmflow import usercode
from tvmflow.errors import ExportError
usercode.call("whole:create", "model factory", ExportError)
print(usercode.imported_sources(*map(Path, sys.argv[2:])).model_dump_json())
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
    assert Sources(files=files).is_unchanged()
    paths[0].write_text("changed = True\n")
    assert not Sources(files=files).is_unchanged()


def test_a_link_in_the_folder_of_the_standard_library_is_no_module_of_the_user(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    standard, elsewhere = tmp_path / "standard", tmp_path / "elsewhere"
    for folder in (standard, elsewhere):
        folder.mkdir()
    target = elsewhere / "customized.py"
    target.write_text("")
    (standard / "customized.py").symlink_to(target)
    module = ModuleType("customized")
    # The other modules of this process would all be read.
    monkeypatch.setattr(usercode, "sys", SimpleNamespace(modules={"customized": module}))
    monkeypatch.setattr(usercode, "_STANDARD", {standard.resolve()})
    module.__file__ = str(target)
    assert str(target.resolve()) in usercode.imported_sources().files
    module.__file__ = str(standard / "customized.py")
    assert str(target.resolve()) not in usercode.imported_sources().files


def test_a_module_beside_the_folder_of_the_release_file_goes_out_by_its_name(tmp_path: Path) -> None:
    for path, text in {
        "ours/whole.py": "import common.losses, helping\ndef create(): return 0\n",
        "ours/helping.py": "",
        "elsewhere/common/__init__.py": "",
        "elsewhere/common/losses.py": "import sys\nsys.modules['zzz'] = sys.modules[__name__]\n",
    }.items():
        (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / path).write_text(text)
    ours, elsewhere = tmp_path / "ours", tmp_path / "elsewhere"
    process = subprocess.run(
        [sys.executable, "-c", LIST_SOURCES, str(ours), str(ours)],
        env={**os.environ, "PYTHONPATH": os.pathsep.join([str(elsewhere), os.environ.get("PYTHONPATH", "")])},
        capture_output=True, text=True, timeout=60, check=True,
    )  # fmt: skip
    sources = Sources.model_validate_json(process.stdout)
    assert sources.is_unchanged(ours)
    assert sources.portable == {
        "common": sha256_file(elsewhere / "common" / "__init__.py"),
        "common.losses": sha256_file(elsewhere / "common" / "losses.py"),
        "helping.py": sha256_file(ours / "helping.py"),
        "whole.py": sha256_file(ours / "whole.py"),
    }


def test_a_path_of_an_older_release_is_cut_to_the_file() -> None:
    older = Sources(files={"/home/somebody/common/losses.py": "1" * 64, "src/model.py": "2" * 64})
    assert older.portable == {"losses.py": "1" * 64, "src/model.py": "2" * 64}
