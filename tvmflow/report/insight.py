"""Insights: where a bundle spends its time, and the samples on which it differs most from the original."""

from tvmflow.workspace import Record


class FunctionTime(Record):
    """A compiled function: its calls in a run, the milliseconds of all of them, and the bytes that they move."""

    name: str
    calls: int
    ms: float
    bytes: int


class Drawing(Record):
    """An input as a page shows it: `image` is a PNG in base64, `wave` the lowest and highest value of each part."""

    name: str
    shape: tuple[int, ...]
    image: str | None = None
    wave: tuple[tuple[float, float], ...] | None = None
    values: str = ""


class SampleInsight(Record):
    """A sample: its index, the largest difference of its outputs from the original's, and the inputs.

    `answer` and `original_answer` are the argmax along the last axis of the first output where that is one number,
    else None; `label` is the true answer.
    """

    index: int
    error: float
    answer: int | None
    original_answer: int | None
    label: str | None
    inputs: tuple[Drawing, ...]


class Insight(Record):
    """The slowest functions and the samples that differ most.

    `flipped` are samples whose answer is not the original's, at most ten of `flips`. `samples` were looked at.
    """

    functions: tuple[FunctionTime, ...]
    worst: tuple[SampleInsight, ...]
    flipped: tuple[SampleInsight, ...]
    flips: int
    samples: int
