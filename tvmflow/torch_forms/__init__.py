"""Forms of PyTorch's functions that its exporter writes for sizes of any value, while a module is exported.

PyTorch's exporter follows a module for one sample. It fixes a free size where a function of PyTorch needs it as a
number, and it has no form of some functions. Here such functions are replaced by others that compute the same, for as
long as a module is exported. Functions of fixed sizes stay as they are wherever the exporter writes them.
"""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from unittest import mock

from tvmflow.torch_forms import convolution, pooling, sampling, signals
from tvmflow.torch_forms.operators import translations
from tvmflow.torch_forms.recurrence import recurrent_layers_as_operators

__all__ = ["functions_of_any_size", "translations"]


@contextmanager
def functions_of_any_size() -> Iterator[None]:
    """Replace functions of PyTorch for the exports that this process makes in the body."""
    with ExitStack() as stack:
        stack.enter_context(recurrent_layers_as_operators())
        for part in (pooling, sampling, convolution, signals):
            for owner, name, replacement in part.replacements():
                stack.enter_context(mock.patch.object(owner, name, replacement))
        yield
