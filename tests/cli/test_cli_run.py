"""`tvmflow run` and `tvmflow verify` on a bundle."""

import dataclasses
import json
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tvmflow import npz
from tvmflow.bundle import extract, pack, read_manifest

Command = Callable[..., Any]
Repack = Callable[..., Path]


@pytest.fixture
def given(tmp_path: Path) -> dict[str, Any]:
    """Inputs for a batch of three, also written to in.npz."""
    generator = np.random.default_rng(1)
    arrays = {
        "x": generator.normal(size=(3, 8)).astype(np.float32),
        "y": generator.normal(size=(3, 4)).astype(np.float32),
    }
    npz.write(tmp_path / "in.npz", arrays)
    return arrays


@pytest.fixture
def repack(bundle: Path, tmp_path: Path) -> Repack:
    """The bundle with other values in its manifest, or another golden sample."""

    def change(sample: Callable[[dict[str, Any]], None] | None = None, **values: Any) -> Path:
        folder = tmp_path / "files"
        folder.mkdir()
        manifest = extract(bundle, folder)
        if sample is not None:
            arrays = npz.read(folder / "sample.npz")
            sample(arrays)
            npz.write(folder / "sample.npz", arrays)
        path = tmp_path / "changed.tar.gz"
        pack(path, dataclasses.replace(manifest, **values), {item.name: item for item in folder.iterdir()})
        return path

    return change


def test_outputs_are_written_by_name_and_by_number(
    tvmflow: Command, bundle: Path, models: Path, given: dict[str, Any]
) -> None:
    import onnxruntime

    ended = tvmflow("run", bundle, "--inputs", "in.npz", "--output", "out.npz")
    assert ended.code == 0
    assert "written to out.npz" in ended.out
    session = onnxruntime.InferenceSession(str(models / "small.onnx"), providers=["CPUExecutionProvider"])
    written = npz.read(Path("out.npz"))
    assert set(written) == {"sum", "positive", "above", "output_0", "output_1", "output_2"}
    for index, (name, expected) in enumerate(zip(("sum", "positive", "above"), session.run(None, given), strict=True)):
        assert written[name].dtype == expected.dtype
        np.testing.assert_allclose(written[name], expected, rtol=1e-5, atol=1e-6)
        assert (written[name] == written[f"output_{index}"]).all()


def test_without_inputs_the_golden_sample_is_run(tvmflow: Command, bundle: Path) -> None:
    ended = tvmflow("run", bundle)
    assert ended.out.splitlines()[:3] == ["sum: float32[1, 4]", "positive: float32[1, 4]", "above: bool[1, 4]"]


def test_it_can_be_run_several_times(tvmflow: Command, bundle: Path) -> None:
    assert "\n5 runs: mean " in tvmflow("run", bundle, "--repeat", "5").out


def test_json_describes_the_outputs_and_the_times(tvmflow: Command, bundle: Path, given: dict[str, Any]) -> None:
    ended = tvmflow("run", bundle, "--inputs", "in.npz", "--repeat", "2", "--json")
    document = json.loads(ended.out)
    assert document["outputs"]["above"] == {"shape": [3, 4], "dtype": "bool"}
    assert document["runs"] == 2
    assert document["latency_ms"].keys() == {"mean", "p50", "min"}
    assert ended.err == ""


def test_the_installed_command_runs_with_tvms_runtime_alone(
    executable: str, environment: dict[str, str], bundle: Path
) -> None:
    for command in ("run", "verify"):
        done = subprocess.run(
            [executable, command, str(bundle)], env=environment, capture_output=True, text=True, timeout=60
        )
        assert (done.returncode, done.stderr) == (0, "")


BAD_INPUTS: list[tuple[dict[str, Any], str]] = [
    ({"x": np.zeros((3, 9), np.float32)}, "input 'x' has shape [3, 9], expected [batch, 8]"),
    ({"x": np.zeros((3, 8))}, "input 'x' is float64, expected float32; convert it first"),
    ({"y": np.zeros((2, 4), np.float32)}, "input 'y': dimension 'batch' is 2, but 3 in another input"),
    ({"z": np.zeros(3)}, "has no input 'z'; it takes x float32[batch, 8], y float32[batch, 4]"),
    ({"y": None}, "input 'y' is missing"),
]


