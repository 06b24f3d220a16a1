"""The verdict on a promotion, verdict.json of its run in MLflow: its checks, the policy, and what a person answered."""

import math
from collections.abc import Mapping
from typing import Any, ClassVar, Literal

from pydantic import AliasChoices, Field

from tvmflow.comparison import Comparison, Interval
from tvmflow.documents import Document, Message, Reader
from tvmflow.spec import Policy
from tvmflow.workspace import Artifact, Record


class Check(Record):
    """One check: its name, its outcome in a sentence, and whether the release passed it.

    `value` is the figure that was compared with `bound`; both are None for a check without figures. `interval` is that
    of a measured figure, `comparison` what was measured, and `samples` the file with the time of every run of it.
    """

    name: str
    message: Message
    passed: bool
    value: float | None = None
    bound: float | None = None
    interval: Interval | None = None
    comparison: Comparison | None = None
    samples: Artifact | None = None

    @property
    def samples_file(self) -> str:
        """The path within the MLflow run to which `samples` is logged; a check without samples has no file there."""
        return f"samples/{self.name}.npz"


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
        """The document in words, as "verdict on digits 3 for production"."""
        return f"verdict on {self.name} {self.version} for {self.channel}"
