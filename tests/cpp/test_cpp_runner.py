"""The C++ runner and the Python runtime compute the same outputs from the same bundle."""

import dataclasses
import json
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import ec, ed25519
from onnx import helper

from support import cpp
from support.archives import unpack
from support.cpp import Runner
from support.models import save_model
from support.mutants import ORIGINAL_FILE, spelled
from support.steps import compile_by_steps
from tvmflow import npz, runtime
from tvmflow.arrays import NamedArrays
from tvmflow.bundle import extract, pack, read_manifest, sign, signature

MakeInputs = Callable[[int], NamedArrays]
InPython = Callable[[Path, NamedArrays], NamedArrays]


@pytest.mark.parametrize("batch", [1, 3, 4, 8])
@pytest.mark.parametrize("weights", ["inside", "apart"])
def test_outputs_are_bit_for_bit_those_of_python(
    runner: Runner,
    request: pytest.FixtureRequest,
    make_inputs: MakeInputs,
    run_in_python: InPython,
    tmp_path: Path,
    weights: str,
    batch: int,
) -> None:
    bundle: Path = request.getfixturevalue("bundle" if weights == "inside" else "bundle_apart")
    arrays = make_inputs(batch)
    expected = run_in_python(bundle, arrays)
    actual = runner.outputs(bundle, arrays, tmp_path)
    for index, (name, array) in enumerate(expected.items()):
        for key in (name, f"output_{index}"):
            assert actual[key].dtype == array.dtype
            np.testing.assert_array_equal(actual[key], array)


@pytest.mark.parametrize("weights", ["inside", "apart"])
def test_weights_that_the_library_packs_are_those_of_python(
    runner: Runner, compile_convolution: Callable[..., Path], run_in_python: InPython, tmp_path: Path, weights: str
) -> None:
    bundle = compile_convolution("native", weights)
    arrays = {"image": np.random.default_rng(3).normal(size=(2, 32, 12, 12)).astype(np.float32)}
    expected = run_in_python(bundle, arrays)["y"]
    np.testing.assert_array_equal(runner.outputs(bundle, arrays, tmp_path)["y"], expected)


def test_a_variant_is_called_for_its_sizes_only(
    runner: Runner, unpacked: Path, make_inputs: MakeInputs, tmp_path: Path
) -> None:
    manifest = json.loads((unpacked / "bundle.json").read_text())
    (variant,) = manifest["variants"]
    assert variant["sizes"] == {"batch": 4}
    # The manifest now names the function of batch 4 for batch 3, so a call of batch 3 must fail.
    variant["sizes"] = {"batch": 3}
    (unpacked / "bundle.json").write_bytes(spelled(manifest))
    for batch in (1, 4):
        assert runner.outputs(unpacked, make_inputs(batch), tmp_path)["logits"].shape == (batch, 5)
    npz.write(tmp_path / "in.npz", make_inputs(3))
    assert "model 'small' failed" in runner.refusal(unpacked, "--inputs", tmp_path / "in.npz")


def test_the_direct_form_of_main_runs_where_python_runs_it(
    runner: Runner, unpacked: Path, make_inputs: MakeInputs, tmp_path: Path
) -> None:
    manifest = json.loads((unpacked / "bundle.json").read_text())
    logits, _ = manifest["outputs"]
    assert logits["shape"] == ["batch", 5]
    # The direct form gets memory of the shape in the manifest, and refuses it; the virtual machine makes its own.
    logits["shape"] = ["batch", 6]
    (unpacked / "bundle.json").write_bytes(spelled(manifest))
    npz.write(tmp_path / "in.npz", make_inputs(3))
    assert "model 'small' failed" in runner.refusal(unpacked, "--inputs", tmp_path / "in.npz")
    # Batch 4 has a function of its own, which the virtual machine runs.
    assert runner.outputs(unpacked, make_inputs(4), tmp_path)["logits"].shape == (4, 5)
    # Without the size, and for an output of more than 16 KiB, memory is not made before.
    for size in ("columns", 5000):
        logits["shape"] = ["batch", size]
        (unpacked / "bundle.json").write_bytes(spelled(manifest))
        assert runner.outputs(unpacked, make_inputs(3), tmp_path)["logits"].shape == (3, 5)


def test_an_unpacked_bundle_computes_the_same(
    runner: Runner, bundle: Path, unpacked: Path, make_inputs: MakeInputs, tmp_path: Path
) -> None:
    arrays = make_inputs(2)
    expected = runner.outputs(bundle, arrays, tmp_path)
    np.testing.assert_array_equal(runner.outputs(unpacked, arrays, tmp_path)["logits"], expected["logits"])


