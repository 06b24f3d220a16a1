"""The whole release file: all sections together, and the rules between them."""

from pathlib import Path
from typing import Any, Literal, Self

from pydantic import Field, field_validator, model_validator

from tvmflow.hardware.target import Precision, Target, resolve
from tvmflow.spec.channels import ChannelGates, ChannelSection, Retrain
from tvmflow.spec.checks import Benchmark, Gates, Validate
from tvmflow.spec.fields import NAME_RULE, Section, explain_channel, is_name, likely_name
from tvmflow.spec.inputs import Dimension, Input
from tvmflow.spec.model import ROUNDED_ERROR, Build, Export, Model, Train, Tune

# The `max_relative_error` of each reduced precision, where the release file sets no bound.
_REDUCED_PRECISION_ERROR: dict[Precision, float] = {"bf16": 5e-2, "fp16": 5e-2, "int8": 5e-2}


class RegistrySection(Section):
    """Names and tags in MLflow."""

    experiment: str | None = None
    """The experiment of the runs; `tvmflow` unless given."""
    model: str | None = None
    """The registered model; the release's name unless given."""
    tags: dict[str, str] = Field(default={})
    """Tags of run and model version."""


class Store(Section):
    """The place of releases. This machine's settings override it; credentials come from the settings alone."""

    endpoint: str | None = None
    """The S3 endpoint, as `https://HOST`."""
    bucket: str | None = None
    """The bucket."""
    prefix: str | None = None
    """A prefix of all keys."""


