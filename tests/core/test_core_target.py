"""Targets: presets, TVM's own forms, and wrong targets, which are refused with a hint."""

import json
import re

import pytest

from tvmflow.errors import TargetError
from tvmflow.hardware.profiles import Processor, shipped
from tvmflow.hardware.target import Host, host, missing_features, presets, resolve


@pytest.mark.parametrize("name", sorted(presets()))
def test_every_preset_resolves_to_its_name(name: str) -> None:
    target = resolve(name)
    assert target.name == name
    assert target.arch in ("x86_64", "aarch64", "cuda")
    model = {} if target.profile is None else {"model": target.profile.model}
    assert json.loads(target.canonical) == {**target.tvm, **model}


def test_native_asks_for_nothing_that_this_machine_lacks() -> None:
    target = resolve("native")
    assert target.arch == host().arch
    assert missing_features(target.features) == ()
    assert target.cross_compiler is None
    assert target.threads == host().cores


def test_each_level_needs_more_than_the_one_below() -> None:
    levels = [set(resolve(f"x86-64-v{level}").features) for level in (2, 3, 4)]
    assert levels[0] < levels[1] < levels[2]
    assert {"avx2", "fma"} <= levels[1] - levels[0]
    assert "avx512f" in levels[2] - levels[1]


def test_another_architecture_is_linked_by_its_cross_compiler() -> None:
    target = resolve("aarch64-cortex-a72" if host().arch == "x86_64" else "x86-64-v3")
    assert target.cross_compiler == f"{target.arch}-linux-gnu-g++"


def test_the_older_form_says_the_same_as_json() -> None:
    older = resolve("llvm -mtriple=x86_64-linux-gnu -mcpu=x86-64-v3 -mattr=+avx512f,-fma -num-cores 4")
    tvm = {
        "kind": "llvm",
        "mtriple": "x86_64-linux-gnu",
        "mcpu": "x86-64-v3",
        "mattr": ["+avx512f", "-fma"],
        "num-cores": 4,
    }
    for form in (json.dumps(tvm), tvm):
        target = resolve(form)
        assert (target.canonical, target.features, target.threads) == (older.canonical, older.features, 4)
    assert "avx512f" in older.features
    assert "fma" not in older.features


def test_the_key_does_not_depend_on_the_order_of_options() -> None:
    assert (
        resolve({"kind": "llvm", "mcpu": "x86-64-v3"}).canonical
        == resolve({"mcpu": "x86-64-v3", "kind": "llvm"}).canonical
    )


def test_a_cpu_by_name_needs_the_features_that_llvm_uses_on_it() -> None:
    features = set(resolve("llvm -mcpu=znver4 -mtriple=x86_64-linux-gnu").features)
    assert set(resolve("x86-64-v4").features) - {"lahf_lm"} <= features
    assert {"avx512_bf16", "avx512_vnni", "avx512_vbmi2", "vaes", "sse4a"} <= features
    assert not {"amx_tile", "avx512_fp16"} & features


