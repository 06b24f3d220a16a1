"""The sections on channels: what a release has to show to be promoted, and a retrained model to be released."""

from typing import Literal

from tvmflow.spec.fields import NonNegativeFloat, PositiveFloat, Section


class ChannelGates(Section):
    """Bounds that a release must keep to be promoted to a channel; a bound that is not set is not checked.

    The current release is the one that the channel holds. `max_ratio_current` bounds the median latency over the
    current release's, both measured side by side on the machine that promotes. `max_metric_drop` bounds how far the
    task metric lies below the current release's. `max_latency_ms` and `min_metric` bound what was measured when the
    release was made.
    """

    max_ratio_current: PositiveFloat | None = None
    max_latency_ms: PositiveFloat | None = None
    max_metric_drop: NonNegativeFloat | None = None
    min_metric: float | None = None


class Channel(Section):
    """What a release needs to reach a channel; `after` names another channel that must have held the release before."""

    automatic: bool = False
    approval: Literal["none", "required"] = "none"
    signature: Literal["optional", "required"] = "optional"
    after: str | None = None
    gates: ChannelGates = ChannelGates()


class Retrain(Section):
    """When a retrained model is good enough to be released.

    The champion is the release that `channel` holds. The retrained model's task metric on the same held-out data must
    reach the champion's plus `min_gain`, which may be negative. The retrained model is registered in MLflow as a
    version of the model `source`, by default NAME-source.
    """

    channel: str = "production"
    min_gain: float = 0.0
    source: str | None = None
