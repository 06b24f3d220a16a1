"""The arrays of a bundle's weights are read where they lie in their file."""

import zipfile
from pathlib import Path

import numpy as np
import pytest

from tvmflow import npz
from tvmflow.compiler import save_params


def test_arrays_are_those_that_numpy_reads(tmp_path: Path) -> None:
    random = np.random.default_rng(0)
    arrays = {f"w{number}": random.normal(size=shape) for number, shape in enumerate([(), (0, 3), (7,), (5, 3, 2)])}
    arrays |= {"half": np.ones(3, "float16"), "flags": np.array([True, False]), "bits": np.zeros(2, "V2")}
    save_params(arrays, tmp_path / "own.npz")
    np.savez(tmp_path / "numpy.npz", **arrays, columns=np.asfortranarray(random.normal(size=(4, 3))))  # type: ignore[arg-type]
    for name in ("own.npz", "numpy.npz"):
        expected = npz.read(tmp_path / name)
        with (tmp_path / name).open("rb") as stream:
            actual = npz.view(stream)
        assert list(actual) == list(expected)
        for key, array in expected.items():
            assert (actual[key].dtype, actual[key].shape) == (array.dtype, array.shape)
            np.testing.assert_array_equal(actual[key], array)


@pytest.mark.parametrize("damage", ["empty", "text", "short", "compressed", "objects", "no array", "shape"])
def test_other_files_are_refused(damage: str, tmp_path: Path) -> None:
    path = tmp_path / "weights.npz"
    np.savez(path, w=np.zeros(8))
    content = path.read_bytes()
    match damage:
        case "empty":
            path.write_bytes(b"")
        case "text":
            path.write_text("no weights")
        case "short":
            path.write_bytes(content[:-30])
        case "compressed":
            np.savez_compressed(path, w=np.zeros(8))
        case "objects":
            np.savez(path, w=np.array([{}], dtype=object))
        case "no array":
            with zipfile.ZipFile(path, "w") as archive:
                archive.writestr("w.npy", b"numbers")
        case "shape":
            path.write_bytes(content.replace(b"'shape': (8,)", b"'shape': (9,)"))
    with path.open("rb") as stream, pytest.raises(ValueError, match=r"\w"):
        npz.view(stream)
