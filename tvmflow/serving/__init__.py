"""The inference server: a compiled model over the Open Inference Protocol, in batches, with metrics and live swaps."""

from tvmflow.serving.limits import Limits
from tvmflow.serving.server import Options, serve
from tvmflow.serving.source import Source, bundle_source, channel_source, release_source

__all__ = ["Limits", "Options", "Source", "bundle_source", "channel_source", "release_source", "serve"]
