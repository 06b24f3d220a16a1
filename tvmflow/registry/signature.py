"""MLflow's signature of a model, made from the tensors of its inputs and outputs."""

from collections.abc import Sequence

import numpy as np
from mlflow.models import ModelSignature

from mlflow import types
from tvmflow.bundle import TensorSpec
from tvmflow.errors import RegistryError


def model_signature(inputs: Sequence[TensorSpec], outputs: Sequence[TensorSpec]) -> ModelSignature:
    """Return MLflow's signature of a model; a symbolic dimension becomes -1.

    Raises RegistryError for a dtype that NumPy does not have, because MLflow's signatures cannot hold it.
    """
    return ModelSignature(
        inputs=types.Schema([_column(tensor) for tensor in inputs]),
        outputs=types.Schema([_column(tensor) for tensor in outputs]),
    )


def _column(tensor: TensorSpec) -> types.TensorSpec:
    try:
        dtype = np.dtype(tensor.dtype)
    except TypeError as error:
        raise RegistryError(
            f"{tensor.name!r} is of dtype {tensor.dtype!r}, which a model signature cannot hold; use one of NumPy's"
        ) from error
    return types.TensorSpec(dtype, tuple(-1 if isinstance(size, str) else size for size in tensor.shape), tensor.name)
