"""Files that people take for ONNX files: what they are, and what to do instead."""

from pathlib import Path

# Bytes of a file's beginning that tell its format.
_BEGINNING = 64
# Formats by the bytes at a place in the file.
_FORMATS = (
    (
        0,
        b"version https://git-lfs",
        "the pointer that Git LFS leaves in place of a file; run `git lfs pull` in its folder",
    ),
    (
        0,
        b"PK\x03\x04",
        "a zip archive, as PyTorch's models are; export the model to ONNX, or name it in a release file",
    ),
    (0, b"\x80\x02", "a pickle, as PyTorch and scikit-learn save models; export the model to ONNX"),
    (0, b"\x80\x03", "a pickle, as PyTorch and scikit-learn save models; export the model to ONNX"),
    (0, b"\x80\x04", "a pickle, as PyTorch and scikit-learn save models; export the model to ONNX"),
    (0, b"\x80\x05", "a pickle, as PyTorch and scikit-learn save models; export the model to ONNX"),
    (0, b"\x1f\x8b", "compressed by gzip; unpack it"),
    (0, b"\x89HDF", "an HDF5 file, as Keras saves models; convert it to ONNX"),
    (0, b"GGUF", "a GGUF file, which holds weights without a graph; export the model to ONNX"),
    (4, b"ORTM", "in ONNX Runtime's own format; take the ONNX file from which it was made"),
    (4, b"TFL3", "a TensorFlow Lite model; convert it to ONNX"),
    (8, b'{"', "a safetensors file, which holds weights without a graph; export the model to ONNX"),
)


def explain_format(path: Path) -> str | None:
    """Return a clause on what a file is that is no ONNX file, and what to do; None for a format that is not known."""
    try:
        with path.open("rb") as file:
            beginning = file.read(_BEGINNING)
    except OSError:
        return None
    if beginning.lstrip().lower().startswith((b"<!doctype html", b"<html")):
        return "it is a web page; download the file itself"
    for place, signature, clause in _FORMATS:
        if beginning[place:].startswith(signature):
            return f"it is {clause}"
    return None
