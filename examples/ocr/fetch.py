"""Fetches the two models of PP-OCRv4 out of a published wheel into `models/`: `python fetch.py`."""

import sys
from pathlib import Path

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE.parent))

from wheels import fetch, take_out  # noqa: E402 - it lies beside the examples

from tvmflow.errors import TvmflowError  # noqa: E402

_REQUIREMENT = "rapidocr-onnxruntime==1.4.4"  # Apache-2.0
_SHA256 = "971d7d5f223a7a808662229df1ef69893809d8457d834e6373d3854bc1782cbf"
_FILES = {"detect.onnx": "ch_PP-OCRv4_det_infer.onnx", "read.onnx": "ch_PP-OCRv4_rec_infer.onnx"}


def main() -> None:
    """Run the command; where pip cannot fetch the wheel it ends with one sentence."""
    models = HERE / "models"
    try:
        wheel = fetch(_REQUIREMENT, _SHA256, models)
        for name, member in _FILES.items():
            print(take_out(wheel, f"rapidocr_onnxruntime/models/{member}", models / name))
    except TvmflowError as error:
        raise SystemExit(f"error: {error}") from error


if __name__ == "__main__":
    main()
