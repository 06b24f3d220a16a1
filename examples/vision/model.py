"""MobileNetV2 and ResNet for 224x224 pictures, with the layer names of torchvision's published weights."""

from collections.abc import Callable

import torch
from torch import Tensor, nn


def mobilenet_v2(num_classes: int = 1000, seed: int = 0) -> nn.Module:
    """MobileNetV2 (Sandler et al., 2018): [batch, 3, 224, 224] to logits [batch, num_classes]."""
    return _seeded(lambda: MobileNetV2(num_classes), seed)


def resnet18(num_classes: int = 1000, seed: int = 0) -> nn.Module:
    """ResNet-18 (He et al., 2015): [batch, 3, 224, 224] to logits [batch, num_classes]."""
    return _seeded(lambda: ResNet(BasicBlock, (2, 2, 2, 2), num_classes), seed)


def resnet50(num_classes: int = 1000, seed: int = 0) -> nn.Module:
    """ResNet-50 with its strides on the 3x3 convolutions ("v1.5"): [batch, 3, 224, 224] to logits."""
    return _seeded(lambda: ResNet(Bottleneck, (3, 4, 6, 3), num_classes), seed)


def _convolution(inputs: int, outputs: int, kernel: int, stride: int = 1, groups: int = 1) -> nn.Conv2d:
    return nn.Conv2d(inputs, outputs, kernel, stride, kernel // 2, groups=groups, bias=False)


class ConvNormActivation(nn.Sequential):
    """A convolution, batch normalisation and ReLU6."""

    def __init__(self, inputs: int, outputs: int, kernel: int, stride: int = 1, groups: int = 1) -> None:
        super().__init__(
            _convolution(inputs, outputs, kernel, stride, groups),
            nn.BatchNorm2d(outputs),
            nn.ReLU6(inplace=True),
        )


class InvertedResidual(nn.Module):
    """MobileNetV2's block: expand, depthwise convolution, project; the input is added where the shapes agree."""

    def __init__(self, inputs: int, outputs: int, stride: int, expansion: int) -> None:
        super().__init__()
        hidden = inputs * expansion
        layers: list[nn.Module] = [] if expansion == 1 else [ConvNormActivation(inputs, hidden, 1)]
        layers += [
            ConvNormActivation(hidden, hidden, 3, stride, groups=hidden),
            _convolution(hidden, outputs, 1),
            nn.BatchNorm2d(outputs),
        ]
        self.conv = nn.Sequential(*layers)
        self.residual = stride == 1 and inputs == outputs

    def forward(self, x: Tensor) -> Tensor:
        """[batch, inputs, height, width] to [batch, outputs, height / stride, width / stride]."""
        y: Tensor = self.conv(x)
        return x + y if self.residual else y


class MobileNetV2(nn.Module):
    """MobileNetV2 of width 1."""

    # expansion, channels, blocks, stride of the first block
    STAGES = ((1, 16, 1, 1), (6, 24, 2, 2), (6, 32, 3, 2), (6, 64, 4, 2), (6, 96, 3, 1), (6, 160, 3, 2), (6, 320, 1, 1))

    def __init__(self, num_classes: int) -> None:
        super().__init__()
        layers: list[nn.Module] = [ConvNormActivation(3, 32, 3, stride=2)]
        inputs = 32
        for expansion, outputs, blocks, stride in self.STAGES:
            for block in range(blocks):
                layers.append(InvertedResidual(inputs, outputs, stride if block == 0 else 1, expansion))
                inputs = outputs
        layers.append(ConvNormActivation(inputs, 1280, 1))
        self.features = nn.Sequential(*layers)
        linear = nn.Linear(1280, num_classes)
        nn.init.normal_(linear.weight, 0, 0.01)
        nn.init.zeros_(linear.bias)
        self.classifier = nn.Sequential(nn.Dropout(0.2), linear)
        _initialise(self)

    def forward(self, image: Tensor) -> Tensor:
        """Logits [batch, num_classes] of images [batch, 3, height, width]."""
        pooled = nn.functional.adaptive_avg_pool2d(self.features(image), 1)
        logits: Tensor = self.classifier(pooled.flatten(1))
        return logits


class _Residual(nn.Module):
    """What both residual blocks share: the shortcut, projected where the shapes differ."""

    expansion: int

    def _shortcut(self, inputs: int, outputs: int, stride: int) -> nn.Module | None:
        if stride == 1 and inputs == outputs:
            return None
        return nn.Sequential(_convolution(inputs, outputs, 1, stride), nn.BatchNorm2d(outputs))


class BasicBlock(_Residual):
    """Two 3x3 convolutions and a shortcut."""

    expansion = 1

    def __init__(self, inputs: int, width: int, stride: int) -> None:
        super().__init__()
        self.conv1 = _convolution(inputs, width, 3, stride)
        self.bn1 = nn.BatchNorm2d(width)
        self.relu = nn.ReLU(inplace=True)
        self.conv2 = _convolution(width, width, 3)
        self.bn2 = nn.BatchNorm2d(width)
        self.downsample = self._shortcut(inputs, width, stride)

    def forward(self, x: Tensor) -> Tensor:
        """[batch, inputs, height, width] to [batch, width, height / stride, width / stride]."""
        shortcut = x if self.downsample is None else self.downsample(x)
        y = self.relu(self.bn1(self.conv1(x)))
        y = self.bn2(self.conv2(y))
        out: Tensor = self.relu(y + shortcut)
        return out


class Bottleneck(_Residual):
    """A 3x3 convolution between two 1x1 convolutions, and a shortcut."""

    expansion = 4

    def __init__(self, inputs: int, width: int, stride: int) -> None:
        super().__init__()
        self.conv1 = _convolution(inputs, width, 1)
        self.bn1 = nn.BatchNorm2d(width)
        self.conv2 = _convolution(width, width, 3, stride)
        self.bn2 = nn.BatchNorm2d(width)
        self.conv3 = _convolution(width, width * self.expansion, 1)
        self.bn3 = nn.BatchNorm2d(width * self.expansion)
        self.relu = nn.ReLU(inplace=True)
        self.downsample = self._shortcut(inputs, width * self.expansion, stride)

    def forward(self, x: Tensor) -> Tensor:
        """[batch, inputs, height, width] to [batch, 4 * width, height / stride, width / stride]."""
        shortcut = x if self.downsample is None else self.downsample(x)
        y = self.relu(self.bn1(self.conv1(x)))
        y = self.relu(self.bn2(self.conv2(y)))
        y = self.bn3(self.conv3(y))
        out: Tensor = self.relu(y + shortcut)
        return out


class ResNet(nn.Module):
    """A residual network of four stages; `blocks` is the number of blocks in each."""

    def __init__(
        self, block: type[BasicBlock] | type[Bottleneck], blocks: tuple[int, int, int, int], num_classes: int
    ) -> None:
        super().__init__()
        self.conv1 = _convolution(3, 64, 7, stride=2)
        self.bn1 = nn.BatchNorm2d(64)
        self.relu = nn.ReLU(inplace=True)
        self.maxpool = nn.MaxPool2d(3, stride=2, padding=1)
        self.layer1 = _stage(block, 64, 64, blocks[0], stride=1)
        self.layer2 = _stage(block, 64 * block.expansion, 128, blocks[1], stride=2)
        self.layer3 = _stage(block, 128 * block.expansion, 256, blocks[2], stride=2)
        self.layer4 = _stage(block, 256 * block.expansion, 512, blocks[3], stride=2)
        self.avgpool = nn.AdaptiveAvgPool2d(1)
        self.fc = nn.Linear(512 * block.expansion, num_classes)
        _initialise(self)

    def forward(self, image: Tensor) -> Tensor:
        """Logits [batch, num_classes] of images [batch, 3, height, width]."""
        x = self.maxpool(self.relu(self.bn1(self.conv1(image))))
        for stage in (self.layer1, self.layer2, self.layer3, self.layer4):
            x = stage(x)
        logits: Tensor = self.fc(self.avgpool(x).flatten(1))
        return logits


def _stage(
    block: type[BasicBlock] | type[Bottleneck], inputs: int, width: int, blocks: int, stride: int
) -> nn.Sequential:
    first = block(inputs, width, stride)
    return nn.Sequential(first, *(block(width * block.expansion, width, 1) for _ in range(blocks - 1)))


def _initialise(model: nn.Module) -> None:
    for module in model.modules():
        if isinstance(module, nn.Conv2d):
            nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")


def _seeded(build: Callable[[], nn.Module], seed: int) -> nn.Module:
    """A network with seeded weights, in evaluation mode."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = build()
        _calibrate(model)
    return model.eval()


def _calibrate(model: nn.Module) -> None:
    """Set the statistics of batch normalisation and the classifier's bias from coarse and fine noise.

    With fresh statistics (mean 0, variance 1) the activations of an untrained network vanish (MobileNetV2) or grow
    (ResNet-50), and the same class wins for every picture. A published state dict replaces all of this.
    """
    noise = [nn.functional.interpolate(torch.randn(4, 3, side, side), size=224, mode="bilinear") for side in (8, 224)]
    pictures = torch.cat(noise)
    norms = [module for module in model.modules() if isinstance(module, nn.BatchNorm2d)]
    momentum = [norm.momentum for norm in norms]
    (classifier,) = (module for module in model.modules() if isinstance(module, nn.Linear))
    with torch.no_grad():
        for norm in norms:
            norm.momentum = 1.0
        model.train()(pictures)
        for norm, usual in zip(norms, momentum, strict=True):
            norm.momentum = usual
        classifier.bias.sub_(model.eval()(pictures).mean(0))
