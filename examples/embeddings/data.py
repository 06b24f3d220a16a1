"""Sentences and their paraphrases, tokenized, and how many of them the embeddings bring together."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[Any]

_TOKENIZER = Path(__file__).parent / "models" / "tokenizer.json"
# Each sentence with one of the same meaning in other words.
PARAPHRASES = (
    ("The train leaves at seven in the morning.", "Departure by rail is at 7 a.m."),
    ("She bought a second-hand bicycle.", "A used bike is what she purchased."),
    ("The soup is too salty.", "There is too much salt in the broth."),
    ("He repairs old clocks for a living.", "Fixing antique timepieces is his job."),
    ("It has rained since Monday.", "The wet weather began at the start of the week."),
    ("The museum is closed on public holidays.", "On bank holidays visitors cannot enter the gallery."),
    ("My phone's battery is empty.", "The mobile has run out of power."),
    ("The children are playing in the garden.", "Outside on the lawn the kids have fun."),
    ("Interest rates went up again.", "Borrowing money has become more expensive once more."),
    ("The cat sleeps on the windowsill.", "A feline is dozing by the window."),
    ("Please send the invoice by email.", "Mail me the bill electronically."),
    ("The bridge was built in the twelfth century.", "This crossing of the river dates from the Middle Ages."),
    ("He forgot his password.", "He no longer remembers how to log in."),
    ("The doctor advised her to rest.", "Her physician said she should take it easy."),
    ("The road is blocked by a fallen tree.", "Traffic cannot pass because a trunk lies across the street."),
    ("Our team won the final by two goals.", "We took the championship with a margin of two."),
)


def load_tokenizer(file: Path) -> Any:
    """The tokenizer of a `tokenizer.json`, which pads to the longest sentence of a batch and cuts at 128 tokens."""
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(file))
    tokenizer.enable_padding()
    tokenizer.enable_truncation(128)
    return tokenizer


def tokenize(tokenizer: Any, sentences: Sequence[str]) -> dict[str, Array]:
    """Ids and mask, both int64 [batch, sequence], of sentences."""
    encodings = tokenizer.encode_batch(list(sentences))
    return {
        "ids": np.array([item.ids for item in encodings], "int64"),
        "mask": np.array([item.attention_mask for item in encodings], "int64"),
    }


def paraphrases(tokenizer: str = str(_TOKENIZER)) -> tuple[dict[str, Array], Array]:
    """All sentences tokenized, and for each the place of its paraphrase; `tokenizer` is the file `tokenizer.json`."""
    sentences = [sentence for pair in PARAPHRASES for sentence in pair]
    return tokenize(load_tokenizer(Path(tokenizer)), sentences), np.arange(len(sentences)) ^ 1


def paraphrases_nearest(outputs: dict[str, Array], labels: Array) -> float:
    """The share of sentences whose nearest other sentence is their paraphrase, of unit vectors [sentence, 384]."""
    (vectors,) = outputs.values()
    likeness = vectors @ vectors.T
    np.fill_diagonal(likeness, -1)
    return float((likeness.argmax(1) == labels).mean())


def show(inputs: dict[str, Array], tokenizer: str = str(_TOKENIZER)) -> str:
    """The sentence of one sample, whose ids and mask are [sequence]."""
    return str(load_tokenizer(Path(tokenizer)).decode(inputs["ids"][inputs["mask"] == 1].tolist()))


def mask(shape: tuple[int, ...], seed: int) -> Array:
    """A sample mask [batch, sequence] as a tokenizer pads it: ones, then zeros; each row keeps its first token."""
    batch, sequence = shape
    lengths = np.random.default_rng(seed).integers(1, max(sequence, 2), batch)
    return (np.arange(sequence) < lengths[:, None]).astype("int64")
