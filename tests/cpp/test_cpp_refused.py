"""What the C++ runner refuses: one sentence, and neither a crash nor anything that the sanitisers object to."""

import gzip
import hashlib
import io
import json
import shutil
import struct
import tarfile
import zipfile
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from tvmflow import npz
from tvmflow.target import host

Arrays = dict[str, npt.NDArray[Any]]
MakeInputs = Callable[[int], Arrays]
Change = Callable[[dict[str, Any]], None]
Runner = Any
OTHER_ARCH = "aarch64" if host().arch == "x86_64" else "x86_64"


@pytest.fixture
def unpacked(bundle: Path, tmp_path: Path) -> Path:
    folder = tmp_path / "unpacked"
    with tarfile.open(bundle) as archive:
        archive.extractall(folder, filter="data")
    return folder


def set_in(*path: str | int, value: Any) -> Change:
    """A change of a manifest's document: the value at a path."""

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
        assert "damaged" in runner.refusal(path), position


def test_a_truncated_bundle_or_one_that_goes_on_is_refused(runner: Runner, bundle: Path, tmp_path: Path) -> None:
    data = bundle.read_bytes()
    path = tmp_path / "damaged.tar.gz"
    for content in (b"", data[:5], data[:18], data[: len(data) // 2], data[:-1], data + b"\0", data + data):
        path.write_bytes(content)
        assert "is not a bundle or is damaged" in runner.refusal(path)


@pytest.mark.parametrize("name", ["mod.so", "mod.json", "sample.npz"])
def test_a_flipped_byte_in_an_unpacked_file_is_refused(runner: Runner, unpacked: Path, name: str) -> None:
    data = bytearray((unpacked / name).read_bytes())
    data[len(data) // 2] ^= 1
    (unpacked / name).write_bytes(data)
    assert f"{name} cannot be used (it is not what the manifest says)" in runner.refusal(unpacked)


def test_a_missing_file_is_refused(runner: Runner, unpacked: Path, tmp_path: Path) -> None:
    (unpacked / "mod.so").unlink()
    assert "mod.so cannot be used (there is no such file)" in runner.refusal(unpacked)
    (unpacked / "bundle.json").unlink()
    assert "it has no bundle.json" in runner.refusal(unpacked)
    assert "there is no bundle" in runner.refusal(tmp_path / "missing.tar.gz")


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        (set_in("arch", value=OTHER_ARCH), f"is built for {OTHER_ARCH}, this machine is {host().arch}; take the"),
        (set_in("cpu_features", value=["sve9", "avx4096"]), "needs the CPU features avx4096, sve9, which this machine"),
        (set_in("versions", "tvm", value="0.19.3"), "is built with apache-tvm 0.19.3, this program with 0."),
        (set_in("versions", "tvm_ffi", value="0.9.1"), "is built with apache-tvm-ffi 0.9.1, this program with 0."),
        (set_in("format", value=99), "its format is 99, this program reads 1; take a newer program"),
        (set_in("format", value="1"), "a value is not a count"),
        (set_in("threads", value=-1), "a value is not a count"),
        (set_in("threads", value=0), "it is for no threads"),
        (set_in("threads", value=1 << 64), "a number of at most 64 bits"),
        (set_in("inputs", 0, "shape", value=[1.5]), "a value is not a count"),
        (set_in("inputs", 0, "name", value="two\nlines"), "a name is not printable"),
        (set_in("dimensions", "batch", value=[1]), "a dimension has no range"),
        (set_in("weights", value="elsewhere"), "'elsewhere' is unknown"),
        (set_in("weights", value="apart"), "it does not say where weights are"),
        (set_in("files", "mod.so", "sha256", value="00"), "'00' is not a SHA-256"),
        (set_in("files", "../escaped", value={"sha256": "0" * 64, "size": 1}), "'../escaped' is unknown"),
        (set_in("files", value={}), "it names no mod.json"),
        (set_in("variants", value=[{"function": "missing", "sizes": {}}]), "has no function 'missing'"),
        (lambda document: document.pop("name"), "it lacks 'name'"),
        (lambda document: document.pop("versions"), "it lacks 'versions'"),
    ],
)
def test_a_manifest_that_does_not_fit_is_refused(runner: Runner, unpacked: Path, change: Change, sentence: str) -> None:
    document = json.loads((unpacked / "bundle.json").read_text())
    change(document)
    (unpacked / "bundle.json").write_text(json.dumps(document))
    assert sentence in runner.refusal(unpacked)


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
        '{"a" 1}',
        "[" * 5000,
        '"\x01"',
        "1 2",
    ],
)
def test_what_is_not_json_is_refused(runner: Runner, unpacked: Path, text: str) -> None:
    (unpacked / "bundle.json").write_text(text)
    assert "it is not JSON" in runner.refusal(unpacked)


def test_a_library_that_is_none_is_refused(runner: Runner, unpacked: Path) -> None:
    (unpacked / "mod.so").write_bytes(b"no library")
    document = json.loads((unpacked / "bundle.json").read_text())
    document["files"]["mod.so"] = {"sha256": hashlib.sha256(b"no library").hexdigest(), "size": 10}
    (unpacked / "bundle.json").write_text(json.dumps(document))
    assert "bundle 'small': its library cannot be loaded" in runner.refusal(unpacked)


