"""A small convolutional network for 8x8 pictures of handwritten digits."""

from torch import Tensor, nn


class DigitNet(nn.Module):
    """Three convolutions and a linear classifier: [batch, 1, 8, 8] in 0..1 to logits [batch, 10]."""

    def __init__(self) -> None:
        super().__init__()
        self.features = nn.Sequential(
            *_convolution(1, 32),
            *_convolution(32, 64),
            nn.MaxPool2d(2),
            *_convolution(64, 64),
        )
        self.pool = nn.AdaptiveAvgPool2d(2)
        self.classifier = nn.Linear(64 * 2 * 2, 10)

    def forward(self, image: Tensor) -> Tensor:
        """Logits [batch, 10] of images [batch, 1, 8, 8]."""
        logits: Tensor = self.classifier(self.pool(self.features(image)).flatten(1))
        return logits


def _convolution(inputs: int, outputs: int) -> tuple[nn.Module, ...]:
    return nn.Conv2d(inputs, outputs, 3, padding=1, bias=False), nn.BatchNorm2d(outputs), nn.ReLU()


def create() -> nn.Module:
    """The untrained network; `train.py` makes its weights."""
    return DigitNet()
