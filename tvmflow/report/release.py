"""The page of a release, for the person who decides whether it may go out."""

import re
from collections.abc import Iterator, Mapping, Sequence

from tvmflow.documents.figures import PEERS, Runner
from tvmflow.documents.release import Release
from tvmflow.report import charts, page, trust
from tvmflow.report.changes import (
    Change,
    PeerRatio,
    Slowdown,
    Spread,
    compare_releases,
    find_slowdowns,
)
from tvmflow.report.insight import Drawing, SampleInsight
from tvmflow.report.layers import SlowerLayer, show_layers, show_losses
from tvmflow.report.page import Markup
from tvmflow.report.release_data import PageData, ProfileSum, Quietness
from tvmflow.spec import Policy

# The functions that the page shows by themselves, and a digest with the digits that tell bundles apart.
_SHOWN_FUNCTIONS = 12
_DIGEST = re.compile(r"((?:sha256:)?[0-9a-f]{12})[0-9a-f]{52}")


_RUNNERS: Mapping[Runner, str] = {"tvm": "the bundle", **PEERS}


def write_difference(now: Release, before: Release, slower: Mapping[str, Sequence[SlowerLayer]] | None = None) -> str:
    """Return an HTML page with the facts and figures that differ between two releases.

    `slower` are their layers by target, in the order of `compare_layers`; None where there are none.
    """
    changes, slowdowns = tuple(compare_releases(now, before)), tuple(find_slowdowns(now, before))
    versions = f"{now.name} {before.version}", f"{now.name} {now.version}"
    sections = {
        "Figures": [*map(_show_slowdown, slowdowns), *figures_beside(changes, *versions)],
        "What differs": list(facts_that_differ(changes, *versions)),
    }
    layers = slower or {}
    losses = [table for target, rows in layers.items() for table in show_losses(target, rows, versions[0])]
    if losses:
        sections["Where the time goes"] = losses
    data = {
        "changes": [change.model_dump(mode="json") for change in changes],
        "slowdowns": [slowdown.model_dump(mode="json") for slowdown in slowdowns],
        "slower": {target: [row.model_dump() for row in rows] for target, rows in layers.items()},
    }
    return page.write(" and ".join(versions), sections, data)


def write_page(data: PageData) -> str:
    """Return the HTML page of a release."""
    release = data.release
    sections: dict[str, list[Markup]] = {
        "Verdict": list(_verdict(data)),
        f"Against {data.channel}": list(_against(data)),
        "Worst samples": list(_samples(data)),
        "Accuracy over latency": list(_trade(release)),
        "Where the time goes": list(_time(data)),
        f"What changed since {data.channel}": list(_changes(data)),
        trust.HEADING: list(trust.show(release, None)),
        "Roll back": list(_commands(data)),
    }
    return page.write(f"{release.name} {release.version}", sections, data.model_dump(mode="json"))


def update_page(html: str, release: Release, standing: trust.Standing) -> str:
    """Return the page `html` of a published release with its Trust section written anew from `standing`.

    The page's JSON document gets the entry `standing`.
    """
    parts = list(trust.show(release, standing))
    return page.replace_section(html, trust.HEADING, parts, {"standing": standing.model_dump(mode="json")})


