"""The C++ runner computes what the runtime in Python computes, from the same bundle."""

import dataclasses
import json
import re
import shutil
import subprocess
import tarfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from tvmflow import npz
from tvmflow.bundle import extract, pack, read_manifest, signature

Arrays = dict[str, npt.NDArray[Any]]
MakeInputs = Callable[[int], Arrays]
InPython = Callable[[Path, Arrays], Arrays]
Runner = Any


@pytest.mark.parametrize("batch", [1, 3, 4, 8])
@pytest.mark.parametrize("weights", ["inside", "apart"])
def test_outputs_are_bit_for_bit_those_of_python(
    runner: Runner,
    request: pytest.FixtureRequest,
    inputs: MakeInputs,
    computed_by_python: InPython,
    tmp_path: Path,
    weights: str,
    batch: int,
) -> None:
    bundle: Path = request.getfixturevalue("bundle" if weights == "inside" else "bundle_apart")
    arrays = inputs(batch)
    expected = computed_by_python(bundle, arrays)
    found = runner.outputs(bundle, arrays, tmp_path)
    for index, (name, array) in enumerate(expected.items()):
        for key in (name, f"output_{index}"):
            assert found[key].dtype == array.dtype
            np.testing.assert_array_equal(found[key], array)


def test_a_variant_is_called_for_its_sizes_only(
    runner: Runner, bundle: Path, inputs: MakeInputs, tmp_path: Path
) -> None:
    with tarfile.open(bundle) as archive:
        archive.extractall(tmp_path / "small", filter="data")
    manifest = json.loads((tmp_path / "small" / "bundle.json").read_text())
    (variant,) = manifest["variants"]
    assert variant["sizes"] == {"batch": 4}
    # Its place is given to batch 3, whose call must fail then: the function takes only batch 4.
    variant["sizes"] = {"batch": 3}
    (tmp_path / "small" / "bundle.json").write_text(json.dumps(manifest))
    for batch in (1, 4):
        assert runner.outputs(tmp_path / "small", inputs(batch), tmp_path)["logits"].shape == (batch, 5)
    npz.write(tmp_path / "in.npz", inputs(3))
    assert "model 'small' failed" in runner.refusal(tmp_path / "small", "--inputs", tmp_path / "in.npz")


def test_a_folder_into_which_the_bundle_was_unpacked_runs_as_well(
    runner: Runner, bundle: Path, inputs: MakeInputs, tmp_path: Path
) -> None:
    with tarfile.open(bundle) as archive:
        archive.extractall(tmp_path / "unpacked", filter="data")
    arrays = inputs(2)
    expected = runner.outputs(bundle, arrays, tmp_path)
    found = runner.outputs(tmp_path / "unpacked", arrays, tmp_path)
    np.testing.assert_array_equal(found["logits"], expected["logits"])


def test_weights_beside_the_bundle_are_found_by_their_digest(
    runner: Runner, bundle_apart: Path, inputs: MakeInputs, tmp_path: Path
) -> None:
    files = tmp_path / "files"
    files.mkdir()
    manifest = extract(bundle_apart, files)
    light = tmp_path / "light.tar.gz"
    pack(light, manifest, {name: files / name for name in manifest.files}, leave_weights_out=True)
    digest = manifest.files["mod.params"].sha256
    assert f"{digest} cannot be used (there is no such file)" in runner.refusal(light)
    (files / "mod.params").rename(tmp_path / digest)
    expected = runner.outputs(bundle_apart, inputs(2), tmp_path)
    np.testing.assert_array_equal(runner.outputs(light, inputs(2), tmp_path)["logits"], expected["logits"])


def test_one_array_per_input_and_a_deflated_archive_are_read_too(
    runner: Runner, bundle: Path, inputs: MakeInputs, tmp_path: Path
) -> None:
    arrays = inputs(2)
    expected = runner.outputs(bundle, arrays, tmp_path)
    np.save(tmp_path / "image.npy", arrays["image"])
    np.savez_compressed(tmp_path / "rest.npz", **{name: arrays[name] for name in ("bias", "scale")})  # type: ignore[arg-type]
    given = ("--inputs", f"image={tmp_path / 'image.npy'}", "--inputs", tmp_path / "rest.npz")
    done = runner(bundle, *given, "--output", tmp_path / "out.npz")
    assert done.returncode == 0, done.stderr
    np.testing.assert_array_equal(npz.read(tmp_path / "out.npz")["logits"], expected["logits"])


def test_without_inputs_the_golden_sample_is_run(runner: Runner, bundle: Path, tmp_path: Path) -> None:
    assert runner(bundle, "--output", tmp_path / "out.npz").returncode == 0
    extract(bundle, tmp_path)
    golden = npz.read(tmp_path / "sample.npz")["output:logits"]
    np.testing.assert_allclose(npz.read(tmp_path / "out.npz")["logits"], golden, rtol=1e-4, atol=1e-5)


def test_the_json_document_tells_shapes_and_times(runner: Runner, bundle: Path, tmp_path: Path) -> None:
    output = tmp_path / "out.npz"
    done = runner(bundle, "--repeat", 5, "--warmup", 2, "--threads", 1, "--output", output, "--json")
    assert done.returncode == 0, done.stderr
    document = json.loads(done.stdout)
    batch = document["outputs"]["logits"]["shape"][0]
    assert document["outputs"] == {
        "logits": {"shape": [batch, 5], "dtype": "float32"},
        "above": {"shape": [batch, 5], "dtype": "bool"},
    }
    assert (document["runs"], document["output"]) == (5, str(output))
    times = document["latency_ms"]
    assert 0 < times["min"] <= times["p50"] <= times["p90"]
    assert times["min"] <= times["mean"]


def test_a_signed_bundle_runs_and_where_signatures_are_asked_for_it_is_refused(
    runner: Runner, bundle: Path, tmp_path: Path
) -> None:
    public = signature.keygen(tmp_path / "key")
    files = tmp_path / "files"
    files.mkdir()
    signed = tmp_path / "signed.tar.gz"
    manifest = extract(bundle, files)
    pack(signed, manifest, {name: files / name for name in manifest.files}, key=tmp_path / "key")
    assert runner(signed).returncode == 0
    assert "checks no signatures" in runner.refusal(signed, env={"TVMFLOW_TRUSTED_KEYS": str(public)})


def test_installed_it_needs_nothing_but_its_own_folder(runner: Runner, bundle: Path, tmp_path: Path) -> None:
    built = Path(runner.command[0]).parent
    cmake = str(shutil.which("cmake"))
    subprocess.run([cmake, "--install", str(built), "--prefix", str(tmp_path)], check=True, capture_output=True)
    installed = dataclasses.replace(runner, command=(str(tmp_path / "tvmflow-run"),))
    done = installed(bundle, env={"LD_DEBUG": "libs", "LD_DEBUG_OUTPUT": str(tmp_path / "loaded")})
    (log,) = tmp_path.glob("loaded.*")
    loaded = set(re.findall(r"calling init: (\S+/libtvm\S+)", log.read_text()))
    assert loaded == {str(tmp_path / f"lib{name}.so") for name in ("tvm_ffi", "tvm_runtime", "tvm_runtime_extra")}
    assert done.returncode == 0, done.stderr
    assert read_manifest(bundle).outputs[0].name in done.stdout
