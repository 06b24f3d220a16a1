"""TVM's runtime on an NVIDIA GPU: its library, and arrays in the GPU's memory."""

import ctypes
from collections.abc import Callable, Iterator
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from tvmflow.errors import BundleError
from tvmflow.runtime import library

if TYPE_CHECKING:
    from tvmflow.arrays import Array


_LIBRARY = "libtvm_runtime_cuda.so"
# The library of CUDA that TVM's needs, and the packages of the Python Package Index that hold it.
_CUDA_RUNTIME, _PACKAGES = "libcudart.so.13", ("cu13/lib", "cuda_runtime/lib")
# The attribute of a TVM device that says whether it exists, and the one of its compute capability.
_EXISTS, _CAPABILITY = 0, 4


@cache
def load() -> None:
    """Load TVM's library for NVIDIA GPUs once per process, after the one for CPUs.

    CUDA's own runtime library is found as the system finds it, or in the package nvidia-cuda-runtime. Raises
    BundleError where one of them cannot be loaded.
    """
    library.load()
    reason: OSError | None = None
    for preloaded in (None, *_find_in_packages()):
        try:
            if preloaded is not None:
                ctypes.CDLL(str(preloaded), ctypes.RTLD_GLOBAL)
            ctypes.CDLL(str(library.folder() / _LIBRARY), ctypes.RTLD_GLOBAL)
        except OSError as error:
            reason = reason or error
        else:
            return
    raise BundleError(
        f"TVM's library for NVIDIA GPUs cannot be loaded ({reason}); install the NVIDIA driver and "
        "CUDA 13's runtime (`pip install nvidia-cuda-runtime`)"
    )


def _find_in_packages() -> Iterator[Path]:
    """CUDA's runtime library in Python packages."""
    package = find_spec("nvidia")
    for root in package.submodule_search_locations or () if package is not None else ():
        for place in _PACKAGES:
            file = Path(root) / place / _CUDA_RUNTIME
            if file.is_file():
                yield file


class Memory:
    """The memory of the first GPU, and its compute capability: the major and the minor number."""

    def __init__(self) -> None:
        """Load the library. Raises BundleError without it or a GPU."""
        load()
        import tvm_ffi

        find = tvm_ffi.get_global_func
        self._device = tvm_ffi.device("cuda", 0)
        self._new_tensor = find("runtime.TVMTensorAllocWithScope")
        self._copy = find("runtime.TVMTensorCopyFromTo")
        self._from_dlpack = tvm_ffi.from_dlpack
        self._shape, self._dtype = tvm_ffi.Shape, tvm_ffi.dtype
        attribute = find("runtime.GetDeviceAttr")
        if not attribute(library.GPU, 0, _EXISTS):
            raise BundleError("this machine shows no NVIDIA GPU")
        major, minor = str(attribute(library.GPU, 0, _CAPABILITY)).split(".")
        self.capability = int(major), int(minor)

    def to_tensor(self, array: "Array") -> Any:
        """Copy an array to a new tensor."""
        tensor = self._new_tensor(self._shape(array.shape), self._dtype(array.dtype.name), self._device, None)
        self._copy_to(array, tensor)
        return tensor

    def copier(self, example: "Array") -> "Callable[[Array], Any]":
        """Make a tensor for arrays of the example's shape and dtype; return the function that copies one into it."""
        tensor = self.to_tensor(example)

        def copy(array: "Array") -> Any:
            self._copy_to(array, tensor)
            return tensor

        return copy

    def _copy_to(self, array: "Array", tensor: Any) -> None:
        usable = array if array.flags.c_contiguous and array.flags.writeable else np.array(array, order="C")
        self._copy(self._from_dlpack(usable), tensor)

    def to_array(self, tensor: Any) -> "Array":
        """Copy a tensor to a new array."""
        array = np.empty(tuple(tensor.shape), str(tensor.dtype))
        self._copy(tensor, self._from_dlpack(array))
        return array
