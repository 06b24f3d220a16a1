"""The digits example learns, and learns the same thing for the same seed."""

from pathlib import Path
from types import ModuleType

import numpy as np
import pytest
import torch

EXAMPLE = "digits"


def test_training_reads_97_of_100_held_out_digits_and_leaves_torch_as_it_was(
    example: dict[str, ModuleType], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    threads, state = torch.get_num_threads(), torch.get_rng_state()
    example["train"].train(tmp_path / "weights.pt")
    assert torch.get_num_threads() == threads
    assert torch.equal(torch.get_rng_state(), state)
    lines = capsys.readouterr().out.splitlines()
    assert [line.rsplit(" ", 1)[0] for line in lines] == [f"epoch {number}/8 loss" for number in range(1, 9)]
    model = example["model"].create()
    model.load_state_dict(torch.load(tmp_path / "weights.pt", weights_only=True))
    inputs, labels = example["data"].held_out()
    with torch.no_grad():
        logits = model.eval()(torch.from_numpy(inputs["image"]))
    assert logits.shape == (len(labels), 10)
    assert np.mean(logits.argmax(1).numpy() == labels) >= 0.97


@pytest.mark.long
def test_the_same_seed_gives_the_same_file_and_another_gives_other_weights(
    example: dict[str, ModuleType], tmp_path: Path
) -> None:
    for folder, seed in (("a", 5), ("b", 5), ("other", 6)):
        (tmp_path / folder).mkdir()
        example["train"].train(tmp_path / folder / "weights.pt", epochs=1, seed=seed)
    assert (tmp_path / "a" / "weights.pt").read_bytes() == (tmp_path / "b" / "weights.pt").read_bytes()
    first, second = (torch.load(tmp_path / folder / "weights.pt", weights_only=True) for folder in ("a", "other"))
    assert not torch.equal(first["classifier.weight"], second["classifier.weight"])


def test_no_epochs_are_refused(example: dict[str, ModuleType], tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="epochs is 0"):
        example["train"].train(tmp_path / "weights.pt", epochs=0)


def test_held_out_digits_are_not_trained_on(example: dict[str, ModuleType]) -> None:
    train, held_out = example["data"].splits()
    inputs, labels = example["data"].held_out()
    assert np.array_equal(inputs["image"], held_out.images)
    assert np.array_equal(labels, held_out.labels)
    training_images = {image.tobytes() for image in train.images}
    assert not any(image.tobytes() in training_images for image in held_out.images)


def test_images_are_grey_levels_from_0_to_1(example: dict[str, ModuleType]) -> None:
    train, held_out = example["data"].splits()
    for split, count in ((train, 1437), (held_out, 360)):
        assert split.images.shape == (count, 1, 8, 8)
        assert split.images.dtype == np.float32
        assert split.images.min() == 0
        assert split.images.max() == 1


def test_noise_draws_that_share_of_the_labels_anew(example: dict[str, ModuleType]) -> None:
    split = example["data"].splits()[0]
    labels = [example["data"].with_noise(split, share, 0).labels for share in (0.0, 0.5)]
    assert np.array_equal(labels[0], split.labels)
    # One redrawn label in ten stays what it was.
    assert 0.35 < np.mean(labels[1] != split.labels) < 0.55
