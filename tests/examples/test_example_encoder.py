"""The encoder example ignores padding, and compiles with symbolic batch and sequence."""

from pathlib import Path
from types import ModuleType

import numpy as np
import pytest
import torch

from support import scale
from support.builds import assert_same_as_onnxruntime
from tvmflow.hardware.target import resolve

EXAMPLE = "encoder"


@pytest.fixture(scope="module")
def encoder(example: dict[str, ModuleType]) -> torch.nn.Module:
    model: torch.nn.Module = example["model"].create()
    return model.requires_grad_(False)


def _ids(batch: int, sequence: int) -> torch.Tensor:
    return torch.randint(0, 8000, (batch, sequence), generator=torch.Generator().manual_seed(0))


def test_the_outputs_are_one_embedding_per_sequence_and_one_state_per_token(encoder: torch.nn.Module) -> None:
    pooled, states = encoder(_ids(3, 17), torch.ones(3, 17, dtype=torch.int64))
    assert pooled.shape == (3, 384)
    assert states.shape == (3, 17, 384)


def test_a_padded_token_changes_neither_the_embedding_nor_the_states_before_it(encoder: torch.nn.Module) -> None:
    ids, mask = _ids(2, 12), torch.ones(2, 12, dtype=torch.int64)
    mask[:, 9:] = 0
    changed = ids.clone()
    changed[:, 9:] = (ids[:, 9:] + 1) % 8000
    (pooled, states), (other, other_states) = encoder(ids, mask), encoder(changed, mask)
    assert torch.equal(pooled, other)
    assert torch.equal(states[:, :9], other_states[:, :9])


def test_a_token_that_is_not_padding_changes_the_embedding(encoder: torch.nn.Module) -> None:
    ids, mask = _ids(1, 12), torch.ones(1, 12, dtype=torch.int64)
    changed = ids.clone()
    changed[:, 11] = (ids[:, 11] + 1) % 8000
    assert (encoder(ids, mask)[0] - encoder(changed, mask)[0]).abs().max() > 1e-3


def test_a_padded_sequence_gives_the_embedding_of_the_sequence_alone(encoder: torch.nn.Module) -> None:
    ids, mask = _ids(1, 40), torch.zeros(1, 40, dtype=torch.int64)
    mask[:, :13] = 1
    alone = encoder(ids[:, :13], mask[:, :13])[0]
    torch.testing.assert_close(encoder(ids, mask)[0], alone, rtol=1e-5, atol=1e-5)


def test_the_order_of_the_tokens_matters(encoder: torch.nn.Module) -> None:
    ids, mask = _ids(1, 12), torch.ones(1, 12, dtype=torch.int64)
    assert (encoder(ids, mask)[0] - encoder(ids.flip(1), mask)[0]).abs().max() > 1e-3


def test_heads_must_divide_the_width(example: dict[str, ModuleType]) -> None:
    with pytest.raises(ValueError, match="384 is not a multiple of heads 5"):
        example["model"].create(heads=5)


@pytest.mark.parametrize("shape", [(1, 2), (8, 3), (4, 512)])
def test_sample_masks_keep_the_first_token_and_pad_the_last(
    example: dict[str, ModuleType], shape: tuple[int, int]
) -> None:
    mask = example["data"].mask(shape, seed=0)
    assert mask.shape == shape
    assert mask.dtype == np.int64
    assert (mask[:, 0] == 1).all()
    assert (mask[:, -1] == 0).all()
    assert (np.diff(mask, axis=1) <= 0).all()


def test_the_sample_mask_of_a_single_token_keeps_it(example: dict[str, ModuleType]) -> None:
    np.testing.assert_array_equal(example["data"].mask((3, 1), seed=0), np.ones((3, 1)))


@pytest.mark.long
def test_the_compiled_encoder_of_any_batch_and_length_equals_onnx_runtime(
    example: dict[str, ModuleType], tmp_path: Path
) -> None:
    small = {"vocabulary": 99, "width": 48, "layers": 1, "heads": 4, "positions": 64}
    model = example["model"].create(**scale.choose(normal=small, long={}))
    batch, sequence = torch.export.Dim("batch", max=64), torch.export.Dim("sequence", min=2, max=64)
    torch.onnx.export(
        model,
        (torch.ones(2, 16, dtype=torch.int64), torch.ones(2, 16, dtype=torch.int64)),
        tmp_path / "encoder.onnx",
        input_names=["ids", "mask"],
        dynamic_shapes=({0: batch, 1: sequence}, {0: batch, 1: sequence}),
        dynamo=True,
        verbose=False,
    )
    feeds = [
        {"ids": _ids(*shape).numpy() % 99, "mask": example["data"].mask(shape, seed=0)}
        for shape in ((1, 2), (3, 17), (2, 64))
    ]
    assert_same_as_onnxruntime(tmp_path / "encoder.onnx", feeds, resolve("native"), rtol=1e-3)
