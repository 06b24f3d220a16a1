"""The voice example cuts recordings into windows, passes the state on and prints where speech is."""

from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
from scipy.io import wavfile

from support.examples import release_of

EXAMPLE = "voice"

Example = dict[str, ModuleType]


def test_each_window_begins_with_the_end_of_the_one_before(example: Example) -> None:
    parts = example["data"].windows(np.arange(1700, dtype="float32"))
    assert parts.shape == (3, 576)
    assert (parts[0, :64] == 0).all()
    np.testing.assert_array_equal(parts[1], np.arange(448, 1024))
    np.testing.assert_array_equal(parts[2], np.arange(960, 1536))


def test_the_state_goes_from_each_window_to_the_next(example: Example) -> None:
    def model(**inputs: Any) -> dict[str, Any]:
        return {"stateN": inputs["state"] + 1, "output": np.full((1, 1), inputs["state"].mean())}

    values = example["predict"].probabilities(model, np.zeros(512 * 4, "float32"))
    np.testing.assert_array_equal(values, [0, 1, 2, 3])


def test_short_pauses_belong_to_the_speech_and_short_speech_is_none(example: Example) -> None:
    values = np.array([0, *[1] * 5, 0, *[1] * 5, *[0] * 8, 1, *[0] * 8])
    assert example["predict"].segments(values) == [(0.032, 0.384)]
    assert example["predict"].segments(np.zeros(5)) == []


def test_a_recording_of_another_rate_ends_with_one_sentence(example: Example, tmp_path: Path) -> None:
    wavfile.write(tmp_path / "music.wav", 44100, np.zeros(100, "int16"))
    with pytest.raises(SystemExit, match=r"error: .*music\.wav has 44100 samples per second"):
        example["predict"].main([str(tmp_path / "voice.tar.gz"), str(tmp_path / "music.wav")])


def test_windows_are_right_on_their_side_of_one_half(example: Example) -> None:
    outputs = {"output": np.array([[[0.9]], [[0.2]], [[0.6]], [[0.1]]]), "stateN": np.zeros((4, 2, 1, 128))}
    assert example["data"].windows_right(outputs, np.array([True, False, False, True])) == 0.5


@pytest.mark.long
@pytest.mark.timeout(1800)
def test_the_released_model_finds_the_three_sentences(example: Example, tmp_path: Path) -> None:
    folder = release_of(EXAMPLE, tmp_path)
    folder.release("release.yaml")
    folder.run("data.py", tmp_path / "recording.wav")
    output = folder.predict(folder.bundle("voice"), tmp_path / "recording.wav")
    times = [float(word) for word in output.split() if word[0].isdigit()]
    _, is_speech = example["data"].recording(str(folder.folder / "models" / "espeak"))
    spoken = np.flatnonzero(np.diff(is_speech.astype(int))) / example["data"].RATE
    np.testing.assert_allclose(times, spoken, atol=0.3)
