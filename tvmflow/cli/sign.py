"""`tvmflow keygen` and `tvmflow sign`: write key pairs, and sign bundles."""

from pathlib import Path

import click

from tvmflow.cli.options import naming_output


@click.command("keygen")
@click.argument("key", type=click.Path(path_type=Path))
@click.option("--openssf", is_flag=True, help="A pair on the curve P-256, for `tvmflow sign --openssf`.")
def keygen_command(key: Path, openssf: bool) -> None:
    """Write a new Ed25519 key pair: the private key to the file KEY, the public key to KEY.pub."""
    from tvmflow.bundle import keygen, public_key
    from tvmflow.bundle.openssf import keygen as openssf_keygen

    public = openssf_keygen(key) if openssf else keygen(key)
    click.echo(f"{key}: the private key; sign with it and keep it secret")
    if openssf:
        click.echo(f"{public}: the public key; verify with it, anyone may have it")
        return
    click.echo(f"{public}: the public key {public_key(public)}; verify with it, anyone may have it")


@click.command("sign")
@click.argument("bundle")
@click.option("--key", type=click.Path(path_type=Path), envvar="TVMFLOW_SIGNING_KEY", help="The private key.")
@click.option("-o", "--output", type=click.Path(path_type=Path, dir_okay=False), help="Default: BUNDLE itself.")
@click.option(
    "--openssf",
    type=click.Path(path_type=Path, dir_okay=False),
    metavar="SIGNATURE",
    help="Leave BUNDLE as it is, and write a signature in OpenSSF's model-signing format to this file.",
)
def sign_command(bundle: str, key: Path | None, output: Path | None, openssf: Path | None) -> None:
    """Sign BUNDLE: a file, release://NAME/VERSION or release://NAME@CHANNEL; an earlier signature is replaced.

    Of a release, the statement on its document is signed, which names all bundles by their digests; the bundles
    themselves stay as they are. Of a channel, what it holds by now and its policy are signed: look at them first.
    """
    from tvmflow.bundle import public_key, sha256_file, sign
    from tvmflow.bundle.openssf import sign as openssf_sign

    if key is None:
        raise click.UsageError("no key to sign with: give --key or set TVMFLOW_SIGNING_KEY; `tvmflow keygen` makes one")
    if openssf is not None:
        if output is not None or bundle.startswith("release://"):
            raise click.UsageError("--openssf signs a bundle in a file, and leaves it as it is")
        openssf_sign(Path(bundle), key, openssf)
        click.echo(f"{openssf}: signature of {bundle}, sha256 {sha256_file(Path(bundle))}")
        return
    if bundle.startswith("release://"):
        if output is not None:
            raise click.UsageError("--output is for a bundle in a file; the statement on a release is in the store")
        _sign_release(bundle, key)
        click.echo(f"{bundle}: signed with {public_key(key)[:16]}")
        return
    place = output or Path(bundle)
    with naming_output(place):
        sign(Path(bundle), key, place)
    click.echo(f"{place}: signed with {public_key(key)[:16]}, sha256 {sha256_file(place)}")


def _sign_release(uri: str, key: Path) -> None:
    """Sign the statement on a release or a channel. Raises StoreError and SettingsError."""
    from tvmflow.fetch import ReleaseAddress
    from tvmflow.services import open_store_of
    from tvmflow.settings import Settings
    from tvmflow.store import channels

    address = ReleaseAddress.parse(uri)
    settings = Settings.load().model_copy(update={"signing_key": key})
    with open_store_of(settings, address.name) as store:
        if address.version is None:
            channels.sign_channel(store, address.name, str(address.channel))
        else:
            store.sign_release(address.name, address.version, key)
