"""The release file: what a user says about a model, validated."""

import re
from collections.abc import Hashable, Mapping
from difflib import get_close_matches
from pathlib import Path
from typing import Annotated, Any, Literal, Self, get_origin

import yaml
from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError, field_validator, model_validator

from tvmflow.errors import SpecError, TargetError
from tvmflow.target import Precision, Target, presets, resolve, without_unit

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")
_OBJECT = re.compile(r"[A-Za-z_][\w.]*:[A-Za-z_]\w*")

Dtype = Literal["float32", "float64", "float16", "int64", "int32", "int16", "int8", "uint8", "bool"]
# The largest relative error that reduced precisions are allowed where the release file says nothing.
_REDUCED_ERROR: dict[Precision, float] = {"bf16": 5e-2, "fp16": 5e-2, "int8": 5e-2}
PositiveInt = Annotated[int, Field(ge=1)]
Fraction = Annotated[float, Field(ge=0, le=1)]


def part(value: object) -> object:
    """A part of one that was written in per cent, as "2%"; anything else as it is. Raises ValueError."""
    if isinstance(value, str) and value.strip().endswith("%"):
        return float(value.strip()[:-1]) / 100
    return value


class _Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


def _object_path(value: str) -> str:
    if not _OBJECT.fullmatch(value):
        raise ValueError(f"{value!r} is not of the form package.module:function")
    return value


class Model(_Strict):
    """Where the model comes from: exactly one of `factory`, `pt2`, `onnx` and `mlflow`."""

    factory: str | None = None
    arguments: dict[str, Any] = {}
    weights: Path | None = None
    pt2: Path | None = None
    onnx: Path | None = None
    mlflow: str | None = None

    @model_validator(mode="after")
    def _one_source(self) -> Self:
        given = [key for key in ("factory", "pt2", "onnx", "mlflow") if getattr(self, key) is not None]
        if len(given) != 1:
            named = "none is given" if not given else f"{' and '.join(given)} are given"
            raise ValueError(f"exactly one of factory, pt2, onnx and mlflow says where the model is; {named}")
        if self.factory is not None:
            _object_path(self.factory)
        elif self.arguments or self.weights is not None:
            raise ValueError("arguments and weights go with factory only")
        if self.mlflow is not None and not re.match(r"^models:/[^/@]+(@[^/@]+|/[^/@]+)$", self.mlflow):
            raise ValueError(f"mlflow {self.mlflow!r} is not of the form models:/NAME@ALIAS or models:/NAME/VERSION")
        return self


class Train(_Strict):
    """How the weights are made: `function(output: pathlib.Path, **arguments)` writes a state dict to `output`."""

    function: str
    arguments: dict[str, Any] = {}
    reads: tuple[Path, ...] = ()

    _function = field_validator("function")(_object_path)


class Samples(_Strict):
    """How the samples of one input are made."""

    kind: Literal["ones", "uniform", "normal", "integers", "npz", "function"] = "normal"
    low: float | None = None
    high: float | None = None
    mean: float = 0.0
    std: Annotated[float, Field(gt=0)] = 1.0
    file: Path | None = None
    key: str | None = None
    function: str | None = None

    @model_validator(mode="after")
    def _complete(self) -> Self:
        if self.kind == "npz" and self.file is None:
            raise ValueError("samples of kind npz need file")
        if self.kind == "function":
            if self.function is None:
                raise ValueError("samples of kind function need function")
            _object_path(self.function)
        if self.kind == "integers" and (self.low is None or self.high is None):
            raise ValueError("samples of kind integers need low and high")
        low, high = self.low or 0.0, 1.0 if self.high is None else self.high
        if self.kind in ("uniform", "integers") and low >= high:
            raise ValueError(f"low ({low:g}) must be below high ({high:g})")
        if self.kind == "integers" and not (low.is_integer() and high.is_integer()):
            raise ValueError(f"low ({low:g}) and high ({high:g}) of kind integers must be whole numbers")
        return self


