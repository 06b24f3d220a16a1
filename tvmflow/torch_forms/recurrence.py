"""PyTorch's recurrent layers as ONNX's operators LSTM, GRU and RNN while a module is exported.

PyTorch's exporter unrolls RNN over the steps. It fixes the length of LSTM and GRU unless their batch is free, comes
first and they have biases. It cannot follow packed sequences, whose sizes depend on data, and writes a wrong LSTM for
one with projections (`proj_size`), which ONNX lacks. Here all of them become the operators of ONNX, for sequences of
any length and any batch: what PyTorch calls for these layers is replaced while a module is exported.

Packed sequences keep their padding here: `data` has the shape (length, batch, features), and `batch_sizes` holds the
lengths, in the shape (1, batch).
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest import mock

import torch
from torch import Tensor
from torch.nn.utils.rnn import PackedSequence

# The version of ONNX's operators whose attributes and inputs are used here; later ones keep them.
_OPSET = 14
# By kind: the place in PyTorch's weights of each gate of ONNX's.
_GATES = {"LSTM": (0, 3, 1, 2), "GRU": (1, 0, 2), "RNN": (0,)}
_ACTIVATIONS = {"RNN_TANH": "Tanh", "RNN_RELU": "Relu"}


@contextmanager
def recurrent_layers_as_operators() -> Iterator[None]:
    """Let LSTM, GRU and RNN become operators of ONNX in an export of this process."""
    module: Any = torch._VF
    functions = {
        "lstm": _function("LSTM"),
        "gru": _function("GRU"),
        "rnn_tanh": _function("RNN_TANH"),
        "rnn_relu": _function("RNN_RELU"),
        "_pack_padded_sequence": _pack,
        "_pad_packed_sequence": _pad,
    }
    with ExitStack() as stack:
        for name, function in functions.items():
            # The module finds its attributes elsewhere and has none of its own.
            stack.enter_context(mock.patch.object(module, name, function, create=True))
        for kind in (torch.nn.LSTM, torch.nn.GRU, torch.nn.RNN):
            stack.enter_context(mock.patch.object(kind, "forward", _forward(kind.forward)))
        yield


def _function(mode: str) -> Callable[..., Any]:
    """Return what PyTorch's function of a mode of layers gives for sequences of one length, as operators of ONNX."""

    def function(
        input: Tensor,
        states: Any,
        weights: Sequence[Tensor],
        has_biases: bool,
        layers: int,
        dropout: float,
        is_training: bool,
        is_bidirectional: bool,
        is_batch_first: bool,
    ) -> tuple[Tensor, ...]:
        output, *after = _recur(
            mode,
            input.transpose(0, 1) if is_batch_first else input,
            tuple(states) if mode == "LSTM" else (states,),
            _groups(weights, layers, is_bidirectional),
            has_biases=has_biases,
        )
        return (output.transpose(0, 1) if is_batch_first else output, *after)

    return function


def _forward(original: Callable[..., Any]) -> Callable[..., Any]:
    """Return the `forward` of a layer that also takes packed sequences as they are here.

    Without states, projections begin with zeros, for which no operations are needed.
    """

    def forward(layer: Any, input: Tensor | PackedSequence, hx: Any = None) -> Any:
        if isinstance(input, PackedSequence):
            data, batch_sizes, sorted_indices, unsorted_indices = input
            states = None if hx is None else layer.permute_hidden(hx, sorted_indices)
            output, hidden = _run(layer, data, states, batch_sizes[0].to(torch.int32))
            packed = PackedSequence(output, batch_sizes, sorted_indices, unsorted_indices)
            return packed, layer.permute_hidden(hidden, unsorted_indices)
        if layer.proj_size and hx is None and input.dim() == 3:
            output, hidden = _run(layer, input.transpose(0, 1) if layer.batch_first else input)
            return output.transpose(0, 1) if layer.batch_first else output, hidden
        return original(layer, input, hx)

    return forward


def _run(layer: Any, data: Tensor, states: Any = None, lengths: Tensor | None = None) -> tuple[Tensor, Any]:
    """Return the output of a layer and its states after the last step, as its `forward` gives them."""
    is_lstm = layer.mode == "LSTM"
    if states is None:
        count = layer.num_layers * (1 + layer.bidirectional)
        zeros = data.new_zeros((count, data.shape[1], layer.hidden_size))
        states = (None if layer.proj_size else zeros, zeros) if is_lstm else zeros
    output, *after = _recur(
        layer.mode,
        data,
        states if is_lstm else (states,),
        _groups(layer._flat_weights, layer.num_layers, layer.bidirectional),
        has_biases=layer.bias,
        lengths=lengths,
    )
    return output, tuple(after) if is_lstm else after[0]


def _groups(weights: Sequence[Tensor], layers: int, is_bidirectional: bool) -> list[list[Sequence[Tensor]]]:
    """Divide the weights of all layers by layer and direction."""
    directions = 1 + is_bidirectional
    size = len(weights) // (layers * directions)
    starts = range(0, len(weights), size)
    groups = [weights[start : start + size] for start in starts]
    return [groups[start : start + directions] for start in range(0, len(groups), directions)]


