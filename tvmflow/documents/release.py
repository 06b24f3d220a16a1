"""The document of a release, release.json: what was released, from what, and every figure that was measured on it."""

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal, NamedTuple

from pydantic import Field, JsonValue

from tvmflow.bundle.manifest import TensorSpec
from tvmflow.comparison import Interval
from tvmflow.documents.encoding import Document, Message, Reader
from tvmflow.documents.figures import Measurements, Point, Validation
from tvmflow.documents.training import Training
from tvmflow.spec import Policy
from tvmflow.workspace import Record


class RegisteredVersion(NamedTuple):
    """A version of a registered model in MLflow."""

    model: str
    version: str


class Blob(Record):
    """A file of the release store, by its digest; `size` is in bytes."""

    sha256: Annotated[str, Field(pattern="^[0-9a-f]{64}$")]
    size: Annotated[int, Field(ge=0)]


class Provenance(Record):
    """The origin of a release: the digest of its ONNX file, `sha256:DIGEST`, and the opset of that file.

    `source` is the version of the registered model that it was exported from, as MODEL/3; None for another origin.
    `training` is None where the release's flow trained nothing, `held_out` the SHA-256 of the held-out data, None
    without such data. `code` has the SHA-256 of the user's modules, by the path in the folder of the release file or by
    the name under which a module from elsewhere was imported; `packages` has the versions of all Python packages that
    were installed where the release was logged. These four are None in a release that was made before they were
    recorded.
    """

    onnx: str
    opset: int
    source: str | None = None
    training: Training | None = None
    held_out: str | None = None
    code: dict[str, str] | None = None
    packages: dict[str, str] | None = None


class Choice(Record):
    """The build that is shipped, tuned or untuned; `message` gives the reason in one sentence.

    `ratio` is the tuned build's latency over the untuned one's, the median over pairs, and `interval` the interval of
    this median; both are None where the two were not measured.
    `part` is the part of the tuning with which the tuned build was made. `threads` is the number of threads of the
    bundle where fewer than the target's were faster, else None.
    """

    shipped: Literal["tuned", "untuned"]
    message: Message
    ratio: float | None = None
    interval: Interval | None = None
    part: Literal["all", "records", "decisions"] = "all"
    threads: int | None = None


class TargetVerdict(Validation):
    """The validation of a target's bundle, with the gates of the release file among its `reasons`.

    `choice` says why this build is shipped, None where tuning changed nothing.
    """

    choice: Choice | None = None


class Tuning(Record):
    """The tuning of a target: its trials, and its coverage in a sentence and in the numbers of `tasks.tune.Coverage`.

    `ratio_untuned` is the tuned build's latency over the untuned one's, None where they were not compared.
    """

    trials: int
    coverage: str
    tuned: int
    workloads: int
    share_of_time: float | None
    untimed: int
    shipped: Literal["tuned", "untuned"]
    ratio_untuned: float | None


class Making(Record):
    """The inputs of a bundle's build beside the model, and the public key that signed the bundle, in hexadecimal.

    `records` is the SHA-256 of the tuning records, `options` that of the release file's sections which decide the
    bundle's content, `code` that of tvmflow's code. `compiler` has the versions by name. `signer` is None for a bundle
    that is not signed.
    """

    records: str
    options: str
    code: str
    compiler: dict[str, str]
    signer: str | None


class ReleaseTarget(Record):
    """A target of a release: what its bundle needs of a machine, the bundle, and how that was judged and measured.

    `weights` are the bundle's, where the store keeps them apart. `measurements` is None where the machine that made
    the release could not run the bundle, `tuning` and `making` where the release was made before they were recorded.
    """

    target: str
    tvm_target: dict[str, JsonValue]
    arch: str
    cpu_features: tuple[str, ...]
    bundle: Blob
    weights: Blob | None = None
    verdict: TargetVerdict
    measurements: Measurements | None
    tuning: Tuning | None
    making: Making | None = None

    @property
    def p50(self) -> float | None:
        """The bundle's median latency in milliseconds at the typical sizes, None where it was not measured."""
        return None if self.measurements is None else self.measurements.typical.bundle.latency_ms.p50


def _read_first(document: Mapping[str, Any]) -> Mapping[str, Any]:
    """A document of format 1, whose writers left out what they did not know yet. What is damaged is passed on."""
    targets = document.get("targets")
    if isinstance(targets, list):
        targets = [_read_first_target(item) if isinstance(item, dict) else item for item in targets]
    return {"channels": {}, **document, "targets": targets}


def _read_first_target(item: Mapping[str, Any]) -> Mapping[str, Any]:
    measurements, tuning, verdict = (item.get(key) for key in ("measurements", "tuning", "verdict"))
    if isinstance(measurements, dict) and "runners" in measurements:
        point = {key: value for key, value in measurements.items() if key in Point.model_fields}
        others = {key: value for key, value in measurements.items() if key not in point}
        measurements = {**others, "points": [{"sizes": {}, **point}]}
    if isinstance(tuning, dict) and "shipped" not in tuning:
        # The first releases had fewer figures of their tuning.
        tuning = None
    if isinstance(verdict, dict):
        verdict = {"algorithms": {}, **verdict}
    return {**item, "verdict": verdict, "measurements": measurements, "tuning": tuning}


def _read_second(document: Mapping[str, Any]) -> Mapping[str, Any]:
    """A document of format 2, which says less about its origin and has no figures of single rounds."""
    return document


def _read_third(document: Mapping[str, Any]) -> Mapping[str, Any]:
    """A document of format 3, which has no first runs, no energy and no figures of several callers."""
    return document


def _read_fourth(document: Mapping[str, Any]) -> Mapping[str, Any]:
    """A document of format 4, whose verdicts have no notes."""
    return document


class Release(Document):
    """A release. It is written once and never changed.

    `created_at` is the UTC time in ISO 8601, `tvmflow` the version that made it, `mlflow_run_id` the run that logs it,
    `model` its registered version as models:/MODEL/3. `channels` are the policies that its release file proposes, by
    channel. `report` is its page, None in a release that was made before there were pages.
    """

    older: ClassVar[Mapping[int, Reader]] = {1: _read_first, 2: _read_second, 3: _read_third, 4: _read_fourth}

    format: Literal[5] = 5
    name: str
    version: str
    created_at: str
    tvmflow: str
    mlflow_run_id: str
    model: Annotated[str, Field(pattern="^models:/[^/@]+/[1-9][0-9]*$")]
    provenance: Provenance
    channels: dict[str, Policy]
    inputs: tuple[TensorSpec, ...]
    outputs: tuple[TensorSpec, ...]
    targets: tuple[ReleaseTarget, ...]
    report: Blob | None = None

    @property
    def label(self) -> str:
        """The words that name this document in messages, as "release digits 3"."""
        return f"release {self.name} {self.version}"

    @property
    def registered_version(self) -> RegisteredVersion:
        """The version of the registered model in MLflow that belongs to the release, as `model` names it."""
        _, model, version = self.model.split("/")
        return RegisteredVersion(model, version)

    @property
    def blobs(self) -> dict[str, set[int]]:
        """The digests of the release's files, each with the sizes in bytes that the document gives for it.

        Several sizes for one digest mean that the document is damaged.
        """
        blobs = [blob for item in self.targets for blob in (item.bundle, item.weights)]
        sizes: dict[str, set[int]] = {}
        for blob in (*blobs, self.report):
            if blob is not None:
                sizes.setdefault(blob.sha256, set()).add(blob.size)
        return sizes