class Input(_Strict):
    """One input: its shape in elements per dimension, a name standing for a symbolic dimension."""

    name: str
    shape: tuple[int | str, ...]
    dtype: Dtype = "float32"
    samples: Samples = Samples()

    @field_validator("shape")
    @classmethod
    def _positive_or_named(cls, shape: tuple[int | str, ...]) -> tuple[int | str, ...]:
        for dimension in shape:
            valid = dimension.isidentifier() if isinstance(dimension, str) else dimension >= 1
            if not valid:
                raise ValueError(f"dimension {dimension!r} is neither a positive number nor a name")
        return shape

    @model_validator(mode="after")
    def _default_samples(self) -> Self:
        if self.samples.kind == "normal" and not self.dtype.startswith("float"):
            raise ValueError(f"input {self.name!r} is {self.dtype}: say its samples, e.g. kind integers, low and high")
        return self


class Dimension(_Strict):
    """The range of a symbolic dimension, and the values to tune and to measure at."""

    min: PositiveInt = 1
    max: PositiveInt | None = None
    tune: PositiveInt | None = None
    measure: tuple[PositiveInt, ...] = ()

    @model_validator(mode="after")
    def _in_range(self) -> Self:
        for value in (self.max, self.tune, *self.measure):
            if value is not None and (value < self.min or (self.max is not None and value > self.max)):
                raise ValueError(f"{value} is outside the range {self.min} to {self.max or 'any'}")
        return self

    @property
    def typical(self) -> int:
        """The value that is measured and reported first."""
        return self.measure[0] if self.measure else self.tune or self.min


class Export(_Strict):
    """How PyTorch is exported to ONNX."""

    opset: Annotated[int, Field(ge=18, le=24)] = 18
    optimize: bool = True
    options: dict[str, Any] = {}
    rtol: Annotated[float, Field(ge=0)] = 1e-3
    atol: Annotated[float, Field(ge=0)] = 1e-4


class Build(_Strict):
    """How TVM builds the library."""

    opt_level: Annotated[int, Field(ge=0, le=4)] = 3
    required_passes: tuple[str, ...] = ()
    disabled_passes: tuple[str, ...] = ()
    config: dict[str, Any] = {}
    exec_mode: Literal["bytecode", "compiled"] = "bytecode"
    weights: Literal["inside", "apart"] = "inside"
    precision: Precision = "fp32"
    fast_algorithms: Literal["allow", "forbid"] = "allow"


class Tune(_Strict):
    """The tuning budget: `trials` in total over all workloads, or `minutes`; 0 trials uses known records only.

    `until` ends tuning when another minute is expected to save less than this part of the model's time, alone or with
    one of the others as an upper bound; `early_stopping` leaves a workload alone after so many trials in a row that
    were not faster.
    """

    trials: Annotated[int, Field(ge=0)] | None = None
    minutes: Annotated[float, Field(gt=0)] | None = None
    until: Annotated[float, Field(gt=0, lt=1), BeforeValidator(part)] | None = None
    early_stopping: PositiveInt = 256
    tuner: Literal["xgb", "ga", "random", "grid"] = "xgb"
    seed: int = 0

    @model_validator(mode="after")
    def _one_budget(self) -> Self:
        if self.trials is not None and self.minutes is not None:
            raise ValueError("give the budget in trials or in minutes, not both")
        return self

    @property
    def measures(self) -> bool:
        """Whether there is a budget to measure anything with."""
        return self.trials != 0 and (self.trials or self.minutes or self.until) is not None


class TaskMetric(_Strict):
    """Held-out data and a metric on it.

    `dataset` is a function returning (inputs by name, labels), arrays whose first axis is the sample; `metric` is
    `accuracy` (top-1) or a function `metric(outputs by name, labels) -> float`, higher being better; `drop` is how
    much lower than the original the bundle may score.
    """

    dataset: str
    arguments: dict[str, Any] = {}
    metric: str = "accuracy"
    drop: Annotated[float, Field(ge=0)] = 0.0
    batch: PositiveInt = 64

    _dataset = field_validator("dataset")(_object_path)

    @field_validator("metric")
    @classmethod
    def _metric(cls, value: str) -> str:
        return value if value == "accuracy" else _object_path(value)


class Validate(_Strict):
    """When the bundle counts as equal to the original.

    `max_relative_error` bounds the largest error of an output relative to its largest magnitude, and stands in the
    place of `rtol` and `atol`, which look at every element by itself.
    """

    samples: PositiveInt = 4
    seed: int = 0
    rtol: Annotated[float, Field(ge=0)] = 1e-3
    atol: Annotated[float, Field(ge=0)] = 1e-4
    max_relative_error: Annotated[float, Field(ge=0)] | None = None
    top1_agreement: Fraction | None = 1.0
    task: TaskMetric | None = None


