"""Writes Relax modules and weights to files, with equal bytes for equal ones, and reads them back."""

import io
import zipfile
from collections.abc import Mapping
from pathlib import Path

import ml_dtypes
import numpy as np
import tvm

from tvmflow.arrays import Array
from tvmflow.errors import ModelImportError

_EPOCH = (1980, 1, 1, 0, 0, 0)
# NumPy's files have no name for bfloat16: its numbers stand there as two bytes without a type.
_BFLOAT16 = np.dtype("V2")


def ir_text(mod: tvm.IRModule) -> str:
    """Return the module as TVMScript, in which constants larger than a scalar have names but no values."""
    return str(mod.script(show_meta=False)) + "\n"


def save_module(mod: tvm.IRModule, path: Path) -> None:
    """Write a module, with its constants, as TVM's JSON. Raises OSError.

    `save_params` writes the weights of a model that are not constants.
    """
    Path(path).write_text(tvm.ir.save_json(mod))


def load_module(path: Path) -> tvm.IRModule:
    """Read a module that `save_module` wrote. Raises ModelImportError if the file is missing or holds none."""
    try:
        mod = tvm.ir.load_json(Path(path).read_text())
    except Exception as error:  # TVM's reader raises several kinds
        raise ModelImportError(
            f"{path} is no Relax module that TVM {tvm.__version__} can read; import again"
        ) from error
    if not isinstance(mod, tvm.IRModule):
        raise ModelImportError(f"{path} holds no Relax module; import the model again")
    return mod


def save_params(params: Mapping[str, Array], path: Path) -> None:
    """Write tensors in order as an uncompressed `.npz`; equal tensors give equal bytes. Raises OSError."""
    with zipfile.ZipFile(path, "w", zipfile.ZIP_STORED) as archive:
        for name, value in params.items():
            buffer = io.BytesIO()
            np.lib.format.write_array(buffer, np.asarray(value, order="C"), allow_pickle=False)
            entry = zipfile.ZipInfo(f"{name}.npy", _EPOCH)
            with archive.open(entry, "w", force_zip64=True) as member:
                member.write(buffer.getbuffer())


def load_params(path: Path) -> dict[str, Array]:
    """Read tensors that `save_params` wrote, in order. Raises ModelImportError if the file is missing or damaged."""
    try:
        with np.load(path, allow_pickle=False) as archive:
            arrays = {name: archive[name] for name in archive.files}
    except (OSError, ValueError, zipfile.BadZipFile) as error:
        raise ModelImportError(f"{path} holds no weights that can be read; import the model again") from error
    return {
        name: array.view(ml_dtypes.bfloat16) if array.dtype == _BFLOAT16 else array for name, array in arrays.items()
    }
