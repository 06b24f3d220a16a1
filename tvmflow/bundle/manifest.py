"""The manifest `bundle.json`: the content of a bundle, the versions it was built with and the machine it needs."""

import json
from collections.abc import Callable, Mapping, Set
from dataclasses import asdict, dataclass, field
from functools import cache
from importlib.metadata import PackageNotFoundError, distribution
from typing import Any, Literal

from tvmflow.errors import BundleError
from tvmflow.hardware.target import host, missing_features, request_amx

# The newest format's number. It is raised whenever a reader of the number before could misread a new bundle.
FORMAT = 3
_DTYPES = frozenset(
    (
        *("bool", "bfloat16", "float16", "float32", "float64"),
        *("int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64"),
    )
)
# Where a bundle's weights are: packed in the library; packed in a file apart; in the library as the model has them,
# whose function `pack_weights` packs them; or as the model has them in a file apart, and packed by that function.
Weights = Literal["inside", "apart", "unpacked", "shared"]
# Those of which `mod.params` has the weights, and those whose library packs weights when it is loaded.
WEIGHTS_IN_FILE: tuple[Weights, ...] = ("apart", "shared")
PACKED_AT_LOAD: tuple[Weights, ...] = ("unpacked", "shared")
# Those of each format.
_PLACES: dict[int, tuple[Weights, ...]] = {1: ("inside", "apart"), 2: ("unpacked",), 3: ("shared",)}
PACK_WEIGHTS = "pack_weights"
# The functions of a library whose `main` runs without the virtual machine: its direct form, and what returns the
# constants that the direct form takes (`compiler.direct`).
DIRECT_MAIN, MAIN_CONSTANTS = "direct_main", "main_constants"
# What a library's error begins with where an index is outside of its data (`compiler.operators.indices`).
INDEX_ERROR = "index error: "
# Bytes; the virtual machine makes memory for larger outputs, which it uses again.
LARGEST_DIRECT_OUTPUT = 1 << 14
# The largest size that a tensor of TVM can have.
_LARGEST_SIZE = (1 << 63) - 1
# The most letters of a wrong value that a message shows.
_MESSAGE_LENGTH = 200


@dataclass(frozen=True)
class TensorSpec:
    """One input or output: its name, its shape and its dtype; a string in the shape is a symbolic dimension."""

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
    """A function of the library that is built for fixed `sizes` of symbolic dimensions; `main` accepts all sizes."""

    function: str
    sizes: dict[str, int]


@dataclass(frozen=True)
class Versions:
    """The versions with which a library was built; it runs with the same minor versions of TVM and tvm-ffi."""

    tvmflow: str
    tvm: str
    tvm_ffi: str
    llvm: str


