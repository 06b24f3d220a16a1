"""The sections on what a release has to show: equal outputs, a task metric, times, and bounds on these."""

from typing import Any, Literal

from pydantic import Field, field_validator

from tvmflow.spec.fields import (
    FunctionName,
    NonNegativeFloat,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    Section,
    Share,
    check_function,
)


class TaskMetric(Section):
    """Held-out data and a metric on it.

    `dataset` is a function that returns (inputs by name, labels), arrays whose first axis is the sample. `metric` is
    `accuracy` (top-1) or a function `metric(outputs by name, labels) -> float`; higher is better. `drop` is how far the
    bundle's metric may lie below the original model's. `batch` samples are run at a time.
    """

    dataset: FunctionName
    arguments: dict[str, Any] = Field(default={})
    metric: str = "accuracy"
    drop: NonNegativeFloat = 0.0
    batch: PositiveInt = 64

    @field_validator("metric")
    @classmethod
    def _is_accuracy_or_a_function(cls, metric: str) -> str:
        return metric if metric == "accuracy" else check_function(metric)


class Validate(Section):
    """When a bundle counts as equal to the original model, judged on `samples` samples.

    `rtol` and `atol` bound the error of every element. `max_relative_error`, where it is set, replaces both: it bounds
    the largest error of an output relative to the output's largest magnitude.
    """

    samples: PositiveInt = 4
    seed: int = 0
    rtol: NonNegativeFloat = 1e-3
    atol: NonNegativeFloat = 1e-4
    max_relative_error: NonNegativeFloat | None = None
    top1_agreement: Share | None = 1.0
    task: TaskMetric | None = None

    @property
    def has_bounds(self) -> bool:
        """Whether the release file itself bounds the errors."""
        return bool(self.model_fields_set & {"rtol", "atol", "max_relative_error"})


class Benchmark(Section):
    """How a bundle is measured, and what it is compared with."""

    repeats: PositiveInt = 50
    rounds: PositiveInt = 3
    warmup: NonNegativeInt = 10
    threads: PositiveInt | None = None
    peers: tuple[Literal["onnxruntime", "pytorch"], ...] = ("onnxruntime", "pytorch")


class Gates(Section):
    """Bounds that a release must keep to be published; a bound that is not set is not checked."""

    max_latency_ms: PositiveFloat | None = None
    max_ratio_onnxruntime: PositiveFloat | None = None
    max_ratio_pytorch: PositiveFloat | None = None
    max_bundle_mb: PositiveFloat | None = None
    unverified_targets: Literal["refuse", "allow"] = "refuse"