@pytest.mark.parametrize(("change", "said"), BAD_INPUTS)
def test_inputs_that_do_not_fit_are_one_sentence(
    tvmflow: Command, bundle: Path, given: dict[str, Any], change: dict[str, Any], said: str
) -> None:
    arrays = {name: array for name, array in {**given, **change}.items() if array is not None}
    npz.write(Path("bad.npz"), arrays)
    ended = tvmflow("run", bundle, "--inputs", "bad.npz", "--output", "out.npz")
    assert ended.code == 1
    assert said in ended.sentence
    assert not Path("out.npz").exists()


def test_a_missing_inputs_file_is_one_sentence(tvmflow: Command, bundle: Path) -> None:
    ended = tvmflow("run", bundle, "--inputs", "absent.npz")
    assert (ended.code, ended.sentence) == (1, "tvmflow: there is no inputs file 'absent.npz'")


def _cut(data: bytes) -> bytes:
    return data[: len(data) // 2]


def _flipped(data: bytes) -> bytes:
    return data[:200] + bytes([data[200] ^ 255]) + data[201:]


@pytest.mark.parametrize("damage", [_cut, _flipped, lambda data: b"", lambda data: b"no arrays", lambda data: data[4:]])
def test_a_damaged_inputs_file_is_one_sentence(
    tvmflow: Command, bundle: Path, given: dict[str, Any], damage: Callable[[bytes], bytes]
) -> None:
    Path("in.npz").write_bytes(damage(Path("in.npz").read_bytes()))
    ended = tvmflow("run", bundle, "--inputs", "in.npz")
    assert ended.code == 1
    assert "'in.npz' is not a readable .npz of arrays; write it with numpy.savez" in ended.sentence


def test_a_single_array_is_no_inputs_file(tvmflow: Command, bundle: Path) -> None:
    np.save("in.npy", np.zeros(3))
    assert "is not a readable .npz" in tvmflow("run", bundle, "--inputs", "in.npy").sentence


def test_pickled_objects_are_refused(tvmflow: Command, bundle: Path) -> None:
    np.savez("in.npz", x=np.array([{}], dtype=object))
    assert "is not a readable .npz" in tvmflow("run", bundle, "--inputs", "in.npz").sentence


def test_a_folder_is_no_inputs_file(tvmflow: Command, bundle: Path, tmp_path: Path) -> None:
    assert "is not a readable .npz" in tvmflow("run", bundle, "--inputs", tmp_path).sentence


@pytest.mark.parametrize("output", ["absent/out.npz", "."])
def test_an_output_that_cannot_be_written_is_one_sentence(tvmflow: Command, bundle: Path, output: str) -> None:
    assert "cannot be written" in tvmflow("run", bundle, "--output", output).sentence


@pytest.mark.parametrize("command", ["run", "verify"])
def test_a_damaged_bundle_is_one_sentence(tvmflow: Command, bundle: Path, command: str) -> None:
    Path("cut.tar.gz").write_bytes(_cut(bundle.read_bytes()))
    ended = tvmflow(command, "cut.tar.gz")
    assert ended.code == 1
    assert "'cut.tar.gz' is not a bundle or is damaged" in ended.sentence


@pytest.mark.parametrize("command", ["run", "verify"])
def test_a_bundle_for_another_machine_is_one_sentence(tvmflow: Command, repack: Repack, command: str) -> None:
    ended = tvmflow(command, repack(cpu_features=("avx4096",)))
    assert ended.code == 1
    assert "needs the CPU features avx4096, which this machine lacks" in ended.sentence


@pytest.mark.parametrize("command", ["run", "verify"])
def test_a_path_through_a_file_is_one_sentence(tvmflow: Command, bundle: Path, command: str) -> None:
    assert "cannot be read (Not a directory)" in tvmflow(command, bundle / "b").sentence


def test_a_good_bundle_is_verified(tvmflow: Command, bundle: Path) -> None:
    ended = tvmflow("verify", bundle)
    assert ended.code == 0
    assert "small for native, whole, golden sample within" in ended.out


def test_verify_prints_the_manifest_as_json(tvmflow: Command, bundle: Path) -> None:
    document = json.loads(tvmflow("verify", bundle, "--json").out)
    assert document["max_abs_error"] < 1e-5
    assert document["manifest"] == json.loads(read_manifest(bundle).to_json())


@pytest.mark.parametrize("output", ["sum", "above"])
def test_other_outputs_than_the_originals_exit_with_three(tvmflow: Command, repack: Repack, output: str) -> None:
    def falsify(arrays: dict[str, Any]) -> None:
        array = arrays[f"output:{output}"]
        arrays[f"output:{output}"] = ~array if array.dtype == bool else array + 1

    ended = tvmflow("verify", repack(falsify))
    assert ended.code == 3
    assert f"output '{output}' differs from the original's by 1" in ended.sentence
