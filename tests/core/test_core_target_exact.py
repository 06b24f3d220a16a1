"""The exact text of every target: it is the key of tuning records and caches, so a change must be noticed."""

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tvmflow.errors import TargetError
from tvmflow.hardware.target import (
    Host,
    Precision,
    Target,
    explain_missing_unit,
    host,
    missing_features,
    needed_features,
    presets,
    processor,
    resolve,
)

V2 = {"cx16", "lahf_lm", "pni", "popcnt", "sse4_1", "sse4_2", "ssse3"}
V3 = V2 | {"abm", "avx", "avx2", "bmi1", "bmi2", "f16c", "fma", "movbe"}
V4 = V3 | {"avx512bw", "avx512cd", "avx512dq", "avx512f", "avx512vl"}
VNNI, BF16 = {"avx512_vnni"}, {"avx512_bf16", "avx512_vnni"}
AMX = BF16 | {"amx_bf16", "amx_int8", "amx_tile"}
ARM_V8_2 = {"asimd", "asimddp", "asimdhp", "asimdrdm", "atomics"}
ARM_V8_4 = ARM_V8_2 | {"asimdfhm", "bf16", "fcma", "i8mm"}
WIDE = "-prefer-256-bit"
RAPIDS = ("+avx512vnni", "+avx512bf16", "+avx512fp16", "+avxvnni", "+amx-tile", "+amx-bf16", "+amx-int8")
Become = Callable[..., None]


@pytest.fixture
def become(monkeypatch: pytest.MonkeyPatch) -> Become:
    """Pretend that this machine is another one, which permits AMX where it has it."""
    monkeypatch.setattr("tvmflow.hardware.target.request_amx", lambda: True)

    def replace(arch: str, features: set[str] = frozenset(), cores: int = 6) -> None:  # type: ignore[assignment]
        machine = Host(arch, frozenset(features), cores)
        monkeypatch.setattr("tvmflow.hardware.target.host", lambda: machine)

    return replace


def x86(mcpu: str, *mattr: str) -> dict[str, Any]:
    options = {"mattr": list(mattr)} if mattr else {}
    return {"kind": "llvm", "mtriple": "x86_64-linux-gnu", "mcpu": mcpu, "num-cores": 6, **options}


def arm(mcpu: str, *mattr: str, cores: int = 4) -> dict[str, Any]:
    options = {"mcpu": mcpu, "mattr": ["+neon", *mattr], "num-cores": cores}
    return {"kind": "llvm", "mtriple": "aarch64-linux-gnu", **options}


def cuda(arch: str) -> dict[str, Any]:
    return {
        "kind": "cuda",
        "arch": arch,
        "max_num_threads": 1024,
        "max_threads_per_block": 1024,
        "max_shared_memory_per_block": 49152,
        "thread_warp_size": 32,
        "host": {"kind": "llvm", "mtriple": "x86_64-linux-gnu"},
    }


PRESETS: dict[str, tuple[dict[str, Any], set[str]]] = {
    "x86-64-v2": (x86("x86-64-v2"), V2),
    "x86-64-v3": (x86("x86-64-v3"), V3),
    "x86-64-v4": (x86("x86-64-v4", WIDE), V4),
    "x86-64-v4-vnni": (x86("x86-64-v4", "+avx512vnni", WIDE), V4 | VNNI),
    "x86-64-v4-bf16": (x86("x86-64-v4", "+avx512bf16", "+avx512vnni", WIDE), V4 | BF16),
    "x86-64-v4-amx": (
        x86("x86-64-v4", "+amx-bf16", "+amx-int8", "+amx-tile", "+avx512bf16", "+avx512vnni", WIDE),
        V4 | AMX,
    ),
    "aarch64-generic": (arm("generic"), {"asimd"}),
    "aarch64-cortex-a72": (arm("cortex-a72"), {"asimd"}),
    "aarch64-cortex-a76": (arm("cortex-a76", "+dotprod", "+fullfp16"), ARM_V8_2),
    "aarch64-neoverse-n1": (arm("neoverse-n1", "+dotprod", "+fullfp16"), ARM_V8_2),
    "aarch64-neoverse-v1": (arm("neoverse-v1", "+dotprod", "+fullfp16", "+bf16", "+i8mm", "-sve"), ARM_V8_4),
    "aarch64-neoverse-v2": (arm("neoverse-v2", "+dotprod", "+fullfp16", "+bf16", "+i8mm", "-sve"), ARM_V8_4),
    "cuda-sm80": (cuda("sm_80"), set()),
    "cuda-sm90": (cuda("sm_90"), set()),
    "zen2": (x86("x86-64-v3"), V3),
    "zen3": (x86("x86-64-v3"), V3),
    "alder-lake": (x86("x86-64-v3", "+avxvnni"), V3 | {"avx_vnni"}),
    "skylake-x": (x86("x86-64-v4", WIDE), V4),
    "cascade-lake": (x86("x86-64-v4", "+avx512vnni", WIDE), V4 | VNNI),
    "ice-lake-sp": (x86("x86-64-v4", "+avx512vnni", WIDE), V4 | VNNI),
    "zen4": (x86("x86-64-v4", "+avx512vnni", "+avx512bf16", WIDE), V4 | BF16),
    "zen5": (x86("x86-64-v4", "+avx512vnni", "+avx512bf16", "+avxvnni", WIDE), V4 | BF16 | {"avx_vnni"}),
    "sapphire-rapids": (x86("x86-64-v4", *RAPIDS, WIDE), V4 | AMX | {"avx512_fp16", "avx_vnni"}),
    "granite-rapids": (x86("x86-64-v4", *RAPIDS, WIDE), V4 | AMX | {"avx512_fp16", "avx_vnni"}),
}


