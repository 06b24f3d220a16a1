"""Targets: named presets, full TVM targets, and the features that this machine's processor has."""

import ctypes
import json
import os
import platform
import re
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from difflib import get_close_matches
from functools import cache
from pathlib import Path
from typing import Any, Literal

from tvmflow.errors import TargetError
from tvmflow.hardware import cores, profiles
from tvmflow.hardware.profiles import Processor, Profile

# The micro-architecture levels of the x86-64 psABI, in the words of /proc/cpuinfo.
_X86_64_V2 = ("cx16", "lahf_lm", "popcnt", "pni", "sse4_1", "sse4_2", "ssse3")
_X86_64_V3 = (*_X86_64_V2, "abm", "avx", "avx2", "bmi1", "bmi2", "f16c", "fma", "movbe")
_X86_64_V4 = (*_X86_64_V3, "avx512bw", "avx512cd", "avx512dq", "avx512f", "avx512vl")
_LEVELS = {"x86-64": (), "x86-64-v2": _X86_64_V2, "x86-64-v3": _X86_64_V3, "x86-64-v4": _X86_64_V4}

# Features beyond the levels that a compiled model may use, and LLVM's names for them.
_EXTENSIONS = {
    "avx512_vnni": "avx512vnni",
    "avx512_bf16": "avx512bf16",
    "avx512_fp16": "avx512fp16",
    "avx_vnni": "avxvnni",
    "amx_tile": "amx-tile",
    "amx_bf16": "amx-bf16",
    "amx_int8": "amx-int8",
}
# The precisions of convolutions and matrix products.
Precision = Literal["fp32", "bf16", "fp16", "int8"]
# The architectures that compute in each, and the extension that their processors need, empty if all have what it takes.
_UNITS: dict[Precision, dict[str, str]] = {
    "fp32": {"x86_64": "", "aarch64": "", "cuda": ""},
    "bf16": {"x86_64": "avx512_bf16", "aarch64": "bf16"},
    "fp16": {"aarch64": "asimdhp", "cuda": ""},
    "int8": {"x86_64": "", "aarch64": "asimddp"},
}
_AMX: dict[Precision, tuple[str, ...]] = {"bf16": ("amx_bf16", "amx_tile"), "int8": ("amx_int8", "amx_tile")}
# Linux's call that requests AMX: the call's number on x86-64, ARCH_REQ_XCOMP_PERM and XFEATURE_XTILEDATA.
_ARCH_PRCTL, _REQUEST_PERMISSION, _TILE_DATA = 158, 0x1023, 18
# Presets of x86-64-v4 with extensions.
_EXTENDED = {
    "x86-64-v4-vnni": ("avx512_vnni",),
    "x86-64-v4-bf16": ("avx512_bf16", "avx512_vnni"),
    "x86-64-v4-amx": ("amx_bf16", "amx_int8", "amx_tile", "avx512_bf16", "avx512_vnni"),
}
# ARM's dot products of 8-bit integers, its arithmetic in float16, and its dot products of bfloat16 and of unsigned with
# signed integers, in the words of /proc/cpuinfo and of LLVM. The presets that have them are below, with their other
# extensions that LLVM uses.
_ARM_UNITS = {"asimddp": "+dotprod", "asimdhp": "+fullfp16", "bf16": "+bf16", "i8mm": "+i8mm"}
_ARMV8_2 = ("asimddp", "asimdhp", "asimdrdm", "atomics")
_ARMV8_4 = (*_ARMV8_2, "asimdfhm", "bf16", "fcma", "i8mm")
# For these processors LLVM would use vectors of an unknown width, SVE's, by itself. The schedules use NEON's.
_SCALABLE = ("neoverse-v1", "neoverse-v2")
_ARM_EXTENSIONS = {
    "aarch64-cortex-a76": _ARMV8_2,
    "aarch64-neoverse-n1": _ARMV8_2,
    "aarch64-neoverse-v1": _ARMV8_4,
    "aarch64-neoverse-v2": _ARMV8_4,
}

