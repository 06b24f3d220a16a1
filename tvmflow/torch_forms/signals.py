"""PyTorch's inverse short-time Fourier transform, for which its exporter writes a file that ONNX Runtime does not load.

Here the frames and their sum, shifted by the hop, are one transposed convolution: its weights are the waves of the
frequencies, times the window.
"""

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional


def replacements() -> Iterator[tuple[Any, str, Callable[..., Any]]]:
    """Yield the functions that are replaced: the module or class, the name, and what replaces them."""
    for owner in (torch, torch.Tensor):
        yield owner, "istft", _istft(owner.istft)


def _istft(original: Callable[..., Tensor]) -> Callable[..., Tensor]:
    def function(
        input: Tensor,
        n_fft: int,
        hop_length: int | None = None,
        win_length: int | None = None,
        window: Tensor | None = None,
        center: bool = True,
        normalized: bool = False,
        onesided: bool | None = None,
        length: Any = None,
        return_complex: bool = False,
    ) -> Tensor:
        options = (hop_length, win_length, window, center, normalized, onesided, length, return_complex)
        if return_complex or onesided is False or (window is not None and window.is_complex()):
            return original(input, n_fft, *options)
        hop, width = hop_length or n_fft // 4, win_length or n_fft
        shape = torch.ones(width) if window is None else window
        shape = functional.pad(shape, ((n_fft - width) // 2, n_fft - width - (n_fft - width) // 2))
        # The exporter has no form of this for complex numbers.
        parts = torch.view_as_real(input)
        frames = (parts.unsqueeze(0) if input.dim() == 2 else parts).movedim(-1, 1).flatten(1, 2)
        scale = n_fft**0.5 if normalized else 1.0
        signal = functional.conv_transpose1d(frames, _waves(n_fft) * (shape * scale), stride=hop).squeeze(1)
        # What the windows of all frames add up to at each place.
        windows = functional.conv_transpose1d(
            torch.ones_like(frames[:1, :1]), shape.square().reshape(1, 1, -1), stride=hop
        ).reshape(1, -1)
        border = n_fft // 2 if center else 0
        if length is not None:
            beyond = torch.sym_max(border + length - signal.shape[1], 0)
            signal, windows = functional.pad(signal, (0, beyond)), functional.pad(windows, (0, beyond), value=1.0)
            end = border + length
        else:
            end = signal.shape[1] - border
        result = signal[:, border:end] / windows[:, border:end]
        return result.squeeze(0) if input.dim() == 2 else result

    return function


def _waves(size: int) -> Tensor:
    """Return the waves of real and imaginary parts of each frequency, in the shape (2 x frequencies, 1, size)."""
    frequencies, places = torch.arange(size // 2 + 1), torch.arange(size)
    # The product is taken modulo the size before it becomes a float, so that large ones are as exact as small ones.
    angles = (frequencies.unsqueeze(1) * places % size).to(torch.float64) * (2 * torch.pi / size)
    # All frequencies but the first, and the last of an even size, stand for their conjugates as well.
    counts = torch.where((frequencies == 0) | (2 * frequencies == size), 1.0, 2.0).unsqueeze(1) / size
    waves = torch.cat([counts * angles.cos(), -counts * angles.sin()])
    return waves.to(torch.float32).unsqueeze(1)
