"""`tvmflow verify`: check a bundle, run its golden sample in another process, and rebuild it from its provenance."""

import json
from collections.abc import Sequence
from pathlib import Path

import click

from tvmflow.cli.options import NumberRange, json_option
from tvmflow.errors import BundleError


@click.command("verify")
@click.argument("bundle", metavar="BUNDLE")
@click.option(
    "--key", "keys", type=click.Path(path_type=Path), multiple=True, help="A public key that must have signed it."
)
@click.option(
    "--timeout", type=NumberRange(min=1), default=300, show_default=True, help="Seconds for the golden sample."
)
@click.option(
    "--rebuild",
    "source",
    type=click.Path(path_type=Path, dir_okay=False),
    help="Build it again from this release file or ONNX file, and compare the two.",
)
@json_option
def verify_command(bundle: str, keys: tuple[Path, ...], timeout: float, source: Path | None, as_json: bool) -> None:
    """Check BUNDLE's digests and signature and that this machine can run it, then run its golden sample.

    The bundle's code runs in another process. Of release://NAME/VERSION or release://NAME@CHANNEL, nothing runs: all
    digests are checked, and it says who signed the channel, the release and each of its bundles. Exit code 3: its
    outputs are not the original model's, or the source given with --rebuild gives another bundle.
    """
    from tvmflow.bundle import read_manifest, read_signer
    from tvmflow.bundle.signature import trusted_keys
    from tvmflow.hardware.target import host
    from tvmflow.verification import verify

    trusted = keys or trusted_keys()
    if bundle.startswith("release://"):
        if source is not None:
            raise click.UsageError("--rebuild is for a bundle in a file; fetch the release's bundle first")
        _show_signers(bundle, trusted, as_json=as_json)
        return
    path = Path(bundle)
    equal_parts, refusal = None, None
    if source is not None:
        from tasks.rebuild import rebuild

        equal_parts = rebuild(path, source, trusted)
        # A bundle for another machine can be built again here, but cannot run.
        try:
            read_manifest(path).check_host()
        except BundleError as error:
            refusal = str(error)
    worst = None if refusal else verify(path, trusted=trusted, timeout=timeout).max_abs_error
    manifest, signer = read_manifest(path), read_signer(path)
    if as_json:
        document = {
            "bundle": str(bundle),
            "max_abs_error": worst,
            "not_run": refusal,
            "signed_by": signer,
            "trusted": bool(trusted),
            "rebuilt": equal_parts and list(equal_parts),
            "manifest": json.loads(manifest.to_json()),
        }
        click.echo(json.dumps(document))
        return
    message = f"{bundle}: {manifest.name} for {manifest.target}, whole, "
    message += f"not run ({refusal})" if worst is None else f"golden sample within {worst:.1e}"
    if signer is not None:
        message += f", signed with {signer[:16]}" + ("" if trusted else " (not checked: no key is trusted here)")
    if equal_parts is not None:
        message += f", the same when built again: {', '.join(equal_parts)}"
    if worst is not None and manifest.threads > host().cores:
        message += (
            f"; slower here: it is built for {manifest.threads} threads, and this machine has {host().cores} cores"
        )
    click.echo(message)


def _show_signers(uri: str, trusted: Sequence[Path], *, as_json: bool) -> None:
    """Print who signed a release, its bundles and the channel that holds it. Raises StoreError and BundleError."""
    from tvmflow.fetch import ReleaseAddress, cache_folder
    from tvmflow.services import open_store_of
    from tvmflow.settings import Settings
    from tvmflow.store.signers import list_signers

    settings, address = Settings.load(), ReleaseAddress.parse(uri)
    with open_store_of(settings, address.name) as store:
        signers = list(list_signers(store, *address, cache_folder(settings), trusted))
    if as_json:
        statements = [{"what": item.what, "signed_by": item.key} for item in signers]
        click.echo(json.dumps({"release": uri, "trusted": bool(trusted), "statements": statements}))
        return
    for item in signers:
        by = "not signed" if item.key is None else f"signed with {item.key[:16]}"
        click.echo(
            f"{item.what}: {by}{'' if trusted or item.key is None else ' (not checked: no key is trusted here)'}"
        )