_AVX = ("avx", "avx2", "avx512bw", "avx512cd", "avx512dq", "avx512f", "avx512vl")
# LLVM's name of a feature -> the name in /proc/cpuinfo, for the features that a bundle's code can depend on.
_LLVM_TO_CPUINFO: dict[str, str] = {
    **{llvm: cpuinfo for cpuinfo, llvm in _EXTENSIONS.items()},
    "avx512vbmi2": "avx512_vbmi2",
    "avx512bitalg": "avx512_bitalg",
    "avx512vpopcntdq": "avx512_vpopcntdq",
    "avx512vp2intersect": "avx512_vp2intersect",
    "bmi": "bmi1",
    "lzcnt": "abm",
    "sse3": "pni",
    "sse4.1": "sse4_1",
    "sse4.2": "sse4_2",
    **{
        same: same
        for same in (
            "avx512ifma",
            "avx512vbmi",
            "bmi2",
            "cx16",
            "f16c",
            "fma",
            "fma4",
            "gfni",
            "movbe",
            "popcnt",
            "sse4a",
            "ssse3",
            "vaes",
            "vpclmulqdq",
            "xop",
            *_AVX,
        )
    },
}
# The same for ARM. LLVM computes no cipher, hash or checksum by itself, and not every processor of a name has them.
_LLVM_TO_ARM = {
    "complxnum": "fcma",
    "dotprod": "asimddp",
    "fp16fml": "asimdfhm",
    "fullfp16": "asimdhp",
    "lse": "atomics",
    "neon": "asimd",
    "rdm": "asimdrdm",
    **{same: same for same in ("bf16", "i8mm", "sve", "sve2")},
}

# The target of an NVIDIA GPU by its compute capability; nvcc says later whether it knows it.
_GPU = re.compile("cuda-sm([1-9][0-9]{1,2})", re.ASCII)

# The file of the profile that `native` uses in place of the recognised one; `tvmflow calibrate` writes such files.
PROFILE_VARIABLE = "TVMFLOW_PROFILE"

_ARCH_NAMES = {"amd64": "x86_64", "x86-64": "x86_64", "arm64": "aarch64"}


@dataclass(frozen=True)
class Target:
    """A machine to build for.

    `name` is the preset's name or the text of the TVM target. `tvm` is the TVM target as JSON data. `arch` is `x86_64`,
    `aarch64` or `cuda`. `features` are the CPU features that the machine must have, in the words of /proc/cpuinfo.
    `cross_compiler` is the command that links for another architecture; None means this machine's compiler. `profile`
    holds the processor's numbers, by which the compiler chooses; None for a GPU.
    """

    name: str
    tvm: dict[str, Any] = field(hash=False)
    arch: str
    features: tuple[str, ...] = ()
    cross_compiler: str | None = None
    profile: Profile | None = None

    @property
    def canonical(self) -> str:
        """The TVM target as one line of JSON with sorted keys: part of the keys of tuning records and caches.

        Its `model` is the profile's name and digest.
        """
        model = {} if self.profile is None else {"model": self.profile.model}
        return json.dumps({**self.tvm, **model}, sort_keys=True, separators=(",", ":"))

    @property
    def threads(self) -> int:
        """The number of worker threads that the target is built for."""
        return int(self.tvm.get("num-cores", 1))


@dataclass(frozen=True)
class Host:
    """A machine: its architecture, its CPU features in the words of /proc/cpuinfo, and its cores for this process.

    `processor` is None where the kernel does not identify it.
    """

    arch: str
    features: frozenset[str]
    cores: int
    processor: Processor | None = None


def processor() -> str:
    """Return the processor's name, or its architecture where the system does not tell the name."""
    try:
        match = re.search(r"^model name\s*:\s*(.*)$", Path("/proc/cpuinfo").read_text(), re.MULTILINE)
    except OSError:
        match = None
    return match.group(1) if match else platform.machine()