def _verdict(data: PageData) -> Iterator[Markup]:
    release = data.release
    reasons = [reason for item in release.targets for reason in item.verdict.reasons]
    refusals = [check.message for check in data.checks if not check.passed]
    if reasons:
        yield page.paragraph("Refused: " + "; ".join(reasons), "verdict fail")
    elif refusals:
        yield page.paragraph(f"{data.channel} would refuse it: " + "; ".join(refusals), "verdict fail")
    else:
        yield page.paragraph("Every target passed its validation and its gates.", "verdict pass")
    for slowdown in data.slowdowns:
        ratio = page.number(slowdown.bundle, "{:.2f}")
        yield page.paragraph(
            Markup(
                f"{page.text(slowdown.target)} takes {ratio} times as long as in {page.text(slowdown.before)}, which "
                f"{page.text(data.channel)} holds."
            ),
            "verdict undecided",
        )
    for target, quietness in data.quietness.items():
        if quietness.busyness is not None:
            yield _show_quietness(target, quietness)
    for item in release.targets:
        yield from (page.paragraph(f"{item.target}: {note}", "verdict undecided") for note in item.verdict.notes)
    rows = []
    for item in release.targets:
        verdict, deviation = item.verdict, item.verdict.original
        rows.append(
            (
                item.target,
                "run here" if verdict.verified else "not run on the machine that built it",
                page.number(None if deviation is None else deviation.max_abs_error, "{:.2e}"),
                page.number(None if deviation is None else deviation.top1_agreement, "{:.4f}"),
                page.number(verdict.metric_original, "{:.4f}"),
                page.number(verdict.metric_bundle, "{:.4f}"),
            )
        )
    headings = ("target", "checked", "largest error", "same top-1", "metric, original", "metric, bundle")
    yield page.table("What was checked", headings, rows)
    conditions = [f"{channel}: {rule}" for channel, policy in release.channels.items() for rule in _list_rules(policy)]
    if conditions:
        yield page.paragraph("A channel takes it only when its policy is kept:")
        yield page.items(conditions)
    if data.checks:
        yield trust.show_checks(f"Gates of {data.channel} on figures", data.checks)


def _list_rules(policy: Policy) -> Iterator[str]:
    """Yield what a policy asks of a release, in the words of a release file."""
    if policy.after is not None:
        yield f"after {policy.after}"
    if policy.approval != "none":
        yield f"approval {policy.approval}"
    for name in ("signature", "rebuild"):
        if getattr(policy, name) == "required":
            yield f"{name} required"
    for gate, bound in policy.gates:
        if bound is not None:
            yield f"{gate} {bound}"


def _against(data: PageData) -> Iterator[Markup]:
    for target, quietness in data.quietness.items():
        if quietness.busyness is None:
            yield _show_quietness(target, quietness)
    if data.production is None:
        yield page.paragraph(f"{data.channel} holds nothing: there is no release to compare with.")
        rows = [
            (target, name, page.number(value))
            for target, figures_of in data.figures.items()
            for name, value in figures_of.items()
            if value is not None
        ]
        yield page.table("Figures", ("target", "figure", "this release"), rows)
    else:
        yield from map(_show_slowdown, data.slowdowns)
        yield from figures_beside(data.changes, data.production, "this release")
        if data.ratios:
            yield _show_ratios(data.ratios)
    if data.spreads:
        yield _show_spreads(data.spreads)
    yield from _show_concurrency(data.release)
    latencies: dict[str, list[tuple[float, float]]] = {}
    for row in data.history:
        if row.p50 is not None:
            latencies.setdefault(row.target, []).append((float(row.position), row.p50))
    if any(len(points) > 1 for points in latencies.values()):
        title = "Latency of the releases"
        yield page.figure(title, charts.points(title, "release", "p50, ms", latencies, is_count=True))
    if data.steps or data.drifts:
        yield page.paragraph("Over the last releases:")
        yield page.items(str(change) for change in (*data.steps, *data.drifts))


def _show_quietness(target: str, quietness: Quietness) -> Markup:
    rounds = "in rounds" if quietness.rounds is None else f"in {page.number(quietness.rounds, '{:d}')} rounds"
    words = f"{page.number(quietness.runs, '{:d}')} runs {rounds}; slow rounds differ from fast ones by "
    words += page.number(quietness.noise, "{:.1%}")
    if quietness.unevenness is not None:
        words += f", and a fixed kernel's times by {page.number(quietness.unevenness, '{:.1%}')}"
    for name, lack in quietness.missing.items():
        words += f"; {name} needs {page.number(lack, '{:d}')} runs more"
    if quietness.busyness is None:
        return page.paragraph(Markup(f"{page.text(target)}: {words}."))
    return page.paragraph(
        Markup(
            f"{page.text(target)}: the machine was busy while it was measured: {words}. "
            "Its times may be those of other work."
        ),
        "verdict undecided",
    )


