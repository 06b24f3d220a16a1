"""`tvmflow verify`: check a bundle, run its golden sample in another process, and rebuild it from its provenance."""

import json
from pathlib import Path

import click

from tvmflow.errors import BundleError


@click.command("verify")
@click.argument("bundle", type=click.Path(path_type=Path))
@click.option("--key", "keys", type=click.Path(path_type=Path), multiple=True, help="A public key that has signed it.")
@click.option(
    "--timeout", type=click.FloatRange(min=1), default=300, show_default=True, help="Seconds for the golden sample."
)
@click.option(
    "--rebuild",
    "source",
    type=click.Path(path_type=Path, dir_okay=False),
    help="Build it again from this release file or ONNX file, and compare.",
)
@click.option("--json", "as_json", is_flag=True, help="Print one JSON document.")
def verify_command(bundle: Path, keys: tuple[Path, ...], timeout: float, source: Path | None, as_json: bool) -> None:
    """Check BUNDLE's digests and signature and that this machine can run it, then run its golden sample.

    Whatever is in the bundle runs in another process. Exit code 3: it runs, and its outputs are not the original's, or
    what it is said to be made from gives another bundle.
    """
    from tvmflow.bundle import read_manifest, read_signer
    from tvmflow.bundle.signature import trusted_keys
    from tvmflow.target import host
    from tvmflow.verification import verify

    trusted = keys or trusted_keys()
    rebuilt, unable = None, None
    if source is not None:
        from tasks.rebuild import rebuild

        rebuilt = rebuild(bundle, source, trusted)
        # What is built for another machine can be built again here, but not run.
        try:
            read_manifest(bundle).check_host()
        except BundleError as refusal:
            unable = str(refusal)
    worst = None if unable else verify(bundle, trusted=trusted, timeout=timeout).max_abs_error
    manifest, signer = read_manifest(bundle), read_signer(bundle)
    if as_json:
        document = {
            "bundle": str(bundle),
            "max_abs_error": worst,
            "not_run": unable,
            "signed_by": signer,
            "trusted": bool(trusted),
            "rebuilt": rebuilt and list(rebuilt),
            "manifest": json.loads(manifest.to_json()),
        }
        click.echo(json.dumps(document))
        return
    said = f"{bundle}: {manifest.name} for {manifest.target}, whole, "
    said += f"not run ({unable})" if worst is None else f"golden sample within {worst:.1e}"
    if signer is not None:
        said += f", signed with {signer[:16]}" + ("" if trusted else " (not checked: no key is trusted here)")
    if rebuilt is not None:
        said += f", the same when built again: {', '.join(rebuilt)}"
    if worst is not None and manifest.threads > host().cores:
        said += f"; slower here, as it is built for {manifest.threads} threads and {host().cores} cores are to be had"
    click.echo(said)
