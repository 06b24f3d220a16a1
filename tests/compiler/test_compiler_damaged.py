"""A damaged ONNX file compiles or is refused in one sentence that names it.

The number in a test's name is the seed of the damage. The long run tries thousands: `pytest --long THIS_FILE`.
"""

import random
from collections.abc import Iterator
from pathlib import Path

import pytest

from support import scale
from support.damaged import Attempt, End, mutate
from support.models import save_text
from tvmflow.errors import StepError, naming_model
from tvmflow.processes.children import Child

_HEADER = '<ir_version: 9, opset_import: ["" : 18]>\n'
_LAYERS = """
    agraph (float[N, 3, 6, 6] x) => (float[N, 5] y)
    <float[4, 3, 3, 3] w = {WEIGHTS}, float[4] b = {0.1, 0.2, 0.3, 0.4}, int64[2] flat = {-1, 64},
     float[64, 5] dense = {DENSE}> {
        a = Conv <pads = [0, 0, 0, 0]> (x, w, b)
        c = Relu (a)
        d = Reshape (c, flat)
        e = MatMul (d, dense)
        y = Softmax <axis = -1> (e)
    }
"""
_SHAPES = """
    agraph (float[2, 8] x) => (float[4, 4] y, bool[2, 8] z)
    <int64[2] target = {4, 4}, int64[1] axes = {1}> {
        a = Transpose <perm = [1, 0]> (x)
        b = Concat <axis = 1> (a, a)
        m = ReduceMax <keepdims = 0> (b, axes)
        c = Sub (x, m)
        y = Reshape (c, target)
        z = Greater (x, m)
    }
"""


def _sources(folder: Path) -> list[bytes]:
    generator = random.Random(0)  # noqa: S311

    def numbers(count: int) -> str:
        return ", ".join(f"{generator.uniform(-1, 1):.3f}" for _ in range(count))

    layers = _LAYERS.replace("WEIGHTS", numbers(4 * 27)).replace("DENSE", numbers(64 * 5))
    return [save_text(folder / "valid.onnx", _HEADER + text).read_bytes() for text in (layers, _SHAPES)]


class _Compiler:
    """A child process that attempts one file after the other; one that crashed is replaced."""

    def __init__(self, folder: Path) -> None:
        self.home, self._log = folder / "state", folder / "log"
        self._child: Child | None = None

    def attempt(self, file: Path) -> End:
        if self._child is None:
            paths = (Path(__file__).parents[1], Path(__file__).parents[2])
            self._child = Child("support.damaged:attempt", log=self._log, paths=paths)
        try:
            with naming_model(str(file)):
                return self._child.call(Attempt(file=file, home=self.home), End, timeout=120)
        except StepError as error:  # The process crashed; the command says so in these words.
            self.close()
            return End(outcome="refused", message=str(error))

    def close(self) -> None:
        if self._child is not None:
            self._child.close()
            self._child = None


@pytest.fixture(scope="module")
def compiler(tmp_path_factory: pytest.TempPathFactory) -> Iterator[_Compiler]:
    compiler = _Compiler(tmp_path_factory.mktemp("compiler"))
    yield compiler
    compiler.close()


@pytest.fixture(scope="module")
def sources(tmp_path_factory: pytest.TempPathFactory) -> list[bytes]:
    return _sources(tmp_path_factory.mktemp("sources"))


def test_the_models_compile_before_they_are_damaged(compiler: _Compiler, sources: list[bytes], tmp_path: Path) -> None:
    for number, source in enumerate(sources):
        file = tmp_path / f"model-{number}.onnx"
        file.write_bytes(source)
        end = compiler.attempt(file)
        assert end.outcome == "built", end.message


@pytest.mark.parametrize("seed", range(scale.count(normal=25, long=400, quick=10)))
def test_a_damaged_model_compiles_or_is_refused_in_one_sentence_that_names_it(
    compiler: _Compiler, sources: list[bytes], tmp_path: Path, seed: int
) -> None:
    generator = random.Random(seed)  # noqa: S311
    file = tmp_path / "damaged.onnx"
    file.write_bytes(mutate(generator.choice(sources), generator))
    end = compiler.attempt(file)
    assert end.outcome in ("built", "refused"), end.message
    if end.outcome == "refused":
        assert "damaged.onnx" in end.message
        assert str(compiler.home) not in end.message
        assert "\n" not in end.message
