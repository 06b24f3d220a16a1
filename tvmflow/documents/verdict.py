"""Verdicts, each a document of its run in MLflow: on a release, a promotion, a retrained model, and a retuning."""

import json
import math
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal

from pydantic import AliasChoices, BeforeValidator, Field, JsonValue, PlainSerializer

from tvmflow.comparison import Comparison, Interval, write_finite
from tvmflow.documents.encoding import Document, Message, Reader
from tvmflow.documents.figures import Metric
from tvmflow.documents.release import TargetVerdict
from tvmflow.documents.training import finite_json
from tvmflow.spec import Policy
from tvmflow.workspace import Artifact, Record, Workspace

REBUILD = "rebuild"
"""The name of the check that a bundle is the same when it is built again."""


class Check(Record):
    """One check: its name, its outcome in a sentence, and whether the release passed it.

    `value` is the figure that was compared with `bound`; both are None for a check without figures. `interval` is the
    confidence interval of a ratio of latencies or of a drop of the metric. For a ratio, `comparison` is the measurement
    and `samples` the file with the time of every run.
    """

    name: str
    message: Message
    passed: bool
    value: float | None = None
    bound: float | None = None
    interval: Interval | None = None
    comparison: Comparison | None = None
    samples: Artifact | None = None

    @classmethod
    def of_ratio(
        cls, name: str, message: str, comparison: Comparison, bound: float, samples: Artifact | None = None
    ) -> "Check":
        """Return the check that the interval of a comparison's ratio ends at `bound` or below.

        An undecided comparison does not pass. `samples` is the file with the times of all runs, None where they were
        not kept.
        """
        return cls(
            name=name,
            message=message,
            passed=comparison.interval.judge(bound) == "pass",
            value=comparison.ratio,
            bound=bound,
            interval=comparison.interval,
            comparison=comparison,
            samples=samples,
        )

    @property
    def samples_file(self) -> str:
        """The path within the MLflow run to which `samples` is logged; a check without samples has no file there."""
        return f"samples/{self.name}.npz"


def samples_of(workspace: Workspace, checks: Iterable[Check]) -> dict[str, Path]:
    """Return the files with the run times of the checks, by their paths in the MLflow run to which they are logged.

    A check without such a file is left out.
    """
    return {check.samples_file: workspace.path(check.samples) for check in checks if check.samples is not None}


class Answer(Record):
    """A person's answer to a promotion that needs approval: whether the release may go out, who says so and why."""

    approve: bool
    who: str
    why: str


def _read_first(document: Mapping[str, Any]) -> Mapping[str, Any]:
    """A document of format 1. An interval without an upper end had `Infinity`, which is no JSON.

    The policy of the first ones also says whether releases were promoted by themselves.
    """
    checks, policy = document.get("checks"), document.get("policy")
    if isinstance(checks, list):
        checks = [_read_first_check(check) if isinstance(check, dict) else check for check in checks]
    if isinstance(policy, dict):
        policy = {key: value for key, value in policy.items() if key != "automatic"}
    return {**document, "checks": checks, "policy": policy}


def _read_first_check(check: Mapping[str, Any]) -> Mapping[str, Any]:
    interval = check.get("interval")
    if isinstance(interval, dict) and interval.get("high") == math.inf:
        interval = {**interval, "high": None}
    return {**check, "interval": interval}


class Verdict(Document):
    """The verdict on a promotion of a release to a channel, which held `from_version`, None where it held nothing.

    `reasons` say why it was refused. `policy` is the one that the release met, `approval` the answer of a person, None
    where none was asked or has answered. `who` asked for the promotion and `why`, `flow_run` is the id of the flow run
    of a deployment that it ran in.
    """

    older: ClassVar[Mapping[int, Reader]] = {1: _read_first}

    format: Literal[2] = 2
    name: str
    version: str
    channel: str
    from_version: str | None = Field(validation_alias=AliasChoices("from_version", "from"), serialization_alias="from")
    verdict: Literal["passed", "refused", "waiting"]
    reasons: tuple[str, ...]
    checks: tuple[Check, ...]
    policy: Policy
    approval: Answer | None
    who: str
    why: str
    flow_run: str | None

    @property
    def label(self) -> str:
        """The words that name this document in messages, as "verdict on digits 3 for production"."""
        return f"verdict on {self.name} {self.version} for {self.channel}"


def _read_first_release(document: Mapping[str, Any]) -> Mapping[str, Any]:
    """A document of format 1: the verdicts alone. The first had no algorithms; an error may be `Infinity`."""
    verdicts = json.loads(json.dumps(document), parse_constant=lambda word: None)
    return {
        "targets": {
            target: {"algorithms": {}, **verdict} if isinstance(verdict, dict) else verdict
            for target, verdict in verdicts.items()
        }
    }


