"""What PyTorch's exporter fixes sizes for, or has no form of, is exported for sizes of any value."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from support.torch_exports import FREE, assert_exported
from tvmflow.torch_forms import functions_of_any_size, translations

pytestmark = [
    # PyTorch's exporter warns about what its own layers do.
    pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning"),
    pytest.mark.usefixtures("seeded"),
]

_IMAGES = [{0: FREE, 2: FREE, 3: FREE}]
_LINES = [{0: FREE, 2: FREE}]


class _PooledImages(nn.Module):
    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        return (
            functional.adaptive_avg_pool2d(x, (3, 4)),
            functional.adaptive_avg_pool2d(x, (None, 5)),
            functional.adaptive_max_pool2d(x, (1, 4)),
            functional.adaptive_avg_pool2d(x[:, :, :3], 2),
            functional.avg_pool2d(x, x.shape[-2:]),
            functional.max_pool2d(x, (x.shape[2], 2)),
            functional.avg_pool2d(x, (3, x.shape[3]), stride=(2, 1)),
        )


def test_images_of_any_size_are_pooled(tmp_path: Path) -> None:
    others = [(torch.randn(1, 3, 5, 8),), (torch.randn(3, 3, 11, 6),), (-torch.rand(1, 3, 4, 4),)]
    assert_exported(_PooledImages(), (torch.randn(2, 3, 7, 9),), _IMAGES, *others, path=tmp_path / "model.onnx")


class _PooledLines(nn.Module):
    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        return (
            functional.max_pool1d(x, 2),
            functional.max_pool1d(x, (3,), (2,), padding=1, dilation=2, ceil_mode=True),
            functional.max_pool1d(x[:, :, 2:], x.shape[2] - 2),
            functional.avg_pool1d(x, x.shape[2]),
            functional.adaptive_max_pool1d(x, 3),
            functional.adaptive_avg_pool1d(x, 3),
        )


def test_lines_of_any_length_are_pooled(tmp_path: Path) -> None:
    others = [(torch.randn(1, 3, 8),), (torch.randn(3, 3, 13),)]
    assert_exported(_PooledLines(), (torch.randn(2, 3, 10),), _LINES, *others, path=tmp_path / "model.onnx")


class _PooledVolumes(nn.Module):
    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        fixed = x[..., :4, :4, :4]
        return functional.adaptive_avg_pool3d(x, (2, 1, 3)), functional.adaptive_avg_pool3d(fixed, 3)


def test_volumes_of_any_size_are_pooled(tmp_path: Path) -> None:
    others = [(torch.randn(1, 2, 7, 6, 9),)]
    free = [{2: FREE, 4: FREE}]
    assert_exported(_PooledVolumes(), (torch.randn(1, 2, 5, 6, 7),), free, *others, path=tmp_path / "model.onnx")


class _Places(nn.Module):
    """Functions of places, an image that becomes as large as another, and a result of a size that is given."""

    def __init__(self) -> None:
        super().__init__()
        self.larger = nn.ConvTranspose2d(3, 2, 3, stride=(2, 1), padding=1)

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        rows, columns = x.shape[-2:]
        grid = functional.affine_grid(torch.eye(2, 3).expand(x.shape[0], 2, 3), list(x.shape), align_corners=False)
        return (
            torch.linspace(-1, 3, columns),
            grid,
            x.roll((rows // 2, 1), (2, 3)),
            functional.interpolate(x[:, :, ::2, ::3], size=(rows, columns)),
            functional.interpolate(x, size=(17, 29)),
            torch.take_along_dim(x, x.argsort(3), 3),
            # Sizes that are rounded up, and less than zero before they are added to another.
            functional.pad(x, (0, -(-columns // 4) * 4 - columns, 0, (4 - rows) // 3 + 4)),
            self.larger(x[:, :, ::2], output_size=x.shape[-2:]),
        )


def test_places_in_images_of_any_size_are_pytorchs(tmp_path: Path) -> None:
    others = [(torch.randn(1, 3, 13, 25),), (torch.randn(3, 3, 6, 5),)]
    assert_exported(_Places(), (torch.randn(2, 3, 7, 9),), _IMAGES, *others, path=tmp_path / "model.onnx", rtol=1e-4)


def test_the_nearest_pixels_are_pytorchs_where_onnx_rounds_to_others(tmp_path: Path) -> None:
    class Network(nn.Module):
        def forward(self, x: Tensor) -> tuple[Tensor, ...]:
            return functional.interpolate(x, size=82), functional.interpolate(x, size=4)

    lines = torch.arange(2.0).reshape(1, 1, 2)
    kinds = assert_exported(Network(), (lines,), [{}], path=tmp_path / "model.onnx")
    # Where both take the same pixels, the operator stays.
    assert kinds.count("Resize") == 1


class _Missing(nn.Module):
    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        other = x[:, 1:].flip(2)
        order = torch.linspace(-1.0, 1.0, 5)
        highest, highest_places = x.cummax(1)
        lowest, lowest_places = x.cummin(2)
        middle, middle_places = x.median(1, keepdim=True)
        return (
            *(torch.cdist(x, other, p) for p in (0.0, 1.0, 2.0, 3.0, float("inf"))),
            *(highest, highest_places, lowest, lowest_places, middle, middle_places, x.median()),
            *(torch.searchsorted(order, x), torch.searchsorted(x.sort(-1).values, x, right=True)),
            torch.hypot(x, x + 1),
            x.cumprod(1),
            *x.kthvalue(2, dim=1, keepdim=True),
            torch.copysign(x, other.mean()),
            x % x.shape[1],
            torch.arange(20) % x.shape[1],
        )


def test_operators_that_the_exporter_has_no_form_of_are_exported(tmp_path: Path) -> None:
    free = [{0: FREE, 1: FREE}]
    others = [(torch.randn(1, 9, 4),)]
    assert_exported(_Missing(), (torch.randn(2, 6, 4),), free, *others, path=tmp_path / "model.onnx", rtol=1e-4)


def test_a_product_of_another_type_is_refused() -> None:
    # PyTorch itself does not run it; a form that ignored the type would give wrong results.
    product = translations()[torch.ops.prims.prod.default]
    with pytest.raises(TypeError, match="output_dtype"):
        product(None, [1], output_dtype=torch.float64)


class _Filtered(nn.Module):
    """Signals whose spectrum is damped, by transforms of two forms."""

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        even, odd, shares = torch.hann_window(16), torch.hann_window(12), torch.linspace(1, 0, 9).unsqueeze(1)
        batch = shares[:8] * torch.stft(x, 15, 5, 12, odd, normalized=True, return_complex=True)
        line = shares * torch.stft(x[0], 16, window=even, return_complex=True)
        return (
            torch.istft(batch, 15, 5, 12, odd, normalized=True, length=x.shape[1]),
            line.istft(16, window=even),
        )


def test_signals_of_any_length_are_transformed_back(tmp_path: Path) -> None:
    others = [(torch.randn(1, 47),), (torch.randn(3, 90),)]
    path = tmp_path / "model.onnx"
    assert_exported(_Filtered(), (torch.randn(2, 64),), [{0: FREE, 1: FREE}], *others, path=path, rtol=1e-4)


def test_functions_are_pytorchs_again_after_an_export() -> None:
    functions = [functional.max_pool1d, functional.interpolate, torch.linspace, torch.Tensor.roll]
    with functions_of_any_size():
        during = [functional.max_pool1d, functional.interpolate, torch.linspace, torch.Tensor.roll]
    after = [functional.max_pool1d, functional.interpolate, torch.linspace, torch.Tensor.roll]
    assert all(item is not other for item, other in zip(functions, during, strict=True))
    assert after == functions
    np.testing.assert_array_equal(torch.linspace(0, 1, 3).numpy(), [0, 0.5, 1])


def test_a_release_exports_a_network_that_pools_to_several_pixels(export_module: Any, kept_samples: Any) -> None:
    network = """class Network(nn.Module):
    def __init__(self):
        super().__init__()
        self.features = nn.Sequential(nn.Conv1d(2, 4, 3), nn.ReLU(), nn.MaxPool1d(2), nn.AdaptiveAvgPool1d(3))
        self.dense = nn.Linear(12, 2)

    def forward(self, x):
        return self.dense(self.features(x).flatten(1)), torch.cdist(x, x + 1).cummax(1).values
"""
    result = export_module(
        network,
        inputs=[{"name": "x", "shape": ["batch", 2, "length"]}],
        dimensions={"batch": {"min": 1, "max": 3}, "length": {"min": 5, "max": 40}},
    )
    assert result.inputs[0].shape == ("batch", 2, "length")
    assert len({inputs["x"].shape for inputs, _ in kept_samples(result)}) > 2
