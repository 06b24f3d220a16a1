"""The sections on the model itself: where it comes from, and how it is trained, exported, built and tuned."""

import re
from pathlib import Path
from typing import Annotated, Any, Literal, Self

from pydantic import Field, model_validator

from tvmflow.spec.fields import (
    Fraction,
    FunctionName,
    NonNegativeFloat,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    Section,
    check_function,
)
from tvmflow.target import Precision

_MLFLOW_URI = re.compile(r"models:/[^/@]+(@[^/@]+|/[^/@]+)")


class Model(Section):
    """Where the model comes from: exactly one of `factory`, `pt2`, `onnx` and `mlflow`."""

    factory: str | None = None
    arguments: dict[str, Any] = Field(default={})
    weights: Path | None = None
    pt2: Path | None = None
    onnx: Path | None = None
    mlflow: str | None = None

    @model_validator(mode="after")
    def _has_one_source(self) -> Self:
        keys = [key for key in ("factory", "pt2", "onnx", "mlflow") if getattr(self, key) is not None]
        if len(keys) != 1:
            number = f"{' and '.join(keys)} are given" if keys else "none is given"
            raise ValueError(f"exactly one of factory, pt2, onnx and mlflow says where the model is; {number}")
        if self.factory is not None:
            check_function(self.factory)
        elif self.arguments or self.weights is not None:
            raise ValueError("arguments and weights go with factory only")
        if self.mlflow is not None and not _MLFLOW_URI.fullmatch(self.mlflow):
            raise ValueError(f"mlflow {self.mlflow!r} is not of the form models:/NAME@ALIAS or models:/NAME/VERSION")
        return self

    @property
    def label(self) -> str:
        """What messages call the model: the factory, file or registered model that the release file names."""
        return self.factory or self.mlflow or str(self.pt2 or self.onnx)


class Train(Section):
    """How the weights are trained: `function(output: pathlib.Path, **arguments)` writes a state dict to `output`.

    `reads` are the files that the function reads: when one of them changes, the model is trained again.
    """

    function: FunctionName
    arguments: dict[str, Any] = Field(default={})
    reads: tuple[Path, ...] = ()


class Export(Section):
    """How PyTorch is exported to ONNX; ONNX Runtime must agree with PyTorch within `rtol` and `atol`."""

    opset: Annotated[int, Field(ge=18, le=24)] = 18
    optimize: bool = True
    options: dict[str, Any] = Field(default={})
    rtol: NonNegativeFloat = 1e-3
    atol: NonNegativeFloat = 1e-4


class Build(Section):
    """How TVM builds the library."""

    opt_level: Annotated[int, Field(ge=0, le=4)] = 3
    required_passes: tuple[str, ...] = ()
    disabled_passes: tuple[str, ...] = ()
    config: dict[str, Any] = Field(default={})
    exec_mode: Literal["bytecode", "compiled"] = "bytecode"
    weights: Literal["inside", "apart"] = "inside"
    precision: Precision = "fp32"
    fast_algorithms: Literal["allow", "forbid"] = "allow"


class Tune(Section):
    """The tuning budget: `trials` over all workloads together, or `minutes`; with 0 trials, stored records alone count.

    `until` is a fraction of the model's time: tuning ends when another minute is expected to save less than it. It is a
    budget by itself, or goes with one of the other two, which is then an upper bound. `early_stopping` is a number of
    trials: tuning leaves a workload when that many in a row were not faster.
    """

    trials: NonNegativeInt | None = None
    minutes: PositiveFloat | None = None
    until: Fraction | None = None
    early_stopping: PositiveInt = 256
    tuner: Literal["xgb", "ga", "random", "grid"] = "xgb"
    seed: int = 0

    @model_validator(mode="after")
    def _has_one_budget(self) -> Self:
        if self.trials is not None and self.minutes is not None:
            raise ValueError("give the budget in trials or in minutes, not both")
        return self

    @property
    def has_budget(self) -> bool:
        """Whether there is a budget to measure anything with."""
        return self.trials != 0 and (self.trials or self.minutes or self.until) is not None