def _recur(
    mode: str,
    input: Tensor,
    states: tuple[Tensor | None, *tuple[Tensor, ...]],
    layers: list[list[Sequence[Tensor]]],
    *,
    has_biases: bool,
    lengths: Tensor | None = None,
) -> list[Tensor]:
    """Return the output of layers and their states after the last step, as PyTorch lays them out.

    `input` has the shape (length, batch, features); states have (layers x directions, batch, hidden). Without a state
    of an LSTM's projections it is zero.
    """
    first, *others = states
    after: list[list[Tensor]] = [[] for _ in states]
    start = 0
    for directions in layers:
        end = start + len(directions)
        state = None if first is None else first[start:end]
        cells = [cell[start:end] for cell in others]
        input, *states_after = _layer(mode, input, state, cells, directions, has_biases, lengths)
        for all_of_state, state_after in zip(after, states_after, strict=True):
            all_of_state.append(state_after)
        start = end
    return [input, *map(torch.cat, after)]


def _layer(
    mode: str,
    input: Tensor,
    state: Tensor | None,
    cells: list[Tensor],
    directions: list[Sequence[Tensor]],
    has_biases: bool,
    lengths: Tensor | None,
) -> list[Tensor]:
    """Return the output of one layer and its states; `directions` are the weights of each direction."""
    kind = mode.partition("_")[0]
    count, (length, batch) = len(directions), input.shape[:2]
    of_input, of_state = (torch.stack([weights[place] for weights in directions]) for place in (0, 1))
    biases = None
    if has_biases:
        biases = torch.stack([bias for weights in directions for bias in weights[2:4]])
        biases = _in_order(kind, biases).reshape(count, -1)
    projections = None
    if len(directions[0]) == (5 if has_biases else 3):
        # The operator's state is what PyTorch projects, and begins with zeros: at the first step of a direction, the
        # projected state comes as more features of the input.
        if state is not None:
            input = torch.cat([input, *_at_first_steps(state, length, lengths)], dim=2)
            # The features of the other direction have weights of zero.
            own = torch.eye(count, dtype=of_state.dtype).reshape(count, count, 1, 1)
            of_input = torch.cat([of_input, *(own * of_state)], dim=2)
        projections = torch.stack([weights[-1] for weights in directions])
        of_state = of_state @ projections
        state = torch.zeros_like(cells[0])
    hidden = of_state.shape[2]
    attributes: dict[str, Any] = {"hidden_size": hidden, "direction": "bidirectional" if count == 2 else "forward"}
    if kind == "GRU":
        attributes["linear_before_reset"] = 1
    if mode in _ACTIVATIONS:
        attributes["activations"] = [_ACTIVATIONS[mode]] * count
    output, *after = torch.onnx.ops.symbolic_multi_out(
        kind,
        (input, _in_order(kind, of_input), _in_order(kind, of_state), biases, lengths, state, *cells),
        attributes,
        dtypes=[input.dtype] * (2 + len(cells)),
        shapes=[[length, count, batch, hidden], *([[count, batch, hidden]] * (1 + len(cells)))],
        version=_OPSET,
    )
    if projections is not None:
        output, after[0] = output @ projections.mT, after[0] @ projections.mT
    return [output.transpose(1, 2).flatten(2), *after]


def _at_first_steps(state: Tensor, length: int, lengths: Tensor | None) -> list[Tensor]:
    """Return, for each direction, features that are its state at its first step, and else zero.

    `state` has the shape (directions, batch, features), and the result (length, batch, features).
    """
    steps = torch.arange(length).reshape(-1, 1, 1)
    last = length - 1 if lengths is None else (lengths - 1).reshape(1, -1, 1)
    firsts = (steps == 0, steps == last)
    return [torch.where(first, item, 0.0) for first, item in zip(firsts, state.unbind(), strict=False)]


def _in_order(kind: str, weights: Tensor) -> Tensor:
    """Return weights, whose second dimension has one part for each of PyTorch's gates, in ONNX's order of the gates."""
    order = _GATES[kind]
    if len(order) == 1:
        return weights
    size = weights.shape[1] // len(order)
    return weights[:, torch.tensor([place * size + row for place in order for row in range(size)])]


def _pack(input: Tensor, lengths: Tensor, is_batch_first: bool) -> tuple[Tensor, Tensor]:
    """Return the `data` and the `batch_sizes` of a padded batch."""
    return input.transpose(0, 1) if is_batch_first else input, lengths.unsqueeze(0)


def _pad(
    data: Tensor, batch_sizes: Tensor, is_batch_first: bool, padding_value: float, length: int
) -> tuple[Tensor, Tensor]:
    """Return a padded batch whose padding is `padding_value`, and the length of each sequence.

    PyTorch takes `length` from `batch_sizes`, where it is 1, unless the model gives the `total_length` of the result.
    """
    lengths, steps = batch_sizes[0], data.shape[0]
    is_padding = torch.arange(steps).unsqueeze(1) >= lengths.unsqueeze(0)
    data = torch.where(is_padding.reshape(*data.shape[:2], *([1] * (data.dim() - 2))), padding_value, data)
    if length == 1:
        longest = lengths.max().item()
        torch._check(longest >= 1)
        torch._check(longest <= steps)
        data = data[:longest]
    elif length > steps:
        data = torch.cat([data, data.new_full((length - steps, *data.shape[1:]), padding_value)])
    else:
        data = data[:length]
    return data.transpose(0, 1) if is_batch_first else data, lengths
