"""The sections on the model itself: its origin, and how it is trained, exported, built and tuned."""

import re
from pathlib import Path
from typing import Annotated, Any, Literal, Self

from pydantic import Field, model_validator

from tvmflow.hardware.target import Precision
from tvmflow.spec.fields import (
    Arguments,
    Fraction,
    FunctionName,
    NonNegativeFloat,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    Section,
    check_function,
)

# The largest error over the largest number of an output, where activations have 8 or 16 bits and the release file sets
# no bound: a last digit decides between two levels, and what follows differs by levels.
ROUNDED_ERROR = 5e-2
_MLFLOW_URI = re.compile(r"models:/[^/@]+(@[^/@]+|/[^/@]+)")


class Model(Section):
    """The origin of the model: exactly one of `factory`, `pt2`, `onnx` and `mlflow`."""

    factory: str | None = None
    """A function that returns the module: `package.module:function`."""
    arguments: Arguments = Field(default={})
    """Keyword arguments of the factory."""
    weights: Path | None = None
    """A state dict for the module: a `.safetensors` file, or one of `torch.save`, read with `weights_only=True`."""
    pt2: Path | None = None
    """A file that `torch.export.save` wrote."""
    onnx: Path | None = None
    """An ONNX file."""
    mlflow: str | None = None
    """A model of the MLflow registry, flavor pytorch or onnx: `models:/NAME@ALIAS` or `models:/NAME/VERSION`."""

    trust: Literal["pickle"] | None = None
    """`pickle` lets a registered PyTorch model be loaded that was saved as a pickle or with Python modules of its own
    (`code_paths`), which can run any code; models saved with `serialization_format="pt2"` and without such modules, and
    ONNX models, load without it."""

    operators: tuple[FunctionName, ...] = ()
    """Operators of your own: `package.module:operator`. See
    [add your own operator](../how-to/add-your-own-operator.md)."""

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
        if self.trust is not None and self.mlflow is None:
            raise ValueError("trust goes with mlflow only")
        if self.mlflow is not None and not _MLFLOW_URI.fullmatch(self.mlflow):
            raise ValueError(f"mlflow {self.mlflow!r} is not of the form models:/NAME@ALIAS or models:/NAME/VERSION")
        return self

    @property
    def label(self) -> str:
        """The model's name in messages: the factory, file or registered model that the release file names."""
        return self.factory or self.mlflow or str(self.pt2 or self.onnx)


class Train(Section):
    """The training of the weights: `function(output: pathlib.Path, **arguments)` writes a state dict to `output`.

    `reads` are the files that the function reads: when one of them changes, the model is trained again.
    """

    function: FunctionName
    """The function: `package.module:function`."""
    arguments: Arguments = Field(default={})
    """Further keyword arguments of the function. They stand in `release.json` and in the report as they are, so that no
    secret belongs here: name its environment variable in the setting `child_variables`. A name that says that it is a
    secret, such as `password` or `api_key`, is refused."""
    reads: tuple[Path, ...] = ()
    """Files that the function reads. When one of them changes, the model is trained again."""


class Export(Section):
    """The export of PyTorch to ONNX; ONNX Runtime must agree with PyTorch within `rtol` and `atol`."""

    opset: Annotated[int, Field(ge=18, le=24)] = 18
    """The version of ONNX's operators."""
    optimize: bool = True
    """Whether the exporter simplifies the graph."""
    options: dict[str, Any] = Field(default={})
    """Further arguments of `torch.onnx.export`."""
    rtol: NonNegativeFloat = 1e-3
    """Relative tolerance of ONNX Runtime against PyTorch."""
    atol: NonNegativeFloat | None = None
    """Absolute tolerance of ONNX Runtime against PyTorch. Without it 1e-4, times the root mean square of an output's
    elements where that is above 1. Where neither `rtol` nor `atol` is given, a model that computes in 8 or 16 bits may
    differ by 0.05 of the largest number of an output."""

    @property
    def has_bounds(self) -> bool:
        """Whether the release file sets `rtol` or `atol`."""
        return bool(self.model_fields_set & {"rtol", "atol"})


class Build(Section):
    """The options with which TVM builds the library."""

    opt_level: Annotated[int, Field(ge=0, le=4)] = 3
    """TVM's optimisation level."""
    required_passes: tuple[str, ...] = ()
    """Passes that run at any optimisation level."""
    disabled_passes: tuple[str, ...] = ()
    """Passes that do not run."""
    config: dict[str, Any] = Field(default={})
    """Options of TVM's pass context."""
    exec_mode: Literal["bytecode", "compiled"] = "bytecode"
    """How the virtual machine runs the model: interpreted bytecode or compiled code."""
    weights: Literal["inside", "apart"] = "inside"
    """Where the weights are: in the library, or in a file of their own that targets, precisions and releases share.
    More than a GiB is in such a file in any case."""
    precision: Precision = "fp32"
    """The precision of convolutions and matrix products; all other operators stay in float32. See [reduced
    precision](../explanation/the-cpu-compiler.md#reduced-precision)."""
    threads: PositiveInt | None = None
    """The most threads that a bundle runs on; unless given, one for each physical core of the machine that runs it, or
    fewer where tuning found that faster."""
    fast_algorithms: Literal["allow", "forbid"] = "allow"
    """Whether algorithms may be used that multiply less and round more. See
    [fast algorithms](../explanation/the-cpu-compiler.md#fast-algorithms)."""


class Tune(Section):
    """The tuning budget: `trials` over all workloads together, or `minutes`; with 0 trials, stored records alone count.

    `until` is a fraction of the model's time: tuning ends when another minute is expected to save less than it. It is a
    budget by itself, or goes with one of the other two, which is then an upper bound. `early_stopping` is a number of
    trials: tuning leaves a workload when that many in a row were not faster.
    """

    trials: NonNegativeInt | None = None
    """The number of trials over all workloads together. 0 means: use stored records, measure nothing."""
    minutes: PositiveFloat | None = None
    """The time for each target."""
    until: Fraction | None = None
    """A fraction of the model's time, such as `2%`. Tuning ends when another minute is expected to save less."""
    early_stopping: PositiveInt = 256
    """Tuning leaves a workload after this many trials in a row that were not faster."""
    tuner: Literal["xgb", "ga", "random", "grid"] = "xgb"
    """The search for schedules: with a learned cost model, by a genetic algorithm, at random, or all in turn."""
    seed: int = 0
    """The seed of the search."""

    @model_validator(mode="after")
    def _has_one_budget(self) -> Self:
        if self.trials is not None and self.minutes is not None:
            raise ValueError("give the budget in trials or in minutes, not both")
        return self

    @property
    def has_budget(self) -> bool:
        """Whether the budget allows any measurement."""
        return self.trials != 0 and (self.trials or self.minutes or self.until) is not None
