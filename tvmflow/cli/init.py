"""`tvmflow init`: write a new, commented release file."""

import re
from pathlib import Path

import click

from tvmflow.cli.options import naming_output
from tvmflow.errors import SpecError


@click.command("init")
@click.argument("file", type=click.Path(path_type=Path), default=Path("release.yaml"))
@click.option("--name", help="The release's name; by default the folder's name.")
@click.option("--force", is_flag=True, help="Overwrite the file.")
def init_command(file: Path, name: str | None, force: bool) -> None:
    """Write a release file with every key explained to FILE, by default release.yaml."""
    from tvmflow.spec import template

    folder = re.sub(r"[^A-Za-z0-9._-]", "-", file.absolute().parent.name).lstrip("-._")
    text = template(name or folder or "model")
    if file.exists() and not force:
        raise SpecError(f"{str(file)!r} exists; name another file, or overwrite it with --force")
    with naming_output(file), file.open("w" if force else "x", encoding="utf-8") as stream:
        stream.write(text)
    click.echo(f"{file} written; say your model and inputs in it, then run `tvmflow release {file}`")