@pytest.mark.parametrize(
    ("name", "array", "sentence"),
    [
        ("image", np.zeros((2, 3, 8, 8)), "input 'image' is float64, expected float32; convert it first"),
        ("image", np.zeros((2, 3, 8), np.float32), "has shape [2, 3, 8], expected [batch, 3, 8, 8]"),
        ("image", np.zeros((2, 3, 8, 9), np.float32), "has shape [2, 3, 8, 9], expected [batch, 3, 8, 8]"),
        ("image", np.zeros((9, 3, 8, 8), np.float32), "dimension 'batch' is 9, expected 1 to 8"),
        ("image", np.zeros((0, 3, 8, 8), np.float32), "dimension 'batch' is 0, expected 1 to 8"),
        ("image", np.zeros((3, 3, 8, 8), np.float32), "dimension 'batch' is 2, but 3 in another input"),
        ("image", None, "input 'image' is missing; the model takes image float32[batch, 3, 8, 8]"),
        ("imagine", np.zeros(1, np.float32), "has no input 'imagine'; it takes image"),
        ("image", np.asfortranarray(np.zeros((2, 3, 8, 8), np.float32)), "save numpy.ascontiguousarray of it"),
        ("image", np.zeros((2, 3, 8, 8), ">f4"), "its dtype '>f4' is not one of numbers in native byte order"),
        ("image", np.array(["a"]), "its dtype '<U1' is not one of numbers"),
    ],
)
def test_an_input_that_does_not_fit_is_refused(
    runner: Runner,
    bundle: Path,
    inputs: MakeInputs,
    tmp_path: Path,
    name: str,
    array: npt.NDArray[Any] | None,
    sentence: str,
) -> None:
    given = {key: value for key, value in {**inputs(2), name: array}.items() if value is not None}
    npz.write(tmp_path / "in.npz", given)
    assert sentence in runner.refusal(bundle, "--inputs", tmp_path / "in.npz")


def test_damaged_inputs_are_refused(runner: Runner, bundle: Path, inputs: MakeInputs, tmp_path: Path) -> None:
    place, data = tmp_path / "in.npz", io.BytesIO()
    np.savez_compressed(data, **inputs(2))  # type: ignore[arg-type]
    npz.write(place, inputs(2))
    generator = np.random.default_rng(1)
    for whole in (place.read_bytes(), data.getvalue()):
        for size in (0, 21, 22, 100, len(whole) // 2, len(whole) - 1):
            place.write_bytes(whole[:size])
            assert "cannot be read" in runner.refusal(bundle, "--inputs", place), size
        for position in generator.integers(0, len(whole), 12).tolist():
            damaged = bytearray(whole)
            damaged[position] ^= 0xFF
            place.write_bytes(damaged)
            done = runner(bundle, "--inputs", place)
            # Not every byte of a zip archive says something.
            assert done.returncode in (0, 1), done.stderr
            assert done.stderr.count("\n") == done.returncode, done.stderr


def test_sizes_that_lie_are_refused(runner: Runner, bundle: Path, tmp_path: Path) -> None:
    header = "{'descr': '<f4', 'fortran_order': False, 'shape': (%s), }\n"
    for shape in ("99999999999999999999,", "4611686018427387904, 4", "1000000000000,", "2, -1", "2, 3", "-"):
        text = (header % shape).encode()
        array = b"\x93NUMPY\x01\x00" + struct.pack("<H", len(text)) + text + bytes(4)
        (tmp_path / "a.npy").write_bytes(array)
        assert "cannot be read" in runner.refusal(bundle, "--inputs", f"image={tmp_path / 'a.npy'}")
        with zipfile.ZipFile(tmp_path / "a.npz", "w", zipfile.ZIP_DEFLATED) as archive:
            archive.writestr("image.npy", array)
        assert "cannot be read" in runner.refusal(bundle, "--inputs", tmp_path / "a.npz")


def test_what_is_no_file_of_arrays_is_refused(runner: Runner, bundle: Path, tmp_path: Path) -> None:
    with zipfile.ZipFile(tmp_path / "a.npz", "w") as archive:
        archive.writestr("readme.txt", "no array")
    assert "it holds 'readme.txt', which is no array" in runner.refusal(bundle, "--inputs", tmp_path / "a.npz")
    assert "there is no such file" in runner.refusal(bundle, "--inputs", tmp_path / "missing.npz")
    assert "it is no regular file" in runner.refusal(bundle, "--inputs", tmp_path)


def test_an_output_that_cannot_be_written_is_refused(runner: Runner, bundle: Path, tmp_path: Path) -> None:
    assert "cannot be written" in runner.refusal(bundle, "--output", tmp_path / "missing" / "out.npz")


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        ((), "no bundle is given; see --help"),
        (("a", "b"), "'b' is one bundle too many; see --help"),
        (("a", "--repeat", "0"), "--repeat is '0'; give a whole number of at least 1"),
        (("a", "--repeat", "2x"), "--repeat is '2x'; give a whole number of at least 1"),
        (("a", "--threads"), "--threads lacks its value; see --help"),
        (("a", "--fast"), "there is no option '--fast'; see --help"),
    ],
)
def test_a_wrong_command_line_is_refused(runner: Runner, arguments: tuple[str, ...], sentence: str) -> None:
    assert runner.refusal(*arguments, code=2) == sentence


def test_nothing_is_left_behind(runner: Runner, bundle: Path, tmp_path: Path) -> None:
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