@dataclass(frozen=True)
class Manifest:
    """The content of `bundle.json`: nothing in it varies from run to run.

    `dimensions` holds the smallest and the largest size of each symbolic dimension; a largest size of None means no
    limit. `weights` says where the packed weights come from that `main` and the variants use: `inside` means constants
    of the library; `apart` means the bundle's file `mod.params`; `unpacked` means that the library's function
    `pack_weights` packs the weights that the library holds, and `shared` that it packs those of `mod.params`. With all
    but `inside`, a call passes the packed weights after the inputs. `threads` is the number of threads that the code
    was chosen for; `max_threads` is the most threads to run on by default, None as many as there are cores.
    `fresh_outputs` is true where every call writes all outputs to memory that nothing else uses, so that a caller may
    keep them without a copy. `indices` holds the least and the largest integer of each input that the model looks up in
    a table, such as a vocabulary. `unaligned_inputs` is true where the memory of inputs may begin at the address of any
    element. `labels` has the labels of inputs and outputs that are the scores of labels, or the places of labels.
    `provenance` maps the inputs of the build to their SHA-256, and `options` and `code` to the options and the digest
    of tvmflow's code.
    """

    name: str
    target: str
    tvm_target: dict[str, Any]
    arch: str
    cpu_features: tuple[str, ...]
    threads: int
    inputs: tuple[TensorSpec, ...]
    outputs: tuple[TensorSpec, ...]
    dimensions: dict[str, tuple[int, int | None]]
    weights: Weights
    versions: Versions
    variants: tuple[Variant, ...] = ()
    provenance: dict[str, str] = field(default_factory=dict)
    files: dict[str, FileEntry] = field(default_factory=dict)
    max_threads: int | None = None
    fresh_outputs: bool = False
    indices: dict[str, tuple[int, int]] = field(default_factory=dict)
    unaligned_inputs: bool = False
    labels: dict[str, tuple[str, ...]] = field(default_factory=dict)

    @property
    def format(self) -> int:
        """The number of the oldest format that can express this manifest."""
        return next(number for number, places in _PLACES.items() if self.weights in places)

    @property
    def has_weights_file(self) -> bool:
        """Whether the weights are in `mod.params`."""
        return self.weights in WEIGHTS_IN_FILE

    @property
    def packs_at_load(self) -> bool:
        """Whether the library has the function `pack_weights`, which returns the weights that calls pass."""
        return self.weights in PACKED_AT_LOAD

    def to_json(self) -> bytes:
        """Return canonical JSON: equal manifests give equal bytes. Raises ValueError for NaN or infinity.

        `max_threads` is left out if it equals `threads`, `fresh_outputs` and `unaligned_inputs` if they are false, and
        `indices` and `labels` without any: a reader takes these values for missing keys.
        """
        document = {**asdict(self), "format": self.format}
        if self.max_threads == self.threads:
            del document["max_threads"]
        for name in ("fresh_outputs", "unaligned_inputs", "indices", "labels"):
            if not document[name]:
                del document[name]
        return _canonical(document)

    @classmethod
    def from_json(cls, data: bytes, source: str) -> "Manifest":
        """Read a manifest from JSON; `source` names the bundle in errors. Raises BundleError for any other content."""
        try:
            return cls.parse(data)
        except _OtherFormatError as error:
            raise BundleError(
                f"bundle {source!r} has format {str(error)[:_MESSAGE_LENGTH]}, this tvmflow reads {FORMAT}; "
                f"upgrade tvmflow"
            ) from error
        except (ValueError, KeyError, TypeError, RecursionError) as error:
            reason = f"{type(error).__name__}: {error}"[:_MESSAGE_LENGTH]
            raise BundleError(f"bundle {source!r} has a damaged manifest ({reason}); fetch it again") from error

    @staticmethod
    def parse(data: bytes) -> "Manifest":
        """Read a manifest from JSON. Raises ValueError, KeyError, TypeError or RecursionError for any other content."""
        document = _mapping(json.loads(data, parse_int=_integer))
        number = document["format"]
        reader = _READERS.get(number) if type(number) is int else None
        if reader is None:
            raise _OtherFormatError(repr(number))
        if _canonical(document) != data:
            raise ValueError("it is not written as tvmflow writes it")
        return reader(document)

    def check_host(self) -> None:
        """Raise BundleError if this machine or the installed TVM cannot run the bundle; for AMX see `check_machine`."""
        check_machine(self.name, self.target, self.arch, self.tvm_target, self.cpu_features)
        for package, needed in ("apache-tvm", self.versions.tvm), ("apache-tvm-ffi", self.versions.tvm_ffi):
            installed = _version(package)
            if _minor(installed) != _minor(needed):
                raise BundleError(
                    f"bundle {self.name!r} is built with {package} {needed}, installed is {installed}; "
                    f"install {package} {needed}"
                )


def check_machine(
    name: str, target: str, arch: str, tvm_target: Mapping[str, Any], cpu_features: tuple[str, ...]
) -> None:
    """Raise BundleError if this machine's processor cannot run a bundle with these requirements.

    `name` and `target` name the bundle in the message. For a bundle that uses AMX, the function requests the kernel's
    permission for this process. A refusal raises BundleError as well.
    """
    machine = host()
    if arch == "cuda":
        host_target = tvm_target.get("host")
        arch = str(host_target.get("mtriple", "")).split("-")[0] if isinstance(host_target, dict) else ""
    if arch and arch != machine.arch:
        raise BundleError(
            f"bundle {name!r} is built for {arch}, this machine is {machine.arch}; "
            f"take the bundle of this machine's target"
        )
    missing = missing_features(cpu_features)
    if missing:
        raise BundleError(
            f"bundle {name!r} for target {target!r} needs the CPU features {', '.join(missing)}, "
            f"which this machine lacks; take a bundle for a lower target"
        )
    if "amx_tile" in cpu_features and not request_amx():
        raise BundleError(
            f"bundle {name!r} for target {target!r} uses AMX, which the system does not let this process do; "
            f"take a bundle for a lower target, or allow arch_prctl in the sandbox that the process runs in"
        )


def installed_versions(llvm: str = "") -> Versions:
    """Return the installed versions, "none" for a missing package; `llvm` is passed on, as only the compiler has it."""
    return Versions(_version("tvmflow"), _version("apache-tvm"), _version("apache-tvm-ffi"), llvm)


@cache
def _version(package: str) -> str:
    """The installed version of a package, "none" for a missing one.

    `importlib.metadata.version` parses all that a package says of itself, which takes longer than to unpack a bundle.
    """
    try:
        installed = distribution(package)
    except PackageNotFoundError:
        return "none"
    lines = (installed.read_text("METADATA") or "").splitlines()
    return next((line.split()[1] for line in lines if line.startswith("Version: ")), None) or installed.version


def _minor(number: str) -> list[str]:
    return number.split(".")[:2]


class _OtherFormatError(ValueError):
    """The manifest is of a format that has no reader here."""


