"""The domains of an ONNX file's operators, as ONNX's own checker expects them."""

from typing import TYPE_CHECKING

from tvmflow.onnx_model.graph import node_name, nodes_of, standard_opset

if TYPE_CHECKING:
    import onnx

# The opset that brought LayerNormalization to the standard.
_FIRST_LAYER_NORM = 17
_CONTRIBUTED = "com.microsoft"


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
        result.graph.node[place].domain = _CONTRIBUTED
    import_contributed(result)
    return result


def import_contributed(model: "onnx.ModelProto") -> None:
    """Give a model with operators of com.microsoft their version, which is always 1, where it has none, in place.

    ONNX Runtime's quantisers leave it out, and ONNX Runtime itself adds it.
    """
    import onnx

    versions = {entry.domain for entry in model.opset_import}
    if _CONTRIBUTED not in versions and any(node.domain == _CONTRIBUTED for node in nodes_of(model.graph)):
        model.opset_import.append(onnx.helper.make_opsetid(_CONTRIBUTED, 1))


def explain_unknown(model: "onnx.ModelProto") -> str | None:
    """Return a clause on the first operator that ONNX's standard lacks in the model's opset, and what to do; else None.

    Exporters leave an operator of their framework where they know no form of it in ONNX.
    """
    import onnx

    opset = standard_opset(model) or 1
    own = {(function.domain, function.name) for function in model.functions}
    for node in nodes_of(model.graph):
        if node.domain not in ("", "ai.onnx") or (node.domain, node.op_type) in own:
            continue
        try:
            is_known = onnx.defs.has(node.op_type, opset)
        except TypeError:  # In a damaged file a name may be no text; the checker refuses it.
            continue
        if is_known:
            continue
        where = f"operator {node.op_type}, node {node_name(node)!r}"
        if onnx.defs.has(node.op_type):
            since = min(
                schema.since_version
                for schema in onnx.defs.get_all_schemas_with_history()
                if not schema.domain and schema.name == node.op_type
            )
            return f"{where}, is not in opset {opset}; export the model with opset {since} or later"
        return f"{where}, is none of ONNX's; the exporter had no form of it: export the model without it"
    return None