@cache
def host() -> Host:
    """Return this machine: architecture, CPU features as the kernel reports them, cores (`cores.count`)."""
    machine = platform.machine().lower()
    arch = _ARCH_NAMES.get(machine, machine)
    cpuinfo = ""
    with suppress(OSError):
        # Not Linux: the features are unknown, so that only bundles that need none can run.
        cpuinfo = Path("/proc/cpuinfo").read_text()
    match = re.search(r"^(?:flags|Features)\s*:\s*(.*)$", cpuinfo, re.MULTILINE)
    features = frozenset(match.group(1).split()) if match else frozenset()
    return Host(arch, features, cores.count(), profiles.parse_processor(cpuinfo))


def missing_features(features: tuple[str, ...]) -> tuple[str, ...]:
    """Return those of `features` (in /proc/cpuinfo's words) that this machine's CPU lacks, sorted."""
    return tuple(sorted(set(features) - host().features))


def needed_features(target: Target, precision: Precision) -> tuple[str, ...]:
    """Return those of a target's CPU features that its code may use in a precision; only bf16 and int8 use AMX."""
    return tuple(name for name in target.features if not name.startswith("amx_") or name in _AMX.get(precision, ()))


@cache
def request_amx() -> bool:
    """Request the kernel's permission to use AMX's tile registers; return whether this process has it.

    Threads and forks inherit the permission; a program that the process starts does not.
    """
    if host().arch != "x86_64" or "amx_tile" not in host().features:
        return False
    return bool(ctypes.CDLL(None).syscall(_ARCH_PRCTL, _REQUEST_PERMISSION, _TILE_DATA) == 0)


def explain_missing_unit(target: Target, precision: Precision) -> str | None:
    """Return the sentence that says why a target cannot compute in a precision; None if it can."""
    units = _UNITS[precision]
    unit = units.get(target.arch)
    if unit == "" or unit in target.features:
        return None
    names = [unit] if unit else list(filter(None, units.values()))
    extended = {**_EXTENDED, **_ARM_EXTENSIONS}
    fitting = [preset for preset, extensions in extended.items() if set(names) & set(extensions)]
    if unit:
        fitting.append("native on such a machine")
    else:
        fitting += [f"any target of {arch}" for arch, name in units.items() if not name]
    return (
        f"target {target.name!r} has no instructions for precision {precision} ({' or '.join(names)}); "
        f"build for {' or '.join(fitting)}"
    )


def compute_capability(tvm: Mapping[str, Any]) -> tuple[int, int] | None:
    """Return the compute capability of a TVM target's GPU, major and minor; None where its `arch` names none."""
    match = re.fullmatch("sm_([0-9]{2,3})[af]?", str(tvm.get("arch", "")))
    return divmod(int(match[1]), 10) if match else None


def presets() -> dict[str, str]:
    """Return a line of description for each named target, by name; those of processors have the names of profiles."""
    return {
        "native": "the machine that builds",
        "x86-64-v2": "x86-64 with SSE4.2: any server of the last 15 years",
        "x86-64-v3": "x86-64 with AVX2 and FMA",
        "x86-64-v4": "x86-64 with AVX-512",
        "x86-64-v4-vnni": "x86-64 with AVX-512 and its 8-bit dot products: Cascade Lake, Ice Lake",
        "x86-64-v4-bf16": "x86-64 with AVX-512, 8-bit and bfloat16 dot products: Cooper Lake, Zen 4",
        "x86-64-v4-amx": "as x86-64-v4-bf16, with AMX for 8 bits and bfloat16: Sapphire Rapids",
        "aarch64-generic": "any 64-bit ARM with NEON",
        "aarch64-cortex-a72": "Raspberry Pi 4",
        "aarch64-cortex-a76": "Raspberry Pi 5, with arithmetic in float16 and 8-bit dot products",
        "aarch64-neoverse-n1": "ARM servers, with arithmetic in float16 and 8-bit dot products",
        "aarch64-neoverse-v1": "AWS Graviton3, also with dot products of bfloat16",
        "aarch64-neoverse-v2": "AWS Graviton4 and NVIDIA Grace, also with dot products of bfloat16",
        "cuda-sm80": "NVIDIA Ampere",
        "cuda-sm90": "NVIDIA Hopper",
        **{name: item.profile.title for name, item in profiles.shipped().items() if item.level},
    }


