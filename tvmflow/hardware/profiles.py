"""Profiles of processors: what a core computes, loads and stores per cycle, its caches, the memory, and the cores.

Every number of a machine that the compiler reads comes from a profile. The files of `tvmflow/hardware/processors/` are
the profiles that tvmflow ships; they name the source of every number. `docs/reference/machines.md` explains the fields.
"""

import hashlib
import json
import math
import re
import tomllib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass, fields, replace
from functools import cache
from importlib import resources
from pathlib import Path
from typing import Any, TypeVar

from tvmflow.errors import BundleError, TargetError

T = TypeVar("T")

_CACHES = Path("/sys/devices/system/cpu/cpu0/cache")
_UNITS = {"K": 1 << 10, "M": 1 << 20, "G": 1 << 30}
# The tables of a profile that hold numbers, besides `vectors`, which may occur several times.
_TABLES = ("first", "second", "third", "memory", "cores", "tiles")
# Digits of a profile's digest: enough to tell the profiles of one processor apart.
_DIGITS = 12


@dataclass(frozen=True)
class Vectors:
    """The vector unit of a core, for vectors of `bits` bits.

    There are `registers` vector registers. `multiply_adds`, `loads` from the first-level cache and `stores` into it are
    vectors per cycle. `latency` is the cycles from one multiply-add to the next that needs its result.
    """

    bits: int
    registers: int
    multiply_adds: float
    latency: int
    loads: float
    stores: float


@dataclass(frozen=True)
class Memory:
    """The memory: the bytes per cycle that one core reads and writes, and that all cores together move (`shared`)."""

    read: float
    write: float
    shared: float

    def read_rate(self, cores: int) -> float:
        """Return the bytes per cycle that each of `cores` cores reads while all of them read."""
        return min(self.read, self.shared / cores)

    def write_rate(self, cores: int) -> float:
        """Return the bytes per cycle that each of `cores` cores writes while all of them write."""
        return min(self.write, self.shared / cores)


@dataclass(frozen=True)
class Cache(Memory):
    """A level of cache: `size` bytes in sets of `ways` lines of `line` bytes, which `cores` cores share.

    `shared` is the bytes per cycle that these cores together move to and from it.
    """

    size: int
    ways: int
    line: int
    cores: int

    @property
    def span(self) -> int:
        """The bytes of one way: cache lines at a multiple of this distance map to the same set."""
        return self.size // self.ways

    def read_rate(self, cores: int) -> float:
        """Return the bytes per cycle that each of `cores` cores reads while all of them read."""
        return super().read_rate(min(cores, self.cores))

    def write_rate(self, cores: int) -> float:
        """Return the bytes per cycle that each of `cores` cores writes while all of them write."""
        return super().write_rate(min(cores, self.cores))

    def share(self, cores: int) -> int:
        """Return the bytes of the cache that each core has where `cores` cores work."""
        return self.size // min(cores, self.cores)


@dataclass(frozen=True)
class Cores:
    """The number of physical cores of one processor, and the cycles to start and to end a parallel `region`."""

    count: int
    region: int


@dataclass(frozen=True)
class Tiles:
    """The costs of AMX in cycles.

    `multiply` is the cost of one product of whole tiles. `load_first` and `load_second` are the costs of loading a tile
    from the first-level and from the second-level cache. `start` is the cost of clearing the registers that hold
    results and of storing them, `configure` that of configuring all registers and releasing them.
    """

    multiply: int
    load_first: int
    load_second: int
    start: int
    configure: int


@dataclass(frozen=True)
class Profile:
    """A processor as the compiler sees it.

    `name` is the name of its file. `vectors` are the widths that a core computes with, the narrowest first. `third` is
    None where the second cache is the last one; `tiles` is None without AMX.
    """

    name: str
    title: str
    arch: str
    vectors: tuple[Vectors, ...]
    first: Cache
    second: Cache
    third: Cache | None
    memory: Memory
    cores: Cores
    tiles: Tiles | None = None

    @property
    def last(self) -> Cache:
        """The cache before the memory."""
        return self.third or self.second

    @property
    def digest(self) -> str:
        """The first 12 hexadecimal digits of the SHA-256 of all fields other than `name` and `title`."""
        numbers = {key: value for key, value in asdict(self).items() if key not in ("name", "title")}
        return hashlib.sha256(json.dumps(numbers, sort_keys=True).encode()).hexdigest()[:_DIGITS]

    @property
    def model(self) -> str:
        """The text `NAME-DIGEST`, which is the `model` in `Target.canonical`."""
        return f"{self.name}-{self.digest}"

    def vectors_of(self, bits: int) -> Vectors:
        """Return the widest of `vectors` of at most `bits` bits, or the narrowest if all are wider."""
        return max(
            (item for item in self.vectors if item.bits <= bits), key=_bits, default=min(self.vectors, key=_bits)
        )

    def to_json(self) -> str:
        """Return the profile as one line of JSON, for `from_json`."""
        return json.dumps(asdict(self), sort_keys=True)

    @staticmethod
    def from_json(text: str) -> "Profile":
        """Return the profile that `to_json` wrote. Raises BundleError for other text."""
        try:
            return _profile(json.loads(text))
        except (ValueError, KeyError, TypeError) as error:
            raise BundleError(f"the profile of a machine is damaged ({error}); build the bundle again") from error


