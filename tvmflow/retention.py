"""Retention: which releases stay in the release stores that this machine knows, and the removal of the others."""

import time
from collections.abc import Collection

from tvmflow.progress import reporter
from tvmflow.promotion.people import identify_user
from tvmflow.registry import Registry
from tvmflow.services import list_sections, open_services
from tvmflow.settings import Settings
from tvmflow.store.garbage import Garbage, Retention, StoredPiece


def collect(settings: Settings, rule: Retention, *, dry_run: bool = False) -> list[StoredPiece]:
    """Remove the releases and files that `rule` does not keep from the release stores that this machine knows.

    Returns the removed pieces; with `dry_run` nothing is removed, and they are those that would be. A version with an
    alias in MLflow keeps its release. Raises StoreError, RegistryError and SettingsError.
    """
    pieces: list[StoredPiece] = []
    for sections in list_sections(settings):
        with open_services(settings, sections.store, sections.registry) as services:
            uri = services.store.config.uri

            def list_named(model: str, registry: Registry = services.registry) -> Collection[str]:
                return registry.list_aliases(model).values()

            def report(done: float, total: float, message: str, uri: str = uri) -> None:
                reporter().advance("gc", uri, done, total, message)

            garbage = Garbage(services.store, rule, list_named, report)
            started_at = time.perf_counter()
            reporter().begin("gc", uri)
            pieces += garbage.find() if dry_run else garbage.collect(identify_user())
            reporter().end("gc", uri, "ran", time.perf_counter() - started_at)
    return pieces