def test_weights_beside_the_bundle_are_read_by_their_digest(
    runner: Runner, bundle_apart: Path, make_inputs: MakeInputs, tmp_path: Path
) -> None:
    files = tmp_path / "files"
    files.mkdir()
    manifest = extract(bundle_apart, files)
    light = tmp_path / "light.tar.gz"
    pack(light, manifest, {name: files / name for name in manifest.files}, leave_weights_out=True)
    digest = manifest.files["mod.params"].sha256
    assert digest in runner.refusal(light)
    (files / "mod.params").rename(tmp_path / digest)
    expected = runner.outputs(bundle_apart, make_inputs(2), tmp_path)
    np.testing.assert_array_equal(runner.outputs(light, make_inputs(2), tmp_path)["logits"], expected["logits"])


def test_npy_files_and_compressed_npz_files_are_read(
    runner: Runner, bundle: Path, make_inputs: MakeInputs, tmp_path: Path
) -> None:
    arrays = make_inputs(2)
    expected = runner.outputs(bundle, arrays, tmp_path)
    np.save(tmp_path / "image.npy", arrays["image"])
    np.savez_compressed(tmp_path / "rest.npz", **{name: arrays[name] for name in ("bias", "scale")})  # type: ignore[arg-type]
    options = ("--inputs", f"image={tmp_path / 'image.npy'}", "--inputs", tmp_path / "rest.npz")
    process = runner(bundle, *options, "--output", tmp_path / "out.npz")
    assert process.returncode == 0, process.stderr
    np.testing.assert_array_equal(npz.read(tmp_path / "out.npz")["logits"], expected["logits"])


def test_without_inputs_the_golden_sample_is_run(runner: Runner, bundle: Path, tmp_path: Path) -> None:
    assert runner(bundle, "--output", tmp_path / "out.npz").returncode == 0
    extract(bundle, tmp_path)
    golden = npz.read(tmp_path / "sample.npz")["output:logits"]
    np.testing.assert_allclose(npz.read(tmp_path / "out.npz")["logits"], golden, rtol=1e-4, atol=1e-5)


def test_the_json_document_holds_shapes_and_times(runner: Runner, bundle: Path, tmp_path: Path) -> None:
    output = tmp_path / "out.npz"
    process = runner(bundle, "--repeat", 5, "--warmup", 2, "--threads", 1, "--output", output, "--json")
    assert process.returncode == 0, process.stderr
    document = json.loads(process.stdout)
    batch = document["outputs"]["logits"]["shape"][0]
    assert document["outputs"] == {
        "logits": {"shape": [batch, 5], "dtype": "float32"},
        "above": {"shape": [batch, 5], "dtype": "bool"},
    }
    assert (document["runs"], document["output"]) == (5, str(output))
    times = document["latency_ms"]
    assert 0 < times["min"] <= times["p50"] <= times["p90"]
    assert times["min"] <= times["mean"]


def test_where_keys_are_trusted_bundles_that_they_signed_run(
    runner: Runner, bundle: Path, tmp_path: Path, unpacked: Path
) -> None:
    public, other = signature.keygen(tmp_path / "key"), signature.keygen(tmp_path / "other")
    signed = tmp_path / "signed.tar.gz"
    sign(bundle, tmp_path / "key", signed)
    assert runner(signed).returncode == 0
    # A private key says which public one it belongs to.
    for keys in (f"{public}", f"{other}:{public}", f"{tmp_path / 'key'}:"):
        assert runner(signed, env={"TVMFLOW_TRUSTED_KEYS": keys}).returncode == 0, keys
    trusting = {"TVMFLOW_TRUSTED_KEYS": str(public)}
    for unsigned in (bundle, unpacked):
        refusal = runner.refusal(unsigned, env=trusting)
        assert refusal.startswith(f"bundle '{unsigned}' cannot be used: it is not signed, and this machine accepts")
    key = signature.public_key(public)[:16]
    refusal = runner.refusal(signed, env={"TVMFLOW_TRUSTED_KEYS": str(other)})
    assert f"it is signed with the key {key}, which is not trusted here" in refusal
    unpack(signed, unpacked, "bundle.sig")
    assert runner(unpacked, env=trusting).returncode == 0
    manifest = unpacked / "bundle.json"
    manifest.write_bytes(manifest.read_bytes().replace(b'"small"', b'"large"'))
    assert runner(unpacked).returncode == 0
    assert "it was changed after it was signed; do not trust it" in runner.refusal(unpacked, env=trusting)


def test_a_trusted_key_that_is_none_is_refused_with_its_file(runner: Runner, bundle: Path, tmp_path: Path) -> None:
    key = ec.generate_private_key(ec.SECP256R1())
    forms = (serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8)
    files = {
        "text": b"a key",
        "empty": b"",
        "curve": key.public_key().public_bytes(
            serialization.Encoding.PEM, serialization.PublicFormat.SubjectPublicKeyInfo
        ),
        "locked": ed25519.Ed25519PrivateKey.generate().private_bytes(
            *forms, serialization.BestAvailableEncryption(b"password")
        ),
    }
    for name, content in files.items():
        path = tmp_path / name
        path.write_bytes(content)
        refusal = runner.refusal(bundle, env={"TVMFLOW_TRUSTED_KEYS": str(path)})
        assert refusal == f"'{path}' is no Ed25519 key in PEM without a password; `tvmflow keygen` makes a pair"
    # Of variables that were to be joined, none was set.
    assert runner.refusal(bundle, env={"TVMFLOW_TRUSTED_KEYS": ":"}).startswith(
        "TVMFLOW_TRUSTED_KEYS is ':', which names"
    )
    for path in (tmp_path / "nowhere", tmp_path):
        assert f"key '{path}' cannot be read" in runner.refusal(bundle, env={"TVMFLOW_TRUSTED_KEYS": str(path)})


