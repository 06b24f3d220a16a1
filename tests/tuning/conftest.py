"""Functions to tune, lowered from Relax as the compiler lowers a model's."""

from collections.abc import Callable
from pathlib import Path

import pytest
from tvm import IRModule, relax, tirx
from tvm import target as tvm_target
from tvm import transform as tvm_transform

from tvmflow.target import Target, resolve
from tvmflow.tuning import RecordStore


def _lower(shapes: dict[str, tuple[object, ...]], build: Callable[..., relax.Expr], target: Target) -> tirx.PrimFunc:
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


@pytest.fixture
def store(tmp_path: Path) -> RecordStore:
    return RecordStore(tmp_path / "records")