def test_every_preset_is_the_target_that_it_was(become: Become) -> None:
    become("x86_64")
    assert PRESETS.keys() | {"native"} == presets().keys()
    assert all(presets().values())
    for name, (tvm, features) in PRESETS.items():
        target = resolve(f" {name}\n")
        assert (target.name, target.tvm, target.features) == (name, tvm, tuple(sorted(features))), name
        assert target.arch == ("cuda" if "kind" in tvm and tvm["kind"] == "cuda" else tvm["mtriple"].split("-")[0])
        assert target.cross_compiler == ("aarch64-linux-gnu-g++" if target.arch == "aarch64" else None)
        assert target.threads == tvm.get("num-cores", 1)
        model = {} if target.profile is None else {"model": target.profile.model}
        assert target.canonical == json.dumps({**tvm, **model}, sort_keys=True, separators=(",", ":"))


def test_on_another_architecture_the_compilers_and_hosts_change_places(become: Become) -> None:
    become("aarch64", cores=2)
    assert resolve("x86-64-v3").cross_compiler == "x86_64-linux-gnu-g++"
    assert resolve("aarch64-generic").cross_compiler is None
    assert resolve("cuda-sm80").tvm["host"] == {"kind": "llvm", "mtriple": "aarch64-linux-gnu"}
    assert resolve("llvm").tvm == {"kind": "llvm", "mtriple": "aarch64-linux-gnu", "num-cores": 2}
    level = resolve("llvm -mcpu=x86-64-v3")
    assert (level.arch, level.tvm["mtriple"], level.features) == ("x86_64", "x86_64-linux-gnu", tuple(sorted(V3)))


@pytest.mark.parametrize(
    ("arch", "features", "tvm", "extensions"),
    [
        ("x86_64", set(), x86("x86-64"), set()),
        ("x86_64", V2 | {"avx2"}, x86("x86-64-v2"), V2),
        ("x86_64", V3, x86("x86-64-v3"), V3),
        ("x86_64", V3 | {"avx_vnni", "sse4a"}, x86("x86-64-v3", "+avxvnni"), V3 | {"avx_vnni"}),
        ("x86_64", V4 - {"fma"}, x86("x86-64-v2"), V2),
        ("x86_64", V4 | {"avx512_fp16"}, x86("x86-64-v4", "+avx512fp16", WIDE), V4 | {"avx512_fp16"}),
        (
            "x86_64",
            V4 | AMX,
            x86("x86-64-v4", "+avx512vnni", "+avx512bf16", "+amx-tile", "+amx-bf16", "+amx-int8", WIDE),
            V4 | AMX,
        ),
        ("aarch64", {"asimd"}, arm("generic", cores=6), {"asimd"}),
        ("aarch64", {"asimd", "asimdhp"}, arm("generic", "+fullfp16", cores=6), {"asimd", "asimdhp"}),
        (
            "aarch64",
            {"asimd", "asimddp", "bf16", "i8mm", "sve"},
            arm("generic", "+dotprod", "+bf16", "+i8mm", cores=6),
            {"asimd", "asimddp", "bf16", "i8mm"},
        ),
    ],
)
def test_native_is_the_highest_level_and_every_extension_of_this_machine(
    become: Become, arch: str, features: set[str], tvm: dict[str, Any], extensions: set[str]
) -> None:
    become(arch, features)
    target = resolve("native")
    assert (target.name, target.tvm, target.arch) == ("native", tvm, arch)
    assert target.features == tuple(sorted(extensions))
    assert target.cross_compiler is None
    assert missing_features(target.features) == ()


