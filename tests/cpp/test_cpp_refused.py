"""Bundles, inputs and command lines that the C++ runner refuses: in one sentence, and without a sanitiser's report."""

import gzip
import hashlib
import io
import json
import shutil
import struct
import zipfile
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from support import scale
from support.cpp import Runner
from support.models import save_counter, save_lookup
from support.mutants import spelled
from support.steps import compile_by_steps
from tvmflow import npz
from tvmflow.arrays import NamedArrays
from tvmflow.hardware.target import host

MakeInputs = Callable[[int], NamedArrays]
Change = Callable[[dict[str, Any]], None]
OTHER_ARCH = "aarch64" if host().arch == "x86_64" else "x86_64"


def set_in(*path: str | int, value: Any) -> Change:
    """A function that sets the value at a path of a manifest's document."""

    def change(document: dict[str, Any]) -> None:
        place: Any = document
        for key in path[:-1]:
            place = place[key]
        place[path[-1]] = value

    return change


def _inflated(data: bytes | bytearray) -> bytes | None:
    try:
        return gzip.decompress(bytes(data))
    except (OSError, EOFError, zlib.error):
        return None


def test_a_flipped_byte_anywhere_in_a_bundle_is_refused(runner: Runner, bundle: Path, tmp_path: Path) -> None:
    data = bundle.read_bytes()
    generator = np.random.default_rng(0)
    positions = {0, 9, 10, len(data) - 1, *generator.integers(0, len(data), 25).tolist()}
    for position in sorted(positions):
        damaged = bytearray(data)
        damaged[position] ^= 1 << int(generator.integers(8))
        if position > 10 and _inflated(damaged) == _inflated(data):
            continue  # deflate can say the same in several ways, as a run of zeros at another distance
        path = tmp_path / "damaged.tar.gz"
        path.write_bytes(damaged)
        assert str(path) in runner.refusal(path), position


