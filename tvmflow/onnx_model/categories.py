"""The categories that an ONNX model's encoders know, by the inputs, and their columns, in which it looks for them."""

from typing import TYPE_CHECKING

from tvmflow.onnx_model.external_data import array_inside
from tvmflow.onnx_model.graph import readers_of

if TYPE_CHECKING:
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
    if not any(node.op_type in _CATEGORIES for node in model.graph.node):
        return {}
    graph = _Graph(model)
    result = {}
    for value in model.graph.input:
        dims = value.type.tensor_type.shape.dim
        count = dims[-1].dim_value if len(dims) > 1 else 1
        categories: dict[int, set[float]] = {}
        graph.follow(value.name, list(range(count)), categories)
        if categories:
            result[value.name] = tuple(tuple(sorted(categories.get(column, ()))) for column in range(count))
    return result


class _Graph:
    """The readers of each value of a model's graph, and its weights."""

    def __init__(self, model: "onnx.ModelProto") -> None:
        self._readers = readers_of(model.graph)
        self._weights = {tensor.name: tensor for tensor in model.graph.initializer}

    def follow(self, name: str, columns: list[int], categories: dict[int, set[float]]) -> None:
        """Add what the encoders behind a value know, whose elements are those of these columns, to `categories`."""
        for node in self._readers[name]:
            if node.input[0] != name:
                continue
            if node.op_type in _CATEGORIES:
                lists = [item for item in node.attribute if item.name in _CATEGORIES[node.op_type]]
                numbers = {number for item in lists for number in (*item.ints, *item.floats)}
                for column in columns if numbers else ():
                    categories[column] = (categories.get(column, numbers) & numbers) or numbers
            elif node.op_type in _MOVING:
                self.follow(node.output[0], columns, categories)
            elif node.op_type in ("ArrayFeatureExtractor", "Gather"):
                self.follow(node.output[0], self._columns_at(node, columns), categories)
            elif node.op_type == "Split" and len(node.output) == len(columns):
                for output, column in zip(node.output, columns, strict=True):
                    self.follow(output, [column], categories)

    def _columns_at(self, node: "onnx.NodeProto", columns: list[int]) -> list[int]:
        """The columns that a node takes of these; none where it takes rows, or where their places are computed."""
        places = array_inside(self._weights, node.input[1])
        axis = next((item.i for item in node.attribute if item.name == "axis"), 0)
        if places is None or (node.op_type == "Gather" and axis not in (1, -1)):
            return []
        return [columns[place] for place in places.ravel().tolist() if -len(columns) <= place < len(columns)]
