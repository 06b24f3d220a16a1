"""A recording of speech, noise and tones with what is speech in it, cut into the windows that Silero VAD takes.

`python data.py FILE.wav` writes the recording.
"""

import sys
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from speech import Synthesiser

Array = npt.NDArray[Any]

RATE = 16000
# A window is 32 ms; the network also wants the last 4 ms before it.
WINDOW, CONTEXT = 512, 64
STATE = (2, 1, 128)

_MODELS = Path(__file__).parent / "models"
_SENTENCES = (
    "The ferry to the island leaves from the second pier.",
    "Would you read me the last line of the letter again?",
    "Nobody had expected the meeting to end before noon.",
)


def recording(synthesiser: str = str(_MODELS / "espeak"), seed: int = 0) -> tuple[Array, Array]:
    """A wave `[samples]` of 16 kHz in -1..1 with three sentences between noise and tones, and what of it is speech."""
    generator = np.random.default_rng([17, seed])
    speaker = Synthesiser(Path(synthesiser))
    voices = ("en+m1", "en+f3", "en-us+m4")
    parts = []
    for place, sentence in enumerate(_SENTENCES):
        time = np.arange(RATE * 3 // 2) / RATE
        chord = sum(np.sin(2 * np.pi * pitch * time) for pitch in (220, 277.2 + 40 * place, 329.6))
        parts += [(0.05 * chord, False), (speaker.say(sentence, voices[(place + seed) % len(voices)]), True)]
        parts.append((np.zeros(RATE), False))
    is_speech = np.concatenate([np.full(len(wave), spoken) for wave, spoken in parts])
    wave = np.concatenate([0.5 * wave / np.abs(wave).max() if spoken else wave for wave, spoken in parts])
    return (wave + 0.003 * generator.standard_normal(len(wave))).astype("float32"), is_speech


def windows(wave: Array) -> Array:
    """A wave `[samples]` in windows `[window, 576]`, each with the end of the one before it."""
    whole = wave[: len(wave) // WINDOW * WINDOW].reshape(-1, WINDOW)
    before = np.concatenate([np.zeros((1, CONTEXT), wave.dtype), whole[:-1, -CONTEXT:]])
    return np.concatenate([before, whole], 1)


def speech_windows(synthesiser: str = str(_MODELS / "espeak"), model: str = str(_MODELS / "vad.onnx")) -> Any:
    """The windows of a recording with the states that the ONNX file `model` passes from each to the next.

    Every sample is a whole input; labels say of each window whether most of it is speech. A model that takes all
    windows at once gets them as one sample.
    """
    import onnxruntime

    wave, is_speech = recording(synthesiser)
    parts = windows(wave)
    labels = is_speech[: len(parts) * WINDOW].reshape(-1, WINDOW).mean(1) > 0.5
    session = onnxruntime.InferenceSession(model, providers=["CPUExecutionProvider"])
    names = {item.name for item in session.get_inputs()}
    if "state" not in names:
        zero = np.zeros((1, 1, 1, 128), "float32")
        return {"input": parts[None], "h": zero, "c": zero}, labels[None]
    states = [np.zeros(STATE, "float32")]
    rate = {"sr": np.array(RATE)} if "sr" in names else {}
    for part in parts:
        states.append(session.run(["stateN"], {"input": part[None], "state": states[-1], **rate})[0])
    rates = {name: np.full(len(parts), value) for name, value in rate.items()}
    return {"input": parts[:, None], "state": np.stack(states[:-1]), **rates}, labels


def windows_right(outputs: dict[str, Array], labels: Array) -> float:
    """The share of windows whose probability of speech, the first output, is on the right side of one half."""
    probabilities = next(iter(outputs.values())).reshape(-1)
    return float(((probabilities > 0.5) == labels.reshape(-1)).mean())


if __name__ == "__main__":
    from scipy.io import wavfile

    wavfile.write(sys.argv[1], RATE, recording()[0])
