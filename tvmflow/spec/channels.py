"""The sections on channels: the checks before a promotion, and before a retrained model is released."""

from typing import Literal

from tvmflow.spec.fields import NonNegativeFloat, NonNegativeInt, PositiveFloat, PositiveInt, Section, Share


class ChannelGates(Section):
    """Bounds that a release must keep to be promoted to a channel; a bound that is not set is not checked.

    The current release is the one that the channel holds. `max_ratio_current` bounds the median latency over the
    current release's, both measured in turn on the machine that promotes: the whole interval of the ratio must be
    at most that. `max_metric_drop` bounds how far the task metric lies below the current release's. The others bound
    figures of the release's targets that were measured when it was made. On a channel without a release the two gates
    that compare pass. A gate that cannot be checked refuses: nothing was measured, there is no task metric, no bundle
    runs here, or the inputs have changed.
    """

    max_ratio_current: PositiveFloat | None = None
    """Median latency over the current release's, with the whole interval: one plus the slowdown that is accepted."""
    max_ratio_onnxruntime: PositiveFloat | None = None
    """Median latency over ONNX Runtime's in the release's own measurement, with the whole interval, of each target that
    was measured. The release measures until it is decided where its file proposes the gate."""
    max_ratio_pytorch: PositiveFloat | None = None
    """The same over PyTorch's."""
    max_latency_ms: PositiveFloat | None = None
    """Median latency in milliseconds of each target that was measured."""
    min_throughput: PositiveFloat | None = None
    """Runs per second at the median latency, of each target that was measured."""
    max_load_ms: PositiveFloat | None = None
    """Milliseconds to load the bundle of each target that was measured."""
    max_memory_mb: PositiveFloat | None = None
    """Most megabytes of memory that the process took which measured the bundle."""
    max_bundle_mb: PositiveFloat | None = None
    """Size of the bundle of each target in megabytes, with weights that are kept apart."""
    max_relative_error: NonNegativeFloat | None = None
    """Largest error of an output over its largest magnitude, beside the original's, of each target that was run."""
    min_top1_agreement: Share | None = None
    """Least share of samples whose largest output has the same index as the original's, of each target that was run."""
    max_metric_drop: NonNegativeFloat | None = None
    """How far the task metric may lie below the current release's; the lowest of a release's targets counts. For an
    accuracy on the same data the verdict has the interval of the drop as well, which does not decide."""
    min_metric: float | None = None
    """The lowest task metric."""
    max_vulnerabilities: NonNegativeInt | None = None
    """Most known vulnerabilities of the packages that the bundles need at run time, by the advisories of the setting
    `advisories` of the machine that promotes."""


class Policy(Section):
    """The requirements of a channel on a release; `after` names another channel that must have held it before."""

    approval: Literal["none", "required", "another"] = "none"
    """Whether a person has to agree first; `another` must be another person than the one who asked."""
    signature: Literal["optional", "required"] = "optional"
    """Whether the release and every bundle must be signed with a key of `TVMFLOW_TRUSTED_KEYS`."""
    rebuild: Literal["optional", "required"] = "optional"
    """Whether every bundle, built again where it is promoted, must be the same: from its ONNX file and its tuning
    records in MLflow, by the same versions of tvmflow and TVM."""
    after: str | None = None
    """Another channel that must have held the release before."""
    gates: ChannelGates = ChannelGates()
    """Bounds on the release."""
    by_hand: Literal["wish", "refuse"] = "wish"
    """The meaning of the channel's own alias that somebody sets: a wish or nothing. Either way the alias goes back."""
    keep: PositiveInt = 5
    """How many of the releases that the channel held last `tvmflow gc --releases` keeps, for rollbacks."""


class ChannelSection(Policy):
    """A policy that a release file proposes for a channel, and whether its releases are promoted there by themselves.

    The channel's own policy counts. A channel that has none takes the first that is proposed; `tvmflow channel` changes
    it.
    """

    automatic: bool = False
    """Whether every release is promoted to this channel, in the file's order."""

    @property
    def policy(self) -> Policy:
        """The policy that is proposed."""
        return Policy(**{name: getattr(self, name) for name in Policy.model_fields})


class Retrain(Section):
    """The rule by which a retrained model is released.

    The champion is the release that `channel` holds. The retrained model's task metric on the same held-out data must
    reach the champion's plus `min_gain`, which may be negative. The retrained model is registered in MLflow as a
    version of the model `source`, by default NAME-source.
    """

    channel: str = "production"
    """The channel that holds the champion."""
    min_gain: float = 0.0
    """How much the retrained model's task metric must exceed the champion's."""
    source: str | None = None
    """The MLflow model that retrained models become versions of; NAME-source unless given."""
