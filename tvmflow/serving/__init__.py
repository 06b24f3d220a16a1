"""Serve a compiled model over the Open Inference Protocol: batched, watched, and swapped when its channel moves."""

from tvmflow.serving.server import Options, serve
from tvmflow.serving.source import Source, bundle_source, channel_source, release_source

__all__ = ["Options", "Source", "bundle_source", "channel_source", "release_source", "serve"]
