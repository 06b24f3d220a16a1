"""Load a bundle and run it: needs TVM's runtime and NumPy, nothing else."""

from tvmflow.runtime.model import CompiledModel, Timings, load

__all__ = ["CompiledModel", "Timings", "load"]
