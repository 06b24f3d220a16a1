"""`tvmflow gc`: remove what this machine's runs have not used for a while, or the releases that nobody needs."""

import json
from collections.abc import Sequence
from typing import TYPE_CHECKING

import click

from tvmflow.cli.options import NumberRange, json_option
from tvmflow.errors import SettingsError

if TYPE_CHECKING:
    from tvmflow.garbage import Piece
    from tvmflow.settings import Settings
    from tvmflow.store.garbage import StoredPiece

_STATE_DAYS = 30.0


@click.command("gc")
@click.option("--releases", is_flag=True, help="Remove from the release store instead of the state folder.")
@click.option(
    "--days",
    type=NumberRange(min=0, max=36500),
    help="What was used within so many days stays; by default 30, of releases the setting retention_days.",
)
@click.option(
    "--keep",
    type=click.IntRange(min=1),
    help="With --releases: as many of the newest releases of each model stay; by default retention_releases.",
)
@click.option("--dry-run", is_flag=True, help="Remove nothing, and show what would be removed.")
@json_option
def gc_command(releases: bool, days: float | None, keep: int | None, dry_run: bool, as_json: bool) -> None:
    """Remove from this machine's state folder what can be made or fetched again, or releases that nobody needs.

    From the state folder go results of steps that no run has used for --days, artifacts that no other result names,
    downloaded models, fetched bundles, compiled code and logs; so do files of runs that were killed. Releases, the
    registry and tuning records stay. It refuses to work while a run uses the folder.

    With --releases, releases go that are older than --days, not among the --keep newest of their model, that no alias
    in MLflow names, and that no channel holds, held last within its policy's keep, or is asked to hold; then files that
    no release refers to, and unused results in the shared workspace unless a run is using it. Nothing younger than a
    day goes. It waits for releases that are being published; while it deletes, new publications wait a few seconds. The
    versions in MLflow stay.

    It may be interrupted at any time.
    """
    from tvmflow.settings import Settings

    settings = Settings.load()
    if releases:
        pieces: Sequence[Piece | StoredPiece] = _collect_releases(settings, days, keep, dry_run, as_json)
        place = "the release store"
    else:
        if keep is not None:
            raise SettingsError("--keep counts releases; give --releases with it")
        pieces = _collect_state(settings, _STATE_DAYS if days is None else days, dry_run)
        place = str(settings.state)
    kinds = dict.fromkeys(piece.kind for piece in pieces)
    sizes = {kind: [piece.size for piece in pieces if piece.kind == kind] for kind in kinds}
    total = sum(map(sum, sizes.values()))
    if as_json:
        documents = {kind: {"count": len(values), "bytes": sum(values)} for kind, values in sizes.items()}
        click.echo(json.dumps({"removed": not dry_run, "bytes": total, "kinds": documents}))
        return
    for kind, values in sizes.items():
        click.echo(f"{kind:20} {len(values):6} {sum(values) / 1e6:10.1f} MB")
    click.echo(f"{'would free' if dry_run else 'freed'} {total / 1e6:.1f} MB in {place}")


def _collect_state(settings: "Settings", days: float, dry_run: bool) -> "list[Piece]":
    from tvmflow.fetch import cache_folder
    from tvmflow.garbage import alone_in, find_garbage, remove

    with alone_in(settings.state):
        pieces = find_garbage(settings.state, cache_folder(settings), days)
        if not dry_run:
            remove(pieces)
    return pieces


def _collect_releases(
    settings: "Settings", days: float | None, keep: int | None, dry_run: bool, as_json: bool
) -> "list[StoredPiece]":
    from rich.console import Console

    from tvmflow.cli.display import RichReporter
    from tvmflow.retention import collect
    from tvmflow.store.garbage import Retention

    rule = Retention(
        settings.retention_days if days is None else days, settings.retention_releases if keep is None else keep
    )
    with RichReporter(Console(stderr=True, quiet=as_json)).live():
        return collect(settings, rule, dry_run=dry_run)