def _show_ratios(ratios: Sequence[PeerRatio]) -> Markup:
    rows = [
        (
            item.target,
            item.peer,
            item.version,
            page.number(item.ratio, "{:.3f}"),
            trust.show_interval(item.interval, item.missing),
            page.number(item.rounds, "{:d}"),
        )
        for item in ratios
    ]
    headings = ("target", "peer", "release", "ratio", "interval", "rounds")
    return page.table("Latency over a peer's, measured in turn", headings, rows)


def _show_spreads(spreads: Sequence[Spread]) -> Markup:
    rows = [
        (
            item.target,
            item.figure,
            item.version,
            page.number(item.median),
            Markup(f"{page.number(item.low)} to {page.number(item.high)}"),
            page.number(item.rounds, "{:d}"),
        )
        for item in spreads
    ]
    headings = ("target", "figure", "release", "median", "least to most", "rounds")
    return page.table("Loading, in a fresh process for each round", headings, rows)


def _show_concurrency(release: Release) -> Iterator[Markup]:
    for item in release.targets:
        rows = [
            (
                _RUNNERS[runner],
                page.number(each.callers, "{:d}"),
                page.number(latency.throughput),
                *(page.number(value, "{:.3f}") for value in (latency.p50, latency.p90, latency.p99)),
            )
            for each in (() if item.measurements is None else item.measurements.concurrency)
            for runner, latency in each.runners.items()
        ]
        if rows:
            headings = ("runner", "callers", "runs per second", "p50 ms", "p90 ms", "p99 ms")
            yield page.table(f"{item.target}: several callers at once", headings, rows)


def _show_slowdown(slowdown: Slowdown) -> Markup:
    return page.paragraph(str(slowdown), "verdict undecided")


def figures_beside(changes: Sequence[Change], before: str, now: str) -> Iterator[Markup]:
    """Yield a table of the figures of two releases; `before` and `now` head its columns."""
    rows = [
        (
            change.target,
            change.name,
            page.number(change.before),
            page.number(change.now),
            page.number(change.ratio, "{:.3f}"),
        )
        for change in changes
        if not isinstance(change.now, str)
        and not isinstance(change.before, str)
        and (change.now, change.before) != (None, None)
    ]
    yield page.table("Figures", ("target", "figure", before, now, "ratio"), rows)
    yield page.paragraph(
        "Each release was measured when it was made, so that a latency may differ by the state of the machine: where "
        "the reference kernel, which is the same each time, takes longer as well, the machine was slower. "
        "A promotion with the gate max_ratio_current measures both in turn and gives an interval, which "
        "tvmflow report then shows under Trust."
    )


def _samples(data: PageData) -> Iterator[Markup]:
    if not data.insights:
        yield page.paragraph("No target was run on the machine that built it.")
    for target, insight in data.insights.items():
        count = page.number(insight.samples, "{:d}")
        if any(sample.answer is not None for sample in (*insight.worst, *insight.flipped)):
            flips = page.number(insight.flips, "{:d}")
            sentence = f"{flips} of {count} samples have another answer than the original."
        else:
            sentence = f"{count} samples were compared with the original; this model gives no single answer."
        yield page.paragraph(Markup(f"{page.text(target)}: {sentence}"))
        if insight.problem is not None:
            yield page.paragraph(insight.problem, "verdict undecided")
        for title, samples in (("Another answer", insight.flipped), ("Largest differences", insight.worst)):
            if samples:
                cards = "".join(_card(sample) for sample in samples)
                yield Markup(f"<h3>{title}</h3><div class='cards'>{cards}</div>")


def _card(sample: SampleInsight) -> str:
    words = [f"sample {page.number(sample.index, '{:d}')}, difference {page.number(sample.error, '{:.2e}')}"]
    if sample.answer is not None:
        words.append(
            f"answer {page.number(sample.answer, '{:d}')}, original {page.number(sample.original_answer, '{:d}')}"
        )
    if sample.label is not None:
        words.append(f"label {page.text(sample.label)}")
    drawings = "".join(_draw(item, sample.index) for item in sample.inputs)
    if sample.text is not None:
        drawings = f"<blockquote>{page.text(sample.text)}</blockquote>{page.details('inputs', [Markup(drawings)])}"
    return f"<figure>{drawings}<figcaption>{'<br>'.join(words)}</figcaption></figure>"


