"""The sizes of an ONNX file's free dimensions at which ONNX Runtime runs it."""

import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

from tvmflow.errors import ExportError

if TYPE_CHECKING:
    import onnx

    from tvmflow.spec import Dimension


def find_ranges(path: Path, model: "onnx.ModelProto") -> "dict[str, Dimension] | None":
    """Return a range for each free dimension of a model that `read_onnx` read from `path`; it is found by trial.

    A range begins with the smallest size that ran, and that is within the model's limits. The model may
    define functions that the file lacks. None where the model runs at no size that is tried. Raises ExportError when
    ONNX Runtime cannot load the file, or an input is no tensor of numbers.
    """
    from tasks.export import described_by
    from tvmflow import samples
    from tvmflow.dimensions import find_dimensions
    from tvmflow.onnx_data import save
    from tvmflow.size_limits import SizeLimits
    from tvmflow.source import open_session, run_session

    items = described_by(model)
    with tempfile.TemporaryDirectory() as folder:
        if model.functions:
            path = Path(folder) / "model.onnx"
            save(model, path)
        session = open_session(path, prints_errors=False)

    limits = SizeLimits(model)

    def runs(sizes: dict[str, int]) -> bool:
        try:
            run_session(session, samples.make(items, {}, 0, 0, Path.cwd(), sizes))
        except ExportError:
            return False
        return limits.explain(sizes) is None

    return find_dimensions(items, {}, runs, limits.weight_sizes)
