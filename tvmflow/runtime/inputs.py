"""The inputs of a model: what callers pass, checked against the names, shapes and dtypes of its bundle."""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from tvmflow.bundle import (
    Manifest,
    TensorSpec,
)
from tvmflow.errors import InputError

if TYPE_CHECKING:
    from tvmflow.arrays import Array


# DLPack's kDLCPU, kDLCUDAHost and kDLCUDAManaged: the memory that NumPy can read.
_HOST_MEMORY = (1, 3, 13)


class InputCheck:
    """Checks arrays against the inputs that a bundle's manifest describes.

    `specs` are the inputs and `names` their names, in order. `indices` has the place of each input that is looked up in
    a table, with the least and the largest integer that it may hold.
    """

    def __init__(self, manifest: Manifest) -> None:
        """Take the inputs, the ranges of their dimensions and the labels of a manifest."""
        self._manifest = manifest
        self.specs = manifest.inputs
        self.names = tuple(spec.name for spec in self.specs)
        self.indices = tuple((self.names.index(name), *limits) for name, limits in manifest.indices.items())

    def match(
        self, args: "tuple[npt.ArrayLike, ...]", kwargs: "dict[str, npt.ArrayLike]"
    ) -> "dict[str, npt.ArrayLike]":
        """Return by name the arrays that a caller passed in order and by name. Raises InputError for too many."""
        if len(args) > len(self.specs):
            raise InputError(f"{len(args)} inputs are given; the model takes {self._signature()}")
        positional = {spec.name: value for spec, value in zip(self.specs, args, strict=False)}
        for name in positional.keys() & kwargs.keys():
            raise InputError(f"input {name!r} is given twice, in order and by name")
        return {**positional, **kwargs}

    def check(self, inputs: "Mapping[str, npt.ArrayLike]") -> "tuple[dict[str, Array], dict[str, int]]":
        """Return inputs by name as C-contiguous arrays in the model's order, and the sizes of symbolic dimensions.

        Strings become their places in the labels. Raises InputError for an input that is missing, unknown, or of the
        wrong shape or dtype.
        """
        for name in inputs:
            if name not in self.names:
                raise InputError(f"model {self._manifest.name!r} has no input {name!r}; it takes {self._signature()}")
        sizes: dict[str, int] = {}
        arrays = {}
        for spec in self.specs:
            if spec.name not in inputs:
                raise InputError(f"input {spec.name!r} is missing; the model takes {self._signature()}")
            array = _array_of(spec.name, inputs[spec.name])
            if array.dtype.kind in "OSTU" and spec.name in self._manifest.labels:
                array = label_places(array, self._manifest.labels[spec.name])
            if array.dtype.name != spec.dtype:
                # The name of a dtype of strings has their number of bits; that of objects does not say what they are.
                is_named = array.dtype.kind not in "OSTU" or not array.size
                own = array.dtype.name if is_named else type(array.item(0)).__name__
                raise InputError(f"input {spec.name!r} is {own}, expected {spec.dtype}; convert it first")
            self._check_shape(spec, array.shape, sizes)
            # In native byte order as well, which the dtype's name does not tell. (np.ascontiguousarray would turn a
            # scalar into a vector.)
            arrays[spec.name] = np.asarray(array, dtype=spec.dtype, order="C")
        return arrays, sizes

    def check_indices(self, arrays: Sequence[Any]) -> None:
        """Raise InputError for integers beyond the table in which the model looks them up; `arrays` are in order."""
        for place, least, largest in self.indices:
            array = arrays[place]
            if not array.size:
                continue
            for value in (array.min(), array.max()):
                if not least <= value <= largest:
                    raise InputError(f"input {self.names[place]!r} holds {value}; the model takes {least} to {largest}")

    def _check_shape(self, spec: TensorSpec, shape: tuple[int, ...], sizes: dict[str, int]) -> None:
        """Check an input's shape against the manifest, and against `sizes`, which gets its symbolic dimensions."""
        expected = f"[{', '.join(map(str, spec.shape))}]"
        if len(shape) != len(spec.shape):
            raise InputError(f"input {spec.name!r} has shape {list(shape)}, expected {expected}")
        for size, dimension in zip(shape, spec.shape, strict=True):
            if isinstance(dimension, int):
                if size != dimension:
                    raise InputError(f"input {spec.name!r} has shape {list(shape)}, expected {expected}")
                continue
            low, high = self._manifest.dimensions.get(dimension, (1, None))
            if size < low or (high is not None and size > high):
                raise InputError(
                    f"input {spec.name!r}: dimension {dimension!r} is {size}, "
                    f"expected {low} to {'any' if high is None else high}"
                )
            if sizes.setdefault(dimension, size) != size:
                raise InputError(
                    f"input {spec.name!r}: dimension {dimension!r} is {size}, but {sizes[dimension]} in another input"
                )

    def _signature(self) -> str:
        return ", ".join(f"{spec.name} {spec.dtype}[{', '.join(map(str, spec.shape))}]" for spec in self.specs)


def _array_of(name: str, value: Any) -> "Array":
    """Return a value as an array: an array or a tensor with DLPack, neither of which is copied, or a list.

    Raises InputError for a tensor on a GPU and for any other value.
    """
    if not isinstance(value, np.ndarray) and hasattr(value, "__dlpack_device__"):
        try:
            kind, _ = value.__dlpack_device__()
            if kind not in _HOST_MEMORY:
                raise InputError(f"input {name!r} is in the memory of a device; copy it to the CPU first")
            if getattr(value, "is_neg", bool)():
                # PyTorch may keep numbers with the opposite sign, and DLPack says nothing of it.
                value = value.resolve_neg()
            return np.from_dlpack(value)
        except (BufferError, RuntimeError, TypeError, ValueError) as error:
            raise InputError(f"input {name!r} cannot be read as an array ({to_one_line(error)})") from error
    try:
        return np.asarray(value)
    except ValueError as error:
        raise InputError(f"input {name!r} is not an array ({error}); give equally long rows") from error


def to_one_line(error: Exception) -> str:
    """Return an error's message without line breaks and without its last full stop."""
    return " ".join(str(error).split()).rstrip(".")


def label_places(strings: "Array", labels: Sequence[str]) -> "Array":
    """Return the place of each string in the labels, int64; -1 for one that is no label."""
    places = {label: place for place, label in enumerate(labels)}
    values = strings.ravel().tolist()
    texts = (item.decode(errors="replace") if isinstance(item, bytes) else str(item) for item in values)
    return np.array([places.get(text, -1) for text in texts], "int64").reshape(strings.shape)
