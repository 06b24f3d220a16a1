"""The runtime: loads a bundle and runs it. It needs TVM's runtime and NumPy, nothing else."""

from tvmflow.runtime.model import CompiledModel, Timings, load

__all__ = ["CompiledModel", "Timings", "load"]
