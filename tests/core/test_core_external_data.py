"""ONNX files with their weights in another file."""

from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import helper

from support.models import make_model, save_dense
from tasks.original import find_original
from tvmflow.compiler import import_onnx
from tvmflow.errors import ExportError, ModelImportError
from tvmflow.onnx_model.external_data import data_digests
from tvmflow.onnx_model.reading import read_onnx
from tvmflow.spec import parse
from tvmflow.workspace import Workspace


def _save(folder: Path, seed: int = 0) -> Path:
    """Write a product by weights that `weights.bin` holds; the ONNX file is the same for every seed."""
    weights = {"w": np.random.default_rng(seed).normal(size=(64, 8)).astype("float32")}
    model = make_model([helper.make_node("MatMul", ["x", "w"], ["y"])], [("x", ["n", 64])], ["y"], weights)
    path = folder / "model.onnx"
    (folder / "weights.bin").unlink(missing_ok=True)
    onnx.save_model(model, path, save_as_external_data=True, location="weights.bin", size_threshold=16)
    return path


def test_other_weights_beside_the_same_file_are_another_original(tmp_path: Path) -> None:
    identities, files = [], []
    for seed in (0, 1):
        files.append(_save(tmp_path, seed).read_bytes())
        spec = parse({"name": "apart", "model": {"onnx": "model.onnx"}}, tmp_path)
        identities.append(find_original(spec, Workspace(tmp_path / "state")).identity)
    assert files[0] == files[1]
    assert identities[0] != identities[1]


def test_a_file_that_holds_its_weights_has_no_data_files(tmp_path: Path) -> None:
    assert data_digests(save_dense(tmp_path / "model.onnx")) == {}
    (tmp_path / "empty.onnx").touch()
    (tmp_path / "text.onnx").write_text("a location")
    assert data_digests(tmp_path / "empty.onnx") == data_digests(tmp_path / "text.onnx") == {}


def _change(path: Path, key: str, value: str) -> None:
    model = onnx.load(path, load_external_data=False)
    for entry in model.graph.initializer[0].external_data:
        if entry.key == key:
            entry.value = value
    onnx.save(model, path)


@pytest.mark.parametrize(
    ("damage", "reason"),
    [
        ("missing", r"'weights.bin' with its weight 'w' is missing beside the model; put it there"),
        ("short", r"'weights.bin' with its weight 'w' has 100 bytes of at least 2048; copy it anew"),
        ("link", r"'weights.bin' with its weight 'w' is a link, .* put the file itself beside the model"),
        ("offset", r"'weights.bin' with its weight 'w' has the offset 'x' and the length '2048'; save the model anew"),
        ("outside", r"'../weights.bin' with its weight 'w' is outside the model's folder; put it beside the model"),
    ],
)
def test_a_data_file_that_cannot_be_read_is_named(tmp_path: Path, damage: str, reason: str) -> None:
    folder = tmp_path / "model"
    folder.mkdir()
    path = _save(folder)
    data = folder / "weights.bin"
    if damage == "short":
        data.write_bytes(data.read_bytes()[:100])
    elif damage == "offset":
        _change(path, "offset", "x")
    else:
        moved = data.rename(tmp_path / "weights.bin")
        if damage == "link":
            data.symlink_to(moved)
        elif damage == "outside":
            _change(path, "location", "../weights.bin")
    assert set(data_digests(path)) == {"../weights.bin" if damage == "outside" else "weights.bin"}
    with pytest.raises(ExportError, match=reason):
        read_onnx(path)
    with pytest.raises(ModelImportError, match=reason):
        import_onnx(path)
