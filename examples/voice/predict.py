"""Prints where somebody speaks in a recording: `python predict.py BUNDLE RECORDING.wav`."""

import argparse
from pathlib import Path

import numpy as np
from data import RATE, STATE, WINDOW, Array, windows

from tvmflow.errors import TvmflowError
from tvmflow.runtime import CompiledModel, load

_THRESHOLD = 0.5
# In seconds; shorter pauses belong to the speech, shorter speech is none.
_SHORTEST_PAUSE, _SHORTEST_SPEECH = 0.2, 0.3


def probabilities(model: CompiledModel, wave: Array) -> Array:
    """The probability of speech in each window of a wave `[samples]`; the state goes from each window to the next."""
    state = np.zeros(STATE, "float32")
    values = []
    for window in windows(wave):
        outputs = model(input=window[None], sr=np.array(RATE), state=state)
        state = outputs["stateN"]
        values.append(float(outputs["output"][0, 0]))
    return np.array(values)


def segments(values: Array) -> list[tuple[float, float]]:
    """The start and end in seconds of each stretch of speech, from the probabilities of the windows."""
    is_speech = np.concatenate([[False], values > _THRESHOLD, [False]])
    starts, ends = (np.flatnonzero(np.diff(is_speech.astype(int)) == step) * WINDOW / RATE for step in (1, -1))
    if not len(starts):
        return []
    is_pause = starts[1:] - ends[:-1] >= _SHORTEST_PAUSE
    stretches = zip(starts[np.insert(is_pause, 0, True)], ends[np.append(is_pause, True)], strict=True)
    return [(start, end) for start, end in stretches if end - start >= _SHORTEST_SPEECH]


def read_wave(file: Path) -> Array:
    """The first channel of a WAV file as a wave `[samples]` of 16 kHz in -1..1. Raises ValueError for another rate."""
    from scipy.io import wavfile

    rate, samples = wavfile.read(file)
    if rate != RATE:
        raise ValueError(f"{file} has {rate} samples per second; the network takes {RATE}")
    wave: Array = samples if samples.ndim == 1 else samples[:, 0]
    return wave.astype("float32") / (np.iinfo(wave.dtype).max if wave.dtype.kind == "i" else 1)


def main(arguments: list[str] | None = None) -> None:
    """Run the command; a mistake of the user ends it with one sentence."""
    parser = argparse.ArgumentParser(description="Print where somebody speaks in a recording.")
    parser.add_argument("bundle", type=Path, help="a bundle of release.yaml")
    parser.add_argument("recording", type=Path, help="a WAV file of 16 kHz")
    options = parser.parse_args(arguments)
    try:
        wave = read_wave(options.recording)
        with load(options.bundle) as model:
            values = probabilities(model, wave)
    except (OSError, ValueError, TvmflowError) as error:
        raise SystemExit(f"error: {error}") from error
    for start, end in segments(values):
        print(f"{start:7.2f} s to {end:7.2f} s")


if __name__ == "__main__":
    main()
