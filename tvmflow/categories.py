"""The categories that an ONNX model's encoders know, by the inputs, and their columns, in which it looks for them."""

from typing import TYPE_CHECKING

from tvmflow.onnx_graph import names_read

if TYPE_CHECKING:
    import numpy as np
    import onnx

# The attributes of encoders of ai.onnx.ml that hold the categories of their operand.
_CATEGORIES = {"OneHotEncoder": ("cats_int64s",), "LabelEncoder": ("keys_int64s", "keys_floats")}
# Operators whose result holds the elements of their operand in the same columns, or the one column of it.
_MOVING = {"Cast", "Flatten", "Identity", "Reshape", "Squeeze", "Unsqueeze"}


def known_categories(model: "onnx.ModelProto") -> dict[str, tuple[tuple[float, ...], ...]]:
    """Return the numbers that encoders of a model know, by the names of the inputs of which they encode elements.

    There is a tuple for each column, the last dimension of an input: empty for one that no encoder reads, and of those
    that several know where several do. An input whose number of columns is unknown is left out.
    """
    graph = _Graph(model)
    result = {}
    for value in model.graph.input:
        dims = value.type.tensor_type.shape.dim
        columns = dims[-1].dim_value if len(dims) > 1 else 1
        if columns < 1:
            continue
        found: dict[int, set[float]] = {}
        graph.follow(value.name, list(range(columns)), found)
        if found:
            result[value.name] = tuple(tuple(sorted(found.get(column, ()))) for column in range(columns))
    return result


class _Graph:
    """The readers of each value of a model's graph, and its weights."""

    def __init__(self, model: "onnx.ModelProto") -> None:
        self._readers: dict[str, list[onnx.NodeProto]] = {}
        self._weights = {tensor.name: tensor for tensor in model.graph.initializer}
        for node in model.graph.node:
            for name in names_read(node):
                self._readers.setdefault(name, []).append(node)

    def follow(self, name: str, columns: list[int], found: dict[int, set[float]]) -> None:
        """Add the categories of the encoders behind a value, whose elements are those of these columns, to `found`."""
        for node in self._readers.get(name, ()):
            if node.input[0] != name:
                continue
            if node.op_type in _CATEGORIES:
                own = [item for item in node.attribute if item.name in _CATEGORIES[node.op_type]]
                known = {number for item in own for number in (*item.ints, *item.floats)}
                for column in columns if known else ():
                    found[column] = (found.get(column, known) & known) or known
            elif node.op_type in _MOVING:
                self.follow(node.output[0], columns, found)
            elif node.op_type in ("ArrayFeatureExtractor", "Gather"):
                chosen = self._chosen(node, columns)
                if chosen:
                    self.follow(node.output[0], chosen, found)
            elif node.op_type == "Split" and len(node.output) == len(columns):
                for output, column in zip(node.output, columns, strict=True):
                    self.follow(output, [column], found)

    def _chosen(self, node: "onnx.NodeProto", columns: list[int]) -> list[int]:
        """The columns that a node takes of these; none where it takes rows, or where they are computed."""
        places = self._numbers(node.input[1])
        axis = next((item.i for item in node.attribute if item.name == "axis"), 0)
        if places is None or (node.op_type == "Gather" and axis not in (1, -1)):
            return []
        return [columns[place] for place in places.ravel().tolist() if -len(columns) <= place < len(columns)]

    def _numbers(self, name: str) -> "np.ndarray[tuple[int, ...], np.dtype[np.generic]] | None":
        from onnx import numpy_helper

        weight = self._weights.get(name)
        return None if weight is None or weight.external_data else numpy_helper.to_array(weight)
