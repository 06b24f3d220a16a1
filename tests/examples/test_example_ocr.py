"""The OCR example finds lines of text and reads them."""

from pathlib import Path
from types import ModuleType

import numpy as np
import pytest
from PIL import Image

from support.examples import release_of

EXAMPLE = "ocr"

Example = dict[str, ModuleType]


def test_repeated_classes_are_one_letter_and_class_0_is_none(example: Example) -> None:
    scores = np.eye(4)[[3, 3, 0, 1, 0, 1, 2, 0]]
    assert example["data"].read(scores) == [3, 1, 1, 2]


def test_letters_count_by_their_edit_distance(example: Example) -> None:
    labels = np.array([[3, 1, 2, -1], [1, 1, 2, 3]])
    scores = np.eye(4)[[[3, 3, 0, 1, 0, 2, 0], [1, 0, 1, 0, 0, 0, 3]]]
    # The first line is right, the second lacks one of its four letters.
    assert example["data"].letters_right({"scores": scores}, labels) == pytest.approx(1 - 1 / 7)


def test_boxes_grow_around_the_cores_that_are_sure_and_come_in_reading_order(example: Example) -> None:
    scores = np.zeros((64, 128))
    scores[40:50, 10:60] = 0.9
    scores[10:20, 70:120] = 0.8
    scores[10:20, 5:30] = 0.4  # not sure enough
    scores[60:61, 100:110] = 0.9  # not high enough for a letter
    upper, lower = example["predict"].find_boxes(scores)
    assert upper.left < 70
    assert upper.top < 10
    assert upper.right == 127
    assert upper.bottom == lower.top - 6 == 27
    assert lower == (3, 33, 67, 57)


def test_the_pixels_of_a_page_are_normalised_and_a_narrow_line_is_filled_up(example: Example) -> None:
    page = example["data"].prepare_page(np.full((32, 64, 3), 255, "uint8"))
    np.testing.assert_allclose(page[0, :, 0, 0], (1 - example["data"].MEAN) / example["data"].DEVIATION, rtol=1e-6)
    line = example["data"].prepare_line(Image.new("RGB", (60, 30), "black"), width=200)
    assert line.shape == (1, 3, 48, 200)
    assert (line[..., :96] == -1).all()
    assert (line[..., 96:] == 0).all()


def test_pages_repeat_and_their_masks_cover_the_ink(example: Example) -> None:
    (first, mask), (second, _) = example["data"].draw_page(3), example["data"].draw_page(3)
    assert first.tobytes() == second.tobytes()
    ink = np.asarray(first)[..., 0] < 100
    assert ink.any()
    assert mask[ink].all()


@pytest.mark.long
@pytest.mark.timeout(1800)
def test_the_released_models_read_a_page(example: Example, tmp_path: Path) -> None:
    folder = release_of(EXAMPLE, tmp_path)
    for name in ("detect", "read"):
        folder.release(f"{name}.yaml")
    image, _ = example["data"].draw_page(0)
    image.save(tmp_path / "page.png")
    output = folder.predict(folder.bundle("ocr-detect"), folder.bundle("ocr-read"), tmp_path / "page.png")
    texts = [line.split(maxsplit=4)[4] for line in output.splitlines()]
    assert texts == [example["data"].text_of(row) for row in range(4)]