def resolve(text: str | Mapping[str, Any]) -> Target:
    """Return the target for a preset's name or a TVM target.

    A TVM target is JSON text, JSON data or the older form `llvm -mcpu=...`. Raises TargetError for an unknown preset,
    kind, architecture or CPU, and for an option of a wrong form. The compiler checks whether the installed TVM can
    build for it.
    """
    if isinstance(text, Mapping):
        try:
            return _from_tvm(json.dumps(dict(text), sort_keys=True), dict(text))
        except (TypeError, ValueError) as error:
            raise TargetError(f"target {dict(text)!r} is not JSON data ({error}); quote its values as text") from error
    name = text.strip()
    if name == "native":
        return _native()
    if name in _LEVELS and name != "x86-64":
        return _x86(name, name, (), host().cores, profiles.named(name))
    if name in _EXTENDED:
        # AMX came with this processor.
        model = "sapphire-rapids" if "amx_tile" in _EXTENDED[name] else "x86-64-v4"
        return _x86(name, "x86-64-v4", _EXTENDED[name], host().cores, profiles.named(model))
    shipped = profiles.shipped().get(name)
    if shipped and shipped.level:
        extensions = tuple(extension for extension in _EXTENSIONS if extension in shipped.extensions)
        return _x86(name, shipped.level, extensions, host().cores, shipped.profile)
    if gpu := _GPU.fullmatch(name):
        return _cuda(name, f"sm_{gpu[1]}")
    if name in presets():
        return _aarch64(name, name.removeprefix("aarch64-"), extensions=_ARM_EXTENSIONS.get(name, ()))
    if name.startswith("{"):
        try:
            return _from_tvm(name, json.loads(name))
        except (ValueError, RecursionError) as error:
            raise TargetError(f"target {name!r} is not valid JSON ({error}); quote it as one argument") from error
    words = name.split()
    if words and words[0] in ("llvm", "cuda", "c"):
        return _from_tvm(name, _parse_older_form(name, words))
    close = get_close_matches(name, presets(), n=1)
    hint = f"did you mean {close[0]!r}?" if close else f"use one of {', '.join(presets())} or a full TVM target"
    raise TargetError(f"target {name!r} is unknown; {hint}")


def _native() -> Target:
    machine = host()
    if machine.arch == "aarch64":
        profile = _native_profile("aarch64-generic")
        units = tuple(_ARM_UNITS.keys() & machine.features)
        return _aarch64("native", "generic", machine.cores, extensions=units, profile=profile)
    if machine.arch != "x86_64":
        raise TargetError(f"target 'native' is not known for this machine's architecture {machine.arch!r}; name one")
    level = max(
        (name for name, features in _LEVELS.items() if machine.features.issuperset(features)), key=list(_LEVELS).index
    )
    # Kernels before Linux 5.16 list AMX and let no process use it, and a sandbox may forbid the request.
    usable = (name for name in _EXTENSIONS if not name.startswith("amx_") or request_amx())
    extensions = tuple(name for name in usable if name in machine.features)
    return _x86("native", level, extensions, machine.cores, _native_profile(level))


def _native_profile(level: str) -> Profile:
    """The profile of this machine: of the file that TVMFLOW_PROFILE names, of its processor, or of `level`.

    An unknown processor gets the numbers of `level` with the caches of this machine. Raises TargetError for a file that
    cannot be read or is for another architecture.
    """
    path = os.environ.get(PROFILE_VARIABLE)
    if path:
        try:
            profile = profiles.read(Path(path).stem, Path(path).read_text()).profile
        except (OSError, UnicodeDecodeError) as error:
            raise TargetError(f"the profile {path!r} of {PROFILE_VARIABLE} cannot be read ({error})") from error
        if profile.arch != host().arch:
            raise TargetError(f"the profile {path!r} of {PROFILE_VARIABLE} is for {profile.arch}, not {host().arch}")
        return profile
    processor = host().processor
    recognised = None if processor is None else profiles.of_processor(processor)
    return recognised or profiles.with_caches(profiles.named(level if level != "x86-64" else "x86-64-v2"))