@pytest.mark.parametrize("name", sorted(name for name, item in shipped().items() if item.level))
def test_a_processor_by_the_name_of_its_profile_is_what_it_is_to_itself(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    item, cores = shipped()[name], host().cores
    target = resolve(name)
    assert target.profile is item.profile
    # LLVM's list of what the oldest of these processors has beyond its level, where a bundle's code can use it.
    of_llvm = set(resolve(f"llvm -mcpu={item.mcpu[0]} -mtriple=x86_64-linux-gnu").features) & _extensions()
    assert set(item.extensions) == of_llvm
    # On the processor itself, the target is the machine's own.
    table = item.processors[0]
    processor = Processor(table["vendor"], table.get("family", 0), table["models"][0], table.get("steppings", [0])[0])
    machine = Host("x86_64", frozenset(target.features), cores, processor)
    monkeypatch.setattr("tvmflow.hardware.target.host", lambda: machine)
    monkeypatch.setattr("tvmflow.hardware.target.request_amx", lambda: True)
    monkeypatch.delenv("TVMFLOW_PROFILE", raising=False)
    assert resolve("native").canonical == target.canonical


def _extensions() -> set[str]:
    return {feature for item in shipped().values() for feature in item.extensions}


@pytest.mark.parametrize(
    "name",
    [
        "aarch64-generic",
        "aarch64-cortex-a72",
        "aarch64-cortex-a76",
        "aarch64-neoverse-n1",
        "aarch64-neoverse-v1",
        "aarch64-neoverse-v2",
    ],
)
def test_a_preset_of_arm_needs_the_features_that_llvm_uses_on_its_cpu(name: str) -> None:
    target = resolve(name)
    without = [attribute for attribute in target.tvm["mattr"] if attribute.startswith("-")]
    options = {"kind": "llvm", "mtriple": target.tvm["mtriple"], "mcpu": target.tvm["mcpu"], "mattr": without}
    assert resolve(options).features == target.features


def test_an_arm_cpu_by_name_needs_the_features_that_llvm_uses_on_it() -> None:
    features = set(resolve("llvm -mtriple=aarch64-linux-gnu -mcpu=neoverse-v1").features)
    assert features >= {"asimd", "asimddp", "asimdhp", "bf16", "i8mm", "sve"}
    assert "sve2" not in features
    assert "sve2" in resolve("llvm -mtriple=aarch64-linux-gnu -mattr=+neon,+sve2").features


def test_an_attribute_adds_to_a_cpus_features() -> None:
    assert "amx_tile" in resolve("llvm -mcpu=znver4 -mtriple=x86_64-linux-gnu -mattr=+amx-tile").features


def test_an_attribute_takes_from_a_cpus_features() -> None:
    features = resolve("llvm -mcpu=znver4 -mtriple=x86_64-linux-gnu -mattr=-avx512f").features
    assert "avx2" in features
    assert not [name for name in features if name.startswith("avx512")]


def test_the_baseline_needs_no_feature() -> None:
    assert resolve("llvm -mtriple=x86_64-linux-gnu").features == ()


def test_a_gpu_target_builds_its_host_part_for_this_machine() -> None:
    target = resolve("cuda-sm90")
    assert target.arch == "cuda"
    assert target.tvm["arch"] == "sm_90"
    assert target.tvm["host"]["kind"] == "llvm"


REFUSED = [
    ("nativ", "'native'?"),
    ("x86-64-v9", "'x86-64-v"),
    ("raspberry", "native, x86-64-v2"),
    ("", "native"),
    ("llvm mcpu=znver4", "'mcpu=znver4'"),
    ("llvm -mcpu", "'-mcpu'"),
    ("llvm -mcpu=nonesuch -mtriple=x86_64-linux-gnu", "'nonesuch'"),
    ("llvm -mcpu=znver4 -mtriple=aarch64-linux-gnu", "'znver4'"),
    ("llvm -mcpu=x86-64 -mtriple=aarch64-linux-gnu", "'x86-64'"),
    ("c", "kind 'c'"),
    ("llvm -num-cores=0", "num-cores is 0"),
    ("llvm -num-cores=many", "num-cores is 'many'"),
    ("llvm -mattr=avx2", "mattr is ['avx2']"),
    ('{"kind": "llvm", "mattr": "+avx2"}', "mattr is '+avx2'"),
    ('{"kind": "vulkan"}', "kind 'vulkan'"),
    ('{"kind": "llvm", "mtriple": "riscv64-linux-gnu"}', "'riscv64'"),
    ('{"kind": "llvm", "mtriple": "x86_64-linux-gnu", "mcpu": "skylake", "cores": 4}', "TVM"),
    ('{"kind": "llvm"', "JSON"),
    ("{}", "kind None"),
]


@pytest.mark.parametrize(("text", "name"), REFUSED)
def test_an_impossible_target_is_refused_with_the_value_that_is_wrong(text: str, name: str) -> None:
    with pytest.raises(TargetError, match=re.escape(name)) as caught:
        resolve(text)
    assert repr(text) in str(caught.value)
    assert "\n" not in str(caught.value)
