"""Functions to tune, lowered from Relax as the compiler lowers a model's."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path

import pytest
from tvm import IRModule, relax, script, tirx
from tvm import target as tvm_target
from tvm import transform as tvm_transform

from tvmflow.hardware.target import Target, host, resolve
from tvmflow.tuning import RecordStore


def _lower(shapes: Mapping[str, tuple[object, ...]], build: Callable[..., relax.Expr], target: Target) -> tirx.PrimFunc:
    """The one function that `build`, an expression over inputs of `shapes`, is fused into."""
    builder = relax.BlockBuilder()
    inputs = [relax.Var(name, relax.TensorType(shape, "float32")) for name, shape in shapes.items()]
    with builder.function("main", inputs):
        with builder.dataflow():
            result = builder.emit_output(build(*inputs))
        builder.emit_func_output(result)
    module: IRModule = builder.get()
    with tvm_target.Target(target.tvm):
        module = tvm_transform.Sequential(
            [
                relax.transform.DecomposeOpsForInference(),
                relax.transform.CanonicalizeBindings(),
                relax.transform.FoldConstant(),
                relax.get_pipeline("zero"),
            ]
        )(module)
    (func,) = [func for func in module.functions.values() if isinstance(func, tirx.PrimFunc)]
    return func


@pytest.fixture(scope="module", autouse=True)
def one_builder(children_in_forks: None) -> Iterator[None]:
    """Pools that tuning opens have one process that builds, a fork as are all that tests start.

    Tests of MeasurePool open pools of two themselves.
    """
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("tvmflow.tuning.measure.host", lambda: replace(host(), cores=1))
        yield


@pytest.fixture(scope="session")
def native() -> Target:
    return resolve("native")


@pytest.fixture(scope="session")
def matmul(native: Target) -> tirx.PrimFunc:
    """out = relu(a @ b + c) of 64 x 64."""
    shapes = {"a": (64, 64), "b": (64, 64), "c": (64,)}
    return _lower(shapes, lambda a, b, c: relax.op.nn.relu(relax.op.add(relax.op.matmul(a, b), c)), native)


@pytest.fixture(scope="session")
def conv(native: Target) -> tirx.PrimFunc:
    def build(x: relax.Expr, w: relax.Expr, b: relax.Expr) -> relax.Expr:
        y = relax.op.nn.conv2d(x, w, padding=1, data_layout="NHWC", kernel_layout="HWIO")
        return relax.op.nn.relu(relax.op.add(y, b))

    return _lower({"x": (1, 14, 14, 32), "w": (3, 3, 32, 32), "b": (32,)}, build, native)


@pytest.fixture(scope="session")
def elementwise(native: Target) -> tirx.PrimFunc:
    return _lower({"x": (128, 256)}, lambda x: relax.op.tanh(relax.op.nn.relu(x)), native)


@pytest.fixture(scope="session")
def symbolic(native: Target) -> tirx.PrimFunc:
    batch = tirx.Var("n", "int64")
    return _lower({"a": (batch, 64), "b": (64, 64)}, relax.op.matmul, native)


def _from_body(arguments: str, body: str) -> tirx.PrimFunc:
    return script.from_source(f"@T.prim_func(s_tir=True, private=True)\ndef main({arguments}):\n    {body}\n")


@pytest.fixture(scope="session")
def sleeps() -> tirx.PrimFunc:
    """A function that does not return for ten minutes."""
    return _from_body('a: T.Buffer((1,), "float32")', 'a[0] = T.cast(T.call_extern("int32", "sleep", 600), "float32")')


@pytest.fixture(scope="session")
def aborts() -> tirx.PrimFunc:
    """A function that ends its process."""
    return _from_body('a: T.Buffer((1,), "float32")', 'a[0] = T.cast(T.call_extern("int32", "abort"), "float32")')


@pytest.fixture(scope="session")
def adds_one() -> tirx.PrimFunc:
    arguments = 'a: T.Buffer((8,), "float32"), b: T.Buffer((8,), "float32")'
    return _from_body(arguments, "for i in range(8): b[i] = a[i] + T.float32(1)")


@pytest.fixture(scope="session")
def adds_one_but_once() -> tirx.PrimFunc:
    """`adds_one`, wrong in its last element."""
    arguments = 'a: T.Buffer((8,), "float32"), b: T.Buffer((8,), "float32")'
    return _from_body(arguments, "for i in range(8): b[i] = T.if_then_else(i == 7, a[i], a[i] + T.float32(1))")


@pytest.fixture
def store(tmp_path: Path) -> RecordStore:
    return RecordStore(tmp_path / "records")
