"""The release store on S3-compatible storage: content-addressed blobs, and releases that are complete or absent."""

from tvmflow.store.config import S3Uri, StoreConfig, parse_uri
from tvmflow.store.releases import ReleaseStore

__all__ = ["ReleaseStore", "S3Uri", "StoreConfig", "parse_uri"]
