"""The sections on the model's inputs: their shapes, the ranges of symbolic dimensions, and how samples are made."""

from pathlib import Path
from typing import Literal, Self

from pydantic import field_validator, model_validator

from tvmflow.spec.fields import PositiveFloat, PositiveInt, Section, check_function

Dtype = Literal["float32", "float64", "float16", "int64", "int32", "int16", "int8", "uint8", "bool"]


class Samples(Section):
    """How the samples of one input are made.

    `low` and `high` belong to the kinds `uniform` (by default 0 and 1) and `integers` (from `low` up to, but without,
    `high`), `mean` and `std` to `normal`, `file` and `key` to `npz`, `function` to `function`.
    """

    kind: Literal["ones", "uniform", "normal", "integers", "npz", "function"] = "normal"
    low: float | None = None
    high: float | None = None
    mean: float = 0.0
    std: PositiveFloat = 1.0
    file: Path | None = None
    key: str | None = None
    function: str | None = None

    @model_validator(mode="after")
    def _is_complete(self) -> Self:
        if self.kind == "npz" and self.file is None:
            raise ValueError("samples of kind npz need file")
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
    """One input: its shape in elements per dimension, where a name stands for a symbolic dimension."""

    name: str
    shape: tuple[int | str, ...]
    dtype: Dtype = "float32"
    samples: Samples = Samples()

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
    max: PositiveInt | None = None
    tune: PositiveInt | None = None
    measure: tuple[PositiveInt, ...] = ()

    @model_validator(mode="after")
    def _is_in_range(self) -> Self:
        for size in (self.max, self.tune, *self.measure):
            if size is not None and (size < self.min or (self.max is not None and size > self.max)):
                raise ValueError(f"{size} is outside the range {self.min} to {self.max or 'any'}")
        return self

    @property
    def typical_size(self) -> int:
        """The size that is measured and reported first: of `measure` the first, else `tune`, else `min`."""
        return self.measure[0] if self.measure else self.tune or self.min
