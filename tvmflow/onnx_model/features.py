"""The features of rows that an operator of ai.onnx.ml has weights for, by its attributes."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

DOMAIN = "ai.onnx.ml"


@dataclass(frozen=True)
class Features:
    """A number of features; with `is_least`, rows may have more, which the operator does not read."""

    count: int
    is_least: bool = False

    def fit(self, size: int) -> bool:
        """Whether rows of `size` features have what the operator reads."""
        return size >= self.count if self.is_least else size == self.count


def features_of(operator: str, attributes: Mapping[str, Any]) -> Features | None:
    """Return the features that an operator with these attributes takes; None where the attributes do not tell."""
    count = _COUNTS[operator](attributes) if operator in _COUNTS else 0
    return Features(count, is_least=operator.startswith("TreeEnsemble")) if count else None


def _for_each(*names: str) -> Callable[[Mapping[str, Any]], int]:
    """One number for each feature in one of these attributes; a single number is for all features."""

    def count(attributes: Mapping[str, Any]) -> int:
        sizes = {len(attributes.get(name, ())) for name in names}
        return max(sizes - {0, 1}, default=0)

    return count


def _of_regressor(attributes: Mapping[str, Any]) -> int:
    return len(attributes.get("coefficients", ())) // int(attributes.get("targets", 1))


def _of_classifier(attributes: Mapping[str, Any]) -> int:
    """The coefficients of a score; of two classes there are one or two scores, as many as intercepts."""
    labels = len(attributes.get("classlabels_ints", ()))
    scores = labels if labels > 2 else len(attributes.get("intercepts", ()))
    return len(attributes.get("coefficients", ())) // scores if scores else 0


def _of_vectors(attributes: Mapping[str, Any]) -> int:
    vectors = int(attributes.get("n_supports", 0)) or sum(attributes.get("vectors_per_class", ()))
    if vectors:
        return len(attributes.get("support_vectors", ())) // vectors
    return len(attributes.get("coefficients", ()))


def _of_trees(attributes: Mapping[str, Any]) -> int:
    return int(max(attributes.get("nodes_featureids", ()), default=-1)) + 1


_COUNTS: Mapping[str, Callable[[Mapping[str, Any]], int]] = {
    "Imputer": _for_each("imputed_value_floats", "imputed_value_int64s"),
    "LinearClassifier": _of_classifier,
    "LinearRegressor": _of_regressor,
    "SVMClassifier": _of_vectors,
    "SVMRegressor": _of_vectors,
    "Scaler": _for_each("offset", "scale"),
    **dict.fromkeys(("TreeEnsemble", "TreeEnsembleClassifier", "TreeEnsembleRegressor"), _of_trees),
}
