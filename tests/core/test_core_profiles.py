"""Profiles of processors: every number has a source, this machine is recognised, and another file is refused."""

import itertools
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tvmflow.compiler.machine import machine
from tvmflow.errors import BundleError, TargetError
from tvmflow.hardware import profiles
from tvmflow.hardware.profiles import Processor, Profile
from tvmflow.hardware.target import Host, resolve

_FILES = Path(profiles.__file__).parent / "processors"


@pytest.mark.parametrize("name", sorted(profiles.shipped()))
def test_every_number_of_a_profile_has_a_source_and_the_levels_get_slower(name: str) -> None:
    item = profiles.shipped()[name]
    profile = item.profile
    assert profile.name == name
    assert set(item.sources_of.values()) == set(item.sources)
    assert {path.split(".")[0] for path in item.sources_of} >= {"vectors", "first", "second", "memory", "cores"}
    levels = [profile.first, profile.second, *([profile.third] if profile.third else []), profile.memory]
    for near, far in itertools.pairwise(levels):
        assert near.read > far.read
        assert near.write >= far.write
    sizes = [level.size for level in levels[:-1] if isinstance(level, profiles.Cache)]
    assert sizes == sorted(sizes)
    assert profile.first.size == profile.first.span * profile.first.ways


def test_a_profile_comes_back_from_json_and_its_digest_counts_numbers_alone() -> None:
    profile = profiles.named("zen4")
    assert Profile.from_json(profile.to_json()) == profile
    assert replace(profile, name="mine", title="another").digest == profile.digest
    assert replace(profile, first=replace(profile.first, ways=4)).digest != profile.digest
    assert profiles.named(profile.model) is profile
    with pytest.raises(BundleError, match="damaged"):
        Profile.from_json('{"name": "x"}')


@pytest.mark.parametrize(
    ("processor", "name"),
    [
        (("GenuineIntel", 6, 85, 4), "skylake-x"),
        (("GenuineIntel", 6, 85, 7), "cascade-lake"),
        (("GenuineIntel", 6, 106, 6), "ice-lake-sp"),
        (("GenuineIntel", 6, 143, 8), "sapphire-rapids"),
        (("GenuineIntel", 6, 207, 2), "sapphire-rapids"),
        (("GenuineIntel", 6, 173, 1), "granite-rapids"),
        (("GenuineIntel", 6, 154, 3), "alder-lake"),
        (("AuthenticAMD", 23, 49, 0), "zen2"),
        (("AuthenticAMD", 25, 1, 1), "zen3"),
        (("AuthenticAMD", 25, 17, 1), "zen4"),
        (("AuthenticAMD", 26, 2, 1), "zen5"),
        (("0x41", 0, 0xD0C, 1), "neoverse-n1"),
        (("0x41", 0, 0xD40, 1), "neoverse-v1"),
        (("0x41", 0, 0xD4F, 1), "neoverse-v2"),
        (("0x41", 0, 0xD08, 3), "cortex-a72"),
        (("0x41", 0, 0xD0B, 1), "cortex-a76"),
        (("AuthenticAMD", 23, 1, 1), None),
        (("GenuineIntel", 6, 63, 2), None),
    ],
)
def test_a_processor_has_the_profile_of_its_microarchitecture(
    processor: tuple[str, int, int, int], name: str | None
) -> None:
    profile = profiles.of_processor(Processor(*processor))
    assert (profile and profile.name) == name
    assert sum(item.includes(Processor(*processor)) for item in profiles.shipped().values()) == (name is not None)


def test_cpuinfo_identifies_the_processor() -> None:
    x86 = "processor: 0\nvendor_id\t: AuthenticAMD\ncpu family\t: 25\nmodel\t\t: 17\nstepping\t: 1\n\nmodel\t: 99\n"
    arm = "processor : 0\nCPU implementer : 0x41\nCPU part : 0xd0c\nCPU revision : 1\n"
    assert profiles.parse_processor(x86) == Processor("AuthenticAMD", 25, 17, 1)
    assert profiles.parse_processor(arm) == Processor("0x41", 0, 0xD0C, 1)
    assert profiles.parse_processor("model name : a processor\n") is None


@pytest.mark.parametrize("name", sorted(profiles.shipped()))
def test_a_profile_that_is_written_is_read_as_the_same(name: str) -> None:
    profile = profiles.named(name)
    item = profiles.read(name, profiles.to_toml(profile, {"me": "measured"}, lambda _: "me"))
    assert item.profile == profile
    assert set(item.sources_of.values()) == {"me"}


def _cache(folder: Path, index: int, **values: str) -> None:
    (folder / f"index{index}").mkdir()
    for key, value in values.items():
        (folder / f"index{index}" / key).write_text(value + "\n")


