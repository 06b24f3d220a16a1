"""A page in one file: no script that it needs, no address that it loads, light and dark, on a phone and on a desk."""

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from html import escape, unescape
from typing import Any

from tvmflow.report import charts
from tvmflow.report.numbers import format_number

_STYLE = (
    ":root{color-scheme:light dark}"
    "body{font:16px/1.5 system-ui,sans-serif;max-width:60rem;margin:0 auto;padding:1rem;background:Canvas;"
    "color:CanvasText;overflow-wrap:break-word}"
    "h1{font-size:1.5rem;line-height:1.2}h2{font-size:1.2rem;margin-top:2.5rem}"
    "nav ul{display:flex;flex-wrap:wrap;gap:.25rem 1rem;padding:0;list-style:none}"
    "a{color:LinkText}"
    "a:focus-visible,summary:focus-visible,.scroll:focus-visible,pre:focus-visible{outline:3px solid Highlight}"
    # A shadow at an edge beyond which there is more; the first two layers move with the content and hide it at the end.
    ".scroll{--shade:color-mix(in srgb,CanvasText 45%,Canvas);overflow-x:auto;max-width:100%;background:"
    "linear-gradient(90deg,Canvas 40%,transparent) 0/2rem 100% no-repeat local,"
    "linear-gradient(270deg,Canvas 40%,transparent) 100%/2rem 100% no-repeat local,"
    "linear-gradient(90deg,var(--shade),transparent) 0/.6rem 100% no-repeat,"
    "linear-gradient(270deg,var(--shade),transparent) 100%/.6rem 100% no-repeat}"
    # A tall chart scrolls by itself, so that what follows it is near.
    ".scroll+.scroll{margin-top:1rem}figure .scroll{max-height:40rem;overflow-y:auto}"
    "@media print{figure .scroll{max-height:none}}"
    "table{border-collapse:collapse;font-size:.9rem}"
    "th,td{padding:.3rem .7rem;text-align:left;font-weight:normal;white-space:nowrap;"
    "border-bottom:1px solid color-mix(in srgb,CanvasText 20%,Canvas)}thead th{font-weight:bold}"
    ".number{text-align:right}caption{text-align:left;padding:.3rem 0}data{white-space:nowrap}"
    # On a phone words of a cell stand below each other, so that most tables need no scrolling.
    "@media(max-width:40rem){th,td{white-space:normal;padding:.3rem .25rem}"
    "th:first-child{padding-left:0}table{font-size:.8rem}tbody th,td:not(.number){overflow-wrap:anywhere}"
    "tbody th{min-width:4.5rem}td:not(.number){min-width:2.5rem}pre{white-space:pre-wrap}}"
    "pre,code{font-size:.85rem}pre{overflow-x:auto;padding:.7rem;"
    "background:color-mix(in srgb,CanvasText 7%,Canvas)}"
    ".verdict{padding:.8rem 1rem;border-left:.5rem solid;font-size:1.1rem}"
    ".pass{border-color:#2e7d32}.fail{border-color:#c62828}.undecided{border-color:#8d6e63}"
    ".cards{display:grid;grid-template-columns:repeat(auto-fill,minmax(10rem,1fr));gap:1rem}"
    ".cards:has(blockquote){grid-template-columns:repeat(auto-fill,minmax(min(100%,16rem),1fr))}"
    ".cards figure{margin:0}.cards img{width:100%;image-rendering:pixelated;background:#888}"
    "blockquote{margin:0 0 .3rem;padding-left:.6rem;border-left:3px solid;white-space:pre-wrap;"
    "max-height:12rem;overflow:auto}"
    "figcaption{font-size:.85rem}img{max-width:100%}figure{margin:1rem 0}"
)


class Markup(str):
    """Text that is HTML already; the functions of this module escape every other text."""


def number(value: float | None, form: str = "") -> Markup:
    """Return a number as a reader sees it, in an HTML element that holds its exact value; "-" for None.

    `form` is a format string with one field, such as "{:.3f}"; "" means `format_number`. The caller must pass the same
    exact value to `write` as part of `data`.
    """
    if value is None:
        return Markup("-")
    return Markup(f'<data value="{value!r}">{escape(form.format(value) if form else format_number(value))}</data>')


def moment(when: str) -> Markup:
    """Return a time (UTC, ISO 8601) as a reader sees it, to the minute, in an HTML element that holds it exactly."""
    return Markup(f'<time datetime="{escape(when)}">{escape(when[:16].replace("T", " "))}</time>')


def text(value: object) -> str:
    """Return a value as HTML: `Markup` as it is, any other value as escaped text."""
    return value if isinstance(value, Markup) else escape(str(value))


def paragraph(content: object, kind: str = "") -> Markup:
    """Return a paragraph; `kind` is its CSS classes, "" for none."""
    return Markup(f'<p class="{kind}">{text(content)}</p>' if kind else f"<p>{text(content)}</p>")


