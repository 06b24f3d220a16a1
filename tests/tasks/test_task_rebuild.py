"""Bundles that are built again from a factory: the same when it is seeded, else a verdict that names the factory."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from support.steps import compile_by_steps, steps_in_this_process
from tasks.rebuild import rebuild
from tvmflow.errors import VerdictError

Compile = Callable[[str], tuple[Path, Path, str]]

_FACTORY = """
import torch
from torch import nn


def create():
    {seed}
    return nn.Linear(4, 3)
"""


@pytest.fixture
def compiled(tmp_path: Path, user_code: Callable[[str], str], monkeypatch: pytest.MonkeyPatch) -> Compile:
    """Builds the bundle of a factory that runs `seed` first; returns it, its release file and the factory's name."""

    def compile_factory(seed: str) -> tuple[Path, Path, str]:
        factory = f"{user_code(_FACTORY.format(seed=seed))}:create"
        inputs: list[dict[str, Any]] = [{"name": "x", "shape": [2, 4]}]
        document = {"name": "again", "model": {"factory": factory}, "inputs": inputs, "targets": ["native"]}
        file = tmp_path / "release.yaml"
        file.write_text(yaml.safe_dump(document))
        monkeypatch.setenv("TVMFLOW_HOME", str(tmp_path / "state"))
        return compile_by_steps(document, tmp_path, tmp_path / "state"), file, factory

    return compile_factory


@pytest.mark.long
def test_a_factory_that_is_not_seeded_is_named_by_the_verdict(
    compiled: Compile,
) -> None:
    bundle, file, factory = compiled("pass")
    with steps_in_this_process(), pytest.raises(VerdictError) as caught:
        rebuild(bundle, file, ())
    message = str(caught.value)
    assert [name for name in (str(bundle), factory, "seed") if name not in message] == []


@pytest.mark.long
def test_the_bundle_of_a_seeded_factory_is_built_again(compiled: Compile) -> None:
    bundle, file, _ = compiled("torch.manual_seed(0)")
    with steps_in_this_process():
        parts = rebuild(bundle, file, ())
    assert {"ONNX file", "weights", "mod.so", "manifest"} <= set(parts)
