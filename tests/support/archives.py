"""The files of a bundle, taken out of its archive without the product's checks."""

import tarfile
from pathlib import Path


def unpack(bundle: Path, folder: Path, *names: str) -> None:
    """Write the files of these names, by default all, into a folder, which is created where it is missing.

    A bundle holds no folders. `extractall` does not serve here: Python 3.11.2 does not know its parameter `filter`, and
    Python 3.12 warns where it is missing.
    """
    folder.mkdir(exist_ok=True)
    with tarfile.open(bundle) as archive:
        for name in names or archive.getnames():
            member = archive.extractfile(name)
            assert member is not None, f"{name} is no regular file"
            (folder / Path(name).name).write_bytes(member.read())