def test_installed_it_needs_nothing_but_its_own_folder(runner: Runner, bundle: Path, tmp_path: Path) -> None:
    source = Path(runner.command[0]).parent
    cmake = str(shutil.which("cmake"))
    subprocess.run([cmake, "--install", str(source), "--prefix", str(tmp_path)], check=True, capture_output=True)
    installed = dataclasses.replace(runner, command=(str(tmp_path / "tvmflow-run"),))
    process = installed(bundle, env={"LD_DEBUG": "libs", "LD_DEBUG_OUTPUT": str(tmp_path / "loaded")})
    (log,) = tmp_path.glob("loaded.*")
    loaded = set(re.findall(r"calling init: (\S+/libtvm\S+)", log.read_text()))
    assert loaded == {str(tmp_path / f"lib{name}.so") for name in ("tvm_ffi", "tvm_runtime", "tvm_runtime_extra")}
    assert process.returncode == 0, process.stderr
    assert read_manifest(bundle).outputs[0].name in process.stdout


def test_a_program_is_linked_with_the_installed_library(program: Runner) -> None:
    process = program("run", ORIGINAL_FILE)
    assert process.returncode == 0, process.stderr
    with runtime.load(ORIGINAL_FILE) as model:
        (expected,) = model(x=np.arange(8, dtype=np.float32).reshape(1, 8)).values()
    np.testing.assert_allclose(np.fromstring(process.stdout, sep=" "), expected.ravel(), rtol=1e-5)


def test_an_input_may_begin_at_the_address_of_any_element(program: Runner, tmp_path: Path) -> None:
    model = save_model(tmp_path / "squares.onnx", [helper.make_node("Mul", ["x", "x"], ["y"])], [("x", [1, 8])], ["y"])
    document = {"name": "squares", "model": {"onnx": str(model)}, "targets": ["native"]}
    bundle = compile_by_steps(document, tmp_path, tmp_path / "state")
    process = program("run", bundle, 4)
    assert (process.stderr, process.stdout.split()) == ("", ["0", "1", "4", "9", "16", "25", "36", "49"])
    process = program("run", bundle, 1)
    assert process.returncode == 1
    assert process.stderr == "input 'x' is not contiguous memory of the CPU, aligned to 4 bytes\n"


def test_a_second_thread_that_runs_a_model_is_refused(program: Runner, tmp_path: Path) -> None:
    model = save_model(tmp_path / "sums.onnx", [helper.make_node("Add", ["x", "x"], ["y"])], [("x", [1, 8])], ["y"])
    document = {"name": "sums", "model": {"onnx": str(model)}, "targets": ["native"]}
    process = program("threads", compile_by_steps(document, tmp_path, tmp_path / "state"))
    assert process.returncode == 0, process.stderr
    assert process.stdout == "another thread runs model 'sums'; give each thread a model of its own\n"


def test_an_input_is_aligned_for_a_bundle_that_needs_it(program: Runner) -> None:
    assert not read_manifest(ORIGINAL_FILE).unaligned_inputs
    process = program("run", ORIGINAL_FILE, 4)
    assert process.returncode == 1
    assert process.stderr == "input 'x' is not contiguous memory of the CPU, aligned to 64 bytes\n"


@pytest.mark.long
def test_calls_at_many_sizes_keep_no_memory_for_each(program: Runner, tmp_path: Path) -> None:
    """Each of 60 sizes needs two tensors of 16 MiB: 2 GB. The sanitiser keeps 256 MiB of what is freed."""
    weights = {"w": np.ones((8, 256), np.float32)}
    nodes = [helper.make_node("MatMul", ["x", "w"], ["z"]), helper.make_node("Softmax", ["z"], ["y"])]
    model = save_model(tmp_path / "shares.onnx", nodes, [("x", ["rows", 8])], ["y"], weights)
    document = {"name": "shares", "model": {"onnx": str(model)}, "targets": ["native"]}
    process = program("sizes", compile_by_steps(document, tmp_path, tmp_path / "state"))
    assert process.returncode == 0, process.stderr
    assert int(process.stdout) < 900


@pytest.mark.long
def test_a_program_builds_the_library_as_a_part_of_itself(runner: Runner, tmp_path: Path) -> None:
    options = (f"-DTVMFLOW_SOURCE={cpp.CPP}", f"-DPython3_EXECUTABLE={sys.executable}")
    cpp.build(tmp_path, cpp.PROGRAM, *options)
    program = dataclasses.replace(runner, command=(str(tmp_path / "program"),))
    assert program("run", ORIGINAL_FILE).returncode == 0
