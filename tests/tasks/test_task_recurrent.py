"""Recurrent layers of PyTorch are exported as operators of ONNX, for every length and batch."""

import contextlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence, pack_padded_sequence, pad_packed_sequence

from support.torch_exports import FREE, assert_exported
from tvmflow.torch_forms import functions_of_any_size

pytestmark = [
    # PyTorch's exporter warns about what its own layers do.
    pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning"),
    pytest.mark.usefixtures("seeded"),
]


class _Layers(nn.Module):
    """Layers side by side, each with the states that it begins with or without them."""

    def __init__(self, *layers: nn.RNNBase, with_states: Sequence[int]) -> None:
        super().__init__()
        self.layers = nn.ModuleList(layers)
        self.with_states = with_states

    def forward(self, steps: Tensor) -> tuple[Tensor, ...]:
        """Return the output and the last states of each layer for steps of shape (length, batch, 5)."""
        results = []
        for place, layer in enumerate(self.layers):
            states = None
            if place in self.with_states:
                first = steps.mean(0, keepdim=True)
                count, size = layer.num_layers * (1 + layer.bidirectional), layer.proj_size or layer.hidden_size
                states = first[..., :1].expand(count, -1, size).contiguous()
                if layer.mode == "LSTM":
                    states = (states, first[..., 1:2].expand(count, -1, layer.hidden_size).contiguous())
            output, after = layer(steps.transpose(0, 1) if layer.batch_first else steps, states)
            results += [output, *(after if isinstance(after, tuple) else (after,))]
        return tuple(results)


def test_layers_of_every_form_are_operators_for_any_length_and_batch(tmp_path: Path) -> None:
    layers = [
        nn.LSTM(5, 4, 2, bidirectional=True),
        nn.LSTM(5, 4, bias=False, batch_first=True),
        nn.LSTM(5, 4, 2, proj_size=3, bidirectional=True),
        nn.GRU(5, 4, bidirectional=True),
        nn.GRU(5, 4, bias=False, batch_first=True),
        nn.RNN(5, 4, bidirectional=True),
        nn.RNN(5, 4, nonlinearity="relu", bias=False, batch_first=True),
    ]
    kinds = assert_exported(
        _Layers(*layers, with_states=[1, 2, 3, 6]),
        (torch.randn(3, 2, 5),),
        [{0: FREE, 1: FREE}],
        (torch.randn(7, 2, 5),),
        (torch.randn(1, 1, 5),),
        path=tmp_path / "model.onnx",
    )
    assert (kinds.count("LSTM"), kinds.count("GRU"), kinds.count("RNN")) == (5, 2, 2)


def test_a_sequence_without_a_batch_has_any_length(tmp_path: Path) -> None:
    class Network(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer, self.projected = nn.GRU(5, 4), nn.LSTM(5, 4, proj_size=2)

        def forward(self, steps: Tensor) -> tuple[Tensor, ...]:
            return self.layer(steps)[0], self.projected(steps)[0]

    assert_exported(Network(), (torch.randn(3, 5),), [{0: FREE}], (torch.randn(6, 5),), path=tmp_path / "model.onnx")


class _Packed(nn.Module):
    """Sequences of several lengths, packed for layers and padded again in three ways."""

    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(5, 4, 2, bidirectional=True, batch_first=True)
        self.projected = nn.LSTM(8, 4, proj_size=3, bidirectional=True)
        self.gru, self.rnn, self.dense = nn.GRU(6, 4), nn.RNN(4, 4), nn.Linear(4, 2)

    def forward(self, steps: Tensor, lengths: Tensor) -> tuple[Tensor, ...]:
        """Return outputs and states for steps of shape (batch, length, 5) and as many lengths as sequences."""
        packed = pack_padded_sequence(steps, lengths, batch_first=True, enforce_sorted=False)
        first, (hidden, cells) = self.lstm(packed)
        states = (hidden[:2, :, :3].contiguous(), cells[:2].contiguous())
        second, _ = self.projected(first, states)
        third, last = self.gru(second)
        fourth, _ = self.rnn(third)
        dense = PackedSequence(
            self.dense(fourth.data), fourth.batch_sizes, fourth.sorted_indices, fourth.unsorted_indices
        )
        as_long, of_steps = pad_packed_sequence(fourth, batch_first=True, total_length=steps.shape[1])
        longer, _ = pad_packed_sequence(third, total_length=steps.shape[1] + 2)
        padded, _ = pad_packed_sequence(dense, batch_first=True, padding_value=-1.5)
        return hidden, cells, last, as_long, of_steps, longer, padded


@pytest.mark.long
def test_packed_sequences_are_operators_with_lengths(tmp_path: Path) -> None:
    def sequences(*lengths: int, size: int) -> tuple[Tensor, Tensor]:
        return torch.randn(len(lengths), size, 5), torch.tensor(lengths)

    kinds = assert_exported(
        _Packed(),
        sequences(2, 5, 3, size=5),
        [{0: FREE, 1: FREE}, {0: FREE}],
        sequences(1, 4, size=6),
        sequences(3, 3, 1, 3, size=3),
        sequences(1, size=1),
        path=tmp_path / "model.onnx",
    )
    assert (kinds.count("LSTM"), kinds.count("GRU"), kinds.count("RNN")) == (3, 1, 1)


def test_what_the_layers_call_is_restored_after_an_export() -> None:
    before = (nn.LSTM.forward, nn.GRU.forward, nn.RNN.forward)
    with contextlib.suppress(KeyError), functions_of_any_size():
        assert nn.LSTM.forward is not before[0]
        raise KeyError
    assert (nn.LSTM.forward, nn.GRU.forward, nn.RNN.forward) == before
    assert "lstm" not in vars(torch._VF)


def test_a_release_exports_a_recurrent_network_of_any_length(export_module: Any, kept_samples: Any) -> None:
    network = """class Network(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.LSTM(4, 3)

    def forward(self, x):
        return self.layer(x)[0]
"""
    result = export_module(
        network,
        inputs=[{"name": "x", "shape": ["length", 2, 4]}],
        dimensions={"length": {"min": 1, "max": 9}},
    )
    assert result.inputs[0].shape == ("length", 2, 4)
    assert {inputs["x"].shape[0] for inputs, _ in kept_samples(result)} > {1, 9}