def table(caption: str, headings: Sequence[str], rows: Iterable[Sequence[object]]) -> Markup:
    """Return a table that scrolls by itself where the screen is too narrow for it; the first cell heads its row.

    Columns with a cell that `number` wrote are aligned at the right. Every row must have as many cells as headings. A
    first column called "target" with the same target in all rows moves into the caption, which leaves a phone's width
    to the figures. Without rows it is a paragraph that says so.
    """
    cells = [[text(cell) for cell in row] for row in rows]
    if not cells:
        return paragraph(f"{caption}: none.")
    if headings[0] == "target" and len({row[0] for row in cells}) == 1:
        caption, headings = f"{caption}, {unescape(cells[0][0])}", headings[1:]
        cells = [row[1:] for row in cells]
    has_figures = [any(cell.startswith("<data") for cell in column) for column in zip(*cells, strict=True)]
    kinds = [' class="number"' if numeric else "" for numeric in has_figures]

    def write_row(row: Sequence[str]) -> str:
        first, *others = (f"{kind}>{cell}" for kind, cell in zip(kinds, row, strict=True))
        return f'<tr><th scope="row"{first}</th>{"".join(f"<td{cell}</td>" for cell in others)}</tr>'

    head = "".join(f'<th scope="col"{kind}>{escape(name)}</th>' for kind, name in zip(kinds, headings, strict=True))
    return Markup(
        f'<div class="scroll" tabindex="0" role="region" aria-label="{escape(caption)}"><table>'
        f"<caption>{escape(caption)}</caption><thead><tr>{head}</tr></thead>"
        f"<tbody>{''.join(map(write_row, cells))}</tbody></table></div>"
    )


def items(entries: Iterable[object]) -> Markup:
    """Return a bulleted list with an item for each entry: `Markup` as it is, any other value as escaped text."""
    return Markup(f"<ul>{''.join(f'<li>{text(entry)}</li>' for entry in entries)}</ul>")


def details(summary: str, content: Iterable[Markup]) -> Markup:
    """Return content that opens when a reader chooses its summary."""
    return Markup(f"<details><summary>{escape(summary)}</summary>{''.join(content)}</details>")


def commands(lines: str) -> Markup:
    """Return command lines, which scroll by themselves where the screen is too narrow for them."""
    return Markup(f'<pre tabindex="0" role="region" aria-label="Commands">{escape(lines)}</pre>')


def figure(caption: str, chart: str) -> Markup:
    """Return a chart of `tvmflow.report.charts` with a caption; it scrolls by itself where the screen is too narrow."""
    return Markup(
        f'<figure><figcaption>{escape(caption)}</figcaption><div class="scroll" tabindex="0" role="region" '
        f'aria-label="{escape(caption)}">{chart}</div></figure>'
    )


_DATA = re.compile(r'(?<=<script type="application/json" id="data">).*?(?=</script>)', re.DOTALL)


def read_data(html: str) -> Any:
    """Return the JSON document of a page that `write` wrote; None where there is none."""
    document = _DATA.search(html)
    return None if document is None else json.loads(document[0])


def replace_section(html: str, heading: str, parts: Sequence[Markup], data: Mapping[str, Any]) -> str:
    """Return a page that `write` wrote, with `parts` as the new content of the section called `heading`.

    The entries of `data` are added to the page's JSON document. A page without the section stays as it is.
    """
    start = _open_section(heading)
    before, separator, rest = html.partition(start)
    if not separator:
        return html
    changed = f"{before}{start}{''.join(parts)}{rest[rest.index('</section>') :]}"
    return _DATA.sub(lambda document: _embed({**json.loads(document[0]), **data}), changed)


def _open_section(heading: str) -> str:
    slug = _slug(heading)
    return f'<section aria-labelledby="{slug}"><h2 id="{slug}">{escape(heading)}</h2>'


def _slug(heading: str) -> str:
    return "".join(letter if letter.isalnum() else "-" for letter in heading.lower())


def _embed(data: Mapping[str, Any]) -> str:
    """A JSON document for a script element, which a "</script>" within a string would end."""
    return json.dumps(data).replace("<", "\\u003c")


def write(title: str, sections: Mapping[str, Sequence[Markup]], data: Mapping[str, Any]) -> str:
    """Return a page as HTML.

    `sections` maps each heading to the content of its section. `data` is the JSON document that the page embeds, which
    has the exact values of all numbers on the page.
    """
    links = items(Markup(f'<a href="#{_slug(heading)}">{escape(heading)}</a>') for heading in sections)
    body = "".join(f"{_open_section(heading)}{''.join(parts)}</section>" for heading, parts in sections.items())
    return (
        '<!DOCTYPE html><html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width,initial-scale=1">'
        f"<title>{escape(title)}</title><style>{_STYLE}{charts.STYLE}</style></head><body>"
        f'<header><h1>{escape(title)}</h1><nav aria-label="Sections">{links}</nav></header><main>{body}</main>'
        f'<script type="application/json" id="data">{_embed(data)}</script></body></html>\n'
    )
