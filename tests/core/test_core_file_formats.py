"""Files that people take for ONNX files."""

import gzip
import pickle
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from support.models import save_dense
from tvmflow.compiler import import_onnx
from tvmflow.errors import ExportError, ModelImportError
from tvmflow.onnx_model.file_formats import explain_format
from tvmflow.onnx_model.reading import read_onnx

POINTER = "version https://git-lfs.github.com/spec/v1\noid sha256:4d7a\nsize 12345\n"


def _contents(folder: Path) -> dict[str, bytes]:
    """Files of several kinds, by the word that tells each."""
    torch.save(torch.nn.Linear(3, 3).state_dict(), folder / "weights")
    save_file({"w": torch.zeros(3)}, folder / "tensors")
    return {
        "Git LFS": POINTER.encode(),
        "web page": b"\n<!DOCTYPE html><html><title>404</title></html>",
        "PyTorch": (folder / "weights").read_bytes(),
        "pickle": pickle.dumps(np.zeros(3)),
        "safetensors": (folder / "tensors").read_bytes(),
        "gzip": gzip.compress(save_dense(folder / "dense.onnx").read_bytes()),
        "ONNX Runtime's own": b"\x14\0\0\0ORTM" + bytes(40),
        "TensorFlow Lite": b"\x1c\0\0\0TFL3" + bytes(40),
        "HDF5": b"\x89HDF\r\n\x1a\n" + bytes(40),
        "GGUF": b"GGUF\x03" + bytes(40),
    }


def test_a_file_of_another_format_is_refused_by_its_name(tmp_path: Path) -> None:
    for word, content in _contents(tmp_path).items():
        path = tmp_path / "model.onnx"
        path.write_bytes(content)
        for read, error in ((import_onnx, ModelImportError), (read_onnx, ExportError)):
            with pytest.raises(error, match=rf"model\.onnx'? is not an ONNX file: it is [^\n]*{word}"):
                read(path)


def test_other_files_are_not_explained(tmp_path: Path) -> None:
    assert explain_format(save_dense(tmp_path / "model.onnx")) is None
    assert explain_format(tmp_path) is None
    assert explain_format(tmp_path / "absent") is None
