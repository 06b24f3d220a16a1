"""Whole architectures with seeded weights, from PyTorch through ONNX to a library, compared with ONNX Runtime.

They are small models of `transformers`' configurations; nothing is downloaded. (`timm` needs torchvision, which does
not import beside this torch.) The normal run takes one network for images; the encoder of the examples, with symbolic
dimensions, is tested beside it (`tests/examples/test_example_encoder.py`).
"""

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

os.environ["HF_HUB_OFFLINE"] = "1"

import numpy as np
import pytest
import torch

from support import scale
from tvmflow.compiler import CompiledModel

# Of the stages of the network for images.
_SIZES = scale.choose(normal=[24, 40], long=[24, 40, 56, 72])
_TEXT = {"hidden_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 96, "vocab_size": 99}


def _bert() -> Any:
    from transformers import BertConfig, BertModel

    return BertModel(BertConfig(**_TEXT), add_pooling_layer=False)


def _gpt2() -> Any:
    from transformers import GPT2Config, GPT2Model

    return GPT2Model(GPT2Config(vocab_size=99, n_embd=48, n_layer=2, n_head=4, use_cache=False))


def _llama() -> Any:
    from transformers import LlamaConfig, LlamaModel

    return LlamaModel(LlamaConfig(**_TEXT, num_key_value_heads=2, use_cache=False))


def _t5() -> Any:
    from transformers import T5Config, T5EncoderModel

    return T5EncoderModel(
        T5Config(attn_implementation="eager", vocab_size=99, d_model=48, d_kv=12, d_ff=96, num_layers=2, num_heads=4)
    )


def _vit() -> Any:
    from transformers import ViTConfig, ViTModel

    text = {key: value for key, value in _TEXT.items() if key != "vocab_size"}
    return ViTModel(ViTConfig(**text, image_size=32, patch_size=8), add_pooling_layer=False)


def _swin() -> Any:
    from transformers import SwinConfig, SwinModel

    config = SwinConfig(
        image_size=32,
        patch_size=2,
        embed_dim=24,
        depths=[2, 2],
        num_heads=[2, 4],
        window_size=4,
        attn_implementation="eager",
    )
    return SwinModel(config, add_pooling_layer=False)


def _convnext() -> Any:
    from transformers import ConvNextConfig, ConvNextModel

    return ConvNextModel(ConvNextConfig(hidden_sizes=[20, 36, 48, 72], depths=[1, 1, 2, 1]))


def _mobilenet() -> Any:
    from transformers import MobileNetV2Config, MobileNetV2Model

    return MobileNetV2Model(MobileNetV2Config(depth_multiplier=0.35))


def _regnet() -> Any:
    from transformers import RegNetConfig, RegNetModel

    return RegNetModel(RegNetConfig(embedding_size=16, hidden_sizes=_SIZES, depths=[1] * len(_SIZES), groups_width=8))


def _segformer() -> Any:
    from transformers import SegformerConfig, SegformerForSemanticSegmentation

    config = SegformerConfig(
        hidden_sizes=[16, 24, 32, 48], depths=[1, 1, 1, 1], num_attention_heads=[1, 2, 2, 4], decoder_hidden_size=32
    )
    return SegformerForSemanticSegmentation(config)


def _whisper() -> Any:
    from transformers import WhisperConfig
    from transformers.models.whisper.modeling_whisper import WhisperEncoder

    config = WhisperConfig(
        d_model=48,
        encoder_layers=2,
        encoder_attention_heads=4,
        encoder_ffn_dim=96,
        num_mel_bins=20,
        max_source_positions=32,
    )
    return WhisperEncoder(config)


def _tokens(length: int = 17) -> torch.Tensor:
    return torch.from_numpy(np.random.default_rng(0).integers(0, 99, (2, length)))


def _image(size: int = 64) -> torch.Tensor:
    return torch.from_numpy(np.random.default_rng(0).standard_normal((1, 3, size, size)).astype("float32"))


def _sound() -> torch.Tensor:
    return torch.from_numpy(np.random.default_rng(0).standard_normal((1, 20, 64)).astype("float32"))


_ARCHITECTURES: dict[str, tuple[Callable[[], Any], Callable[[], torch.Tensor], str]] = {
    "bert": (_bert, _tokens, "input_ids"),
    "gpt2": (_gpt2, _tokens, "input_ids"),
    "llama": (_llama, _tokens, "input_ids"),
    "t5-encoder": (_t5, _tokens, "input_ids"),
    "vit": (_vit, lambda: _image(32), "pixel_values"),
    "swin": (_swin, lambda: _image(32), "pixel_values"),
    "convnext": (_convnext, _image, "pixel_values"),
    "mobilenet-v2": (_mobilenet, _image, "pixel_values"),
    "regnet": (_regnet, _image, "pixel_values"),
    "segformer": (_segformer, _image, "pixel_values"),
    "whisper-encoder": (_whisper, _sound, "input_features"),
}


class _FirstResult(torch.nn.Module):
    """A model of one input and one output."""

    def __init__(self, model: Any, keyword: str) -> None:
        super().__init__()
        self.model = model
        self.keyword = keyword

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = self.model(**{self.keyword: x}, return_dict=False)[0]
        return result


@pytest.mark.long
@pytest.mark.parametrize("name", scale.choose(normal=["regnet"], long=list(_ARCHITECTURES)))
def test_architectures_equal_onnx_runtime(
    name: str, tmp_path: Path, assert_same_as_onnxruntime: Callable[..., CompiledModel]
) -> None:
    make, example, keyword = _ARCHITECTURES[name]
    torch.manual_seed(0)
    model = _FirstResult(make(), keyword).eval()
    x = example()
    path = tmp_path / f"{name}.onnx"
    torch.onnx.export(
        model, (x,), path, input_names=["x"], output_names=["y"], opset_version=18, dynamo=True, verbose=False
    )
    compiled_model = assert_same_as_onnxruntime(path, {"x": x.numpy()})
    assert compiled_model.schedules
