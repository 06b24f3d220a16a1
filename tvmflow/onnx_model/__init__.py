"""An ONNX model: what its file says, read, checked and brought to the forms that the compiler takes."""
