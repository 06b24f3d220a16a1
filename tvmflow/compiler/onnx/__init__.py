"""Converters for ONNX operators of which TVM's importer converts some forms wrongly or not at all, by family.

`CONVERTERS` lists them by operator. A converter returns None for the forms that TVM's own converter gets right.
"""

from collections.abc import Callable
from typing import Any

import onnx
from tvm import relax
from tvm.relax.frontend.onnx import onnx_frontend

from tvmflow.compiler.onnx import (
    attention,
    blockwise,
    classical,
    conditions,
    contributed,
    einsum,
    elementwise,
    generators,
    indexing,
    loops,
    matrices,
    movement,
    norms,
    ordering,
    outlining,
    padding,
    pooling,
    products,
    quantised,
    recurrence,
    reductions,
    resize,
    sequences,
    signals,
    support_vectors,
    suppression,
    text,
    trees,
    vision,
)
from tvmflow.compiler.onnx.node import Converter, FreeSizeError, Node, UnsupportedFormError
from tvmflow.compiler.onnx.values import const, is_static
from tvmflow.onnx_model.graph import operator_name

__all__ = [
    "CONTROL",
    "CONVERTERS",
    "RANDOM",
    "TAKES_SIZES",
    "WINDOWED",
    "Converter",
    "FreeSizeError",
    "Node",
    "UnsupportedFormError",
    "const",
    "has_converter",
    "is_function",
    "is_static",
]

_STANDARD: dict[str, Converter] = {
    "Attention": attention.convert_attention,
    "AveragePool": vision.convert_padding("AveragePool"),
    "BatchNormalization": norms.convert_batch_norm,
    "BitCast": elementwise.convert_bit_cast,
    "BitShift": elementwise.convert_shift,
    "Cast": elementwise.convert_cast,
    "Celu": elementwise.convert_celu,
    "Clip": elementwise.convert_clip,
    "Col2Im": vision.convert_col2im,
    "Compress": indexing.convert_compress,
    "ConcatFromSequence": sequences.convert_concat_from_sequence,
    "Conv": vision.convert_padding("Conv"),
    "ConstantOfShape": generators.convert_constant_of_shape,
    "ConvInteger": quantised.convert_conv_integer,
    "ConvTranspose": vision.convert_conv_transpose,
    "CumSum": ordering.convert_cum_sum,
    "CumProd": ordering.convert_cum_prod,
    "DequantizeLinear": quantised.convert_blocked,
    "Det": matrices.convert_det,
    "DepthToSpace": movement.convert_depth_to_space,
    "DFT": signals.convert_dft,
    "Dropout": elementwise.convert_dropout,
    "DeformConv": vision.convert_deform_conv,
    "DynamicQuantizeLinear": quantised.convert_dynamic_quantize_linear,
    "Equal": elementwise.convert_equal,
    "Expand": movement.convert_expand,
    "Einsum": einsum.convert_einsum,
    "Elu": elementwise.convert_elu,
    "EyeLike": generators.convert_eye_like,
    "Gather": indexing.convert_gather,
    "GatherElements": indexing.convert_gather_elements,
    "GatherND": indexing.convert_gather_nd,
    "Gemm": products.convert_gemm,
    "GroupNormalization": norms.convert_group_norm,
    "GridSample": vision.convert_grid_sample,
    "GRU": recurrence.convert_recurrence("GRU"),
    "Hardmax": ordering.convert_hardmax,
    "IsInf": elementwise.convert_is_inf,
    "LayerNormalization": norms.convert_layer_norm,
    "LpPool": vision.convert_padding("LpPool"),
    "LSTM": recurrence.convert_recurrence("LSTM"),
    "LpNormalization": norms.convert_lp_normalization,
    "MatMulInteger": quantised.convert_matmul_integer,
    "MaxPool": vision.convert_padding("MaxPool"),
    "MaxRoiPool": vision.convert_max_roi_pool,
    "MaxUnpool": pooling.convert_max_unpool,
    "Max": elementwise.convert_by_pairs(relax.op.maximum),
    "MelWeightMatrix": signals.convert_mel_weight_matrix,
    "Mean": elementwise.convert_mean,
    "Min": elementwise.convert_by_pairs(relax.op.minimum),
    "Mod": elementwise.convert_mod,
    "NonMaxSuppression": suppression.convert_non_max_suppression,
    "NonZero": ordering.convert_non_zero,
    "OneHot": generators.convert_one_hot,
    "Pad": padding.convert_pad,
    "Pow": elementwise.convert_pow,
    "PRelu": elementwise.convert_prelu,
    "QLinearConv": quantised.convert_qlinear_conv,
    "QLinearMatMul": quantised.convert_qlinear_matmul,
    "QuantizeLinear": quantised.convert_blocked,
    "Range": generators.convert_range,
    "Resize": resize.convert_resize,
    "RNN": recurrence.convert_recurrence("RNN"),
    "ReverseSequence": indexing.convert_reverse_sequence,
    **{name: reductions.convert_reduction(name) for name in reductions.OPERATORS},
    "RMSNormalization": norms.convert_rms_norm,
    "Reshape": movement.convert_reshape,
    "RoiAlign": vision.convert_roi_align,
    "Scatter": indexing.convert_scatter_elements,
    "ScatterElements": indexing.convert_scatter_elements,
    "ScatterND": indexing.convert_scatter_nd,
    "Selu": elementwise.convert_selu,
    "SequenceAt": sequences.convert_sequence_at,
    "SequenceErase": sequences.convert_sequence_erase,
    "SequenceInsert": sequences.convert_sequence_insert,
    "SequenceLength": sequences.convert_sequence_length,
    "Shrink": elementwise.convert_shrink,
    "Sign": elementwise.convert_sign,
    "Slice": movement.convert_slice,
    "STFT": signals.convert_stft,
    "SpaceToDepth": movement.convert_space_to_depth,
    "Split": movement.convert_split,
    "SplitToSequence": sequences.convert_split_to_sequence,
    "Squeeze": movement.convert_squeeze,
    "Sum": elementwise.convert_by_pairs(relax.op.add),
    "TensorScatter": indexing.convert_tensor_scatter,
    "TfIdfVectorizer": text.convert_tf_idf_vectorizer,
    "ThresholdedRelu": elementwise.convert_thresholded_relu,
    "Tile": movement.convert_tile,
    "TopK": ordering.convert_top_k,
    "Unique": ordering.convert_unique,
    "Unsqueeze": movement.convert_unsqueeze,
    "Upsample": resize.convert_upsample,
}

