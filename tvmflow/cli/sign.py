"""`tvmflow keygen` and `tvmflow sign`: write key pairs, and sign bundles."""

from pathlib import Path

import click


@click.command("keygen")
@click.argument("key", type=click.Path(path_type=Path))
def keygen_command(key: Path) -> None:
    """Write a new Ed25519 key pair: the private key to the file KEY, the public key to KEY.pub."""
    from tvmflow.bundle import keygen, public_key

    public = keygen(key)
    click.echo(f"{key}: the private key; sign with it and keep it secret")
    click.echo(f"{public}: the public key {public_key(public)}; verify with it, anyone may have it")


@click.command("sign")
@click.argument("bundle", type=click.Path(path_type=Path))
@click.option("--key", type=click.Path(path_type=Path), envvar="TVMFLOW_SIGNING_KEY", help="The private key.")
@click.option("-o", "--output", type=click.Path(path_type=Path, dir_okay=False), help="Default: BUNDLE itself.")
def sign_command(bundle: Path, key: Path | None, output: Path | None) -> None:
    """Sign BUNDLE; an earlier signature is replaced."""
    from tvmflow.bundle import public_key, sha256_file, sign

    if key is None:
        raise click.UsageError("no key to sign with: give --key or set TVMFLOW_SIGNING_KEY; `tvmflow keygen` makes one")
    place = output or bundle
    sign(bundle, key, place)
    click.echo(f"{place}: signed with {public_key(key)[:16]}, sha256 {sha256_file(place)}")