@dataclass(frozen=True)
class Processor:
    """A processor by the numbers that /proc/cpuinfo gives: on x86-64 those of CPUID, on ARM those of MIDR_EL1.

    On ARM `vendor` is the implementer's number as text, `family` is 0, `model` is the part and `stepping` the revision.
    """

    vendor: str
    family: int
    model: int
    stepping: int


@dataclass(frozen=True)
class Shipped:
    """A profile's file: the profile, the processors that it is for, and the sources of its numbers.

    `processors` are the tables of the file: vendor, family, models and perhaps the first and last stepping. `mcpu` are
    LLVM's names of these processors. `level` is the psABI level that all of them have, None on ARM and for the profile
    of a level itself; `extensions` are their features beyond it, in the words of /proc/cpuinfo. `sources` maps the name
    of a source to its description, and `sources_of` maps the path of a number, such as `first.size`, to the name of its
    source.
    """

    profile: Profile
    processors: tuple[Mapping[str, Any], ...]
    mcpu: tuple[str, ...]
    level: str | None
    extensions: tuple[str, ...]
    sources: Mapping[str, str]
    sources_of: Mapping[str, str]

    def includes(self, processor: Processor) -> bool:
        """Whether the profile is for a processor."""
        return any(
            (item["vendor"], item.get("family", 0)) == (processor.vendor, processor.family)
            and processor.model in item["models"]
            and item.get("steppings", [0, 1 << 30])[0] <= processor.stepping <= item.get("steppings", [0, 1 << 30])[1]
            for item in self.processors
        )


@cache
def shipped() -> dict[str, Shipped]:
    """Return the profiles of `tvmflow/hardware/processors/` by name, in the order of the names."""
    folder = resources.files("tvmflow.hardware") / "processors"
    files = sorted((item for item in folder.iterdir() if item.name.endswith(".toml")), key=lambda item: item.name)
    return {name: read(name, item.read_text()) for item in files for name in [item.name.removesuffix(".toml")]}


def read(name: str, text: str) -> Shipped:
    """Read the text of a profile's file, which is TOML; `name` is the file's name without the ending.

    Raises TargetError for text that is no TOML, an unknown, missing or non-positive number, and a number without a
    source.
    """
    try:
        document = tomllib.loads(text)
        sources = dict(document.pop("sources"))
        processors, mcpu = tuple(document.pop("processors", ())), tuple(document.pop("mcpu", ()))
        level, extensions = document.pop("level", None), tuple(document.pop("extensions", ()))
        sources_of: dict[str, str] = {}
        for path, table in _tables(document):
            for source, keys in table.pop("sources").items():
                if source not in sources:
                    raise ValueError(f"{path} names the source {source!r}, which [sources] does not describe")
                sources_of |= {f"{path}.{key}": source for key in keys}
            bare = [key for key in table if f"{path}.{key}" not in sources_of]
            if bare:
                raise ValueError(f"{path}.{bare[0]} has no source")
        profile = _profile({"name": name, **document})
        return Shipped(profile, processors, mcpu, level, extensions, sources, sources_of)
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        reason = f"{error} is missing" if isinstance(error, KeyError) else str(error)
        raise TargetError(
            f"the profile {name!r} cannot be read ({reason}); compare it with those of tvmflow/hardware/processors"
        ) from error


def _tables(document: Mapping[str, Any]) -> Iterator[tuple[str, dict[str, Any]]]:
    for table in document["vectors"]:
        yield f"vectors.{table['bits']}", table
    for key in _TABLES:
        if key in document:
            yield key, document[key]


def _profile(document: Mapping[str, Any]) -> Profile:
    """The profile of a document. Raises KeyError, TypeError or ValueError for another form."""
    third, tiles = document.get("third"), document.get("tiles")
    unknown = set(document) - {item.name for item in fields(Profile)}
    if unknown:
        raise ValueError(f"{min(unknown)!r} is no part of a profile")
    return Profile(
        name=document["name"],
        title=document["title"],
        arch=document["arch"],
        vectors=tuple(sorted((_table(Vectors, item) for item in document["vectors"]), key=_bits)),
        first=_table(Cache, document["first"]),
        second=_table(Cache, document["second"]),
        third=None if third is None else _table(Cache, third),
        memory=_table(Memory, document["memory"]),
        cores=_table(Cores, document["cores"]),
        tiles=None if tiles is None else _table(Tiles, tiles),
    )


