"""The bundle: one compiled model for one target, in one deterministic file that is checked before its code runs."""

from tvmflow.bundle.archive import extract, missing_weights, pack, read_manifest, read_signer, sha256_file, sign
from tvmflow.bundle.manifest import (
    DIRECT_MAIN,
    FORMAT,
    INDEX_ERROR,
    LARGEST_DIRECT_OUTPUT,
    MAIN_CONSTANTS,
    PACK_WEIGHTS,
    PACKED_AT_LOAD,
    WEIGHTS_IN_FILE,
    FileEntry,
    Manifest,
    TensorSpec,
    Variant,
    Versions,
    Weights,
    installed_versions,
)
from tvmflow.bundle.signature import keygen, public_key

__all__ = [
    "DIRECT_MAIN",
    "FORMAT",
    "INDEX_ERROR",
    "LARGEST_DIRECT_OUTPUT",
    "MAIN_CONSTANTS",
    "PACKED_AT_LOAD",
    "PACK_WEIGHTS",
    "WEIGHTS_IN_FILE",
    "FileEntry",
    "Manifest",
    "TensorSpec",
    "Variant",
    "Versions",
    "Weights",
    "extract",
    "installed_versions",
    "keygen",
    "missing_weights",
    "pack",
    "public_key",
    "read_manifest",
    "read_signer",
    "sha256_file",
    "sign",
]
