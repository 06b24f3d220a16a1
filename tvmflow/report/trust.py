"""Trust: the part of a release's page on who signed and approved it, and whether its bundles were built again."""

import math
from collections.abc import Iterator, Sequence

from tvmflow.comparison import Interval
from tvmflow.documents.release import Release
from tvmflow.documents.verdict import REBUILD, Answer, Check
from tvmflow.report import page
from tvmflow.report.page import Markup
from tvmflow.workspace import Record

HEADING = "Trust"
"""The heading of the section, which `tvmflow report` writes anew."""
# The hexadecimal digits by which a person tells keys apart.
_DIGITS = 16
# The check whose figure is a metric and whose interval is that of the metric's drop.
_DROP = "max_metric_drop"


class ChannelEvent(Record):
    """An event in a channel's history that concerns a release: what happened when (UTC, ISO 8601), by whom and why."""

    channel: str
    when: str
    what: str
    who: str
    why: str


class Promotion(Record):
    """The last verdict on a promotion of a release to a channel, which `who` asked for.

    `approval` is a person's answer, None where nobody was asked. `run` is the verdict's run in MLflow. `signer` is the
    public key that the signed statement on the verdict names, in hexadecimal; None without such a statement.
    """

    channel: str
    verdict: str
    who: str
    why: str
    approval: Answer | None
    checks: tuple[Check, ...]
    run: str
    signer: str | None


class Standing(Record):
    """The facts on a release at the time `when` (UTC, ISO 8601) that arose after its own document was written.

    `signer` is the public key that the signed statement on the release names, in hexadecimal; None without such a
    statement. `is_checked` is true where this machine trusts keys and has checked the statement. `faults` are sentences
    on signatures that are not valid and on facts that could not be read.
    """

    when: str
    signer: str | None
    is_checked: bool
    events: tuple[ChannelEvent, ...]
    promotions: tuple[Promotion, ...]
    faults: tuple[str, ...]

    @property
    def rebuilds(self) -> tuple[Check, ...]:
        """The checks of all promotions that built a bundle again and compared it with the release's."""
        return tuple(check for item in self.promotions for check in item.checks if check.name == REBUILD)


def show(release: Release, standing: Standing | None) -> Iterator[Markup]:
    """Yield the content of the Trust section of a release's page; `standing` is None while the release is made."""
    rows = [
        (
            item.target,
            page.number(item.bundle.size, "{:,}"),
            "not recorded" if item.making is None else _name_signature(item.making.signer),
            Markup(f"<code>{page.text(item.bundle.sha256)}</code>"),
        )
        for item in release.targets
    ]
    yield page.table("Bundles", ("target", "bytes", "signature", "SHA-256"), rows)
    created = page.moment(release.created_at)
    yield page.paragraph(Markup(f"Made at {created} (UTC) by tvmflow {page.text(release.tvmflow)}."))
    if standing is None:
        yield page.paragraph(
            "This page was written while the release was made, when nobody had promoted it or built it again. It is "
            "written with who signed and approved the release since, and with what promotions measured, by"
        )
        yield page.commands(f"tvmflow report {release.name} {release.version}")
        yield from _show_rebuilds(())
        return
    for fault in standing.faults:
        yield page.paragraph(fault, "verdict fail")
    note = "" if standing.signer is None or standing.is_checked else " (not checked: no key is trusted here)"
    yield page.paragraph(
        Markup(f"At {page.moment(standing.when)} (UTC) the release is {_name_signature(standing.signer)}{note}.")
    )
    yield from _show_rebuilds(standing.rebuilds)
    if standing.events:
        cells = [
            (item.channel, page.moment(item.when), item.what, item.who, item.why or "-") for item in standing.events
        ]
        yield page.table("In the channels", ("channel", "when (UTC)", "what", "who", "why"), cells)
        yield page.paragraph(
            "A signature on a channel covers what it holds and has held, but not who moved it and why. "
            "One on a verdict covers all of it."
        )
    else:
        yield page.paragraph("No channel has held it or refused it.")
    for promotion in standing.promotions:
        yield page.paragraph(_describe(promotion))
        measured = [check for check in promotion.checks if check.value is not None]
        others = [check for check in promotion.checks if check.value is None and check.name != REBUILD]
        yield page.items(f"{'kept' if check.passed else 'not kept'}: {check.message}" for check in others)
        if measured:
            yield show_checks(f"Figures of the promotion to {promotion.channel}", measured)


def _show_rebuilds(checks: Sequence[Check]) -> Iterator[Markup]:
    if checks:
        yield page.items(check.message for check in checks)
    else:
        yield page.paragraph(
            "No promotion known here built it again. One to a channel whose policy has rebuild: required builds every "
            "bundle again and compares them. For one bundle, this does:"
        )
        yield page.commands("tvmflow verify BUNDLE --rebuild RELEASE_FILE")


def _describe(promotion: Promotion) -> str:
    answer = promotion.approval
    approval = "no approval was asked for"
    if answer is not None:
        verb = "approved" if answer.approve else "rejected"
        approval = f"{verb} by {answer.who}{f' ({answer.why})' if answer.why else ''}"
    why = f" ({promotion.why})" if promotion.why else ""
    return (
        f"Promotion to {promotion.channel}: {promotion.verdict}; asked for by {promotion.who}{why}; {approval}; "
        f"its verdict is {_name_signature(promotion.signer)}; MLflow run {promotion.run}."
    )


def _name_signature(key: str | None) -> str:
    return "not signed" if key is None else f"signed with {key[:_DIGITS]}"


def show_checks(caption: str, checks: Sequence[Check]) -> Markup:
    """Return a table of checks with their figures, bounds and intervals."""
    cells = [
        (
            check.name,
            "yes" if check.passed else "no",
            page.number(check.value),
            page.number(check.bound),
            _show_interval_of(check),
        )
        for check in checks
    ]
    return page.table(caption, ("gate", "kept", "figure", "bound", "interval"), cells)


def _show_interval_of(check: Check) -> Markup:
    """The interval of a check's figure; that of a lower metric is of the drop, which the figure is not."""
    interval = None if check.interval is None or math.isinf(check.interval.high) else check.interval
    prefix = "" if interval is None or check.name != _DROP else "a drop of "
    return Markup(prefix + show_interval(interval))


def show_interval(interval: Interval | None, missing: int = 0) -> Markup:
    """Return an interval as HTML with three decimals, or "-" for None.

    `missing` is the number of further rounds that an interval takes. If it is above 0, it follows the "-".
    """
    if interval is None:
        return Markup(f"-, rounds missing: {page.number(missing, '{:d}')}" if missing else "-")
    return Markup(f"{page.number(interval.low, '{:.3f}')} to {page.number(interval.high, '{:.3f}')}")