class Spec(Section):
    """A whole release file."""

    name: str
    """The release's name: letters, digits, dots, dashes and underscores."""
    model: Model
    """The origin of the model."""
    train: Train | None = None
    """The training of the weights of a factory's model."""
    inputs: tuple[Input, ...] = ()
    """The inputs. An ONNX file describes its own; an unnamed free dimension is named after input and axis: `x_0`."""
    dimensions: dict[str, Dimension] = Field(default={})
    """The symbolic dimensions, by name."""
    outputs: tuple[str, ...] = ()
    """Names of the outputs, in the model's order."""
    export: Export = Export()
    """How PyTorch is exported to ONNX."""
    targets: tuple[str | dict[str, Any], ...] = ("native",)
    """Machines to build for: presets such as `native` or `x86-64-v3`, or full TVM targets."""
    build: Build = Build()
    """How TVM builds the library."""
    tune: Tune = Tune()
    """The tuning budget."""
    validation: Validate = Field(default=Validate(), alias="validate")
    """When a bundle counts as equal to the original."""
    benchmark: Benchmark = Benchmark()
    """How a bundle is measured."""
    gates: Gates = Gates()
    """Bounds that a release must keep to be published."""
    channels: dict[str, ChannelSection] = Field(default={})
    """The policies that the file proposes, by channel. Without channels, a release may go to any."""
    retrain: Retrain | None = None
    """When a retrained model is released."""
    registry: RegistrySection = RegistrySection()
    """Names in MLflow."""
    store: Store = Store()
    """Where releases are kept."""

    _folder: Path = Path()

    @field_validator("name")
    @classmethod
    def _is_plain(cls, name: str) -> str:
        if not is_name(name):
            raise ValueError(f"{name!r} {NAME_RULE}")
        return name

    @model_validator(mode="after")
    def _has_distinct_inputs_and_outputs(self) -> Self:
        if not self.inputs and self.model.onnx is None and self.model.mlflow is None:
            raise ValueError("inputs are needed: name, shape and dtype of each")
        for key, names in (("inputs", [item.name for item in self.inputs]), ("outputs", list(self.outputs))):
            for name in names:
                if names.count(name) > 1:
                    raise ValueError(f"{key}: {name!r} is given twice")
        return self

    @model_validator(mode="after")
    def _has_dimensions_of_its_inputs(self) -> Self:
        symbols = {size for item in self.inputs for size in item.shape if isinstance(size, str)}
        for name in self.dimensions:
            if self.inputs and name not in symbols:
                raise ValueError(f"dimension {name!r} stands in no input's shape{likely_name(name, symbols)}")
        return self

    @model_validator(mode="after")
    def _has_targets(self) -> Self:
        if not self.targets:
            raise ValueError("targets must name at least one")
        return self

    @model_validator(mode="after")
    def _measures_what_gates_compare(self) -> Self:
        sections: dict[str, Gates | ChannelGates] = {"gates": self.gates}
        sections |= {f"channels.{name}.gates": channel.gates for name, channel in self.channels.items()}
        for peer in ("onnxruntime", "pytorch"):
            gates = [f"{place}.max_ratio_{peer}" for place in sections if self._bound_ratio(sections[place], peer)]
            if gates and peer not in self.benchmark.peers:
                raise ValueError(f"{gates[0]} needs {peer} among benchmark.peers")
            if gates and peer == "pytorch" and self.model.onnx is not None:
                raise ValueError(f"{gates[0]} cannot be checked for an ONNX file; use max_ratio_onnxruntime")
        return self

    @staticmethod
    def _bound_ratio(gates: Gates | ChannelGates, peer: str) -> float | None:
        bound: float | None = getattr(gates, f"max_ratio_{peer}")
        return bound

    @property
    def registered_model(self) -> str:
        """The registered model in MLflow whose versions are the releases."""
        return self.registry.model or self.name

    def ratio_bounds(self, peer: Literal["onnxruntime", "pytorch"]) -> tuple[float, ...]:
        """Return the distinct bounds on the ratio to a peer, of the release's gates and of those of its channels."""
        gates: list[Gates | ChannelGates] = [self.gates, *(channel.gates for channel in self.channels.values())]
        bounds = (self._bound_ratio(each, peer) for each in gates)
        return tuple(sorted({bound for bound in bounds if bound is not None}))

    @model_validator(mode="after")
    def _has_an_order_of_channels(self) -> Self:
        for name, channel in self.channels.items():
            reason = explain_channel(name)
            if reason is not None:
                raise ValueError(f"channel {name!r} {reason}")
            if channel.after is not None and (channel.after == name or channel.after not in self.channels):
                raise ValueError(f"channels.{name}.after: {channel.after!r} is no other channel of this file")
        for name in self.channels:
            if self._follows(name, name):
                raise ValueError(f"channels.{name}.after: a release would have to reach {name!r} before itself")
        return self

    @model_validator(mode="after")
    def _can_be_trained(self) -> Self:
        if self.retrain is not None and (self.train is None or self.validation.task is None):
            raise ValueError("retrain needs train, which makes the weights, and validate.task, which judges them")
        if self.retrain is not None and self.channels and self.retrain.channel not in self.channels:
            raise ValueError(f"retrain.channel: {self.retrain.channel!r} is not among channels")
        if self.train is not None and (self.model.factory is None or self.model.weights is not None):
            raise ValueError("train makes the weights of a factory's model: give factory, and no weights file")
        return self

    def bounds(self, *, rounds_activations: bool = False) -> Validate:
        """Return the bounds of validation: the release file's.

        Where it sets none, they are wider for a reduced precision, and for a model whose activations are rounded to 8
        or 16 bits.
        """
        error = _REDUCED_PRECISION_ERROR.get(self.build.precision, ROUNDED_ERROR if rounds_activations else None)
        if error is None or self.validation.has_bounds:
            return self.validation
        return self.validation.model_copy(update={"max_relative_error": error})

    @property
    def folder(self) -> Path:
        """The folder of the release file: its relative paths and its modules are looked up there."""
        return self._folder

    def path(self, path: Path) -> Path:
        """Return a path in the release file as an absolute one."""
        return path if path.is_absolute() else self._folder / path

    def dimension(self, name: str) -> Dimension:
        """Return the range of a symbolic dimension; 1 or more without an entry in the release file."""
        return self.dimensions.get(name, Dimension())

    @property
    def source_alias(self) -> tuple[str, str] | None:
        """The model in MLflow to which a retraining adds a version, and the alias that asks to release that version.

        The alias is named after the channel of the section `retrain`. None without such a section.
        """
        return None if self.retrain is None else (self.retrain.source or f"{self.name}-source", self.retrain.channel)

    def resolve_targets(self) -> tuple[Target, ...]:
        """Return the targets to build for, each once. Raises TargetError for one that is not possible."""
        targets = [resolve(item) for item in self.targets]
        return tuple({target.name: target for target in targets}.values())

    def automatic_channels(self) -> tuple[str, ...]:
        """Return the names of the channels to which every release is promoted.

        They are in the file's order, except that a channel stands after the one that its key `after` names.
        """
        order: list[str] = []
        waiting = [name for name, channel in self.channels.items() if channel.automatic]
        while waiting:
            name = next(name for name in waiting if not any(self._follows(name, other) for other in waiting))
            waiting.remove(name)
            order.append(name)
        return tuple(order)

    def _follows(self, name: str, other: str) -> bool:
        """Whether a release reaches the channel `name` only after the channel `other`."""
        before, earlier = self.channels[name].after, {name}
        while before is not None and before != other and before not in earlier:
            earlier.add(before)
            before = self.channels[before].after
        return before == other
