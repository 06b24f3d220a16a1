"""Figures of a bundle: its speed beside its peers', and the distance of its outputs from the original model's."""

import math
import zlib
from base64 import b64decode, b64encode
from collections.abc import Mapping
from typing import Annotated, Literal

import numpy as np
import numpy.typing as npt
from pydantic import Field, PlainSerializer, field_validator, model_validator

from tvmflow.comparison import Comparison, Extended, write_finite
from tvmflow.hardware.target import Precision
from tvmflow.workspace import Record

Runner = Literal["tvm", "onnxruntime", "pytorch"]
PEERS: Mapping[Runner, str] = {"onnxruntime": "ONNX Runtime", "pytorch": "PyTorch"}
"""The runners beside which a bundle is measured, with their names for people."""

# When medians of rounds differ by more than this share, the machine was too busy for good measurements.
_NOISY = 0.2


class Latency(Record):
    """Milliseconds per run over all rounds; `throughput` is runs per second, at the median where one caller runs.

    p90 and p99 are None where there are fewer runs than they need, 64 and 662.
    """

    mean: float
    std: float
    p50: float
    p90: float | None
    p99: float | None
    min: float
    throughput: float


class Measurement(Record):
    """The figures of one runner at one point.

    `latency_ms` is in milliseconds, `total_seconds` the sum of all timed runs, `load_seconds` the median time to
    load the model. `peak_memory` is in bytes, as is `size`, the size of the runner's model file. `loads`, `firsts` and
    `peaks` are the seconds to load the model, the seconds of the first run and the peak memory in bytes of each round,
    whose process is a fresh one; empty where they were not recorded. `joules` is the energy of the processor for a run
    in each round, empty where the machine does not tell it.
    """

    latency_ms: Latency
    total_seconds: float
    load_seconds: float
    peak_memory: int
    size: int
    loads: tuple[float, ...] = ()
    firsts: tuple[float, ...] = ()
    peaks: tuple[int, ...] = ()
    joules: tuple[float, ...] = ()


class Point(Record):
    """The measurements of all runners at the same `sizes` of the symbolic dimensions; the runners took turns.

    `ratio` is the bundle's latency over each peer's, the median over the rounds: below one, the bundle is faster.
    `noise` is the largest difference between the bundle's round medians, divided by their median.
    """

    sizes: dict[str, int]
    runners: dict[Runner, Measurement]
    ratio: dict[Runner, float]
    noise: float

    @field_validator("runners")
    @classmethod
    def _has_bundle(cls, runners: dict[Runner, Measurement]) -> dict[Runner, Measurement]:
        if "tvm" not in runners:
            raise ValueError("the bundle, tvm, is not among them")
        return runners

    @property
    def bundle(self) -> Measurement:
        """The figures of the bundle."""
        return self.runners["tvm"]

    @property
    def label(self) -> str:
        """The sizes in words, as "batch 1"; empty for static shapes."""
        return ", ".join(f"{name} {size}" for name, size in self.sizes.items())


class Concurrency(Record):
    """The figures of all runners at the typical sizes while `callers` threads of one process call the model at once.

    The latency is that of single runs, which wait for each other's processors. `throughput` is the runs per second of
    all callers together, the median over the rounds. `runs` is the number of timed runs of each runner.
    """

    callers: int
    runs: int
    runners: dict[Runner, Latency]


class Measurements(Record):
    """The measured points, the typical sizes first; `runs` is the number of timed runs of each runner at each point.

    `threads` is the number of threads of the peers. `comparisons` has the bundle's comparison with each peer at the
    typical sizes, by the peer's name. `concurrency` has the numbers of callers that the release file lists.
    """

    runs: int
    threads: int
    points: Annotated[tuple[Point, ...], Field(min_length=1)]
    concurrency: tuple[Concurrency, ...] = ()
    comparisons: dict[Runner, Comparison] = Field(default={})

    @property
    def typical(self) -> Point:
        """The point at the typical sizes, which the gates check."""
        return self.points[0]

    @property
    def noise(self) -> float:
        """The difference of the bundle's medians at the typical sizes between slow rounds and fast ones, as a share.

        It is between the 90th and the 10th percentile, so that it does not grow with the number of rounds. Without a
        comparison it is the `noise` of the point.
        """
        return max((comparison.spread for comparison in self.comparisons.values()), default=self.typical.noise)

    @property
    def unevenness(self) -> float | None:
        """The largest `unevenness` of the comparisons with peers, None without any."""
        return max((comparison.unevenness for comparison in self.comparisons.values()), default=None)

    @property
    def is_busy(self) -> bool:
        """Whether other work took a part of the machine while it was measured, so that its times are less sure.

        So it was where `noise` is more than 20 %, or where the reference kernel, which is the same all the time, took
        more than 5 % longer in slow rounds than in fast ones.
        """
        return self.noise > _NOISY or any(comparison.is_uneven for comparison in self.comparisons.values())

    def describe_busyness(self) -> str | None:
        """Return a sentence on other work on the machine while it was measured, None where `is_busy` is false."""
        if not self.is_busy:
            return None
        reasons = []
        if self.noise > _NOISY:
            reasons.append(f"rounds differ by {self.noise:.0%}")
        if (unevenness := self.unevenness) is not None and any(item.is_uneven for item in self.comparisons.values()):
            reasons.append(f"a fixed kernel took {1 + unevenness:.2f} times as long at times")
        return f"the machine was busy while it was measured: {', and '.join(reasons)}"


