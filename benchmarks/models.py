"""Architectures for which no schedule rule was written, in plain PyTorch with seeded weights.

Each takes pictures [batch, 3, height, width]; the classifiers return logits [batch, 1000].
"""

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn import functional


def efficientnet_b0(seed: int = 0) -> nn.Module:
    """Return EfficientNet-B0 (Tan and Le, 2019)."""
    return _seeded(EfficientNetB0, seed)


def densenet121(seed: int = 0) -> nn.Module:
    """Return DenseNet-121 (Huang et al., 2017)."""
    return _seeded(DenseNet121, seed)


def shufflenet_v2(seed: int = 0) -> nn.Module:
    """Return ShuffleNetV2 of width 1 (Ma et al., 2018)."""
    return _seeded(ShuffleNetV2, seed)


def squeezenet(seed: int = 0) -> nn.Module:
    """Return SqueezeNet 1.1 (Iandola et al., 2016)."""
    return _seeded(SqueezeNet, seed)


def convnext_tiny(seed: int = 0) -> nn.Module:
    """Return ConvNeXt-T (Liu et al., 2022)."""
    return _seeded(ConvNeXtTiny, seed)


def unet(seed: int = 0) -> nn.Module:
    """Return a U-Net (Ronneberger et al., 2015) of four levels, 32 channels at the first, with batch normalisation."""
    return _seeded(UNet, seed)


def vit_tiny(seed: int = 0) -> nn.Module:
    """Return ViT-Ti with patches of 16x16: 197 tokens at 224x224 (Dosovitskiy et al., 2021; Touvron et al., 2021)."""
    return _seeded(lambda: VisionTransformer(192, 3), seed)


def vit_b16(seed: int = 0) -> nn.Module:
    """Return ViT-B with patches of 16x16: 197 tokens at 224x224 (Dosovitskiy et al., 2021)."""
    return _seeded(lambda: VisionTransformer(768, 12), seed)


def mobilenet_v3_large(seed: int = 0) -> nn.Module:
    """Return MobileNetV3-Large of width 1 (Howard et al., 2019)."""
    return _seeded(MobileNetV3Large, seed)


def resnext50(seed: int = 0) -> nn.Module:
    """Return ResNeXt-50 of 32 groups, 4 channels wide at the first stage (Xie et al., 2017)."""
    return _seeded(ResNeXt50, seed)


def regnet_y(seed: int = 0) -> nn.Module:
    """Return RegNetY-1.6GF (Radosavovic et al., 2020)."""
    return _seeded(RegNetY, seed)


def detector(seed: int = 0) -> nn.Module:
    """Return a detector of one stage with three scales, in the manner of YOLO (Redmon et al., 2016)."""
    return _seeded(Detector, seed)


def atrous_segmenter(seed: int = 0) -> nn.Module:
    """Return a segmenter with the pyramid of dilated convolutions of DeepLabV3 (Chen et al., 2017)."""
    return _seeded(AtrousSegmenter, seed)