class Benchmark(_Strict):
    """How the bundle is measured, and against whom."""

    repeats: PositiveInt = 50
    rounds: PositiveInt = 3
    warmup: Annotated[int, Field(ge=0)] = 10
    threads: PositiveInt | None = None
    peers: tuple[Literal["onnxruntime", "pytorch"], ...] = ("onnxruntime", "pytorch")


class Gates(_Strict):
    """Bounds a release must keep to be published; unset bounds are not checked."""

    max_latency_ms: Annotated[float, Field(gt=0)] | None = None
    max_ratio_onnxruntime: Annotated[float, Field(gt=0)] | None = None
    max_ratio_pytorch: Annotated[float, Field(gt=0)] | None = None
    max_bundle_mb: Annotated[float, Field(gt=0)] | None = None
    unverified_targets: Literal["refuse", "allow"] = "refuse"


class ChannelGates(_Strict):
    """Bounds a release must keep to be promoted to a channel; unset bounds are not checked.

    `max_ratio_current` is its median latency over that of the release which the channel holds, measured side by side
    on the machine that promotes; `max_metric_drop` is how much lower than that release's the task metric may be;
    `max_latency_ms` and `min_metric` bound what was measured when it was released.
    """

    max_ratio_current: Annotated[float, Field(gt=0)] | None = None
    max_latency_ms: Annotated[float, Field(gt=0)] | None = None
    max_metric_drop: Annotated[float, Field(ge=0)] | None = None
    min_metric: float | None = None


class Channel(_Strict):
    """What it takes to reach a channel; `after` names another channel that must have held the release before."""

    automatic: bool = False
    approval: Literal["none", "required"] = "none"
    signature: Literal["optional", "required"] = "optional"
    after: str | None = None
    gates: ChannelGates = ChannelGates()


class Retrain(_Strict):
    """When a retrained model is good enough to be released.

    The champion is what `channel` holds; the challenger's task metric on the same held-out data must be at least the
    champion's plus `min_gain`, which may be negative. It is registered in MLflow as the model `source`, by default
    NAME-source.
    """

    channel: str = "production"
    min_gain: float = 0.0
    source: str | None = None


class RegistrySection(_Strict):
    """Names in MLflow."""

    experiment: str | None = None
    model: str | None = None
    tags: dict[str, str] = {}


class Store(_Strict):
    """Where releases are kept; what this machine's settings say comes first, credentials come only from there."""

    endpoint: str | None = None
    bucket: str | None = None
    prefix: str | None = None