def test_a_truncated_bundle_or_one_that_goes_on_is_refused(runner: Runner, bundle: Path, tmp_path: Path) -> None:
    data = bundle.read_bytes()
    path = tmp_path / "damaged.tar.gz"
    for content in (b"", data[:5], data[:18], data[: len(data) // 2], data[:-1], data + b"\0", data + data):
        path.write_bytes(content)
        assert str(path) in runner.refusal(path)


@pytest.mark.parametrize("name", ["mod.so", "mod.json", "sample.npz"])
def test_a_flipped_byte_in_an_unpacked_file_is_refused(runner: Runner, unpacked: Path, name: str) -> None:
    data = bytearray((unpacked / name).read_bytes())
    data[len(data) // 2] ^= 1
    (unpacked / name).write_bytes(data)
    assert name in runner.refusal(unpacked)


def test_a_missing_file_is_refused(runner: Runner, unpacked: Path, tmp_path: Path) -> None:
    (unpacked / "mod.so").unlink()
    assert "mod.so" in runner.refusal(unpacked)
    (unpacked / "bundle.json").unlink()
    assert "bundle.json" in runner.refusal(unpacked)
    assert "missing.tar.gz" in runner.refusal(tmp_path / "missing.tar.gz")


@pytest.mark.parametrize(
    ("change", "names"),
    [
        (set_in("arch", value=OTHER_ARCH), [OTHER_ARCH, host().arch]),
        (set_in("cpu_features", value=["sve9", "avx4096"]), ["avx4096", "sve9"]),
        (set_in("versions", "tvm", value="0.19.3"), ["apache-tvm 0.19.3"]),
        (set_in("versions", "tvm_ffi", value="0.9.1"), ["apache-tvm-ffi 0.9.1"]),
        (set_in("format", value=99), ["format is 99", "reads 3"]),
        (set_in("format", value=2), ["'weights'"]),
        (set_in("format", value=3), ["'weights'"]),
        (set_in("weights", value="unpacked"), ["'weights'"]),
        (set_in("weights", value="shared"), ["'weights'"]),
        (set_in("format", value="1"), ["'format'"]),
        (set_in("threads", value=-1), ["'threads'"]),
        (set_in("threads", value=0), ["'threads'"]),
        (set_in("threads", value=1 << 63), ["'threads'"]),
        (set_in("inputs", 0, "shape", value=[1.5]), ["'inputs[0].shape[0]'"]),
        (set_in("inputs", 0, "name", value="two\nlines"), ["'inputs[0].name'"]),
        (set_in("inputs", 0, "dtype", value="float33"), ["'inputs[0].dtype'"]),
        (set_in("dimensions", "batch", value=[1]), ["'dimensions.batch'"]),
        (set_in("dimensions", "batch", value=[2, 1]), ["'dimensions.batch[1]'"]),
        (set_in("weights", value="elsewhere"), ["'weights'"]),
        (set_in("weights", value="apart"), ["'weights'", "'files'"]),
        (set_in("files", "mod.so", "sha256", value="00"), ["'files.mod.so.sha256'"]),
        (set_in("files", "../escaped", value={"sha256": "0" * 64, "size": 1}), ["'files.../escaped'"]),
        (set_in("files", value={}), ["'files.mod.json'"]),
        (set_in("variants", value=[{"function": "missing", "sizes": {}}]), ["'missing'"]),
        (set_in("variants", value=[{"function": "main", "sizes": {"height": 1}}]), ["'variants[0].sizes.height'"]),
        (lambda document: document.pop("name"), ["'name'"]),
        (lambda document: document.pop("versions"), ["'versions'"]),
    ],
)
def test_a_manifest_that_does_not_fit_is_refused(
    runner: Runner, unpacked: Path, change: Change, names: list[str]
) -> None:
    document = json.loads((unpacked / "bundle.json").read_text())
    change(document)
    (unpacked / "bundle.json").write_bytes(spelled(document))
    refusal = runner.refusal(unpacked)
    assert [name for name in names if name not in refusal] == []


@pytest.mark.parametrize(
    "text",
    [
        "",
        "{",
        "[1,]",
        '{"a": 1, "a": 2}',
        '{"a": 01}',
        '"\\ud800"',
        '"\\u12',
        "nul",
        "[" * 5000,
        '"\x01"',
        "1 2",
        "1e999",
    ],
)
def test_text_that_is_not_json_is_refused(program: Runner, unpacked: Path, text: str) -> None:
    (unpacked / "bundle.json").write_text(text)
    process = program("verify", text=f"{unpacked}\n")
    assert process.returncode == 0, process.stderr
    assert str(unpacked) in process.stdout


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ('"threads"', '"threads": 1, "threads"'),
        ('"threads": ', '"threads": -0, "x": '),
        ('"threads"', ' "threads"'),
        ('"x86_64', '"\\u0078\\u0038\\u0036_64'),
        ('"tvm_target": {', '"tvm_target": {"a": 100000000000000000000,'),
    ],
)
def test_a_manifest_in_another_spelling_is_refused(program: Runner, unpacked: Path, old: str, new: str) -> None:
    text = (unpacked / "bundle.json").read_text()
    assert old in text
    (unpacked / "bundle.json").write_text(text.replace(old, new, 1))
    assert "spelled" in program("verify", text=f"{unpacked}\n").stdout


def test_a_file_that_is_no_library_is_refused(runner: Runner, unpacked: Path) -> None:
    (unpacked / "mod.so").write_bytes(b"no library")
    document = json.loads((unpacked / "bundle.json").read_text())
    document["files"]["mod.so"] = {"sha256": hashlib.sha256(b"no library").hexdigest(), "size": 10}
    (unpacked / "bundle.json").write_bytes(spelled(document))
    assert "'small': its library" in runner.refusal(unpacked)


@pytest.mark.parametrize(
    ("name", "array", "words"),
    [
        ("image", np.zeros((2, 3, 8, 8)), ["'image'", "float64", "float32"]),
        ("image", np.zeros((2, 3, 8), np.float32), ["'image'", "[2, 3, 8]", "[batch, 3, 8, 8]"]),
        ("image", np.zeros((2, 3, 8, 9), np.float32), ["'image'", "[2, 3, 8, 9]", "[batch, 3, 8, 8]"]),
        ("image", np.zeros((9, 3, 8, 8), np.float32), ["'image'", "'batch' is 9", "1 to 8"]),
        ("image", np.zeros((0, 3, 8, 8), np.float32), ["'image'", "'batch' is 0", "1 to 8"]),
        ("image", np.zeros((3, 3, 8, 8), np.float32), ["'batch' is 2", "3 in"]),
        ("image", None, ["'image'", "float32[batch, 3, 8, 8]"]),
        ("imagine", np.zeros(1, np.float32), ["'imagine'", "image float32[batch, 3, 8, 8]"]),
        ("image", np.asfortranarray(np.zeros((2, 3, 8, 8), np.float32)), ["'image'", "ascontiguousarray"]),
        ("image", np.zeros((2, 3, 8, 8), ">f4"), ["'image'", "'>f4'"]),
        ("image", np.array(["a"]), ["'image'", "'<U1'"]),
    ],
)
def test_an_input_that_does_not_fit_is_refused(
    runner: Runner,
    bundle: Path,
    make_inputs: MakeInputs,
    tmp_path: Path,
    name: str,
    array: npt.NDArray[Any] | None,
    words: list[str],
) -> None:
    arrays = {key: value for key, value in {**make_inputs(2), name: array}.items() if value is not None}
    npz.write(tmp_path / "in.npz", arrays)
    refusal = runner.refusal(bundle, "--inputs", tmp_path / "in.npz")
    assert [word for word in words if word not in refusal] == []


@pytest.mark.parametrize("save", [np.savez, np.savez_compressed])
def test_damaged_inputs_are_refused_or_change_nothing(
    runner: Runner, bundle: Path, make_inputs: MakeInputs, tmp_path: Path, save: Callable[..., None]
) -> None:
    path, output = tmp_path / "in.npz", tmp_path / "out.npz"
    save(path, **make_inputs(2))
    original = path.read_bytes()
    expected = runner.outputs(bundle, make_inputs(2), tmp_path)
    for size in (0, 21, 22, 100, len(original) // 2, len(original) - 1):
        path.write_bytes(original[:size])
        assert str(path) in runner.refusal(bundle, "--inputs", path), size
    generator = np.random.default_rng(1)
    refusals = 0
    positions = generator.integers(0, len(original), scale.count(normal=12, long=100))
    for position in positions.tolist():
        damaged = bytearray(original)
        damaged[position] ^= 0xFF
        path.write_bytes(damaged)
        process = runner(bundle, "--inputs", path, "--output", output)
        assert process.returncode in (0, 1), (position, process.stderr)
        if process.returncode == 1:
            refusals += 1
            assert process.stderr.count("\n") == 1, position
            continue
        # Times and attributes of a member say nothing about its array.
        actual = npz.read(output)
        assert actual.keys() == expected.keys(), position
        for name, array in expected.items():
            np.testing.assert_array_equal(actual[name], array, err_msg=f"byte {position}")
    assert refusals > len(positions) / 2


def test_sizes_that_lie_are_refused(runner: Runner, bundle: Path, tmp_path: Path) -> None:
    header = "{'descr': '<f4', 'fortran_order': False, 'shape': (%s), }\n"
    large = "4611686018427387904"
    for shape in (
        "99999999999999999999,",
        f"{large}, 4",
        "1000000000000,",
        "2, -1",
        "2, 3",
        "-",
        f"0, {large}, {large}",
    ):
        text = (header % shape).encode()
        content = b"" if shape.startswith("0") else bytes(4)
        array = b"\x93NUMPY\x01\x00" + struct.pack("<H", len(text)) + text + content
        (tmp_path / "a.npy").write_bytes(array)
        assert "a.npy" in runner.refusal(bundle, "--inputs", f"image={tmp_path / 'a.npy'}")
        with zipfile.ZipFile(tmp_path / "a.npz", "w", zipfile.ZIP_DEFLATED) as archive:
            archive.writestr("image.npy", array)
        assert "a.npz" in runner.refusal(bundle, "--inputs", tmp_path / "a.npz")


def test_a_bomb_of_zeros_is_refused_in_little_memory(runner: Runner, bundle: Path, tmp_path: Path) -> None:
    header = b"{'descr': '<f4', 'fortran_order': False, 'shape': (16777216,), }\n"
    with zipfile.ZipFile(tmp_path / "a.npz", "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("image.npy", b"\x93NUMPY\x01\x00" + struct.pack("<H", len(header)) + header + bytes(1 << 26))
    data = bytearray((tmp_path / "a.npz").read_bytes())
    # The directory now declares a member of four gigabytes, which no compression makes so small.
    entry = data.rindex(b"PK\x01\x02")
    data[entry + 24 : entry + 28] = struct.pack("<L", 0xFFFFFFFE)
    (tmp_path / "a.npz").write_bytes(data)
    assert "a.npz" in runner.refusal(bundle, "--inputs", tmp_path / "a.npz")


def test_a_file_that_holds_no_arrays_is_refused(runner: Runner, bundle: Path, tmp_path: Path) -> None:
    with zipfile.ZipFile(tmp_path / "a.npz", "w") as archive:
        archive.writestr("readme.txt", "no array")
    assert "'readme.txt'" in runner.refusal(bundle, "--inputs", tmp_path / "a.npz")
    assert "missing.npz" in runner.refusal(bundle, "--inputs", tmp_path / "missing.npz")
    assert str(tmp_path) in runner.refusal(bundle, "--inputs", tmp_path)


def test_an_output_that_cannot_be_written_is_refused(runner: Runner, bundle: Path, tmp_path: Path) -> None:
    output = tmp_path / "missing" / "out.npz"
    assert str(output) in runner.refusal(bundle, "--output", output)


@pytest.mark.parametrize(
    ("arguments", "word"),
    [
        ((), "bundle"),
        (("a", "b"), "'b'"),
        (("a", "--repeat", "0"), "--repeat is '0'"),
        (("a", "--repeat", "2x"), "--repeat is '2x'"),
        (("a", "--threads"), "--threads"),
        (("a", "--fast"), "'--fast'"),
    ],
)
def test_a_wrong_command_line_is_refused(runner: Runner, arguments: tuple[str, ...], word: str) -> None:
    assert word in runner.refusal(*arguments, code=2)


def test_no_temporary_file_remains(runner: Runner, bundle: Path, tmp_path: Path) -> None:
    scratch = tmp_path / "scratch"
    scratch.mkdir()
    damaged = tmp_path / "damaged.tar.gz"
    shutil.copyfile(bundle, damaged)
    with damaged.open("r+b") as stream:
        stream.seek(-1, io.SEEK_END)
        stream.write(b"\xff")
    assert runner(bundle, env={"TMPDIR": str(scratch)}).returncode == 0
    runner.refusal(damaged, env={"TMPDIR": str(scratch)})
    assert list(scratch.iterdir()) == []


@pytest.mark.parametrize("dtype", ["int64", "int32"])
def test_an_integer_that_the_table_lacks_is_named(runner: Runner, tmp_path: Path, dtype: str) -> None:
    path = save_lookup(tmp_path / "lookup.onnx", dtype)
    bundle = compile_by_steps({"name": "lookup", "model": {"onnx": str(path)}}, tmp_path, tmp_path / "state")
    assert runner.outputs(bundle, {"ids": np.array([[-5, 4]], dtype)}, tmp_path)
    for value in (5, -6):
        npz.write(tmp_path / "in.npz", {"ids": np.array([[0, value]], dtype)})
        message = runner.refusal(bundle, "--inputs", tmp_path / "in.npz")
        assert message.endswith(f"input 'ids' holds {value}; the model takes -5 to 4")


def test_an_index_that_the_model_computes_is_checked(runner: Runner, tmp_path: Path) -> None:
    path = save_counter(tmp_path / "counter.onnx")
    bundle = compile_by_steps({"name": "counter", "model": {"onnx": str(path)}}, tmp_path, tmp_path / "state")
    x = np.full((2, 4), 11, "float32")
    assert runner.outputs(bundle, {"x": x}, tmp_path)["y"].tolist() == [[1, 2, 3, 4]] * 2
    npz.write(tmp_path / "in.npz", {"x": np.full((2, 5), 11, "float32")})
    assert "an index is not from -5 to 4" in runner.refusal(bundle, "--inputs", tmp_path / "in.npz")
