"""Speech from text by the synthesiser espeak-ng, as its wheel has it in a folder."""

import ctypes
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[Any]

# From espeak-ng's speak_lib.h.
_SYNCHRONOUS, _FROM_CHARACTERS, _UTF8 = 2, 1, 1
_WORDS_PER_MINUTE, _PITCH = 1, 3


class Synthesiser:
    """espeak-ng out of the folder that holds `libespeak-ng.so` and `espeak-ng-data`."""

    def __init__(self, folder: Path) -> None:
        self._library = ctypes.CDLL(str(folder / "libespeak-ng.so"))
        self.own_rate = int(self._library.espeak_Initialize(_SYNCHRONOUS, 0, str(folder).encode(), 0))
        if self.own_rate <= 0:
            raise OSError(f"espeak-ng does not start from {folder}")
        self._parts: list[Array] = []
        form = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.POINTER(ctypes.c_short), ctypes.c_int, ctypes.c_void_p)
        # The library calls it until the process ends: it must live as long.
        self._callback = form(self._take)
        self._library.espeak_SetSynthCallback(self._callback)

    def _take(self, samples: Any, count: int, _: Any) -> int:
        if samples and count:
            self._parts.append(np.ctypeslib.as_array(samples, (count,)).copy())
        return 0

    def say(self, text: str, voice: str = "en", pitch: int = 50, speed: int = 165, rate: int = 16000) -> Array:
        """A wave `[samples]` in -1..1 at `rate` per second; `pitch` is in 0..99, `speed` in words per minute.

        `voice` is a language with a variant, such as `en+f3`. Raises OSError for a voice that there is not.
        """
        from scipy.signal import resample_poly

        self._parts.clear()
        if self._library.espeak_SetVoiceByName(voice.encode()):
            raise OSError(f"espeak-ng has no voice {voice!r}")
        # A voice has noise, which would differ from run to run.
        self._library.espeak_ng_SetRandSeed(ctypes.c_long(0))
        self._library.espeak_SetParameter(_WORDS_PER_MINUTE, speed, 0)
        self._library.espeak_SetParameter(_PITCH, pitch, 0)
        content = text.encode()
        size = ctypes.c_size_t(len(content) + 1)
        self._library.espeak_Synth(content, size, 0, _FROM_CHARACTERS, 0, _UTF8, None, None)
        wave = np.concatenate(self._parts).astype("float64") / 32768
        return resample_poly(wave, rate, self.own_rate).astype("float32")
