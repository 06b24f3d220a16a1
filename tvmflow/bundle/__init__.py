"""The bundle: one compiled model for one target in one deterministic file, verified before anything in it runs."""

from tvmflow.bundle.archive import extract, pack, read_manifest, sha256_file
from tvmflow.bundle.manifest import FORMAT, FileEntry, Manifest, TensorSpec, Variant, Versions, installed_versions

__all__ = [
    "FORMAT",
    "FileEntry",
    "Manifest",
    "TensorSpec",
    "Variant",
    "Versions",
    "extract",
    "installed_versions",
    "pack",
    "read_manifest",
    "sha256_file",
]