class Spec(_Strict):
    """A whole release file."""

    name: str
    model: Model
    train: Train | None = None
    inputs: tuple[Input, ...] = ()
    dimensions: dict[str, Dimension] = {}
    outputs: tuple[str, ...] = ()
    export: Export = Export()
    targets: tuple[str | dict[str, Any], ...] = ("native",)
    build: Build = Build()
    tune: Tune = Tune()
    validation: Validate = Field(default=Validate(), alias="validate")
    benchmark: Benchmark = Benchmark()
    gates: Gates = Gates()
    channels: dict[str, Channel] = {}
    retrain: Retrain | None = None
    registry: RegistrySection = RegistrySection()
    store: Store = Store()

    _folder: Path = Path()

    @field_validator("name")
    @classmethod
    def _plain_name(cls, value: str) -> str:
        if not _NAME.fullmatch(value):
            raise ValueError(f"{value!r} must consist of letters, digits, dots, dashes and underscores")
        return value

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        if not self.inputs and self.model.onnx is None and self.model.mlflow is None:
            raise ValueError("inputs are needed: name, shape and dtype of each")
        for kind, names in (("input", [item.name for item in self.inputs]), ("output", list(self.outputs))):
            for name in {name for name in names if names.count(name) > 1}:
                raise ValueError(f"{kind} {name!r} is given twice")
        used = {dim for item in self.inputs for dim in item.shape if isinstance(dim, str)}
        for name in self.dimensions:
            if self.inputs and name not in used:
                raise ValueError(f"dimension {name!r} stands in no input's shape{_hint(name, used)}")
        if not self.targets:
            raise ValueError("targets must name at least one")
        for peer in ("onnxruntime", "pytorch"):
            if getattr(self.gates, f"max_ratio_{peer}") is None:
                continue
            if peer not in self.benchmark.peers:
                raise ValueError(f"gates.max_ratio_{peer} needs {peer} among benchmark.peers")
            if peer == "pytorch" and self.model.onnx is not None:
                raise ValueError(
                    "gates.max_ratio_pytorch cannot be checked for an ONNX file; use max_ratio_onnxruntime"
                )
        for name, channel in self.channels.items():
            if not _NAME.fullmatch(name):
                raise ValueError(f"channel {name!r} must consist of letters, digits, dots, dashes and underscores")
            if name == "latest" or re.fullmatch(r"v[0-9]+", name):
                raise ValueError(f"channel {name!r} has a name that MLflow keeps for itself; take another")
            if channel.after is not None and (channel.after == name or channel.after not in self.channels):
                raise ValueError(f"channels.{name}.after: {channel.after!r} is no other channel of this file")
        for name in self.channels:
            if self._follows(name, name):
                raise ValueError(f"channels.{name}.after: a release would have to reach {name!r} before itself")
        if self.retrain is not None and (self.train is None or self.validation.task is None):
            raise ValueError("retrain needs train, which makes the weights, and validate.task, which judges them")
        if self.retrain is not None and self.channels and self.retrain.channel not in self.channels:
            raise ValueError(f"retrain.channel: {self.retrain.channel!r} is not among channels")
        if self.train is not None and (self.model.factory is None or self.model.weights is not None):
            raise ValueError("train makes the weights of a factory's model: give factory, and no weights file")
        return self

    @property
    def bounds(self) -> Validate:
        """The bounds of validation; where the file says none, a reduced precision has wider ones."""
        error = _REDUCED_ERROR.get(self.build.precision)
        if error is None or self.validation.model_fields_set & {"rtol", "atol", "max_relative_error"}:
            return self.validation
        return self.validation.model_copy(update={"max_relative_error": error})

    @property
    def folder(self) -> Path:
        """The folder of the release file: relative paths and modules are looked up there."""
        return self._folder

    def path(self, path: Path) -> Path:
        """A path of the release file, made absolute."""
        return path if path.is_absolute() else self._folder / path

    def _follows(self, name: str, other: str) -> bool:
        """Whether a release reaches the channel `name` only after `other`."""
        before, seen = self.channels[name].after, {name}
        while before is not None and before != other and before not in seen:
            seen.add(before)
            before = self.channels[before].after
        return before == other

    def automatic_channels(self) -> tuple[str, ...]:
        """The channels that every release is promoted to, in the file's order, each after those it comes after."""
        found: list[str] = []
        wanted = [name for name, channel in self.channels.items() if channel.automatic]
        while wanted:
            name = next(name for name in wanted if not any(self._follows(name, other) for other in wanted))
            wanted.remove(name)
            found.append(name)
        return tuple(found)

    def dimension(self, name: str) -> Dimension:
        """The range of a symbolic dimension; one that the file does not describe may be anything from 1."""
        return self.dimensions.get(name, Dimension())

    @property
    def retrained(self) -> tuple[str, str] | None:
        """The registered model that retraining makes versions of, and the alias that asks to release one of them."""
        return None if self.retrain is None else (self.retrain.source or f"{self.name}-source", self.retrain.channel)

    def resolved_targets(self) -> tuple[Target, ...]:
        """The targets to build for, each once."""
        found = {target.name: target for target in (resolve(item) for item in self.targets)}
        return tuple(found.values())


def load(path: Path) -> Spec:
    """Read and validate a release file.

    Raises SpecError with one sentence that names the file, the key and, for an unknown key, the likely one.
    """
    try:
        text = path.read_text(encoding="utf-8")
    except OSError as error:
        raise SpecError(
            f"release file {str(path)!r} cannot be read ({error.strerror}); `tvmflow init` writes one"
        ) from error
    except UnicodeDecodeError as error:
        raise SpecError(f"release file {str(path)!r} is not UTF-8 text; `tvmflow init` writes a good one") from error
    try:
        document = yaml.load(text, _Loader)  # noqa: S506 - a safe loader
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        where = getattr(error, "problem_mark", None)
        line = f" at line {where.line + 1}" if where is not None else ""
        raise SpecError(f"release file {str(path)!r} is not valid YAML{line}: {_yaml_problem(error)}") from error
    return parse(document, path.resolve().parent, str(path))


