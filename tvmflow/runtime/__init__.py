"""The runtime: it loads a bundle and runs it, and needs only TVM's runtime library and NumPy."""

from tvmflow.runtime.inputs import label_places
from tvmflow.runtime.model import CompiledModel, load
from tvmflow.runtime.timings import Timings

__all__ = ["CompiledModel", "Timings", "label_places", "load"]