def test_native_does_without_amx_where_the_system_does_not_permit_it(
    become: Become, monkeypatch: pytest.MonkeyPatch
) -> None:
    become("x86_64", V4 | AMX)
    monkeypatch.setattr("tvmflow.hardware.target.request_amx", lambda: False)
    assert resolve("native").features == tuple(sorted(V4 | BF16))


def test_native_of_an_unknown_architecture_is_refused(become: Become) -> None:
    become("riscv64")
    with pytest.raises(TargetError, match="'riscv64'"):
        resolve("native")


@pytest.mark.parametrize(
    ("machine", "text", "arch", "features", "name"),
    [
        ("AMD64", "model name\t: Zen 4\nflags\t\t: fpu avx2\nflags: no\n", "x86_64", {"fpu", "avx2"}, "Zen 4"),
        ("arm64", "Features : asimd fp\n", "aarch64", {"asimd", "fp"}, "arm64"),
        ("x86-64", "my flags: none\nmy model name: none\n", "x86_64", set(), "x86-64"),
        ("riscv64", None, "riscv64", set(), "riscv64"),
    ],
)
def test_this_machine_is_what_the_kernel_says(
    monkeypatch: pytest.MonkeyPatch, machine: str, text: str | None, arch: str, features: set[str], name: str
) -> None:
    def read_text(path: Path) -> str:
        assert path == Path("/proc/cpuinfo")
        if text is None:
            raise FileNotFoundError
        return text

    monkeypatch.setattr("platform.machine", lambda: machine)
    monkeypatch.setattr(Path, "read_text", read_text)
    monkeypatch.setattr("tvmflow.hardware.cores.count", lambda: 3)
    assert host.__wrapped__() == Host(arch, frozenset(features), 3)
    assert processor() == name


def test_missing_features_are_sorted_and_those_that_are_here_left_out(become: Become) -> None:
    become("x86_64", {"avx2"})
    assert missing_features(("sve", "avx2", "avx512f")) == ("avx512f", "sve")
    assert missing_features(("avx2",)) == ()


def test_only_products_of_narrow_numbers_need_amx() -> None:
    target = Target("t", {}, "x86_64", ("amx_bf16", "amx_fp16", "amx_int8", "amx_tile", "avx2"))
    needs: dict[Precision, tuple[str, ...]] = {
        "fp32": ("avx2",),
        "fp16": ("avx2",),
        "bf16": ("amx_bf16", "amx_tile", "avx2"),
        "int8": ("amx_int8", "amx_tile", "avx2"),
    }
    assert {precision: needed_features(target, precision) for precision in needs} == needs


@pytest.mark.parametrize(
    ("arch", "features", "precisions"),
    [
        ("x86_64", (), {"fp32", "int8"}),
        ("x86_64", ("avx512_bf16",), {"fp32", "int8", "bf16"}),
        ("aarch64", (), {"fp32"}),
        ("aarch64", ("asimddp",), {"fp32", "int8"}),
        ("aarch64", ("bf16",), {"fp32", "bf16"}),
        ("aarch64", ("asimdhp",), {"fp32", "fp16"}),
        ("cuda", (), {"fp32", "fp16"}),
    ],
)
def test_a_reduced_precision_needs_one_of_its_units(
    arch: str, features: tuple[str, ...], precisions: set[Precision]
) -> None:
    target = Target("poor", {}, arch, features)
    arm_8_4 = {"aarch64-neoverse-v1", "aarch64-neoverse-v2"}
    arm_8_2 = {"aarch64-cortex-a76", "aarch64-neoverse-n1", *arm_8_4}
    with_bf16 = {"x86_64": {"x86-64-v4-bf16", "x86-64-v4-amx"}, "aarch64": arm_8_4}
    presets_with: dict[Precision, set[str]] = {
        "bf16": with_bf16.get(arch, set().union(*with_bf16.values())),
        "int8": arm_8_2,
        "fp16": arm_8_2,
    }
    for precision in ("fp32", "bf16", "fp16", "int8"):
        reason = explain_missing_unit(target, precision)
        assert (reason is None) == (precision in precisions), precision
        if reason is not None:
            assert "'poor'" in reason
            assert precision in reason
            assert {name for name in PRESETS if re.search(rf" {name}([ ,]|$)", reason)} == presets_with[precision]