def _read_second_release(document: Mapping[str, Any]) -> Mapping[str, Any]:
    """A document of format 2, whose verdicts have no notes."""
    return document


class ReleaseVerdict(Document):
    """The verdict on a release, passed or refused, by target."""

    older: ClassVar[Mapping[int, Reader]] = {1: _read_first_release, 2: _read_second_release}

    format: Literal[3] = 3
    targets: dict[str, TargetVerdict]

    @property
    def label(self) -> str:
        """The words that name this document in messages, as "verdict on a release for native"."""
        return f"verdict on a release for {', '.join(self.targets)}"


def _read_first_choices(document: Mapping[str, Any]) -> Mapping[str, Any]:
    """A document of format 1: the checks alone."""
    return {"targets": {target: [_read_first_check(check) for check in checks] for target, checks in document.items()}}


class Choices(Document):
    """The measurements that decided for each target which build is shipped: tuned or not, on fewer threads or not."""

    older: ClassVar[Mapping[int, Reader]] = {1: _read_first_choices}

    format: Literal[2] = 2
    targets: dict[str, tuple[Check, ...]]

    @property
    def label(self) -> str:
        """The words that name this document in messages, as "choice of the builds for native"."""
        return f"choice of the builds for {', '.join(self.targets)}"


def _read_metric(value: object) -> object:
    return math.nan if value is None else value


class Evaluation(Record):
    """The comparison of a retrained model, the challenger, with the champion on `samples` held-out samples.

    `champion` is the version that `channel` holds; it and `champion_metric` are None where the channel holds nothing. A
    metric that is no number is null in JSON. `held_out` is the SHA-256 of the held-out data, inputs and labels.
    """

    passed: bool
    reason: str
    metric: str
    challenger: Annotated[
        float, BeforeValidator(_read_metric), PlainSerializer(write_finite, float | None, when_used="json")
    ]
    champion_metric: Metric
    champion: str | None
    channel: str
    min_gain: float
    samples: int
    held_out: str


def _read_first_retraining(document: Mapping[str, Any]) -> Mapping[str, Any]:
    """A document of format 1, in which a number may be `NaN` or `Infinity`, which are no JSON."""
    metrics = {key: write_finite(document[key]) for key in ("challenger", "champion_metric")}
    return {**document, **metrics, "arguments": finite_json(document["arguments"])}


class RetrainVerdict(Evaluation, Document):
    """The verdict on a retrained model: who retrained it and why, with these `arguments`.

    The arguments are those of the training; one that is no finite number is a word, see `finite_json`.
    """

    older: ClassVar[Mapping[int, Reader]] = {1: _read_first_retraining}

    format: Literal[2] = 2
    why: str
    who: str
    arguments: dict[str, JsonValue]

    @property
    def label(self) -> str:
        """The words that name this document in messages, as "verdict on a retrained model for production"."""
        return f"verdict on a retrained model for {self.channel}"


class Gain(Record):
    """A comparison of a new build with the bundle in production, on one target; `message` gives it in one sentence.

    `ratios` are the new build's latency over the other's in each pair, empty where both have the same library; `ratio`
    is their median, 1 without any, and `interval` the median's confidence interval. `better` and `worse` say whether
    the new build is faster or slower; both may be False. `check` has the measurement, None without one.
    """

    target: str
    better: bool
    worse: bool
    message: Message
    ratio: float
    ratios: tuple[float, ...]
    interval: Interval | None = None
    check: Check | None = None


class RetunedTarget(Record):
    """One target: the functions that were tuned, the costliest first, the trials, and the gain of the new build."""

    target: str
    functions: tuple[str, ...]
    trials: int
    gain: Gain


def _read_first_retuning(document: Mapping[str, Any]) -> Mapping[str, Any]:
    """A document of format 1. A gain had `sources` too, and an interval without an upper end `Infinity`."""
    targets = [{**item, "gain": _read_first_check(item["gain"])} for item in document["targets"]]
    for item in targets:
        item["gain"].pop("sources", None)
    return {**document, "targets": targets}


class RetuneVerdict(Document):
    """The verdict on a retuning of the `version` that `channel` held, which took `minutes`."""

    older: ClassVar[Mapping[int, Reader]] = {1: _read_first_retuning}

    format: Literal[2] = 2
    verdict: Literal["better", "no gain"]
    reason: str
    channel: str
    version: str
    minutes: float
    targets: tuple[RetunedTarget, ...]

    @property
    def label(self) -> str:
        """The words that name this document in messages, as "verdict on the retuning of 3 for production"."""
        return f"verdict on the retuning of {self.version} for {self.channel}"
