"""The fleet: what the channels of all models hold, what waits or needs somebody, and the page that shows it."""

from collections.abc import Iterator
from typing import NamedTuple

from tvmflow.report import page
from tvmflow.report.drift import Drift, Step
from tvmflow.workspace import Record

# A step is news until as many releases have its level.
_RECENT = 6


class Wish(Record):
    """A request that a channel hold `version`, not yet granted: who asked for it, why, and how many days ago."""

    version: str
    who: str
    why: str
    days: float


class LastVerdict(Record):
    """The last verdict on a promotion to a channel: the version, the outcome, and the reasons of a refusal."""

    version: str
    verdict: str
    reasons: tuple[str, ...]


class Signature(Record):
    """The signed statement on a channel: the key, in hexadecimal, that it names, and the days until it expires.

    Both are None where there is no statement. `fault` is a sentence on why the statement is not valid; None where it is
    valid, or where this machine trusts no key and has not checked it. `is_late` is true where the statement should have
    been renewed by now.
    """

    key: str | None
    days: float | None
    fault: str | None
    is_late: bool


class ChannelStatus(Record):
    """A channel of a model, or a model without channels (`channel` None).

    The channel of the model `name` has held `version` for `days`; both are None where it holds none. `p50_ms` is the
    smallest median latency of that release's targets, and `newer` are the releases after it. `is_gone` is true where
    the release is no longer in the store, and `lags` where MLflow's alias names another release. `verdict` is None
    where there is none or MLflow does not answer.
    """

    name: str
    channel: str | None
    version: str | None = None
    days: float | None = None
    p50_ms: float | None = None
    newer: tuple[str, ...] = ()
    is_gone: bool = False
    lags: bool = False
    wish: Wish | None = None
    verdict: LastVerdict | None = None
    signature: Signature | None = None

    @property
    def label(self) -> str:
        """The channel in words, as "digits@production"."""
        return f"{self.name}@{self.channel}"


class WaitingApproval(Record):
    """A promotion that waits for a person's approval in a flow run.

    `run` is the id of the flow run, `who` asked for the promotion, and `days` is how long it has waited.
    """

    run: str
    name: str
    version: str
    channel: str
    who: str
    days: float


class FleetDrift(Drift):
    """A drift of the model `name`."""

    name: str


class FleetStep(Step):
    """A step in a figure of the model `name`."""

    name: str


class Task(NamedTuple):
    """A task for somebody on duty, in a sentence, and the command that shows more or ends it."""

    sentence: str
    command: str


class Fleet(Record):
    """All models at a time `when` (UTC, ISO 8601); `faults` are sentences on servers that do not answer."""

    when: str
    channels: tuple[ChannelStatus, ...]
    approvals: tuple[WaitingApproval, ...]
    drifts: tuple[FleetDrift, ...]
    steps: tuple[FleetStep, ...]
    faults: tuple[str, ...]

    def list_tasks(self) -> list[Task]:
        """Return what somebody should look at, the most urgent first."""
        return [*self._list_faults(), *self._list_waiting(), *self._list_refusals(), *self._list_changes()]

    def _list_faults(self) -> Iterator[Task]:
        for fault in self.faults:
            yield Task(fault, "tvmflow status")
        for item in self.channels:
            if item.is_gone:
                sentence = f"{item.label} holds {item.version}, which is gone from the store"
                yield Task(sentence, f"tvmflow history {item.name} --channel {item.channel}")
            if item.signature is not None and item.signature.fault is not None:
                yield Task(item.signature.fault, f"tvmflow verify release://{item.label}")
            elif item.signature is not None and item.signature.is_late:
                sentence = (
                    f"the statement on {item.label} expires in {item.signature.days:.1f} days and was not renewed"
                )
                yield Task(sentence, "tvmflow reconcile")
            if item.lags:
                yield Task(f"MLflow's alias of {item.label} names another release", "tvmflow reconcile")

    def _list_waiting(self) -> Iterator[Task]:
        requests = {(item.name, item.channel, item.version) for item in self.approvals}
        for waiting in self.approvals:
            promotion = f"{waiting.name} {waiting.version} to {waiting.channel}"
            sentence = f"{promotion} waits for approval since {waiting.days:.1f} days; {waiting.who} asked for it"
            yield Task(sentence, f"tvmflow approve {waiting.run[:8]}")
        for item in self.channels:
            wish = item.wish
            if wish is not None and (item.name, item.channel, wish.version) not in requests:
                sentence = f"{wish.who} asked for {wish.version} on {item.label} {wish.days:.1f} days ago"
                yield Task(sentence, f"tvmflow history {item.name} --channel {item.channel}")

    def _list_refusals(self) -> Iterator[Task]:
        for item in self.channels:
            last = item.verdict
            if last is not None and last.verdict == "refused" and last.version in item.newer:
                sentence = f"{item.label} refused {last.version}: {'; '.join(last.reasons)}"
                yield Task(sentence, f"tvmflow verdict {item.name} {last.version} --channel {item.channel}")

    def _list_changes(self) -> Iterator[Task]:
        """Steps of the last releases, and drifts that have no step."""
        steps = {(step.name, step.target, step.figure) for step in self.steps}
        changes: list[FleetStep | FleetDrift] = [
            *(step for step in self.steps if step.releases <= _RECENT),
            *(drift for drift in self.drifts if (drift.name, drift.target, drift.figure) not in steps),
        ]
        for change in changes:
            yield Task(f"{change.name}, {change}", f"tvmflow history {change.name} --figures")


