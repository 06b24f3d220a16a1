"""The domains of an ONNX file's operators, as ONNX's own checker expects them."""

from typing import TYPE_CHECKING

from tvmflow.onnx_graph import standard_opset

if TYPE_CHECKING:
    import onnx

# The opset that brought LayerNormalization to the standard.
_FIRST_LAYER_NORM = 17


def with_own_domain(model: "onnx.ModelProto") -> "onnx.ModelProto":
    """Return a copy of the model with ONNX Runtime's own normalizations in the domain com.microsoft.

    These are SimplifiedLayerNormalization and, before opset 17, LayerNormalization. ONNX Runtime's optimizer writes
    them into the standard's domain, which does not define them, and ONNX Runtime finds them only there. A model without
    them is returned itself.
    """
    import onnx

    opset = standard_opset(model) or 1
    names = {"SimplifiedLayerNormalization", *(["LayerNormalization"] if opset < _FIRST_LAYER_NORM else [])}
    places = [i for i, node in enumerate(model.graph.node) if node.op_type in names and node.domain in ("", "ai.onnx")]
    if not places:
        return model
    result = onnx.ModelProto()
    result.CopyFrom(model)
    for place in places:
        result.graph.node[place].domain = "com.microsoft"
    if not any(entry.domain == "com.microsoft" for entry in result.opset_import):
        result.opset_import.append(onnx.helper.make_opsetid("com.microsoft", 1))
    return result
