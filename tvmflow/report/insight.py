"""Insights: where a bundle spends its time, and the samples on which it differs most from the original."""

from tvmflow.workspace import Record


class FunctionTime(Record):
    """A compiled function: its calls in a run, the milliseconds of all of them, and the bytes that they move."""

    name: str
    calls: int
    ms: float
    bytes: int


class Layer(Record):
    """A call of a compiled function in a run: its time in ms, its operations in 1e9 and the bytes that it moves in 1e6.

    `rule` is the schedule rule of the function. `scope` are the names of the model's modules that the call belongs to,
    the outermost first. `operators` and `nodes` are those of the ONNX model that it computes, empty where its result is
    no value of the model. `reads` are the indices of the layers whose results it reads, and `shape` is the shape of its
    result. `error` is the largest difference of the result from ONNX Runtime's, divided by the largest value there;
    None where the two cannot be compared.
    """

    function: str
    rule: str
    scope: tuple[str, ...]
    operators: tuple[str, ...]
    nodes: tuple[str, ...]
    reads: tuple[int, ...]
    shape: tuple[int, ...]
    ms: float
    gflop: float
    megabytes: float
    error: float | None


class Level(Record):
    """A cache or the memory: the bytes that it holds for all threads, None for the memory, and its rate for reads."""

    name: str
    bytes: float | None
    gigabytes_per_second: float


class Peaks(Record):
    """The most that a machine can do with `threads` threads.

    `gflops` is the rate of fp32 arithmetic, where a multiply-add is two operations. `levels` have the rates of reads,
    the smallest level first. `gigahertz` is the clock that was measured.
    """

    processor: str
    threads: int
    gigahertz: float
    gflops: float
    levels: tuple[Level, ...]


class Drawing(Record):
    """An input as a page shows it: as an image, else as a waveform, else as text.

    `image` is a PNG in base64. `wave` has the lowest and the highest value of each of the parts, of about equal length,
    into which the input is divided. `values` is the text of its first values.
    """

    name: str
    shape: tuple[int, ...]
    image: str | None = None
    wave: tuple[tuple[float, float], ...] | None = None
    values: str = ""


class SampleInsight(Record):
    """A sample: its index, the largest difference of its outputs from the original's, and the inputs.

    `answer` and `original_answer` are the argmax along the last axis of the first output where that is one number,
    else None; `label` is the true answer. `text` shows the sample to a person, None where the release file names no
    function for it.
    """

    index: int
    error: float
    answer: int | None
    original_answer: int | None
    label: str | None
    inputs: tuple[Drawing, ...]
    text: str | None = None


class Insight(Record):
    """The slowest functions, the layers, the machine's peaks, and the samples that differ most.

    `samples` is the number of samples that were compared. `flips` is the number of those whose answer is not the
    original's, and `flipped` are at most ten of them. `worst` are the samples with the largest differences. `problem`
    says in one sentence why no sample has a text though the release file names a function for it, else it is None.
    """

    functions: tuple[FunctionTime, ...]
    layers: tuple[Layer, ...]
    peaks: Peaks | None
    worst: tuple[SampleInsight, ...]
    flipped: tuple[SampleInsight, ...]
    flips: int
    samples: int
    problem: str | None = None