def _canonical(document: Mapping[str, Any]) -> bytes:
    """The canonical JSON of a document. Raises ValueError for NaN and infinity."""
    return (json.dumps(document, indent=2, sort_keys=True, ensure_ascii=False, allow_nan=False) + "\n").encode()


def _read(document: dict[str, Any]) -> Manifest:
    """Read a format. Unknown keys are ignored: a later writer may add keys that no reader needs."""
    inputs = tuple(_tensor(item) for item in _list(document["inputs"]))
    symbols = {dim for item in inputs for dim in item.shape if isinstance(dim, str)}
    return Manifest(
        name=_text(document["name"]),
        target=_text(document["target"]),
        tvm_target=_mapping(document["tvm_target"]),
        arch=_text(document["arch"]),
        cpu_features=tuple(_text(item) for item in _list(document["cpu_features"])),
        threads=_count(document["threads"], least=1),
        max_threads=_limit(document),
        fresh_outputs=_flag(document.get("fresh_outputs", False)),
        unaligned_inputs=_flag(document.get("unaligned_inputs", False)),
        indices=_indices(document.get("indices", {}), {item.name for item in inputs}),
        inputs=inputs,
        outputs=tuple(_tensor(item) for item in _list(document["outputs"])),
        labels={
            _text(name): tuple(_text(label) for label in _list(labels))
            for name, labels in _mapping(document.get("labels", {})).items()
        },
        dimensions={_text(name): _range(item) for name, item in _mapping(document["dimensions"]).items()},
        variants=tuple(_variant(item, symbols) for item in _list(document["variants"])),
        weights=_weights(document["weights"], document["format"]),
        versions=Versions(**{key: _text(document["versions"][key]) for key in ("tvmflow", "tvm", "tvm_ffi", "llvm")}),
        provenance={_text(key): _text(value) for key, value in _mapping(document["provenance"]).items()},
        files={
            _text(name): FileEntry(_digest(entry["sha256"]), _count(entry["size"]))
            for name, entry in _mapping(document["files"]).items()
        },
    )


# A reader for every format ever written. They differ in what `weights` may be.
_READERS: dict[int, Callable[[dict[str, Any]], Manifest]] = {1: _read, 2: _read, 3: _read}


def _integer(digits: str) -> int:
    """An integer of JSON. Raises ValueError beyond 64 bits, where other readers round."""
    value = int(digits)
    if not -(1 << 63) <= value < 1 << 64:
        raise ValueError(f"an integer has more than 64 bits: {digits[:_MESSAGE_LENGTH]}")
    return value


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
    # Names appear in messages: none may break the line or control a terminal.
    if not value.isprintable():
        raise ValueError(f"{value!r} is not printable")
    return value


def _count(value: object, least: int = 0) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or not least <= value <= _LARGEST_SIZE:
        raise TypeError(f"{value!r} is not a count")
    return value


def _flag(value: object) -> bool:
    if not isinstance(value, bool):
        raise TypeError(f"{value!r} is neither true nor false")
    return value


def _limit(document: dict[str, Any]) -> int | None:
    """The most threads to run on. An older bundle, which does not name them, runs on those it was built for."""
    limit = document.get("max_threads", document["threads"])
    return None if limit is None else _count(limit, least=1)


def _range(item: Any) -> tuple[int, int | None]:
    low, high = item
    limits = _count(low), None if high is None else _count(high)
    if limits[1] is not None and limits[1] < limits[0]:
        raise ValueError(f"{limits[0]} to {limits[1]} is no range")
    return limits


def _indices(value: object, inputs: Set[str]) -> dict[str, tuple[int, int]]:
    least = -_LARGEST_SIZE
    limits = {_text(name): (_count(low, least), _count(high, least)) for name, (low, high) in _mapping(value).items()}
    if not limits.keys() <= inputs:
        raise ValueError(f"{min(limits.keys() - inputs)!r} is no input")
    return limits


def _variant(item: Mapping[str, Any], symbols: Set[str]) -> Variant:
    sizes = {name: _count(size) for name, size in _mapping(item["sizes"]).items()}
    if not sizes.keys() <= symbols:
        raise ValueError(f"{min(sizes.keys() - symbols)!r} is no dimension of an input")
    return Variant(_text(item["function"]), sizes)


def _digest(value: object) -> str:
    text = _text(value)
    if len(text) != 64 or set(text) - set("0123456789abcdef"):
        raise ValueError(f"{text!r} is not a SHA-256")
    return text


def _weights(value: object, number: int) -> Weights:
    for place in _PLACES[number]:
        if value == place:
            return place
    raise ValueError(f"weights are {value!r}")


def _tensor(item: Mapping[str, Any]) -> TensorSpec:
    shape = tuple(_text(dim) if isinstance(dim, str) else _count(dim) for dim in _list(item["shape"]))
    if item["dtype"] not in _DTYPES:
        raise ValueError(f"{item['dtype']!r} is no dtype")
    return TensorSpec(_text(item["name"]), shape, item["dtype"])
