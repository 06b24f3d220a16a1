"""The samples of an ONNX file's inputs, and the sizes of its free dimensions, with which ONNX Runtime runs it."""

import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import onnx

    from tvmflow.spec import Dimension, Input


def find_inputs(path: Path, model: "onnx.ModelProto") -> "tuple[tuple[Input, ...], dict[str, Dimension]] | None":
    """Return the inputs of a model that `read_onnx` read from `path`, and a range for each of its free dimensions.

    Both are found by trial: the kinds of samples on which the model runs, and ranges that begin with the smallest size
    that ran and that is within the model's limits. The model may define functions that the file lacks. None where a
    model of free dimensions runs at no size that is tried. Raises ExportError when ONNX Runtime cannot load the file,
    or an input is no tensor of numbers.
    """
    from tasks.sizes import SizeTrial
    from tvmflow.onnx_model.external_data import save
    from tvmflow.onnx_model.reading import declared_inputs, sample_candidates
    from tvmflow.onnx_model.session import open_session
    from tvmflow.onnx_model.size_limits import SizeLimits

    items = declared_inputs(model)
    with tempfile.TemporaryDirectory() as folder:
        session = None if model.functions else open_session(path, prints_errors=False, packs=False)
        if session is None or any(item.type == "tensor(string)" for item in session.get_inputs()):
            # `model` defines functions that the file lacks, or has numbers in the place of its strings.
            path = Path(folder) / "model.onnx"
            save(model, path)
            session = open_session(path, prints_errors=False, packs=False)

    limits = SizeLimits(model)
    for inputs in sample_candidates(items):
        trial = SizeTrial(session, limits, inputs, {}, 0, Path.cwd())
        ranges = trial.find_ranges()
        # Without free dimensions, nothing was tried.
        if ranges or (ranges is not None and trial.runs({})):
            return inputs, ranges
    return None if any(isinstance(size, str) for item in items for size in item.shape) else (items, {})
