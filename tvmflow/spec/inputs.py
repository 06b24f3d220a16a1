"""The sections on the model's inputs: their shapes, the ranges of symbolic dimensions, and their samples."""

from pathlib import Path
from typing import Literal, Self

from pydantic import field_validator, model_validator

from tvmflow.spec.fields import PositiveFloat, PositiveInt, Section, check_function

Dtype = Literal[
    "float32", "float64", "float16", "int64", "int32", "int16", "int8", "uint64", "uint32", "uint16", "uint8", "bool"
]


class Samples(Section):
    """The way in which the samples of one input are made.

    `low` and `high` belong to the kinds `uniform` (by default 0 and 1) and `integers` (from `low` up to, but without,
    `high`), `mean` and `std` to `normal`, `file` and `key` to `npz`, `function` to `function`. `lengths` are whole
    numbers from 1 to the largest dimension of the sample's other inputs, their first ones left out: the lengths of the
    texts or recordings of a batch. `categories` are the numbers that each column, the last dimension, may have.
    """

    kind: Literal["ones", "uniform", "normal", "integers", "lengths", "categories", "npz", "function"] = "normal"
    """The kind of values: a constant, a distribution, lengths of other inputs, categories, a file or a function."""
    low: float | None = None
    """The lowest value; 0 for `uniform` unless given, required for `integers`."""
    high: float | None = None
    """The highest value; 1 for `uniform` unless given, required for `integers`, which stay below it."""
    mean: float = 0.0
    """The mean of `normal`."""
    std: PositiveFloat = 1.0
    """The standard deviation of `normal`."""
    categories: tuple[tuple[float, ...], ...] | None = None
    """The numbers that each column may have for `categories`, as `[[0, 1], [2, 3, 4]]`. A column without any has normal
    ones in an input of floats, 0 and 1 in others."""
    file: Path | None = None
    """The file of `npz`."""
    key: str | None = None
    """The array's name in the file of `npz`; the input's name unless given."""
    function: str | None = None
    """The function of `function`: `package.module:function`, called as `function(shape, seed)`, returns an array."""

    @model_validator(mode="after")
    def _is_complete(self) -> Self:
        if self.kind == "npz" and self.file is None:
            raise ValueError("samples of kind npz need file")
        if self.kind == "categories" and not self.categories:
            raise ValueError("samples of kind categories need categories")
        if self.kind == "function":
            if self.function is None:
                raise ValueError("samples of kind function need function")
            check_function(self.function)
        if self.kind == "integers" and (self.low is None or self.high is None):
            raise ValueError("samples of kind integers need low and high")
        low, high = self.low or 0.0, 1.0 if self.high is None else self.high
        if self.kind in ("uniform", "integers") and low >= high:
            raise ValueError(f"low ({low:g}) must be below high ({high:g})")
        if self.kind == "integers" and not (low.is_integer() and high.is_integer()):
            raise ValueError(f"low ({low:g}) and high ({high:g}) of kind integers must be whole numbers")
        return self


class Input(Section):
    """One input: its shape, where a name means a symbolic dimension, and its dtype and samples."""

    name: str
    """The input's name in the model."""
    shape: tuple[int | str, ...]
    """The size of each dimension; a name is a symbolic dimension."""
    dtype: Dtype = "float32"
    """The element type."""
    samples: Samples = Samples()
    """The way in which its samples are made."""

    @field_validator("shape")
    @classmethod
    def _has_positive_or_named_dimensions(cls, shape: tuple[int | str, ...]) -> tuple[int | str, ...]:
        for dimension in shape:
            is_valid = dimension.isidentifier() if isinstance(dimension, str) else dimension >= 1
            if not is_valid:
                raise ValueError(f"dimension {dimension!r} is neither a positive number nor a name")
        return shape

    @model_validator(mode="after")
    def _has_samples_of_its_dtype(self) -> Self:
        if self.samples.kind == "normal" and not self.dtype.startswith("float"):
            raise ValueError(f"input {self.name!r} is {self.dtype}: say its samples, e.g. kind integers, low and high")
        return self


class Dimension(Section):
    """The range of a symbolic dimension, the size to tune for and the sizes to measure."""

    min: PositiveInt = 1
    """The smallest size."""
    max: PositiveInt | None = None
    """The largest size; any unless given."""
    tune: PositiveInt | None = None
    """A size for which the bundle gets a tuned function with static shapes."""
    measure: tuple[PositiveInt, ...] = ()
    """The sizes to measure. Gates look at the first."""

    @model_validator(mode="after")
    def _is_in_range(self) -> Self:
        for size in (self.max, self.tune, *self.measure):
            if size is not None and (size < self.min or (self.max is not None and size > self.max)):
                raise ValueError(f"{size} is outside the range {self.min} to {self.max or 'any'}")
        return self

    @property
    def typical_size(self) -> int:
        """The size that is measured and reported first: the first of `measure`, else `tune`, else `min`."""
        return self.measure[0] if self.measure else self.tune or self.min