class Deviation(Record):
    """The distance of outputs from the original's: largest absolute and relative error, least cosine, top-1 agreement.

    The relative error is the absolute one over the output's largest value. `top1_agreement` is the share, 0 to 1, of
    equal argmax along the last axis of the first output; None where that axis has one element. The errors are infinite
    where an output is not finite and the original's is.
    """

    against: Literal["pytorch", "onnxruntime"]
    max_abs_error: Extended
    max_rel_error: Extended
    cosine: float
    top1_agreement: float | None
    samples: int


class Algorithm(Record):
    """The number of functions that use an algorithm with fewer multiplications, and the largest of their error bounds.

    A bound of `winograd` is relative to the largest output that the convolution's weights can give when all inputs are
    as large as the largest one.
    """

    functions: int
    bound: float


# More labels than this would make a release's document large.
_MOST_ANSWERS = 1 << 17


class Answers(Record):
    """Which labels of the held-out data a model predicted correctly.

    `data` is the SHA-256 of the data, `count` the number of labels. `bits` has one bit per label, in order, packed into
    bytes with the highest bit first, compressed with zlib, in base64.
    """

    data: str
    count: Annotated[int, Field(ge=1, le=_MOST_ANSWERS)]
    bits: str

    @model_validator(mode="after")
    def _has_every_bit(self) -> "Answers":
        self.is_right()
        return self

    @classmethod
    def of(cls, is_right: npt.NDArray[np.bool_], data: str) -> "Answers | None":
        """Return the answers for an array with one entry per label; None for more than 131,072 labels.

        `data` is the SHA-256 of the held-out data.
        """
        if is_right.size > _MOST_ANSWERS:
            return None
        bits = b64encode(zlib.compress(np.packbits(is_right).tobytes(), 9)).decode()
        return cls(data=data, count=is_right.size, bits=bits)

    def is_right(self) -> npt.NDArray[np.bool_]:
        """Return for each label whether it was predicted correctly. Raises ValueError when the bits are damaged."""
        try:
            packed = zlib.decompressobj().decompress(b64decode(self.bits, validate=True), _MOST_ANSWERS)
        except zlib.error as error:
            raise ValueError("the bits of the answers are damaged") from error
        if len(packed) != math.ceil(self.count / 8):
            raise ValueError(f"the bits are those of {8 * len(packed)} answers, not of {self.count}")
        return np.unpackbits(np.frombuffer(packed, np.uint8), count=self.count).astype(bool)


Metric = Annotated[float | None, PlainSerializer(write_finite, float | None, when_used="json")]
"""The value of a metric, None where it was not computed; null in JSON also where it is no finite number."""


class Validation(Record):
    """The outcome of validating one bundle; `reasons` say why it failed and are empty when it passed.

    `notes` are sentences about what the comparison cannot show, though it may have passed.
    `algorithms` are those with fewer multiplications, by name; the comparisons include their errors. `precision` is the
    one in which the bundle's products are computed. `max_relative_error` is the bound that replaces the tolerances for
    each element, or None. `verified` is False for a target that this machine cannot run, whose outputs were not
    compared. `metric_original` and `metric_bundle` are the task metric on the held-out data; None without such data.
    `answers` says which held-out labels the bundle predicted correctly; None without such data, for another metric than
    accuracy, and for too many labels.
    """

    passed: bool
    verified: bool
    reasons: tuple[str, ...]
    notes: tuple[str, ...] = ()
    precision: Precision = "fp32"
    algorithms: dict[str, Algorithm]
    max_relative_error: float | None = None
    comparisons: tuple[Deviation, ...]
    metric_name: str | None
    metric_original: Metric
    metric_bundle: Metric
    answers: Answers | None = None

    @property
    def original(self) -> Deviation | None:
        """The comparison with the model's own framework; None for a bundle that was not run."""
        return self.comparisons[0] if self.comparisons else None