# Operators of the domain ai.onnx.ml.
_CLASSICAL: dict[str, Converter] = {
    "ArrayFeatureExtractor": classical.convert_array_feature_extractor,
    "Binarizer": classical.convert_binarizer,
    "FeatureVectorizer": classical.convert_feature_vectorizer,
    "Imputer": classical.convert_imputer,
    "LabelEncoder": classical.convert_label_encoder,
    "LinearClassifier": classical.convert_linear_classifier,
    "LinearRegressor": classical.convert_linear_regressor,
    "Normalizer": classical.convert_normalizer,
    "OneHotEncoder": classical.convert_one_hot_encoder,
    "Scaler": classical.convert_scaler,
    "SVMClassifier": support_vectors.convert_svm_classifier,
    "SVMRegressor": support_vectors.convert_svm_regressor,
    "TreeEnsemble": trees.convert_ensemble,
    "TreeEnsembleClassifier": trees.convert_classifier,
    "TreeEnsembleRegressor": trees.convert_regressor,
}

# Operators whose attributes are graphs. They return whether the nodes of these were imported in place of their own.
CONTROL: dict[str, Callable[[outlining.Importer, onnx.NodeProto], bool]] = {
    "If": conditions.convert_if,
    "Loop": loops.convert_loop,
    "Scan": loops.convert_scan,
}

