"""Draws the way of the data through tvmflow: which step or module turns what into what.

`docs/generate.py` writes the picture, `docs/data-way.svg`. A box names a step (`tasks/`) or a module, which must exist.
"""

from html import escape
from importlib import import_module
from pathlib import Path
from typing import NamedTuple

from tasks.step import Step

_ROOT = Path(__file__).parents[1]
# Pixels: a box, the arrow to the next one, and the distance of the rows.
_WIDTH, _HEIGHT, _ARROW, _ROW, _LEFT, _TOP = 122, 44, 76, 118, 20, 46
_STYLE = (
    "text{font:12px system-ui,sans-serif;fill:#24292f}.head{font-weight:bold;font-size:14px}"
    ".module{font-size:10px;fill:#57606a}.box{fill:#ddf4ff;stroke:#0969da}.end{fill:#f6f8fa;stroke:#8c959f}"
    "path{stroke:#57606a;fill:none;marker-end:url(#tip)}"
)


class _Box(NamedTuple):
    """A part of the way: a step, as `module:name`, a folder or file of the repository, or a thing without code.

    `makes` is what it passes on to the next box.
    """

    part: str
    makes: str = ""

    def texts(self) -> tuple[str, str]:
        """Return the two lines of the box: what it is called, and where its code is."""
        module, colon, name = self.part.partition(":")
        if colon:
            step = getattr(import_module(module), name)
            if not isinstance(step, Step):
                raise TypeError(f"{self.part} is no step")
            return step.name, f"{module.replace('.', '/')}.py"
        path = _ROOT / self.part
        if "/" not in self.part:
            return self.part, ""
        if not path.exists():
            raise FileNotFoundError(f"{self.part} is not in the repository")
        return path.stem, self.part


_ROWS: dict[str, tuple[_Box, ...]] = {
    "The model, once": (
        _Box("release file", "spec"),
        _Box("tasks.train:train", "weights"),
        _Box("tasks.export:export", "ONNX file"),
        _Box("tasks.relax_import:relax_import", "Relax"),
    ),
    "Each target": (
        _Box("tasks.tune:_TUNE", "records"),
        _Box("tasks.build:build", "library"),
        _Box("tasks.package:package", "bundle"),
        _Box("tasks.validate:validate", "verdict"),
        _Box("tasks.benchmark:benchmark", "figures"),
    ),
    "Within relax_import and build: the compiler": (
        _Box("tvmflow/compiler/onnx/", "Relax"),
        _Box("tvmflow/compiler/passes/", "operators"),
        _Box("tvmflow/compiler/operators/", "loops"),
        _Box("tvmflow/compiler/schedules/", "schedule"),
        _Box("tvmflow/compiler/codegen.py", "library"),
    ),
    "The release": (
        _Box("tasks.track:track", "MLflow run"),
        _Box("tasks.insight:insight", "times"),
        _Box("tasks.report:report", "page"),
        _Box("tasks.publish:publish", "release"),
        _Box("tvmflow/store/"),
    ),
    "A promotion": (
        _Box("tvmflow/store/", "release"),
        _Box("tasks.integrity:integrity", "checks"),
        _Box("tasks.gate:gate", "checks"),
        _Box("tasks.reproduce:reproduce", "checks"),
        _Box("tvmflow/promotion/moves.py", "channel"),
    ),
    "In use": (
        _Box("tvmflow/store/resolve.py", "bundle"),
        _Box("tvmflow/bundle/", "library"),
        _Box("tvmflow/runtime/", "outputs"),
        _Box("tvmflow/serving/"),
    ),
}


def draw() -> str:
    """Return the picture as SVG: a row of boxes for each part of the way."""
    width = 2 * _LEFT + max(len(row) for row in _ROWS.values()) * (_WIDTH + _ARROW)
    height = len(_ROWS) * _ROW
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" role="img" '
        f'aria-label="The way of the data through tvmflow"><style>{_STYLE}</style>',
        '<defs><marker id="tip" markerWidth="8" markerHeight="8" refX="7" refY="4" orient="auto">'
        '<path d="M0 0L8 4L0 8z" style="fill:#57606a;stroke:none;marker-end:none"/></marker></defs>',
        f'<rect width="{width}" height="{height}" fill="#ffffff"/>',
    ]
    for index, (heading, row) in enumerate(_ROWS.items()):
        top = index * _ROW + _TOP
        parts.append(f'<text class="head" x="{_LEFT}" y="{top - 16}">{escape(heading)}</text>')
        for place, box in enumerate(row):
            parts += _draw_box(box, _LEFT + place * (_WIDTH + _ARROW), top)
    return "\n".join([*parts, "</svg>"])


def _draw_box(box: _Box, left: int, top: int) -> list[str]:
    name, module = box.texts()
    middle, height = left + _WIDTH // 2, top + _HEIGHT // 2
    kind = "box" if ":" in box.part else "end"
    parts = [f'<rect class="{kind}" x="{left}" y="{top}" width="{_WIDTH}" height="{_HEIGHT}" rx="5"/>']
    lines = [(name, "", height - 2 if module else height + 4), (module.removeprefix("tvmflow/"), "module", height + 14)]
    parts += [
        f'<text class="{style}" x="{middle}" y="{y}" text-anchor="middle">{escape(text)}</text>'
        for text, style, y in lines
        if text
    ]
    if box.makes:
        start, end = left + _WIDTH, left + _WIDTH + _ARROW
        parts.append(f'<path d="M{start} {height}H{end - 1}"/>')
        parts.append(
            f'<text x="{(start + end) // 2 - 3}" y="{height - 6}" text-anchor="middle">{escape(box.makes)}</text>'
        )
    return parts