def test_the_caches_of_an_unknown_processor_are_those_that_the_kernel_tells(tmp_path: Path) -> None:
    common = {"ways_of_associativity": "12", "coherency_line_size": "64"}
    _cache(tmp_path, 0, level="1", type="Data", size="48K", shared_cpu_map="0000,00000003", **common)
    _cache(tmp_path, 1, level="1", type="Instruction", size="64K", shared_cpu_map="3", **common)
    _cache(tmp_path, 2, level="3", type="Unified", size="30M", shared_cpu_map="ff", **common)
    _cache(tmp_path, 3, level="2", type="Unified", size="?", shared_cpu_map="3", **common)
    _cache(tmp_path, 4, level="2", type="Unified", size="0K", shared_cpu_map="3", **common)
    level = profiles.named("x86-64-v3")
    profile = profiles.with_caches(level, tmp_path)
    assert profile.name == "x86-64-v3-caches"
    assert (profile.first.size, profile.first.ways, profile.first.cores) == (48 << 10, 12, 1)
    assert profile.second == level.second
    assert profile.third is not None
    assert (profile.third.size, profile.third.cores) == (30 << 20, 8)
    assert profiles.with_caches(level, tmp_path / "none") is level


def test_native_uses_the_recognised_profile_or_the_one_of_a_file(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    level = set(resolve("x86-64-v4").features)
    become = Host("x86_64", frozenset(level), 2, Processor("AuthenticAMD", 25, 17, 1))
    monkeypatch.setattr("tvmflow.hardware.target.host", lambda: become)
    monkeypatch.delenv("TVMFLOW_PROFILE", raising=False)
    assert resolve("native").profile == profiles.named("zen4")
    mine = tmp_path / "mine.toml"
    mine.write_text((_FILES / "zen5.toml").read_text())
    monkeypatch.setenv("TVMFLOW_PROFILE", str(mine))
    own = resolve("native").profile
    assert own is not None
    assert (own.name, own.digest) == ("mine", profiles.named("zen5").digest)
    canonical = resolve("native").canonical
    assert resolve(canonical).canonical == canonical
    for text, reason in (("x = ", "cannot be read"), ((_FILES / "cortex-a72.toml").read_text(), "aarch64")):
        mine.write_text(text)
        with pytest.raises(TargetError, match=reason):
            resolve("native")
    monkeypatch.setenv("TVMFLOW_PROFILE", str(tmp_path / "absent.toml"))
    with pytest.raises(TargetError, match=r"absent\.toml"):
        resolve("native")


@pytest.mark.parametrize(
    ("target", "name"),
    [
        ("x86-64-v3", "x86-64-v3"),
        ("x86-64-v4-amx", "sapphire-rapids"),
        ("aarch64-cortex-a76", "cortex-a76"),
        ("aarch64-generic", "aarch64-generic"),
        ("llvm -mcpu=x86-64-v4 -model=zen4", "zen4"),
        ("llvm -mtriple=aarch64-linux-gnu -mcpu=neoverse-v1", "neoverse-v1"),
        ("llvm -mcpu=x86-64-v2 -mattr=+avx2,+avx512f,+avx512bw", "x86-64-v4"),
        # Without products of short integers in 512 bits the code has 256.
        ("llvm -mcpu=x86-64-v2 -mattr=+avx2,+avx512f", "x86-64-v3"),
        ("llvm -mcpu=x86-64-v4 -mattr=+amx-tile", "sapphire-rapids"),
    ],
)
def test_a_target_has_the_profile_of_its_model_or_its_processor(target: str, name: str) -> None:
    profile = resolve(target).profile
    assert profile is not None
    assert profile.name == name
    assert resolve("cuda-sm80").profile is None


def test_a_target_of_another_architectures_or_an_unknown_profile_is_refused() -> None:
    with pytest.raises(TargetError, match="'zen9'"):
        resolve("llvm -mcpu=x86-64-v4 -model=zen9")
    with pytest.raises(TargetError, match="aarch64"):
        resolve("llvm -mtriple=x86_64-linux-gnu -mcpu=x86-64-v4 -model=cortex-a72")


def test_code_of_narrower_vectors_sees_their_numbers_on_the_same_caches() -> None:
    narrow, wide = (machine(resolve(f"llvm -mcpu=x86-64-{level} -model=zen4")) for level in ("v3", "v4"))
    assert (narrow.lanes, narrow.registers, narrow.vectors.multiply_adds) == (8, 16, 2)
    assert (wide.lanes, wide.registers, wide.vectors.multiply_adds) == (16, 32, 1)
    assert narrow.first == wide.first


@pytest.mark.parametrize(
    ("before", "after", "reason"),
    [
        ("ways = 8", "", "missing"),
        ("ways = 8", 'ways = "8"', "ways"),
        ("ways = 8", "ways = -1", "ways"),
        ("ways = 8", "ways = 8\nrows = 8", "rows has no source"),
        ('sog = "', 'dog = "', "'sog'"),
        ('arch = "x86_64"', 'arch = "x86_64"\nowner = "me"', "owner"),
    ],
)
def test_a_wrong_file_is_refused_in_one_sentence(before: str, after: str, reason: str) -> None:
    text: Any = (_FILES / "zen4.toml").read_text()
    assert before in text
    with pytest.raises(TargetError, match=reason):
        profiles.read("mine", text.replace(before, after, 1))