@pytest.mark.parametrize(
    ("text", "tvm", "features"),
    [
        ("llvm -mcpu=x86-64-v3 --num-cores 4", {"mcpu": "x86-64-v3", "num-cores": 4}, V3),
        (
            "llvm -mcpu x86-64-v2 -mattr=+fma,-ssse3,+made-up",
            {"mcpu": "x86-64-v2", "mattr": ["+fma", "-ssse3", "+made-up"]},
            (V2 | {"fma"}) - {"ssse3"},
        ),
        (
            "llvm -mcpu=x86-64-v2 -mattr=+bmi,+lzcnt",
            {"mcpu": "x86-64-v2", "mattr": ["+bmi", "+lzcnt"]},
            V2 | {"abm", "bmi1"},
        ),
        ("llvm -keys=cpu,fast -libs=mkl", {"keys": ["cpu", "fast"], "libs": ["mkl"]}, set()),
        ("llvm -mcpu=generic", {"mcpu": "generic"}, set()),
        ("llvm -mtriple=amd64-linux-gnu", {"mtriple": "amd64-linux-gnu"}, set()),
        ("llvm -mtriple=arm64-linux-gnu", {"mtriple": "arm64-linux-gnu"}, {"asimd"}),
        (
            "llvm -mtriple=aarch64-linux-gnu -mattr=+fullfp16",
            {"mtriple": "aarch64-linux-gnu", "mattr": ["+fullfp16"]},
            {"asimd", "asimdhp"},
        ),
    ],
)
def test_a_full_target_is_completed_by_this_machine(
    become: Become, text: str, tvm: dict[str, Any], features: set[str]
) -> None:
    become("x86_64")
    target = resolve(text)
    assert target.tvm == {"kind": "llvm", "mtriple": "x86_64-linux-gnu", "num-cores": 6, **tvm}
    assert target.features == tuple(sorted(features))
    assert target.name == text
    assert target.arch == ("aarch64" if "asimd" in features else "x86_64")
    assert target.cross_compiler == ("aarch64-linux-gnu-g++" if target.arch == "aarch64" else None)
    assert target.threads == tvm.get("num-cores", 6)


def test_a_target_as_data_is_named_alike_in_any_order_of_its_options(become: Become) -> None:
    become("x86_64")
    options = {"kind": "llvm", "num-cores": 2, "mcpu": "x86-64-v3"}
    assert resolve(options).name == resolve(dict(reversed(options.items()))).name


_CIRCULAR: dict[str, Any] = {"kind": "llvm"}
_CIRCULAR["host"] = _CIRCULAR


def test_a_gpu_is_named_by_any_compute_capability() -> None:
    assert resolve("cuda-sm89").tvm["arch"] == "sm_89"
    assert resolve("cuda-sm120").tvm == {**resolve("cuda-sm90").tvm, "arch": "sm_120"}
    for name in ("cuda-sm", "cuda-sm9", "cuda-sm09", "cuda-sm90x", "cuda-sm1200", "cuda-sm\uff19\uff10"):
        with pytest.raises(TargetError, match="is unknown"):
            resolve(name)


def test_a_gpu_target_stays_as_it_is(become: Become) -> None:
    become("x86_64", V4)
    for text in ("cuda -arch=sm_75", {"kind": "cuda", "arch": "sm_75"}, '{"kind": "cuda", "arch": "sm_75"}'):
        target = resolve(text)
        assert (target.tvm, target.arch, target.features) == ({"kind": "cuda", "arch": "sm_75"}, "cuda", ())
        assert target.cross_compiler is None
        assert target.threads == 1


@pytest.mark.parametrize(
    ("target", "value"),
    [
        ({"kind": "llvm", "num-cores": 0}, "0"),
        ({"kind": "llvm", "num-cores": True}, "True"),
        ({"kind": "llvm", "num-cores": 1.5}, "1.5"),
        ({"kind": "cuda", "num-cores": -1}, "-1"),
        ({"kind": "llvm", "mattr": ["+avx2", "fma"]}, "'fma'"),
        ({"kind": "llvm", "mattr": ["-avx2", 3]}, "3"),
        ({"kind": "llvm", "x": object()}, "JSON"),
        (_CIRCULAR, "JSON"),
        ("llvm -num-cores 99999999999999999999", "'99999999999999999999'"),
        ("llvm mcpu=x", "'mcpu=x'"),
        ("llvm -mcpu", "'-mcpu'"),
        ("x86-64", "'x86-64'"),
        ("{" + '"a":' * 3, "JSON"),
        ('{"a":' * 100_000, "JSON"),
    ],
)
def test_a_wrong_option_is_refused_by_its_value(become: Become, target: Any, value: str) -> None:
    become("x86_64")
    with pytest.raises(TargetError) as caught:
        resolve(target)
    assert value in str(caught.value)
    assert resolve({"kind": "llvm", "num-cores": 1, "mattr": ["+fma", "-avx2"], "mcpu": "x86-64-v2"}).threads == 1
