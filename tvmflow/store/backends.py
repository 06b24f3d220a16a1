"""The object store that a configuration names."""

from tvmflow.store.config import StoreConfig
from tvmflow.store.folder import FolderObjects
from tvmflow.store.objects import ObjectStore


def open_objects(config: StoreConfig) -> ObjectStore:
    """Return the object store that `config` names: its folder on this machine if it has one, else its S3 server.

    Raises StoreError when the connection to a server cannot be prepared.
    """
    if config.folder is not None:
        return FolderObjects(config, config.folder)
    from tvmflow.store.s3 import S3Objects

    return S3Objects(config)
