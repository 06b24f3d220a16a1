"""`tvmflow gc`: remove what this machine's runs have not used for a while."""

import json

import click


@click.command("gc")
@click.option(
    "--days",
    type=click.FloatRange(min=0),
    default=30,
    show_default=True,
    help="What was used within so many days stays.",
)
@click.option("--dry-run", is_flag=True, help="Remove nothing, and show what would be removed.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON document.")
def gc_command(days: float, dry_run: bool, as_json: bool) -> None:
    """Remove from this machine's state folder what can be made or fetched again.

    Results of steps that no run has used for --days, artifacts that no other result names, downloaded models, fetched
    bundles, compiled code and logs go; so do files of runs that were killed. Releases, the registry and tuning records
    stay. It refuses to work while a run uses the folder, and may be interrupted at any time.
    """
    from tvmflow import settings as machine
    from tvmflow.fetch import cache_folder
    from tvmflow.garbage import alone_in, find_garbage, remove

    settings = machine.load()
    with alone_in(settings.state):
        pieces = find_garbage(settings.state, cache_folder(settings), days)
        if not dry_run:
            remove(pieces)
    kinds = dict.fromkeys(piece.kind for piece in pieces)
    sizes = {kind: [piece.size for piece in pieces if piece.kind == kind] for kind in kinds}
    total = sum(map(sum, sizes.values()))
    if as_json:
        documents = {kind: {"count": len(values), "bytes": sum(values)} for kind, values in sizes.items()}
        click.echo(json.dumps({"removed": not dry_run, "bytes": total, "kinds": documents}))
        return
    for kind, values in sizes.items():
        click.echo(f"{kind:20} {len(values):6} {sum(values) / 1e6:10.1f} MB")
    click.echo(f"{'would free' if dry_run else 'freed'} {total / 1e6:.1f} MB in {settings.state}")
