"""The release file: how a user wants a model released, as validated sections.

`load` reads a release file, `parse` validates one that is in memory, and `amend` replaces values in one. The sections
are in `model` (the model and how it is exported, built and tuned), `inputs` (its inputs and their samples), `checks`
(the checks of a release) and `channels` (the checks of a promotion); `document` puts them together.
"""

from tvmflow.spec.channels import ChannelGates, ChannelSection, Policy, Retrain
from tvmflow.spec.checks import Benchmark, Gates, TaskMetric, Validate
from tvmflow.spec.document import RegistrySection, Spec, Store
from tvmflow.spec.inputs import Dimension, Dtype, Input, Samples
from tvmflow.spec.model import ROUNDED_ERROR, Build, Export, Model, Train, Tune
from tvmflow.spec.reading import amend, load, parse, to_document
from tvmflow.spec.template import template

__all__ = [
    "ROUNDED_ERROR",
    "Benchmark",
    "Build",
    "ChannelGates",
    "ChannelSection",
    "Dimension",
    "Dtype",
    "Export",
    "Gates",
    "Input",
    "Model",
    "Policy",
    "RegistrySection",
    "Retrain",
    "Samples",
    "Spec",
    "Store",
    "TaskMetric",
    "Train",
    "Tune",
    "Validate",
    "amend",
    "load",
    "parse",
    "template",
    "to_document",
]