def write_fleet(fleet: Fleet) -> str:
    """Return the HTML page of the fleet: tasks first, then the channels, approvals, drifts and signatures."""
    first = [
        page.Markup(f"{page.paragraph(task.sentence, 'verdict fail')}{page.commands(task.command)}")
        for task in fleet.list_tasks()
    ]
    sections = {
        "First": first or [page.paragraph("Nothing waits, nothing was refused and nothing drifts.", "verdict pass")],
        "Channels": [_channels_table(fleet)],
        "Waiting": [_approvals_table(fleet)],
        "Drift": [_steps_table(fleet), _drifts_table(fleet)],
        "Signatures": [_signatures_table(fleet)],
    }
    return page.write(f"tvmflow, {fleet.when[:16].replace('T', ' ')} UTC", sections, describe_fleet(fleet))


def _channels_table(fleet: Fleet) -> page.Markup:
    return page.table(
        "What the channels hold",
        ("channel", "version", "last verdict", "waits", "newer", "p50 ms", "days"),
        (
            (
                item.label if item.channel is not None else item.name,
                item.version or "-",
                "-" if item.verdict is None else f"{item.verdict.version} {item.verdict.verdict}",
                "-" if item.wish is None else item.wish.version,
                ", ".join(item.newer) or "-",
                page.number(item.p50_ms, "{:.3f}"),
                page.number(item.days, "{:.0f}"),
            )
            for item in fleet.channels
        ),
    )


def _signatures_table(fleet: Fleet) -> page.Markup:
    return page.table(
        "Signed statements on channels",
        ("channel", "key", "days until it expires", "fault"),
        (
            (
                item.label,
                "not signed" if item.signature.key is None else item.signature.key[:16],
                page.number(item.signature.days, "{:.1f}"),
                item.signature.fault or ("to renew" if item.signature.is_late else "-"),
            )
            for item in fleet.channels
            if item.signature is not None
        ),
    )


def _approvals_table(fleet: Fleet) -> page.Markup:
    return page.table(
        "Promotions that wait for a person",
        ("promotion", "asked by", "days", "run"),
        (
            (
                f"{item.name} {item.version} to {item.channel}",
                item.who,
                page.number(item.days, "{:.1f}"),
                item.run[:8],
            )
            for item in fleet.approvals
        ),
    )


def _drifts_table(fleet: Fleet) -> page.Markup:
    return page.table(
        "Figures that rise or fall over several releases",
        ("model", "target", "figure", "releases", "first", "last", "by chance"),
        (
            (
                item.name,
                item.target,
                item.figure,
                page.number(item.releases, "{}"),
                page.number(item.first),
                page.number(item.last),
                page.number(item.chance, "{:.1g}"),
            )
            for item in fleet.drifts
        ),
    )


def _steps_table(fleet: Fleet) -> page.Markup:
    return page.table(
        "Figures that changed at one release and stayed so",
        ("model", "target", "figure", "release", "made", "before", "since", "by chance"),
        (
            (
                item.name,
                item.target,
                item.figure,
                item.version,
                item.when[:10],
                page.number(item.before),
                page.number(item.since),
                page.number(item.chance, "{:.1g}"),
            )
            for item in fleet.steps
        ),
    )


def describe_fleet(fleet: Fleet) -> dict[str, object]:
    """Return a fleet and its tasks as JSON data, which has every number of the page."""
    return {**fleet.model_dump(mode="json"), "tasks": [task._asdict() for task in fleet.list_tasks()]}