def parse(document: object, folder: Path, source: str = "release file") -> Spec:
    """Validate a release file's document; relative paths are looked up in `folder`."""
    if not isinstance(document, Mapping):
        raise SpecError(f"{source} must be a mapping with name, model and inputs; `tvmflow init` writes one")
    try:
        spec = Spec.model_validate(dict(document))
    except ValidationError as error:
        raise SpecError(f"{source}: {_explain(error)}") from error
    spec._folder = folder
    try:
        targets = spec.resolved_targets()
    except TargetError as error:
        raise SpecError(f"{source}: targets: {error}") from error
    for target in targets:
        reason = without_unit(target, spec.build.precision)
        if reason is not None:
            raise SpecError(f"{source}: build.precision: {reason}")
    for key, file in (
        ("model.onnx", spec.model.onnx),
        ("model.pt2", spec.model.pt2),
        ("model.weights", spec.model.weights),
        *((f"inputs.{item.name}.samples.file", item.samples.file) for item in spec.inputs),
        *(("train.reads", file) for file in (spec.train.reads if spec.train else ())),
    ):
        if file is not None and not spec.path(file).is_file():
            raise SpecError(f"{source}: {key}: there is no file {str(spec.path(file))!r}")
    return spec


class _Loader(yaml.SafeLoader):
    """YAML's safe loader that refuses a key given twice, where PyYAML silently takes the last."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Hashable, Any]:
        seen = set()
        for key, _ in node.value:
            if key.tag != "tag:yaml.org,2002:merge" and key.value in seen:
                raise yaml.constructor.ConstructorError(None, None, f"{key.value!r} is given twice", key.start_mark)
            seen.add(key.value)
        return super().construct_mapping(node, deep)


def _yaml_problem(error: Exception) -> str:
    return " ".join(str(getattr(error, "problem", None) or error).split())


def _explain(error: ValidationError) -> str:
    """The first problem of a validation, in one sentence."""
    problems = sorted(error.errors(), key=lambda item: item["type"] != "extra_forbidden")
    first = problems[0]
    where = ".".join(str(part) for part in first["loc"])
    more = f" (and {len(problems) - 1} more)" if len(problems) > 1 else ""
    if first["type"] == "extra_forbidden":
        key = str(first["loc"][-1])
        known = _known_keys(first["loc"][:-1])
        return f"unknown key {where!r}{_hint(key, known) or '; known here are ' + ', '.join(sorted(known))}{more}"
    # Pydantic's words are Python's; the file's are YAML's.
    message = first["msg"].removeprefix("Value error, ").replace("tuple", "list").replace("dictionary", "mapping")
    if first["type"] == "missing":
        message = "is required"
    return f"{where}: {message}{more}" if where else f"{message}{more}"


def _known_keys(location: tuple[int | str, ...]) -> set[str]:
    """The keys that the release file knows at a place."""
    model: type[BaseModel] = Spec
    named = False  # whether the next part is a name that the user gave: a dimension's, a channel's
    for part in location:
        if isinstance(part, int) or named:
            named = False
            continue
        fields = {(info.alias or name): info for name, info in model.model_fields.items()}
        if part not in fields:
            continue
        annotation = fields[part].annotation
        candidates = [item for item in _flatten(annotation) if issubclass(item, BaseModel)]
        if candidates:
            model = candidates[0]
            named = get_origin(annotation) is dict
    return {(info.alias or name) for name, info in model.model_fields.items()}


def _flatten(annotation: object) -> list[type]:
    """All classes that stand anywhere in a type annotation."""
    if isinstance(annotation, type) and not getattr(annotation, "__args__", ()):
        return [annotation]
    return [item for part in getattr(annotation, "__args__", ()) for item in _flatten(part)]


def _hint(key: str, known: set[str]) -> str:
    close = get_close_matches(key, known, n=1, cutoff=0.5)
    return f"; did you mean {close[0]!r}?" if close else ""


def template(name: str) -> str:
    """A new release file, commented. Raises SpecError for a name that no release may have."""
    if not _NAME.fullmatch(name):
        raise SpecError(f"name {name!r} must consist of letters, digits, dots, dashes and underscores; give such a one")
    plain = yaml.safe_load(name) == name  # and not a number, a date or a truth value
    return _TEMPLATE.format(name=name if plain else f'"{name}"', presets=" | ".join(presets()))


_TEMPLATE = """\
# A release file: what `tvmflow release` ships. Every key is shown; what is commented out shows its default.

name: {name}

