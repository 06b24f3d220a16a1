"""The sections on the checks of a release: equal outputs, a task metric, times, and bounds on these."""

from typing import Literal

from pydantic import Field, field_validator

from tvmflow.spec.fields import (
    Arguments,
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
    bundle's metric may lie below the original model's. `batch` samples are run at a time; arrays that all have one
    axis more than the model's inputs hold whole inputs, which are run one by one.
    """

    dataset: FunctionName
    """A function that returns the data."""
    arguments: Arguments = Field(default={})
    """Keyword arguments of `dataset`."""
    metric: str = "accuracy"
    """`accuracy`, or a function."""
    drop: NonNegativeFloat = 0.0
    """How far the bundle's metric may lie below the original model's."""
    batch: PositiveInt = 64
    """The number of samples in one run."""

    @field_validator("metric")
    @classmethod
    def _is_accuracy_or_a_function(cls, metric: str) -> str:
        return metric if metric == "accuracy" else check_function(metric)


class Validate(Section):
    """The rule by which a bundle counts as equal to the original model, on `samples` samples.

    `rtol` and `atol` bound the error of every element; integers and bools must be equal, or differ by no more than an
    `atol` that is set. Where an integer is the place of the largest or smallest score, or a label of it, the place of a
    score that is equal within the bounds is as right, and so is either answer of a comparison of two such numbers.
    `max_relative_error`, where it is set, replaces `rtol` and `atol`: it bounds the largest error of an output relative
    to the output's largest magnitude.

    Where no bound is set, and there is no `task`, outputs beyond the default are as right as ONNX Runtime's if a
    computation in float64 gives them within it, or if ONNX Runtime's differ by as much without its optimizations, and
    if `tvmflow verify` accepts them. The verdict then has a note that says so.
    """

    samples: PositiveInt = 4
    """The number of samples."""
    seed: int = 0
    """The seed of the samples."""
    rtol: NonNegativeFloat = 1e-3
    """Relative tolerance of each element."""
    atol: NonNegativeFloat | None = None
    """Absolute tolerance of each element. Without it 1e-4, times the root mean square of an output's elements where
    that is above 1."""
    max_relative_error: NonNegativeFloat | None = None
    """Largest error of an output over its largest magnitude; replaces `rtol` and `atol`. Without any bound it is 0.05
    for a reduced precision and for a model that rounds its activations to 8 or 16 bits."""
    top1_agreement: Share | None = 1.0
    """The least share of samples whose largest output has the same index as the original's. `null` where outputs are
    not class scores."""
    task: TaskMetric | None = None
    """A metric on held-out data."""
    show: FunctionName | None = None
    """A function `show(inputs by name) -> str` that returns a sample as text for the report, such as the words of token
    ids. Of held-out data it gets one sample at a time, without the axis of samples."""

    @property
    def has_bounds(self) -> bool:
        """Whether the release file itself bounds the errors."""
        return bool(self.model_fields_set & {"rtol", "atol", "max_relative_error"})


class Benchmark(Section):
    """The measurement of a bundle, and the peers to which it is compared."""

    repeats: PositiveInt = 50
    """Runs in each round."""
    rounds: PositiveInt = 3
    """Rounds of fresh processes, in which the bundle and its peers take turns; a gate on a ratio takes more, until it
    is decided."""
    warmup: NonNegativeInt = 10
    """Runs at the beginning of each round that are not counted."""
    threads: PositiveInt | None = None
    """Threads of each runner; the target's unless given."""
    peers: tuple[Literal["onnxruntime", "pytorch"], ...] = ("onnxruntime", "pytorch")
    """The runners with which the bundle is compared."""
    callers: tuple[PositiveInt, ...] = ()
    """Numbers of threads that call the model at once, as in `[2, 8]`: for each, throughput and latency of all runners
    at the typical sizes, over all rounds. Every caller makes `repeats` runs in a round."""


class Gates(Section):
    """Bounds that a release must keep to be published; a bound that is not set is not checked."""

    max_latency_ms: PositiveFloat | None = None
    """Median latency in milliseconds."""
    max_ratio_onnxruntime: PositiveFloat | None = None
    """Median latency over ONNX Runtime's, with the whole interval."""
    max_ratio_pytorch: PositiveFloat | None = None
    """Median latency over PyTorch's, with the whole interval."""
    max_bundle_mb: PositiveFloat | None = None
    """Size of a bundle in megabytes."""
    unverified_targets: Literal["refuse", "allow"] = "refuse"
    """Whether a bundle that this machine cannot run may be released."""
