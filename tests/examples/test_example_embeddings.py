"""The embeddings example brings sentences of one meaning together."""

from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace

from support.examples import release_of

EXAMPLE = "embeddings"

Example = dict[str, ModuleType]


@pytest.fixture(scope="module")
def encoder(example: Example) -> torch.nn.Module:
    """The encoder with weights drawn at random."""
    encoder: torch.nn.Module = example["model"].create()
    return encoder.requires_grad_(False)


def test_vectors_have_length_1_and_do_not_see_padding(encoder: torch.nn.Module) -> None:
    ids, mask = torch.randint(0, 30522, (3, 12), generator=torch.Generator().manual_seed(0)), torch.ones(3, 12).long()
    mask[:, 7:] = 0
    vectors = encoder(ids, mask)
    torch.testing.assert_close(vectors.norm(dim=1), torch.ones(3))
    torch.testing.assert_close(vectors, encoder(ids[:, :7], mask[:, :7]), rtol=1e-4, atol=1e-5)


def test_weights_of_the_published_names_fit_the_encoder(
    example: Example, encoder: torch.nn.Module, tmp_path: Path
) -> None:
    published = {name.removeprefix("bert."): value.clone() for name, value in encoder.state_dict().items()}
    published |= {"pooler.dense.weight": torch.zeros(2, 2), "embeddings.position_ids": torch.arange(4)}
    save_file(published, tmp_path / "model.safetensors")
    weights = torch.load(example["fetch"].save_weights(tmp_path / "model.safetensors", tmp_path / "weights.pt"))
    other: Any = example["model"].create()
    other.load_state_dict(weights)
    assert all(torch.equal(weights[name], value) for name, value in encoder.state_dict().items())


def test_a_batch_is_padded_to_its_longest_sentence(example: Example, tmp_path: Path) -> None:
    words = Tokenizer(WordLevel({"[PAD]": 0, "[UNK]": 1, "river": 2, "bridge": 3}, unk_token="[UNK]"))
    words.pre_tokenizer = Whitespace()
    words.save(str(tmp_path / "tokenizer.json"))
    tokenizer = example["data"].load_tokenizer(tmp_path / "tokenizer.json")
    inputs = example["data"].tokenize(tokenizer, ["river", "the bridge"])
    np.testing.assert_array_equal(inputs["ids"], [[2, 0], [1, 3]])
    np.testing.assert_array_equal(inputs["mask"], [[1, 0], [1, 1]])
    # The report shows the words again, without the padding.
    shown = [
        example["data"].show({name: array[row] for name, array in inputs.items()}, str(tmp_path / "tokenizer.json"))
        for row in (0, 1)
    ]
    assert shown == ["river", "[UNK] bridge"]


def test_the_share_of_sentences_nearest_to_their_paraphrase(example: Example) -> None:
    vectors = np.array([[1.0, 0], [0.8, 0.6], [0, 1], [-0.6, 0.8]])
    assert example["data"].paraphrases_nearest({"v": vectors}, np.array([1, 0, 3, 2])) == 1
    assert example["data"].paraphrases_nearest({"v": vectors}, np.array([2, 3, 0, 1])) == 0


def test_no_tokenizer_ends_with_one_sentence(example: Example, tmp_path: Path) -> None:
    with pytest.raises(SystemExit, match=r"error: there is no tokenizer .*tokenizer\.json"):
        example["predict"].main(["bundle", "question", "sentence", "--tokenizer", str(tmp_path / "tokenizer.json")])


@pytest.mark.long
@pytest.mark.timeout(1800)
def test_the_released_model_ranks_sentences(tmp_path: Path) -> None:
    folder = release_of(EXAMPLE, tmp_path)
    folder.release("release.yaml")
    sentences = ("There is too much salt in the broth.", "Departure by rail is at 7 a.m.")
    output = folder.predict(folder.bundle("embeddings"), "When does the train leave?", *sentences)
    ranks = [line.split(maxsplit=1) for line in output.splitlines()]
    assert [sentence for _, sentence in ranks] == [sentences[1], sentences[0]]
    assert float(ranks[0][0]) > 0.4 > float(ranks[1][0])
