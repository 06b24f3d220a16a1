"""Charts as SVG text that a page holds in itself: light and dark, with the figures in words for a screen reader."""

from collections.abc import Mapping, Sequence
from html import escape

COLOURS = ("#1565c0", "#c62828", "#8d6e63", "#2e7d32", "#6a1b9a", "#ef6c00")
"""Colours that differ on a light and on a dark page, and in their lightness as well."""
STYLE = (
    "svg.chart{width:100%;height:auto;min-width:30rem;font:12px system-ui,sans-serif;color:#222}"
    "svg.chart text{fill:currentColor}svg.chart .axis{stroke:currentColor;stroke-opacity:.35;fill:none}"
    "svg.small{min-width:0}"
    "@media(prefers-color-scheme:dark){svg.chart{color:#ddd}}"
)
"""The style sheet of the charts, for the head of a page."""

_WIDTH = 640
_LEFT, _RIGHT, _ROW = 150, 20, 30


def shares(title: str, rows: Mapping[str, Mapping[str, float]], colours: Mapping[str, str]) -> str:
    """Return bars of shares that add up to one: each row is a name with its shares by kind.

    `colours` has the colour of each kind, in the order of the bars; the legend names them.
    """
    scale = _WIDTH - _LEFT - _RIGHT
    parts, texts = [], []
    for index, (name, row) in enumerate(rows.items()):
        top, left = 30 + index * _ROW, float(_LEFT)
        parts.append(_text(_LEFT - 8, top + 15, name, "end"))
        for kind, colour in colours.items():
            width = row.get(kind, 0.0) * scale
            if width:
                parts.append(f'<rect x="{left:.1f}" y="{top}" width="{width:.1f}" height="20" fill="{colour}"/>')
            left += width
        texts.append(f"{name}: " + ", ".join(f"{kind} {row.get(kind, 0.0):.0%}" for kind in colours))
    bottom, left = 30 + len(rows) * _ROW, float(_LEFT)
    for kind, colour in colours.items():
        parts.append(f'<rect x="{left:.0f}" y="{bottom + 6}" width="12" height="12" fill="{colour}"/>')
        parts.append(_text(left + 18, bottom + 16, kind))
        left += 30 + 8 * len(kind)
    return _picture(title, "; ".join(texts), bottom + 28, parts)


def intervals(title: str, rows: Mapping[str, tuple[float, float, float]], line: float, unit: str = "") -> str:
    """Return a row for each figure: its interval as a bar and its value as a dot; `line` is a value drawn across them.

    A row has the low end, the value and the high end.
    """
    ends = [value for row in rows.values() for value in row] + [line]
    low, high = min(ends), max(ends)
    margin = (high - low) * 0.08 or abs(high) * 0.1 or 1.0
    low, high = low - margin, high + margin

    def place(value: float) -> float:
        return _LEFT + (_WIDTH - _LEFT - _RIGHT) * (value - low) / (high - low)

    parts, texts = [], []
    for index, (name, (least, value, most)) in enumerate(rows.items()):
        middle = 40 + index * _ROW
        parts.append(_text(_LEFT - 8, middle + 4, name, "end"))
        parts.append(
            f'<path d="M{place(least):.1f} {middle}H{place(most):.1f}" stroke="{COLOURS[0]}" stroke-width="6" '
            f'stroke-opacity=".45"/><circle cx="{place(value):.1f}" cy="{middle}" r="5" fill="{COLOURS[0]}"/>'
        )
        parts.append(_text(place(value), middle - 9, f"{value:.3f}{unit}", "middle"))
        texts.append(f"{name} {value:.3f}{unit}, between {least:.3f} and {most:.3f}")
    bottom = 40 + len(rows) * _ROW
    parts.append(f'<path class="axis" d="M{place(line):.1f} 24V{bottom - 8}" stroke-dasharray="4 3"/>')
    parts.append(_text(place(line), bottom + 6, f"{line:g}{unit}", "middle"))
    return _picture(title, "; ".join(texts), bottom + 14, parts)


