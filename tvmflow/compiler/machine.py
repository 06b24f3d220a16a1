"""The processor of a target as the rules see it: its profile at the vector width that the target's code uses."""

from dataclasses import dataclass, replace

from tvmflow.hardware.profiles import Cache, Memory, Profile, Tiles, Vectors
from tvmflow.hardware.target import Target, profile_of

# The numbers of 32 bits in the narrowest vectors of every instruction set that this project compiles for: 128 bits.
NARROWEST = 4


@dataclass(frozen=True)
class Machine:
    """A processor as the schedules and the cost model see it; see `tvmflow.hardware.profiles` for the numbers.

    `arch` is `x86_64` or `aarch64`. `vectors` describes the vectors that the code uses. `cores` is the number of cores
    that work together. `region` is the cycles to start and to end a parallel region. `amx` names the dot products
    (`tvmflow.compiler.dotproduct`) that AMX computes; `tiles` are its costs. `cold` is true where a model's weights
    come from memory in every run. `number` is the bytes of one number of the type that is computed with.
    `converts_halves` says whether there are instructions that convert float16 to float32.
    """

    arch: str
    vectors: Vectors
    first: Cache
    second: Cache
    third: Cache | None
    memory: Memory
    region: int
    cores: int
    tiles: Tiles | None = None
    amx: frozenset[str] = frozenset()
    cold: bool = False
    number: int = 4
    converts_halves: bool = False

    @property
    def lanes(self) -> int:
        """How many numbers a vector holds."""
        return self.vectors.bits // (8 * self.number)

    @property
    def fewest_lanes(self) -> int:
        """The fewest numbers that are worth a vector: half of the lanes, and at least 4."""
        return max(self.lanes // 2, NARROWEST)

    @property
    def registers(self) -> int:
        """The number of vector registers."""
        return self.vectors.registers

    @property
    def own_cache(self) -> int:
        """A core's share of the second-level cache, in bytes."""
        return self.second.share(self.cores)

    @property
    def last(self) -> Cache:
        """The cache before the memory."""
        return self.third or self.second

    @property
    def parallel_cycles(self) -> int:
        """The fewest cycles, on one core, of a function that gains by a parallel region."""
        return 2 * self.region

    @property
    def parallel_iterations(self) -> int:
        """The fewest iterations of a loop nest that is worth a parallel region.

        It is the number of cycles to start and to end a region: an iteration counts as one cycle.
        """
        return self.region

    def for_weights(self, size: int) -> "Machine":
        """Return this machine for a model of `size` bytes of weights: `cold` if they exceed half of the last cache."""
        return replace(self, cold=2 * size > self.last.size)


def machine(target: Target) -> Machine:
    """Return the processor of a CPU target."""
    profile = target.profile or profile_of(target.tvm, target.arch, target.features)
    return of_profile(profile, target.features, target.threads)


def of_profile(profile: Profile, features: tuple[str, ...], cores: int) -> Machine:
    """Return the processor of a profile, of which `cores` cores work together.

    `features`, in the words of /proc/cpuinfo, decide on the width of its vectors and on AMX.
    """
    # Kernels of 512 bits multiply 8-bit and 16-bit integers, which AVX512F alone does not.
    bits = 512 if {"avx512f", "avx512bw"} <= set(features) else 256 if "avx" in features else 128
    tiles = {name for name in ("bf16", "int8") if {"amx_tile", f"amx_{name}"} <= set(features)}
    return Machine(
        arch=profile.arch,
        vectors=profile.vectors_of(bits),
        first=profile.first,
        second=profile.second,
        third=profile.third,
        memory=profile.memory,
        region=profile.cores.region,
        cores=cores,
        tiles=profile.tiles,
        amx=frozenset(tiles if profile.tiles is not None else ()),
        converts_halves=profile.arch == "aarch64" or "f16c" in features,
    )
