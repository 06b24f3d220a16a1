"""The runtime: it loads a bundle and runs it, and needs only TVM's runtime library and NumPy."""

from tvmflow.runtime.model import CompiledModel, Timings, label_places, load

__all__ = ["CompiledModel", "Timings", "label_places", "load"]
