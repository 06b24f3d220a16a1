"""Pictures: the charts of a page as PNG, for programs that show no SVG."""

import importlib.util
import re
from html import unescape
from pathlib import Path

from tvmflow.report import charts

_WIDTH, _TALLEST = 1280, 16_384
_FONT = "DejaVu Sans"


def draw_png(chart: str) -> bytes:
    """Return a chart of `tvmflow.report.charts` as a PNG on white.

    It is 1280 pixels wide, and less where it would be taller than 16,384 pixels.
    """
    import resvg_py

    # Only the file is used: a machine that builds may have no fonts, and every machine draws the same picture.
    package = importlib.util.find_spec("matplotlib")
    fonts = Path(str(package and package.origin)).parent / "mpl-data" / "fonts" / "ttf"
    width, height = map(float, re.findall(r'viewBox="0 0 (\S+) ([^"]+)"', chart)[0])
    return bytes(
        resvg_py.svg_to_bytes(
            svg_string=charts.standalone(chart),
            background="white",
            zoom=min(_WIDTH / width, _TALLEST / height),
            font_files=[str(fonts / "DejaVuSans.ttf")],
            font_family=_FONT,
            sans_serif_family=_FONT,
            skip_system_fonts=True,
        )
    )


def find_charts(html: str) -> dict[str, str]:
    """Return the SVG of each chart by its caption, in the order of the page; `html` is its HTML."""
    figures = re.findall(r"<figure><figcaption>([^<]*)</figcaption><div[^>]*>(<svg.*?</svg>)", html, re.DOTALL)
    return {unescape(caption): chart for caption, chart in figures}