def points(title: str, across: str, up: str, series: Mapping[str, Sequence[tuple[float, float]]]) -> str:
    """Return a chart of points from zero: `across` and `up` name the axes, with their units.

    A series of several points is joined by a line.
    """
    height, bottom = 280, 240
    largest_x = max((x for values in series.values() for x, _ in values), default=1.0) * 1.08 or 1.0
    largest_y = max((y for values in series.values() for _, y in values), default=1.0) * 1.08 or 1.0

    def place(x: float, y: float) -> str:
        return f"{60 + (_WIDTH - 90) * x / largest_x:.1f} {bottom - (bottom - 30) * y / largest_y:.1f}"

    parts = [f'<path class="axis" d="M60 30V{bottom}H{_WIDTH - 30}"/>']
    parts += [_text(60, 22, f"{up} (to {largest_y:.3g})"), _text(_WIDTH - 30, bottom + 18, across, "end")]
    parts += [_text(60, bottom + 18, "0", "middle"), _text(_WIDTH - 30, bottom - 6, f"{largest_x:.3g}", "end")]
    texts = []
    for index, (name, values) in enumerate(series.items()):
        colour = COLOURS[index % len(COLOURS)]
        if len(values) > 1:
            path = "M" + "L".join(place(*value) for value in values)
            parts.append(f'<path d="{path}" fill="none" stroke="{colour}" stroke-width="2"/>')
        for value in values:
            x, y = place(*value).split()
            parts.append(f'<circle cx="{x}" cy="{y}" r="4" fill="{colour}"/>')
        if values:
            x, y = place(*values[-1]).split()
            is_right = float(x) > _WIDTH * 0.75
            beside, anchor = (float(x) - 8, "end") if is_right else (float(x) + 8, "start")
            parts.append(_text(beside, float(y) - 8, name, anchor))
        texts.append(f"{name}: " + ", ".join(f"({x:.4g}, {y:.4g})" for x, y in values))
    return _picture(title, f"{across} across, {up} up. " + "; ".join(texts), height, parts)


def bars(title: str, rows: Mapping[str, float], form: str = "{:.3g}") -> str:
    """Return a bar for each figure, drawn from zero; `form` is the format of a figure."""
    scale = (_WIDTH - _LEFT - _RIGHT - 70) / (max(rows.values(), default=1.0) or 1.0)
    parts = []
    for index, (name, value) in enumerate(rows.items()):
        top, width = 30 + index * _ROW, value * scale
        short = name if len(name) < 20 else f"{name[:18]}…"
        parts.append(f"<g><title>{escape(name)}</title>{_text(_LEFT - 8, top + 15, short, 'end')}")
        parts.append(f'<rect x="{_LEFT}" y="{top}" width="{width:.1f}" height="20" fill="{COLOURS[0]}"/></g>')
        parts.append(_text(_LEFT + width + 6, top + 15, form.format(value)))
    texts = ", ".join(f"{name} {form.format(value)}" for name, value in rows.items())
    return _picture(title, texts, 30 + len(rows) * _ROW, parts)


def standalone(chart: str) -> str:
    """Return a chart as a file of its own, with its style."""
    head, _, rest = chart.partition(">")
    return f'{head} xmlns="http://www.w3.org/2000/svg"><style>{STYLE}</style>{rest}\n'


def _picture(title: str, description: str, height: float, parts: Sequence[str]) -> str:
    return (
        f'<svg class="chart" role="img" viewBox="0 0 {_WIDTH} {height:.0f}"><title>{escape(title)}</title>'
        f"<desc>{escape(description)}</desc>{''.join(parts)}</svg>"
    )


def _text(x: float, y: float, text: str, anchor: str = "start") -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}">{escape(text)}</text>'


def wave(title: str, parts: Sequence[Sequence[float]]) -> str:
    """Return a waveform: the lowest and the highest value of each part, one after the other."""
    low, high = min(part[0] for part in parts), max(part[1] for part in parts)
    scale, step = 80 / ((high - low) or 1.0), 160 / len(parts)
    path = "".join(
        f"M{index * step:.1f} {85 - (least - low) * scale:.1f}V{84 - (most - low) * scale:.1f}"
        for index, (least, most) in enumerate(parts)
    )
    return (
        f'<svg class="chart small" role="img" viewBox="0 0 160 90"><title>{escape(title)}</title>'
        f'<path d="{path}" stroke="{COLOURS[0]}" fill="none"/></svg>'
    )