model:                          # exactly one of factory, pt2, onnx, mlflow
  factory: model:create         # package.module:function returning a torch.nn.Module, looked up beside this file
  # arguments: {{width: 32}}      # keyword arguments of the factory
  # weights: weights.pt         # a state dict loaded into the module
  # pt2: model.pt2              # a torch.export ExportedProgram
  # onnx: model.onnx            # an ONNX file
  # mlflow: models:/NAME@ALIAS  # a pytorch or onnx model of the MLflow registry

# train:                        # makes the weights of the factory's model
#   function: train:train       # function(output: Path, **arguments) writes a state dict
#   arguments: {{epochs: 5}}
#   reads: [data.csv]           # files whose change trains anew

inputs:
  - name: input
    shape: [batch, 3, 224, 224] # a name is a symbolic dimension
    dtype: float32
    samples: {{kind: normal}}     # ones | uniform (low, high) | normal (mean, std) | integers (low, high)
                                # | npz (file, key) | function (package.module:function(shape, seed) -> array)

dimensions:
  batch: {{min: 1, max: 64, tune: 1, measure: [1]}}

# outputs: [logits]             # names, in the model's order

# export:
#   opset: 18
#   optimize: true
#   options: {{}}                 # further arguments of torch.onnx.export
#   rtol: 1.0e-3                # ONNX Runtime against PyTorch
#   atol: 1.0e-4

targets: [native]               # {presets}
                                # or a full TVM target: {{kind: llvm, mtriple: x86_64-linux-gnu, mcpu: znver4}}

# build:
#   opt_level: 3
#   required_passes: []
#   disabled_passes: []
#   config: {{}}                  # PassContext options
#   exec_mode: bytecode         # bytecode | compiled
#   weights: inside             # inside the library | apart
#   precision: fp32             # of convolutions and products: fp32 | bf16 | fp16 (ARM) | int8 (of a quantised model)
#   fast_algorithms: allow      # forbid: without Winograd's and Strassen's, which multiply less and round more

tune:
  trials: 0                     # total over all workloads; or minutes: 10; or until: 2%, what another minute must save
  # tuner: xgb                  # xgb | ga | random | grid
  # early_stopping: 256         # leave a workload alone after so many trials that were not faster
  # seed: 0

validate:
  samples: 4
  rtol: 1.0e-3
  atol: 1.0e-4
  # max_relative_error: null    # in the place of rtol and atol, of an output's largest value; reduced precision: 0.05
  top1_agreement: 1.0           # null: the outputs are not class scores
  # seed: 0
  # task:                       # a metric on held-out data
  #   dataset: data:held_out    # function returning (inputs by name, labels)
  #   metric: accuracy          # or package.module:function(outputs by name, labels), higher is better
  #   drop: 0.0                 # how much lower than the original it may be
  #   arguments: {{}}
  #   batch: 64

# benchmark:
#   repeats: 50                 # per round
#   rounds: 3
#   warmup: 10
#   threads: 2                  # default: the target's
#   peers: [onnxruntime, pytorch]

# gates:                        # a release out of bounds is not published
#   max_latency_ms: 20
#   max_ratio_onnxruntime: 1.0
#   max_ratio_pytorch: 0.5
#   max_bundle_mb: 200
#   unverified_targets: refuse  # targets this machine cannot run: refuse | allow

# channels:                     # pointers that devices follow, and what it takes to move each; none: any, freely
#   staging: {{automatic: true}}  # every release is promoted to it
#   production:
#     automatic: false
#     approval: none            # required: a person says yes
#     signature: optional       # required: every bundle is signed with a key that is trusted where it is promoted
#     after: staging            # the channel that must have held the release before
#     gates:                    # a release out of bounds is not promoted
#       max_ratio_current: 1.1  # latency over that of the release which the channel holds, measured side by side
#       max_latency_ms: 20
#       max_metric_drop: 0.01   # how much lower than that release's the task metric may be
#       min_metric: 0.9

# retrain:                      # when a retrained model is released: needs train and validate.task
#   channel: production         # what it holds is the champion
#   min_gain: 0.0               # how much better on the held-out data the new model must be; may be negative
#   source: {name}-source       # the model of the MLflow registry that it becomes a version of

# registry: {{experiment: tvmflow, model: {name}, tags: {{}}}}
# store: {{endpoint: null, bucket: tvmflow, prefix: ""}}   # the machine's settings (TVMFLOW_S3_...) come first
"""