def _table(kind: type[T], values: Mapping[str, Any]) -> T:
    """A table as a data class whose fields are positive numbers, whole ones or of floating point."""
    types = {item.name: item.type for item in fields(kind)}  # type: ignore[arg-type]
    for key, value in values.items():
        if type(value) not in (int, types.get(key, value)) or not 0 < value < math.inf:
            raise ValueError(f"{key} is {value!r}, not a positive number")
    return kind(**{key: float(value) if types[key] is float else value for key, value in values.items()})


def _bits(vectors: Vectors) -> int:
    return vectors.bits


def named(name: str) -> Profile:
    """Return the shipped profile whose `name` or `model` is `name`. Raises TargetError for an unknown one."""
    for profile in (item.profile for item in shipped().values()):
        if name in (profile.name, profile.model):
            return profile
    raise TargetError(f"the profile {name!r} of a processor is unknown; tvmflow has {', '.join(shipped())}")


def of_mcpu(mcpu: str) -> Profile | None:
    """Return the shipped profile of the processor that LLVM calls `mcpu`; None where no profile is for it."""
    return next((item.profile for item in shipped().values() if mcpu in item.mcpu), None)


def of_processor(processor: Processor) -> Profile | None:
    """Return the shipped profile that is for a processor; None where there is none."""
    return next((item.profile for item in shipped().values() if item.includes(processor)), None)


def parse_processor(cpuinfo: str) -> Processor | None:
    """Return the first processor of the text of /proc/cpuinfo; None where the text does not identify it."""
    values: dict[str, str] = {}
    for line in cpuinfo.splitlines():
        key, colon, value = line.partition(":")
        if colon:
            values.setdefault(key.strip(), value.strip())
    try:
        if "CPU implementer" in values:
            implementer, part, revision = (values[f"CPU {key}"] for key in ("implementer", "part", "revision"))
            return Processor(implementer, 0, int(part, 0), int(revision, 0))
        return Processor(
            values["vendor_id"], int(values["cpu family"]), int(values["model"]), int(values.get("stepping", "0"))
        )
    except (KeyError, ValueError):
        return None


def with_caches(profile: Profile, folder: Path = _CACHES) -> Profile:
    """Return a profile with the caches' sizes, ways, lines and sharing of this machine, as far as sysfs tells them.

    `folder` is the folder of sysfs with the caches of one core. A profile whose caches differ from sysfs gets the name
    `NAME-caches`. Values that sysfs lacks stay as they are.
    """
    levels: dict[int, dict[str, int]] = {}
    for entry in folder.glob("index*"):
        try:
            if (entry / "type").read_text().strip() == "Instruction":
                continue
            level = int((entry / "level").read_text())
            size = re.fullmatch(r"(\d+)([KMG])", (entry / "size").read_text().strip())
            ways, line = (int((entry / key).read_text()) for key in ("ways_of_associativity", "coherency_line_size"))
            sharing = (entry / "shared_cpu_map").read_text().replace(",", "")
        except (OSError, ValueError):
            continue
        total = 0 if size is None else int(size[1]) * _UNITS[size[2]]
        if ways > 0 and line > 0 and total >= ways * line:
            levels[level] = {"size": total, "ways": ways, "line": line, "cores": max(1, int(sharing, 16).bit_count())}
    changes: dict[str, Any] = {}
    for level, key in ((1, "first"), (2, "second"), (3, "third")):
        values = levels.get(level)
        if values is None:
            continue
        # A private cache that two hardware threads share is one core's.
        cache_of_level = getattr(profile, key) or profile.second
        cores = 1 if cache_of_level.cores == 1 and values["cores"] <= 2 else values["cores"]
        changes[key] = replace(cache_of_level, **{**values, "cores": cores})
    changed = replace(profile, **changes)
    return profile if changed == profile else replace(changed, name=f"{profile.name}-caches")


def to_toml(profile: Profile, sources: Mapping[str, str], source_of: Callable[[str], str]) -> str:
    """Return a profile as the text of a file that `read` reads.

    `sources` maps the name of each source to its description. `source_of` returns the name of a number's source from
    the number's path, such as `first.size` or `vectors.256.loads`.
    """
    lines = [f"title = {json.dumps(profile.title)}", f"arch = {json.dumps(profile.arch)}"]
    tables = [("[[vectors]]", f"vectors.{item.bits}", item) for item in profile.vectors]
    tables += [(f"[{key}]", key, getattr(profile, key)) for key in _TABLES if getattr(profile, key) is not None]
    for heading, path, table in tables:
        numbers = asdict(table)
        names = {source_of(f"{path}.{key}") for key in numbers}
        by_source = {name: [key for key in numbers if source_of(f"{path}.{key}") == name] for name in sorted(names)}
        lines += ["", heading, *(f"{key} = {value}" for key, value in numbers.items())]
        lines.append(f"sources = {{ {', '.join(f'{name} = {json.dumps(keys)}' for name, keys in by_source.items())} }}")
    return "\n".join([*lines, "", "[sources]", *(f"{key} = {json.dumps(text)}" for key, text in sources.items()), ""])
