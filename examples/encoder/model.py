"""A transformer encoder of text: token states, and their mean as one embedding per sequence."""

import torch
from torch import Tensor, nn

MASKED = -1e9  # added to the score of a padded token: its weight after the softmax is exactly 0


class Attention(nn.Module):
    """Multi-head self-attention over [batch, sequence, width]."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.scale = (width // heads) ** -0.5
        self.query = nn.Linear(width, width)
        self.key = nn.Linear(width, width)
        self.value = nn.Linear(width, width)
        self.output = nn.Linear(width, width)

    def forward(self, x: Tensor, bias: Tensor) -> Tensor:
        """[batch, sequence, width]; `bias` [batch, 1, 1, sequence] is added to the scores."""
        query, key, value = (self._split(layer(x)) for layer in (self.query, self.key, self.value))
        scores = torch.matmul(query * self.scale, key.transpose(-1, -2)) + bias
        mixed = torch.matmul(torch.softmax(scores, dim=-1).to(value.dtype), value)
        joined: Tensor = self.output(mixed.transpose(1, 2).flatten(2))
        return joined

    def _split(self, x: Tensor) -> Tensor:
        batch, sequence, width = x.shape
        return x.reshape(batch, sequence, self.heads, width // self.heads).transpose(1, 2)


class Layer(nn.Module):
    """Attention and a GELU network, each added to its input and normalised after (Vaswani et al., 2017)."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.attention = Attention(width, heads)
        self.attention_norm = nn.LayerNorm(width)
        self.feed_forward = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))
        self.feed_forward_norm = nn.LayerNorm(width)

    def forward(self, x: Tensor, bias: Tensor) -> Tensor:
        """[batch, sequence, width] to the same."""
        x = self.attention_norm(x + self.attention(x, bias))
        out: Tensor = self.feed_forward_norm(x + self.feed_forward(x))
        return out


class Encoder(nn.Module):
    """Embeddings of tokens and positions, layers, and the mean of the states that are not padding."""

    def __init__(self, vocabulary: int, width: int, layers: int, heads: int, positions: int) -> None:
        super().__init__()
        self.tokens = nn.Embedding(vocabulary, width)
        self.positions = nn.Embedding(positions, width)
        self.norm = nn.LayerNorm(width)
        self.layers = nn.ModuleList(Layer(width, heads) for _ in range(layers))

    def forward(self, ids: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
        """The pooled embedding [batch, width] and the states [batch, sequence, width] of ids [batch, sequence].

        `mask` [batch, sequence] is 1 for a token and 0 for padding.
        """
        token_weights = mask.to(torch.float32)
        bias = ((1.0 - token_weights) * MASKED)[:, None, None, :]
        x = self.norm(self.tokens(ids) + self.positions.weight[: ids.shape[1]])
        for layer in self.layers:
            x = layer(x, bias)
        weights = token_weights[:, :, None]
        pooled = (x * weights).sum(1) / weights.sum(1).clamp(min=1.0)
        return pooled, x


def create(
    vocabulary: int = 8000, width: int = 384, layers: int = 6, heads: int = 6, positions: int = 512, seed: int = 0
) -> nn.Module:
    """An encoder with seeded weights, initialised as BERT's; sequences may be up to `positions` tokens long.

    Raises ValueError where `heads` does not divide `width`.
    """
    if width % heads:
        raise ValueError(f"width {width} is not a multiple of heads {heads}")
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = Encoder(vocabulary, width, layers, heads, positions)
        for module in model.modules():
            if isinstance(module, nn.Linear | nn.Embedding):
                nn.init.normal_(module.weight, 0, 0.02)
            if isinstance(module, nn.Linear):
                nn.init.zeros_(module.bias)
    return model.eval()