def _x86(name: str, level: str, extensions: tuple[str, ...], cores: int, profile: Profile) -> Target:
    attributes = [f"+{_EXTENSIONS[extension]}" for extension in extensions]
    if "avx512f" in _LEVELS[level]:
        # On this level LLVM halves every vector by default; the schedules choose the width themselves.
        attributes.append("-prefer-256-bit")
    tvm: dict[str, Any] = {"kind": "llvm", "mtriple": "x86_64-linux-gnu", "mcpu": level, "num-cores": cores}
    if attributes:
        tvm["mattr"] = attributes
    features = tuple(sorted((*_LEVELS[level], *extensions)))
    return Target(name, tvm, "x86_64", features, _cross_compiler("x86_64"), profile)


def _aarch64(
    name: str, mcpu: str, cores: int = 4, *, extensions: tuple[str, ...] = (), profile: Profile | None = None
) -> Target:
    units = [name for unit, name in _ARM_UNITS.items() if unit in extensions]
    tvm: dict[str, Any] = {
        "kind": "llvm",
        "mtriple": "aarch64-linux-gnu",
        "mcpu": mcpu,
        "mattr": ["+neon", *units, *(["-sve"] if mcpu in _SCALABLE else [])],
        "num-cores": cores,
    }
    features = tuple(sorted(("asimd", *extensions)))
    profile = profile or profile_of(tvm, "aarch64", features)
    return Target(name, tvm, "aarch64", features, _cross_compiler("aarch64"), profile)


def _cuda(name: str, arch: str) -> Target:
    tvm: dict[str, Any] = {
        "kind": "cuda",
        "arch": arch,
        "max_num_threads": 1024,
        "max_threads_per_block": 1024,
        "max_shared_memory_per_block": 49152,
        "thread_warp_size": 32,
        "host": {"kind": "llvm", "mtriple": f"{host().arch}-linux-gnu"},
    }
    return Target(name, tvm, "cuda")


def _cross_compiler(arch: str) -> str | None:
    return None if host().arch == arch else f"{arch}-linux-gnu-g++"


def _parse_older_form(name: str, words: list[str]) -> dict[str, Any]:
    """Parse `llvm -mcpu=x -mattr=+a,+b -num-cores 4`, a form that TVM itself no longer reads. Raises TargetError."""
    tvm: dict[str, Any] = {"kind": words[0]}
    rest = words[1:]
    while rest:
        option = rest.pop(0)
        key, equals, value = option.lstrip("-").partition("=")
        if not option.startswith("-") or (not equals and not rest):
            raise TargetError(f"target {name!r}: cannot read {option!r}; write options as -mcpu=NAME")
        value = value if equals else rest.pop(0)
        if key in ("mattr", "libs", "keys"):
            tvm[key] = value.split(",")
        else:
            tvm[key] = int(value) if re.fullmatch("[0-9]{1,9}", value) else value
    return tvm


def _from_tvm(name: str, tvm: dict[str, Any]) -> Target:
    kind = tvm.get("kind")
    cores, attributes = tvm.get("num-cores", 1), tvm.get("mattr", [])
    if type(cores) is not int or cores < 1:
        raise TargetError(f"target {name!r}: num-cores is {cores!r}; give a positive number")
    if not isinstance(attributes, list) or not all(str(item).startswith(("+", "-")) for item in attributes):
        raise TargetError(f"target {name!r}: mattr is {attributes!r}; give a list such as ['+avx2', '-fma']")
    if kind == "cuda":
        return Target(name, tvm, "cuda")
    if kind != "llvm":
        raise TargetError(f"target {name!r}: kind {kind!r} is not built here; use kind 'llvm' or 'cuda'")
    # The levels are x86-64's, on whatever machine they are built for.
    triple = str(tvm.get("mtriple", f"{'x86_64' if tvm.get('mcpu') in _LEVELS else host().arch}-linux-gnu"))
    arch = _ARCH_NAMES.get(triple.split("-")[0], triple.split("-")[0])
    if arch not in ("x86_64", "aarch64"):
        raise TargetError(f"target {name!r}: architecture {arch!r} is not built here; use x86_64 or aarch64")
    full = {"mtriple": triple, "num-cores": host().cores, **tvm}
    features = _llvm_features(name, full, arch)
    profile = profile_of(full, arch, features)
    if profile.arch != arch:
        raise TargetError(f"target {name!r}: the profile {profile.name!r} is for {profile.arch}, not {arch}")
    return Target(name, full, arch, features, _cross_compiler(arch), profile)


