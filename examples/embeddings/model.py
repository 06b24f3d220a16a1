"""all-MiniLM-L6-v2: a sentence's token ids to one unit vector, pooled and normalised inside."""

import torch
from torch import Tensor, nn

# The sizes of all-MiniLM-L6-v2.
_SETTINGS = {
    "vocab_size": 30522,
    "hidden_size": 384,
    "num_hidden_layers": 6,
    "num_attention_heads": 12,
    "intermediate_size": 1536,
    "max_position_embeddings": 512,
}


class SentenceEncoder(nn.Module):
    """BERT, the mean of the states that are not padding, and that mean at length 1."""

    def __init__(self) -> None:
        from transformers import BertConfig, BertModel

        super().__init__()
        self.bert = BertModel(BertConfig(**_SETTINGS), add_pooling_layer=False)

    def forward(self, ids: Tensor, mask: Tensor) -> Tensor:
        """The embedding [batch, 384] of ids [batch, sequence]; `mask` is 1 for a token and 0 for padding."""
        states = self.bert(input_ids=ids, attention_mask=mask).last_hidden_state
        weights = mask[:, :, None].to(states.dtype)
        mean = (states * weights).sum(1) / weights.sum(1).clamp(min=1.0)
        return nn.functional.normalize(mean)


def create() -> nn.Module:
    """The encoder, whose weights the release file names."""
    with torch.random.fork_rng(devices=[]):
        return SentenceEncoder().eval()
