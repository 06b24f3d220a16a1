"""PyTorch's transposed convolutions whose result has a free size that the module gives.

What such a result has beyond the least, `output_padding`, depends on that size, and the exporter needs it as a number.
Here the convolution computes the most that the stride permits, and the rest is cut off.
"""

from collections.abc import Callable, Iterator
from typing import Any

from torch import Tensor
from torch.nn import functional

from tvmflow.torch_forms.sizes import any_free, of_each


def replacements() -> Iterator[tuple[Any, str, Callable[..., Any]]]:
    """Yield the functions that are replaced: the module, the name, and what replaces them."""
    for rank in (1, 2, 3):
        name = f"conv_transpose{rank}d"
        yield functional, name, _cut(getattr(functional, name), rank)


def _cut(original: Callable[..., Tensor], rank: int) -> Callable[..., Tensor]:
    """Return a transposed convolution that cuts its result to a free size."""

    def function(
        input: Tensor,
        weight: Tensor,
        bias: Tensor | None = None,
        stride: Any = 1,
        padding: Any = 0,
        output_padding: Any = 0,
        groups: int = 1,
        dilation: Any = 1,
    ) -> Tensor:
        paddings = of_each(output_padding, rank)
        if not any_free(paddings):
            return original(input, weight, bias, stride, padding, output_padding, groups, dilation)
        most = [step - 1 for step in of_each(stride, rank)]
        result = original(input, weight, bias, stride, padding, most, groups, dilation)
        for axis, (beyond, largest) in enumerate(zip(paddings, most, strict=True), -rank):
            if largest > 0:
                result = result.narrow(axis, 0, result.shape[axis] - (largest - beyond))
        return result

    return function