def _convolution(
    inputs: int,
    outputs: int,
    kernel: int,
    stride: int = 1,
    groups: int = 1,
    activation: type[nn.Module] | None = nn.ReLU,
) -> nn.Sequential:
    """A convolution of the same padding, batch normalisation and an activation."""
    layers: list[nn.Module] = [
        nn.Conv2d(inputs, outputs, kernel, stride, kernel // 2, groups=groups, bias=False),
        nn.BatchNorm2d(outputs),
    ]
    return nn.Sequential(*layers, *([] if activation is None else [activation()]))


class SqueezeExcitation(nn.Module):
    """A scale for each channel, which two 1x1 convolutions compute from the channels' means."""

    def __init__(self, channels: int, squeezed: int, activation: Callable[[Tensor], Tensor] = functional.silu) -> None:
        super().__init__()
        self.activation = activation
        self.reduce = nn.Conv2d(channels, squeezed, 1)
        self.expand = nn.Conv2d(squeezed, channels, 1)

    def forward(self, x: Tensor) -> Tensor:
        """Return scaled channels: [batch, channels, height, width] to the same shape."""
        scale = self.reduce(functional.adaptive_avg_pool2d(x, 1))
        return x * torch.sigmoid(self.expand(self.activation(scale)))


class MBConv(nn.Module):
    """EfficientNet's block: expand, depthwise convolution, squeeze-and-excitation, project."""

    def __init__(self, inputs: int, outputs: int, expansion: int, kernel: int, stride: int) -> None:
        super().__init__()
        hidden = inputs * expansion
        expand = [] if expansion == 1 else [_convolution(inputs, hidden, 1, activation=nn.SiLU)]
        self.layers = nn.Sequential(
            *expand,
            _convolution(hidden, hidden, kernel, stride, groups=hidden, activation=nn.SiLU),
            SqueezeExcitation(hidden, inputs // 4),
            _convolution(hidden, outputs, 1, activation=None),
        )
        self.residual = stride == 1 and inputs == outputs

    def forward(self, x: Tensor) -> Tensor:
        """Run the block: [batch, inputs, height, width] to [batch, outputs, height / stride, width / stride]."""
        y: Tensor = self.layers(x)
        return x + y if self.residual else y


class EfficientNetB0(nn.Module):
    """EfficientNet of width and depth 1 in its form for inference: without stochastic depth and dropout."""

    # expansion, kernel, stride of the first block, channels, blocks
    STAGES = (
        (1, 3, 1, 16, 1),
        (6, 3, 2, 24, 2),
        (6, 5, 2, 40, 2),
        (6, 3, 2, 80, 3),
        (6, 5, 1, 112, 3),
        (6, 5, 2, 192, 4),
        (6, 3, 1, 320, 1),
    )

    def __init__(self) -> None:
        super().__init__()
        layers: list[nn.Module] = [_convolution(3, 32, 3, 2, activation=nn.SiLU)]
        inputs = 32
        for expansion, kernel, stride, outputs, blocks in self.STAGES:
            for block in range(blocks):
                layers.append(MBConv(inputs, outputs, expansion, kernel, stride if block == 0 else 1))
                inputs = outputs
        layers.append(_convolution(inputs, 1280, 1, activation=nn.SiLU))
        self.features = nn.Sequential(*layers)
        self.classifier = nn.Linear(1280, 1000)

    def forward(self, image: Tensor) -> Tensor:
        """Return logits [batch, 1000] of images [batch, 3, height, width]."""
        pooled = functional.adaptive_avg_pool2d(self.features(image), 1)
        logits: Tensor = self.classifier(pooled.flatten(1))
        return logits


class DenseLayer(nn.Module):
    """Normalise, 1x1 to four times the growth, normalise, 3x3 to the growth; the result is joined to the input."""

    def __init__(self, inputs: int, growth: int) -> None:
        super().__init__()
        self.norm1 = nn.BatchNorm2d(inputs)
        self.conv1 = nn.Conv2d(inputs, 4 * growth, 1, bias=False)
        self.norm2 = nn.BatchNorm2d(4 * growth)
        self.conv2 = nn.Conv2d(4 * growth, growth, 3, padding=1, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """Run the layer: [batch, inputs, height, width] to [batch, inputs + growth, height, width]."""
        y = self.conv1(functional.relu(self.norm1(x)))
        y = self.conv2(functional.relu(self.norm2(y)))
        return torch.cat([x, y], 1)


class DenseNet121(nn.Module):
    """DenseNet of growth 32 with blocks of 6, 12, 24 and 16 layers."""

    def __init__(self) -> None:
        super().__init__()
        layers: list[nn.Module] = [
            nn.Conv2d(3, 64, 7, 2, 3, bias=False),
            nn.BatchNorm2d(64),
            nn.ReLU(),
            nn.MaxPool2d(3, 2, 1),
        ]
        channels = 64
        for block, count in enumerate((6, 12, 24, 16)):
            if block > 0:
                layers += [nn.BatchNorm2d(channels), nn.ReLU(), nn.Conv2d(channels, channels // 2, 1, bias=False)]
                layers += [nn.AvgPool2d(2, 2)]
                channels //= 2
            for _ in range(count):
                layers.append(DenseLayer(channels, 32))
                channels += 32
        self.features = nn.Sequential(*layers, nn.BatchNorm2d(channels), nn.ReLU())
        self.classifier = nn.Linear(channels, 1000)

    def forward(self, image: Tensor) -> Tensor:
        """Return logits [batch, 1000] of images [batch, 3, height, width]."""
        pooled = functional.adaptive_avg_pool2d(self.features(image), 1)
        logits: Tensor = self.classifier(pooled.flatten(1))
        return logits


class ShuffleUnit(nn.Module):
    """ShuffleNetV2's unit: two branches joined, their channels interleaved; half the channels pass at stride 1."""

    def __init__(self, inputs: int, outputs: int, stride: int) -> None:
        super().__init__()
        width = outputs // 2
        self.stride = stride
        self.passed = (
            nn.Sequential()
            if stride == 1
            else nn.Sequential(
                _convolution(inputs, inputs, 3, stride, groups=inputs, activation=None),
                _convolution(inputs, width, 1),
            )
        )
        self.computed = nn.Sequential(
            _convolution(inputs // 2 if stride == 1 else inputs, width, 1),
            _convolution(width, width, 3, stride, groups=width, activation=None),
            _convolution(width, width, 1),
        )

    def forward(self, x: Tensor) -> Tensor:
        """Run the unit: [batch, inputs, height, width] to [batch, outputs, height / stride, width / stride]."""
        kept_half, input_half = x.chunk(2, 1) if self.stride == 1 else (x, x)
        joined = torch.cat([self.passed(kept_half), self.computed(input_half)], 1)
        batch, channels, height, width = joined.shape
        return joined.view(batch, 2, channels // 2, height, width).transpose(1, 2).reshape(joined.shape)


class ShuffleNetV2(nn.Module):
    """ShuffleNetV2 of width 1."""

    def __init__(self) -> None:
        super().__init__()
        layers: list[nn.Module] = [_convolution(3, 24, 3, 2), nn.MaxPool2d(3, 2, 1)]
        inputs = 24
        for outputs, units in ((116, 4), (232, 8), (464, 4)):
            for unit in range(units):
                layers.append(ShuffleUnit(inputs, outputs, 2 if unit == 0 else 1))
                inputs = outputs
        self.features = nn.Sequential(*layers, _convolution(inputs, 1024, 1))
        self.classifier = nn.Linear(1024, 1000)

    def forward(self, image: Tensor) -> Tensor:
        """Return logits [batch, 1000] of images [batch, 3, height, width]."""
        logits: Tensor = self.classifier(self.features(image).mean((2, 3)))
        return logits


class Fire(nn.Module):
    """SqueezeNet's block: squeeze by 1x1, expand by 1x1 and 3x3 side by side."""

    def __init__(self, inputs: int, squeezed: int, expanded: int) -> None:
        super().__init__()
        self.squeeze = nn.Conv2d(inputs, squeezed, 1)
        self.expand1 = nn.Conv2d(squeezed, expanded, 1)
        self.expand3 = nn.Conv2d(squeezed, expanded, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        """Run the block: [batch, inputs, height, width] to [batch, 2 * expanded, height, width]."""
        x = functional.relu(self.squeeze(x))
        return torch.cat([functional.relu(self.expand1(x)), functional.relu(self.expand3(x))], 1)


class SqueezeNet(nn.Module):
    """SqueezeNet 1.1: no batch normalisation, its classifier a 1x1 convolution."""

    def __init__(self) -> None:
        super().__init__()
        pool = nn.MaxPool2d(3, 2, ceil_mode=True)
        self.features = nn.Sequential(
            nn.Conv2d(3, 64, 3, 2),
            nn.ReLU(),
            pool,
            Fire(64, 16, 64),
            Fire(128, 16, 64),
            pool,
            Fire(128, 32, 128),
            Fire(256, 32, 128),
            pool,
            Fire(256, 48, 192),
            Fire(384, 48, 192),
            Fire(384, 64, 256),
            Fire(512, 64, 256),
        )
        self.classifier = nn.Conv2d(512, 1000, 1)

    def forward(self, image: Tensor) -> Tensor:
        """Return logits [batch, 1000] of images [batch, 3, height, width]."""
        scores = functional.relu(self.classifier(self.features(image)))
        return functional.adaptive_avg_pool2d(scores, 1).flatten(1)


class ChannelNorm(nn.LayerNorm):
    """Layer normalisation over the channels of [batch, channels, height, width]."""

    def forward(self, x: Tensor) -> Tensor:
        """Normalise each pixel by itself: [batch, channels, height, width] to the same shape."""
        return super().forward(x.permute(0, 2, 3, 1)).permute(0, 3, 1, 2)


class ConvNeXtBlock(nn.Module):
    """Depthwise 7x7, layer normalisation, two dense layers over the channels, a scale; added to the input."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.depthwise = nn.Conv2d(width, width, 7, padding=3, groups=width)
        self.norm = nn.LayerNorm(width, eps=1e-6)
        self.expand = nn.Linear(width, 4 * width)
        self.project = nn.Linear(4 * width, width)
        # 1e-6 before training, at which a block would hardly change what it gets; trained scales are about this.
        self.scale = nn.Parameter(torch.full((width,), 0.1))

    def forward(self, x: Tensor) -> Tensor:
        """Run the block: [batch, width, height, width of the picture] to the same shape."""
        y = self.norm(self.depthwise(x).permute(0, 2, 3, 1))
        y = self.scale * self.project(functional.gelu(self.expand(y)))
        return x + y.permute(0, 3, 1, 2)


class ConvNeXtTiny(nn.Module):
    """ConvNeXt with stages of 3, 3, 9 and 3 blocks, 96 to 768 wide."""

    def __init__(self) -> None:
        super().__init__()
        layers: list[nn.Module] = [nn.Conv2d(3, 96, 4, 4), ChannelNorm(96, eps=1e-6)]
        inputs = 96
        for outputs, blocks in ((96, 3), (192, 3), (384, 9), (768, 3)):
            if outputs != inputs:
                layers += [ChannelNorm(inputs, eps=1e-6), nn.Conv2d(inputs, outputs, 2, 2)]
                inputs = outputs
            layers += [ConvNeXtBlock(outputs) for _ in range(blocks)]
        self.features = nn.Sequential(*layers)
        self.norm = nn.LayerNorm(inputs, eps=1e-6)
        self.classifier = nn.Linear(inputs, 1000)

    def forward(self, image: Tensor) -> Tensor:
        """Return logits [batch, 1000] of images [batch, 3, height, width]."""
        logits: Tensor = self.classifier(self.norm(self.features(image).mean((2, 3))))
        return logits


class UNet(nn.Module):
    """Two 3x3 convolutions a level, pooled on the way down; transposed convolutions and skips on the way up."""

    WIDTHS = (32, 64, 128, 256, 512)

    def __init__(self, classes: int = 2) -> None:
        super().__init__()
        inputs = (3, *self.WIDTHS[:-1])
        self.down = nn.ModuleList(self._double(*widths) for widths in zip(inputs, self.WIDTHS, strict=True))
        upwards = list(zip(self.WIDTHS[:0:-1], self.WIDTHS[-2::-1], strict=True))
        self.grow = nn.ModuleList(nn.ConvTranspose2d(wide, narrow, 2, 2) for wide, narrow in upwards)
        self.up = nn.ModuleList(self._double(wide, narrow) for wide, narrow in upwards)
        self.classifier = nn.Conv2d(self.WIDTHS[0], classes, 1)

    @staticmethod
    def _double(inputs: int, outputs: int) -> nn.Sequential:
        return nn.Sequential(_convolution(inputs, outputs, 3), _convolution(outputs, outputs, 3))

    def forward(self, image: Tensor) -> Tensor:
        """Return scores [batch, classes, height, width] of images [batch, 3, height, width], sides multiples of 16."""
        skips, x = [], self.down[0](image)
        for level in self.down[1:]:
            skips.append(x)
            x = level(functional.max_pool2d(x, 2))
        for grow, up in zip(self.grow, self.up, strict=True):
            x = up(torch.cat([skips.pop(), grow(x)], 1))
        scores: Tensor = self.classifier(x)
        return scores


class TransformerBlock(nn.Module):
    """Self-attention and a GELU network, each on the normalised input and added to it."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1 = nn.LayerNorm(width, eps=1e-6)
        self.qkv = nn.Linear(width, 3 * width)
        self.output = nn.Linear(width, width)
        self.norm2 = nn.LayerNorm(width, eps=1e-6)
        self.expand = nn.Linear(width, 4 * width)
        self.project = nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        """Run the block: [batch, tokens, width] to the same shape."""
        batch, tokens, width = x.shape
        qkv = self.qkv(self.norm1(x)).reshape(batch, tokens, 3, self.heads, width // self.heads)
        query, key, value = qkv.permute(2, 0, 3, 1, 4).unbind(0)
        mixed = functional.scaled_dot_product_attention(query, key, value)
        x = x + self.output(mixed.transpose(1, 2).reshape(batch, tokens, width))
        return x + self.project(functional.gelu(self.expand(self.norm2(x))))


class VisionTransformer(nn.Module):
    """A vision transformer of 12 layers; the first token's state is classified."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.patches = nn.Conv2d(3, width, 16, 16)
        self.token = nn.Parameter(torch.randn(1, 1, width) * 0.02)
        self.positions = nn.Parameter(torch.randn(1, 197, width) * 0.02)
        self.blocks = nn.Sequential(*(TransformerBlock(width, heads) for _ in range(12)))
        self.norm = nn.LayerNorm(width, eps=1e-6)
        self.classifier = nn.Linear(width, 1000)

    def forward(self, image: Tensor) -> Tensor:
        """Return logits [batch, 1000] of images [batch, 3, 224, 224]."""
        patches = self.patches(image).flatten(2).transpose(1, 2)
        tokens = torch.cat([self.token.expand(image.shape[0], -1, -1), patches], 1) + self.positions
        logits: Tensor = self.classifier(self.norm(self.blocks(tokens))[:, 0])
        return logits


class MobileNetV3Block(nn.Module):
    """Expand, depthwise convolution, squeeze-and-excitation in some blocks, project."""

    def __init__(
        self, inputs: int, hidden: int, outputs: int, kernel: int, stride: int, squeezed: int, swish: bool
    ) -> None:
        super().__init__()
        activation = nn.Hardswish if swish else nn.ReLU
        layers: list[nn.Module] = [] if hidden == inputs else [_convolution(inputs, hidden, 1, activation=activation)]
        layers.append(_convolution(hidden, hidden, kernel, stride, groups=hidden, activation=activation))
        if squeezed:
            layers.append(HardSqueezeExcitation(hidden, squeezed))
        self.layers = nn.Sequential(*layers, _convolution(hidden, outputs, 1, activation=None))
        self.residual = stride == 1 and inputs == outputs

    def forward(self, x: Tensor) -> Tensor:
        """Run the block: [batch, inputs, height, width] to [batch, outputs, height / stride, width / stride]."""
        y: Tensor = self.layers(x)
        return x + y if self.residual else y


class HardSqueezeExcitation(SqueezeExcitation):
    """Squeeze-and-excitation with ReLU and the piecewise linear sigmoid."""

    def forward(self, x: Tensor) -> Tensor:
        """Return scaled channels: [batch, channels, height, width] to the same shape."""
        scale = self.reduce(functional.adaptive_avg_pool2d(x, 1))
        return x * functional.hardsigmoid(self.expand(functional.relu(scale)))


class MobileNetV3Large(nn.Module):
    """MobileNetV3-Large of width 1."""

    # kernel, hidden channels, channels, squeezed channels (0: none), swish, stride
    BLOCKS = (
        (3, 16, 16, 0, False, 1),
        (3, 64, 24, 0, False, 2),
        (3, 72, 24, 0, False, 1),
        (5, 72, 40, 24, False, 2),
        (5, 120, 40, 32, False, 1),
        (5, 120, 40, 32, False, 1),
        (3, 240, 80, 0, True, 2),
        (3, 200, 80, 0, True, 1),
        (3, 184, 80, 0, True, 1),
        (3, 184, 80, 0, True, 1),
        (3, 480, 112, 120, True, 1),
        (3, 672, 112, 168, True, 1),
        (5, 672, 160, 168, True, 2),
        (5, 960, 160, 240, True, 1),
        (5, 960, 160, 240, True, 1),
    )

    def __init__(self) -> None:
        super().__init__()
        layers: list[nn.Module] = [_convolution(3, 16, 3, 2, activation=nn.Hardswish)]
        inputs = 16
        for kernel, hidden, outputs, squeezed, swish, stride in self.BLOCKS:
            layers.append(MobileNetV3Block(inputs, hidden, outputs, kernel, stride, squeezed, swish))
            inputs = outputs
        self.features = nn.Sequential(*layers, _convolution(inputs, 960, 1, activation=nn.Hardswish))
        self.classifier = nn.Sequential(nn.Linear(960, 1280), nn.Hardswish(), nn.Linear(1280, 1000))

    def forward(self, image: Tensor) -> Tensor:
        """Return logits [batch, 1000] of images [batch, 3, height, width]."""
        pooled = functional.adaptive_avg_pool2d(self.features(image), 1)
        logits: Tensor = self.classifier(pooled.flatten(1))
        return logits


class ResNeXtBlock(nn.Module):
    """ResNeXt's bottleneck: 1x1, grouped 3x3, 1x1, added to the input."""

    def __init__(self, inputs: int, width: int, stride: int) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            _convolution(inputs, width, 1),
            _convolution(width, width, 3, stride, groups=32),
            _convolution(width, 2 * width, 1, activation=None),
        )
        is_same = inputs == 2 * width and stride == 1
        self.shortcut = nn.Identity() if is_same else _convolution(inputs, 2 * width, 1, stride, activation=None)

    def forward(self, x: Tensor) -> Tensor:
        """Run the block: [batch, inputs, height, width] to [batch, 2 * width, height / stride, width / stride]."""
        return functional.relu(self.shortcut(x) + self.layers(x))


class ResNeXt50(nn.Module):
    """ResNeXt-50 (32x4d)."""

    def __init__(self) -> None:
        super().__init__()
        layers: list[nn.Module] = [_convolution(3, 64, 7, 2), nn.MaxPool2d(3, 2, 1)]
        inputs = 64
        for width, blocks in ((128, 3), (256, 4), (512, 6), (1024, 3)):
            for block in range(blocks):
                layers.append(ResNeXtBlock(inputs, width, 2 if block == 0 and width > 128 else 1))
                inputs = 2 * width
        self.features = nn.Sequential(*layers)
        self.classifier = nn.Linear(inputs, 1000)

    def forward(self, image: Tensor) -> Tensor:
        """Return logits [batch, 1000] of images [batch, 3, height, width]."""
        logits: Tensor = self.classifier(self.features(image).mean((2, 3)))
        return logits


class RegNetYBlock(nn.Module):
    """RegNetY's bottleneck: 1x1, grouped 3x3, squeeze-and-excitation, 1x1, added to the input."""

    def __init__(self, inputs: int, width: int, stride: int, group_width: int) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            _convolution(inputs, width, 1),
            _convolution(width, width, 3, stride, groups=width // group_width),
            SqueezeExcitation(width, inputs // 4, functional.relu),
            _convolution(width, width, 1, activation=None),
        )
        is_same = inputs == width and stride == 1
        self.shortcut = nn.Identity() if is_same else _convolution(inputs, width, 1, stride, activation=None)

    def forward(self, x: Tensor) -> Tensor:
        """Run the block: [batch, inputs, height, width] to [batch, width, height / stride, width / stride]."""
        return functional.relu(self.shortcut(x) + self.layers(x))


class RegNetY(nn.Module):
    """RegNetY-1.6GF, whose groups are 24 channels wide."""

    def __init__(self) -> None:
        super().__init__()
        layers: list[nn.Module] = [_convolution(3, 32, 3, 2)]
        inputs = 32
        for width, blocks in ((48, 2), (120, 6), (336, 17), (888, 2)):
            for block in range(blocks):
                layers.append(RegNetYBlock(inputs, width, 2 if block == 0 else 1, 24))
                inputs = width
        self.features = nn.Sequential(*layers)
        self.classifier = nn.Linear(inputs, 1000)

    def forward(self, image: Tensor) -> Tensor:
        """Return logits [batch, 1000] of images [batch, 3, height, width]."""
        logits: Tensor = self.classifier(self.features(image).mean((2, 3)))
        return logits


class CrossStage(nn.Module):
    """Half the channels go through residual pairs of 3x3 convolutions; all stages are joined (Wang et al., 2020)."""

    def __init__(self, inputs: int, outputs: int, blocks: int) -> None:
        super().__init__()
        half = outputs // 2
        self.split = _convolution(inputs, outputs, 1, activation=nn.SiLU)
        self.blocks = nn.ModuleList(
            nn.Sequential(*(_convolution(half, half, 3, activation=nn.SiLU) for _ in range(2))) for _ in range(blocks)
        )
        self.join = _convolution(outputs + blocks * half, outputs, 1, activation=nn.SiLU)

    def forward(self, x: Tensor) -> Tensor:
        """Run the stage: [batch, inputs, height, width] to [batch, outputs, height, width]."""
        parts = list(self.split(x).chunk(2, 1))
        for block in self.blocks:
            parts.append(parts[-1] + block(parts[-1]))
        joined: Tensor = self.join(torch.cat(parts, 1))
        return joined


class Detector(nn.Module):
    """A backbone, features of three scales joined upwards and downwards, and a box with scores for every cell."""

    WIDTHS = (16, 32, 64, 128, 256)
    STRIDES = (8, 16, 32)

    def __init__(self, classes: int = 80) -> None:
        super().__init__()
        stem, first, *wide = self.WIDTHS
        self.stem = nn.Sequential(_down(3, stem), _down(stem, first), CrossStage(first, first, 1))
        self.stages = nn.ModuleList(
            nn.Sequential(_down(narrow, width), CrossStage(width, width, blocks))
            for narrow, width, blocks in zip((first, *wide), wide, (2, 2, 1), strict=False)
        )
        small, middle, large = wide
        self.pool_in = _convolution(large, large // 2, 1, activation=nn.SiLU)
        self.pool_out = _convolution(2 * large, large, 1, activation=nn.SiLU)
        self.up = nn.ModuleList([CrossStage(large + middle, middle, 1), CrossStage(middle + small, small, 1)])
        self.down = nn.ModuleList([_down(small, small), _down(middle, middle)])
        self.joined = nn.ModuleList([CrossStage(small + middle, middle, 1), CrossStage(middle + large, large, 1)])
        self.heads = nn.ModuleList(
            nn.Sequential(_convolution(width, small, 3, activation=nn.SiLU), nn.Conv2d(small, 4 + classes, 1))
            for width in wide
        )

    def forward(self, image: Tensor) -> Tensor:
        """Return the boxes and scores of all cells, [batch, cells, 4 + classes].

        `image` is [batch, 3, height, width] with sides that are multiples of 32. A box is its centre and its size in
        pixels of the image; scores lie from 0 to 1.
        """
        x, scales = self.stem(image), []
        for stage in self.stages:
            x = stage(x)
            scales.append(x)
        pooled = [self.pool_in(x)]
        for _ in range(3):
            pooled.append(functional.max_pool2d(pooled[-1], 5, 1, 2))
        x = self.pool_out(torch.cat(pooled, 1))
        small, middle, large = scales[0], scales[1], x
        middle = self.up[0](torch.cat([functional.interpolate(large, scale_factor=2.0), middle], 1))
        small = self.up[1](torch.cat([functional.interpolate(middle, scale_factor=2.0), small], 1))
        middle = self.joined[0](torch.cat([self.down[0](small), middle], 1))
        large = self.joined[1](torch.cat([self.down[1](middle), large], 1))
        cells = [
            self._boxes(head(x).sigmoid(), stride)
            for head, x, stride in zip(self.heads, (small, middle, large), self.STRIDES, strict=True)
        ]
        return torch.cat(cells, 1)

    @staticmethod
    def _boxes(x: Tensor, stride: int) -> Tensor:
        """The boxes in pixels: [batch, 4 + classes, height, width] to [batch, height * width, 4 + classes]."""
        height, width = x.shape[2:]
        rows, columns = torch.meshgrid(
            torch.arange(height, device=x.device), torch.arange(width, device=x.device), indexing="ij"
        )
        centre = (2 * x[:, :2] - 0.5 + torch.stack([columns, rows])) * stride
        size = (2 * x[:, 2:4]) ** 2 * stride
        return torch.cat([centre, size, x[:, 4:]], 1).flatten(2).transpose(1, 2)


def _down(inputs: int, outputs: int) -> nn.Sequential:
    return _convolution(inputs, outputs, 3, 2, activation=nn.SiLU)


class AtrousSegmenter(nn.Module):
    """A small backbone, 3x3 convolutions of dilation 12, 24 and 36 side by side, and scores resized to the image."""

    WIDTHS = (32, 64, 128, 256)

    def __init__(self, classes: int = 21) -> None:
        super().__init__()
        inputs = (3, *self.WIDTHS[:-1])
        self.backbone = nn.Sequential(
            *(_convolution(narrow, wide, 3, 2) for narrow, wide in zip(inputs, self.WIDTHS, strict=True))
        )
        width = self.WIDTHS[-1]
        self.point = _convolution(width, width, 1)
        self.atrous = nn.ModuleList(
            nn.Sequential(
                nn.Conv2d(width, width, 3, padding=dilation, dilation=dilation, bias=False),
                nn.BatchNorm2d(width),
                nn.ReLU(),
            )
            for dilation in (12, 24, 36)
        )
        self.pooled = _convolution(width, width, 1)
        self.join = _convolution(5 * width, width, 1)
        self.classifier = nn.Conv2d(width, classes, 1)

    def forward(self, image: Tensor) -> Tensor:
        """Return scores [batch, classes, height, width] of images [batch, 3, height, width], sides multiples of 16."""
        x = self.backbone(image)
        pooled = self.pooled(functional.adaptive_avg_pool2d(x, 1)).expand(-1, -1, *x.shape[2:])
        joined = self.join(torch.cat([self.point(x), *(layer(x) for layer in self.atrous), pooled], 1))
        scores = self.classifier(joined)
        return functional.interpolate(scores, image.shape[2:], mode="bilinear", align_corners=False)


def _seeded(build: Callable[[], nn.Module], seed: int) -> nn.Module:
    """A network with seeded weights, in evaluation mode.

    Statistics of batch normalisation are those of noise, so that activations neither vanish nor grow with depth, as
    they would with fresh ones, and outputs can be compared.
    """
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        torch.manual_seed(seed)
        model = build()
        for module in model.modules():
            if isinstance(module, nn.Conv2d):
                nn.init.kaiming_normal_(module.weight, mode="fan_in", nonlinearity="relu")
        norms = [module for module in model.modules() if isinstance(module, nn.BatchNorm2d)]
        if norms:
            for norm in norms:
                norm.momentum = 1.0
            model.train()(torch.randn(4, 3, 128, 128))
            for norm in norms:
                norm.momentum = 0.1
    return model.eval()