def profile_of(tvm: Mapping[str, Any], arch: str, features: tuple[str, ...]) -> Profile:
    """Return the profile for a TVM target of a CPU.

    The target's `model`, if it has one, names the profile, a shipped one or this machine's. Otherwise its `mcpu` does,
    if a shipped profile is for that CPU. Otherwise the profile is `aarch64-generic` on ARM, and on x86-64
    `sapphire-rapids` for a target with AMX and else that of the highest psABI level that `features` include. `features`
    are in the words of /proc/cpuinfo. Raises TargetError for a `model` that is no profile's name.
    """
    if tvm.get("model"):
        return _named_profile(str(tvm["model"]))
    mcpu = str(tvm.get("mcpu", ""))
    own = profiles.of_mcpu(mcpu)
    if own is not None and own.arch == arch and mcpu not in _LEVELS:
        return own
    if arch == "aarch64":
        return profiles.named("aarch64-generic")
    if "amx_tile" in features:
        return profiles.named("sapphire-rapids")
    return profiles.named("x86-64-v4" if "avx512bw" in features else "x86-64-v3" if "avx2" in features else "x86-64-v2")


def _named_profile(name: str) -> Profile:
    """The shipped profile of a name or a `model`, or this machine's, which may have no file. Raises TargetError."""
    try:
        return profiles.named(name)
    except TargetError:
        with suppress(TargetError):
            own = _native().profile
            if own is not None and name in (own.name, own.model):
                return own
        raise


def _llvm_features(name: str, tvm: dict[str, Any], arch: str) -> tuple[str, ...]:
    """The CPU features that LLVM may use for a CPU target, in /proc/cpuinfo's words. Raises TargetError."""
    is_arm = arch == "aarch64"
    words = _LLVM_TO_ARM if is_arm else _LLVM_TO_CPUINFO
    levels = {"generic": ("asimd",)} if is_arm else _LEVELS
    mcpu = str(tvm.get("mcpu", "generic" if is_arm else "x86-64"))
    attributes = [str(item) for item in tvm.get("mattr", [])]
    if not is_arm and mcpu == "generic" and not attributes:
        return ()
    if mcpu in levels:
        features = set(levels[mcpu])
        for attribute in attributes:
            feature = words.get(attribute[1:])
            if feature:
                (features.add if attribute.startswith("+") else features.discard)(feature)
        return tuple(sorted(features))
    import tvm as library
    from tvm_ffi import get_global_func

    # For an unknown CPU TVM only warns, and builds for any. The list of CPUs comes from a target that names none.
    generic = library.target.Target({"kind": "llvm", "mtriple": tvm["mtriple"]})
    if mcpu not in [str(name) for name in get_global_func("target.llvm_get_cpu_archlist")(generic)]:
        other = "x86_64" if is_arm else "aarch64"
        raise TargetError(
            f"target {name!r}: LLVM knows no CPU {mcpu!r} of {arch}; see `llc -mcpu=help` for its names, and add "
            f"-mtriple={other}-linux-gnu for one of {other}"
        )
    try:
        target = library.target.Target({key: value for key, value in tvm.items() if key != "num-cores"})
    except (ValueError, TypeError) as error:
        raise TargetError(f"target {name!r} is refused by TVM: {str(error).splitlines()[0]}") from error
    features_of_llvm = (str(feature) for feature in get_global_func("target.llvm_get_cpu_features")(target))
    return tuple(sorted({words[feature] for feature in features_of_llvm if feature in words}))
