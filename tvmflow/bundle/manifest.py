"""The manifest `bundle.json`: what a bundle holds, what it was built with and which machine it needs."""

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from importlib.metadata import PackageNotFoundError, version
from typing import Any, Literal, Self

from tvmflow.errors import BundleError
from tvmflow.target import host, missing_features

# Raised whenever a reader of the former number could misread a bundle of the new one.
FORMAT = 1


@dataclass(frozen=True)
class TensorSpec:
    """One input or output: its name, shape in elements (a string is a symbolic dimension) and dtype."""

    name: str
    shape: tuple[int | str, ...]
    dtype: str


@dataclass(frozen=True)
class FileEntry:
    """One file of the bundle: the SHA-256 of its bytes and its size in bytes."""

    sha256: str
    size: int


@dataclass(frozen=True)
class Variant:
    """A function of the library built for fixed sizes of symbolic dimensions; `main` takes any."""

    function: str
    sizes: dict[str, int]


@dataclass(frozen=True)
class Versions:
    """The versions a library was built with; it runs with the same minor version of TVM."""

    tvmflow: str
    tvm: str
    tvm_ffi: str
    llvm: str


@dataclass(frozen=True)
class Manifest:
    """The content of `bundle.json`: nothing in it varies from run to run."""

    name: str
    target: str
    tvm_target: dict[str, Any]
    arch: str
    cpu_features: tuple[str, ...]
    threads: int
    inputs: tuple[TensorSpec, ...]
    outputs: tuple[TensorSpec, ...]
    dimensions: dict[str, tuple[int, int | None]]
    weights: Literal["inside", "apart"]
    versions: Versions
    variants: tuple[Variant, ...] = ()
    provenance: dict[str, str] = field(default_factory=dict)
    files: dict[str, FileEntry] = field(default_factory=dict)
    format: int = FORMAT

    def to_json(self) -> bytes:
        """The manifest as canonical JSON: the same manifest gives the same bytes."""
        return (json.dumps(asdict(self), indent=2, sort_keys=True, ensure_ascii=False) + "\n").encode()

    @classmethod
    def from_json(cls, data: bytes, source: str) -> Self:
        """Read a manifest; `source` names the bundle in errors. Raises BundleError for anything unexpected."""
        try:
            document = _mapping(json.loads(data))
            number = document["format"]
            if number != FORMAT or not isinstance(number, int) or isinstance(number, bool):
                raise BundleError(
                    f"bundle {source!r} has format {number!r}, this tvmflow reads {FORMAT}; upgrade tvmflow"
                )
            return cls(
                name=_text(document["name"]),
                target=_text(document["target"]),
                tvm_target=_mapping(document["tvm_target"]),
                arch=_text(document["arch"]),
                cpu_features=tuple(_text(item) for item in _list(document["cpu_features"])),
                threads=_count(document["threads"]),
                inputs=tuple(_tensor(item) for item in _list(document["inputs"])),
                outputs=tuple(_tensor(item) for item in _list(document["outputs"])),
                dimensions={
                    name: (_count(low), None if high is None else _count(high))
                    for name, (low, high) in _mapping(document["dimensions"]).items()
                },
                variants=tuple(
                    Variant(
                        _text(item["function"]),
                        {name: _count(size) for name, size in _mapping(item["sizes"]).items()},
                    )
                    for item in _list(document["variants"])
                ),
                weights=_weights(document["weights"]),
                versions=Versions(
                    **{key: _text(document["versions"][key]) for key in ("tvmflow", "tvm", "tvm_ffi", "llvm")}
                ),
                provenance={key: _text(value) for key, value in _mapping(document["provenance"]).items()},
                files={
                    name: FileEntry(_digest(entry["sha256"]), _count(entry["size"]))
                    for name, entry in _mapping(document["files"]).items()
                },
            )
        except BundleError:
            raise
        except (ValueError, KeyError, TypeError, RecursionError) as error:
            raise BundleError(
                f"bundle {source!r} has a damaged manifest ({type(error).__name__}: {error}); fetch it again"
            ) from error

    def check_host(self) -> None:
        """Raise BundleError, in one sentence, if this machine or the installed TVM cannot run the bundle."""
        machine = host()
        arch = self.arch
        if arch == "cuda":
            host_target = self.tvm_target.get("host")
            arch = str(host_target.get("mtriple", "")).split("-")[0] if isinstance(host_target, dict) else ""
        if arch and arch != machine.arch:
            raise BundleError(
                f"bundle {self.name!r} is built for {arch}, this machine is {machine.arch}; "
                f"take the bundle of this machine's target"
            )
        missing = missing_features(self.cpu_features)
        if missing:
            raise BundleError(
                f"bundle {self.name!r} for target {self.target!r} needs the CPU features {', '.join(missing)}, "
                f"which this machine lacks; take a bundle for a lower target"
            )
        running = installed_versions()
        if _minor(running.tvm) != _minor(self.versions.tvm):
            raise BundleError(
                f"bundle {self.name!r} is built with apache-tvm {self.versions.tvm}, installed is {running.tvm}; "
                f"install apache-tvm {self.versions.tvm}"
            )


def installed_versions(llvm: str = "") -> Versions:
    """The versions that run here; `llvm` is known only where the compiler is loaded."""

    def installed(name: str) -> str:
        try:
            return version(name)
        except PackageNotFoundError:
            return "none"

    return Versions(installed("tvmflow"), installed("apache-tvm"), installed("apache-tvm-ffi"), llvm)


def _minor(number: str) -> list[str]:
    return number.split(".")[:2]


def _mapping(value: object) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise TypeError(f"{value!r} is not a mapping")
    return value


def _list(value: object) -> list[Any]:
    if not isinstance(value, list):
        raise TypeError(f"{value!r} is not a list")
    return value


def _text(value: object) -> str:
    if not isinstance(value, str):
        raise TypeError(f"{value!r} is not a string")
    return value


def _count(value: object) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or value < 0:
        raise TypeError(f"{value!r} is not a count")
    return value


def _digest(value: object) -> str:
    text = _text(value)
    if len(text) != 64 or set(text) - set("0123456789abcdef"):
        raise ValueError(f"{text!r} is not a SHA-256")
    return text


def _weights(value: object) -> Literal["inside", "apart"]:
    if value == "inside":
        return "inside"
    if value == "apart":
        return "apart"
    raise ValueError(f"weights are {value!r}")


def _tensor(item: Mapping[str, Any]) -> TensorSpec:
    shape = tuple(dim if isinstance(dim, str) else _count(dim) for dim in _list(item["shape"]))
    return TensorSpec(_text(item["name"]), shape, _text(item["dtype"]))
