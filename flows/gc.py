"""The gc flow: it removes the releases that nobody needs any more from the release stores that this machine knows."""

from typing import Any

from prefect import flow, get_run_logger

from tvmflow.retention import collect
from tvmflow.settings import Settings
from tvmflow.store.garbage import Retention


@flow(name="gc", flow_run_name="gc", validate_parameters=True)
def gc() -> dict[str, Any]:
    """Remove what the settings retention_days and retention_releases, channels and aliases do not keep.

    Returns the number of objects that went and their bytes. Raises StoreError, RegistryError and SettingsError.
    """
    settings = Settings.load()
    pieces = collect(settings, Retention(settings.retention_days, settings.retention_releases))
    size = sum(piece.size for piece in pieces)
    get_run_logger().info("removed %d objects, %.1f MB", len(pieces), size / 1e6)
    return {"objects": len(pieces), "bytes": size}