def _draw(item: Drawing, index: int) -> str:
    description = page.text(f"input {item.name} of sample {index}")
    if item.image is not None:
        return f'<img alt="{description}" src="data:image/png;base64,{item.image}">'
    if item.wave is not None:
        return charts.wave(f"input {item.name} of sample {index}", item.wave)
    return f"<p><code>{page.text(item.name)}: {page.text(item.values)}</code></p>"


def _trade(release: Release) -> Iterator[Markup]:
    series: dict[str, list[tuple[float, float]]] = {}
    name = "largest error"
    for item in release.targets:
        deviation, metric = item.verdict.original, item.verdict.metric_bundle
        if item.p50 is not None and deviation is not None:
            name = "largest error" if metric is None else "task metric"
            label = f"{item.target}, {item.verdict.precision}"
            series[label] = [(item.p50, deviation.max_abs_error if metric is None else metric)]
    if series:
        title = "Every target that was measured"
        yield page.figure(title, charts.points(title, "p50, ms", name, series))
    else:
        yield page.paragraph("No target was measured on the machine that built it.")


def _time(data: PageData) -> Iterator[Markup]:
    for target, rows in data.functions.items():
        insight = data.insights[target]
        yield from show_layers(target, insight, data.layers[target], data.slower[target], data.production)
        milliseconds = {row.name: row.ms for row in rows[:_SHOWN_FUNCTIONS]}
        title = f"{target}: milliseconds of a run by function"
        yield page.figure(title, charts.bars(title, milliseconds))
        yield page.table(
            f"{target}: the slowest functions",
            ("function", "calls", "ms", "share", "MB", "GB/s"),
            [
                (
                    row.name,
                    page.number(row.calls, "{:d}"),
                    page.number(row.ms, "{:.4f}"),
                    page.number(row.share, "{:.1%}"),
                    page.number(row.megabytes, "{:.2f}"),
                    page.number(row.gigabytes_per_second, "{:.1f}"),
                )
                for row in rows
            ],
        )
        yield _explain_sum(target, data.profiles[target])
    if not data.functions:
        yield page.paragraph("No target was run on the machine that built it.")


def _explain_sum(target: str, profile: ProfileSum) -> Markup:
    median = "" if profile.p50 is None else f", while a run takes {page.number(profile.p50, '{:.4f}')} ms (p50)"
    return page.paragraph(
        Markup(
            f"{page.text(target)}: these {page.number(profile.calls, '{:d}')} calls take "
            f"{page.number(profile.ms, '{:.4f}')} ms together{median}. The two differ because the profile is "
            "of other runs: each call is timed by itself, one after the other, and its shortest time counts; and the "
            "clock that is read around every call takes time too, most of all in a model of short calls. Shares tell "
            "more than the sum."
        )
    )


def _changes(data: PageData) -> Iterator[Markup]:
    if data.production is None:
        yield page.paragraph("There is no release to compare with.")
    else:
        yield from facts_that_differ(data.changes, data.production, "this release")


def facts_that_differ(changes: Sequence[Change], before: str, now: str) -> Iterator[Markup]:
    """Yield a table of the facts that differ or are not recorded; `before` and `now` head its columns."""
    rows = [
        (
            change.target or "all targets",
            change.name,
            *("-" if value is None else shorten(value) for value in (change.before, change.now)),
        )
        for change in changes
        if change.is_shown and (isinstance(change.now, str) or isinstance(change.before, str))
    ]
    if rows:
        yield page.table("What differs", ("target", "fact", before, now), rows)
    else:
        yield page.paragraph("Model, data, code, packages, machine, tuning, compiler and bundles are the same.")


def _commands(data: PageData) -> Iterator[Markup]:
    name, version, channel = data.release.name, data.release.version, data.channel
    yield page.paragraph("To put it out, and to take it back:")
    lines = f"tvmflow promote {name} {version} --channel {channel}\ntvmflow rollback {name} --channel {channel}"
    yield page.commands(lines)


def shorten(value: object) -> str:
    """Return a fact as text; a SHA-256, also one behind "sha256:", is cut to its first 12 hexadecimal digits."""
    text = str(value)
    digest = _DIGEST.fullmatch(text)
    return text if digest is None else f"{digest[1]}…"