# Operators of the domain com.microsoft, which ONNX Runtime's quantiser and optimizer write.
_CONTRIBUTED: dict[str, Converter] = {
    "Attention": contributed.convert_attention,
    "BiasGelu": contributed.convert_bias_gelu("none"),
    "BiasSoftmax": contributed.convert_bias_softmax,
    "CDist": contributed.convert_cdist,
    "DequantizeLinear": contributed.convert_as("DequantizeLinear"),
    "DynamicQuantizeLSTM": recurrence.convert_dynamic_quantize_lstm,
    "DynamicQuantizeMatMul": quantised.convert_dynamic_quantize_matmul,
    "EmbedLayerNormalization": contributed.convert_embed_layer_norm,
    "ExpandDims": contributed.convert_expand_dims,
    "FastGelu": contributed.convert_bias_gelu("tanh"),
    "FusedConv": contributed.convert_fused_conv,
    "FusedGemm": contributed.convert_fused_gemm,
    "FusedMatMul": contributed.convert_fused_matmul,
    "GatherBlockQuantized": blockwise.convert_gather_block_quantized,
    "GatherND": contributed.convert_gather_nd,
    "Gelu": contributed.convert_bias_gelu("none"),
    "GridSample": contributed.convert_as("GridSample", opset=16),
    "GroupQueryAttention": contributed.convert_group_query_attention,
    "Inverse": matrices.convert_inverse,
    "LayerNormalization": contributed.convert_as("LayerNormalization"),
    "MatMulBnb4": blockwise.convert_matmul_bnb4,
    "MatMulInteger16": quantised.convert_matmul_integer,
    "MatMulIntegerToFloat": quantised.convert_matmul_integer_to_float,
    "MatMulNBits": blockwise.convert_matmul_nbits,
    "MultiHeadAttention": contributed.convert_multi_head_attention,
    "NhwcMaxPool": contributed.convert_nhwc_max_pool,
    "Pad": contributed.convert_as("Pad"),
    "QAttention": contributed.convert_qattention,
    "QEmbedLayerNormalization": contributed.convert_qembed_layer_norm,
    "QGemm": quantised.convert_qgemm,
    "QLinearAdd": quantised.convert_qlinear_add,
    "QLinearAveragePool": quantised.convert_qlinear_average_pool,
    "QLinearConcat": quantised.convert_qlinear_concat,
    "QLinearConv": quantised.convert_qlinear_conv,
    "QLinearGlobalAveragePool": quantised.convert_qlinear_global_average_pool,
    "QLinearLeakyRelu": quantised.convert_by_dequantizing("LeakyRelu", (0,), 3),
    "QLinearMul": quantised.convert_by_dequantizing("Mul", (0, 3), 6),
    "QLinearSigmoid": quantised.convert_by_dequantizing("Sigmoid", (0,), 3),
    "QLinearSoftmax": quantised.convert_by_dequantizing("Softmax", (0,), 3),
    "QLinearWhere": quantised.convert_qlinear_where,
    "QuantizeLinear": contributed.convert_as("QuantizeLinear"),
    "QuickGelu": contributed.convert_quick_gelu,
    "RotaryEmbedding": contributed.convert_rotary_embedding,
    "SimplifiedLayerNormalization": contributed.convert_as("RMSNormalization", opset=23),
    "SkipLayerNormalization": contributed.convert_skip_norm("LayerNormalization"),
    "SkipSimplifiedLayerNormalization": contributed.convert_skip_norm("RMSNormalization"),
    "TransposeMatMul": contributed.convert_fused_matmul,
    "Trilu": contributed.convert_as("Trilu"),
}
# All converters, by the operator's name with its domain, unless it is of the standard.
CONVERTERS: dict[str, Converter] = {
    **_STANDARD,
    **{f"ai.onnx.ml.{name}": converter for name, converter in _CLASSICAL.items()},
    **{f"com.microsoft.{name}": converter for name, converter in _CONTRIBUTED.items()},
}

# Operators of TVM's importer that the standard does not have.
_NOT_STANDARD = {
    *("AllClassNMS", "BiasGelu", "EmbedLayerNormalization", "FastGelu", "MatMulInteger16", "SkipLayerNormalization"),
}

# Operators that take symbolic sizes for what they are, with the positions of these operands; all others get tensors.
TAKES_SIZES: dict[str, tuple[int, ...]] = {
    "com.microsoft.GroupQueryAttention": (6,),
    "ConstantOfShape": (0,),
    "DFT": (1,),
    "Expand": (1,),
    "OneHot": (1,),
    "Pad": (1,),
    "Range": (0, 1, 2),
    "Reshape": (1,),
    "Resize": (3,),
    "Slice": (1, 2, 3, 4),
    "Split": (1,),
    "Tile": (1,),
    "TopK": (1,),
}
# Operators that move a window over data, which must be as large as the window.
WINDOWED = {"AveragePool", "Conv", "ConvInteger", "LpPool", "MaxPool", "QLinearConv"}
# Operators whose results are random: no converter could compute what the original computes.
RANDOM = {
    *("Bernoulli", "Multinomial", "RandomNormal", "RandomNormalLike", "RandomUniform", "RandomUniformLike"),
}
# The operators of the standard that TVM's importer takes. It does not look at domains.
_OF_TVM = onnx_frontend._get_convert_map().keys() - _NOT_STANDARD | {"Constant"}


def is_function(node: onnx.NodeProto) -> bool:
    """Return whether ONNX defines the node's operator as a function of other operators; false for a random one."""
    if node.domain not in ("", "ai.onnx") or node.op_type in RANDOM or not onnx.defs.has(node.op_type):
        return False
    schema: Any = onnx.defs.get_schema(node.op_type)
    return bool(schema.has_function or schema.has_context_dependent_function)


def has_converter(node: onnx.NodeProto) -> bool:
    """Return whether TVM's importer or ours has a converter for the node's operator."""
    name = operator_name(node)
    return name in CONVERTERS or name in CONTROL or name in _OF_TVM
