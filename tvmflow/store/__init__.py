"""The release store on S3-compatible storage: content-addressed blobs, and releases that exist whole or not at all."""

from tvmflow.store.config import S3Uri, StoreConfig, parse_uri
from tvmflow.store.releases import ReleaseStore

__all__ = ["ReleaseStore", "S3Uri", "StoreConfig", "parse_uri"]
