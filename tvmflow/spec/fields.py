"""The common parts of a release file's sections: their base class, the types of their fields, and the form of names."""

import re
from collections.abc import Iterable
from difflib import get_close_matches
from typing import Annotated, Any

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}")
# The aliases that MLflow allows, less those that it keeps for itself.
_CHANNEL = re.compile(r"[A-Za-z0-9][A-Za-z0-9_-]{0,127}")
_OF_MLFLOW = re.compile(r"latest|v[0-9]+", re.IGNORECASE)
_FUNCTION = re.compile(r"[A-Za-z_][\w.]*:[A-Za-z_]\w*")
# Names of secrets; "pad_token" and "max_tokens" are none.
_SECRET = re.compile(
    r"(?:^|_)(?:passw(?:or)?d|secrets?|credentials?|api_?key|access_?key|secret_?key|private_?key"
    r"|(?:access|api|auth|bearer|hf|github|refresh|session)_?token)(?:_|$)",
    re.IGNORECASE,
)
NAME_RULE = (
    "must consist of up to 128 letters, digits, dots, dashes and underscores, the first of them a letter or a digit"
)
WANTED = "-wanted"
"""An alias in MLflow that ends in this asks for a release in the channel of the name before it."""


class Section(BaseModel):
    """A section of the release file: immutable, without unknown keys, and with finite numbers."""

    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True, allow_inf_nan=False)


def is_name(text: str) -> bool:
    """Whether a release can have this name: NAME_RULE."""
    return _NAME.fullmatch(text) is not None


def explain_channel(name: str) -> str | None:
    """Return a clause on why no channel can have this name, which is its alias in MLflow as well; None if one can."""
    if not _CHANNEL.fullmatch(name):
        return (
            "must consist of up to 128 letters, digits, dashes and underscores, the first of them a letter or a digit"
        )
    if _OF_MLFLOW.fullmatch(name):
        return "has a name that MLflow keeps for itself; take another"
    if name.endswith(WANTED):
        return (
            f"ends in {WANTED}, as an alias that asks for a release in the channel of the name before it; take another"
        )
    return None


def check_function(text: str) -> str:
    """Return `text` unchanged. Raises ValueError unless it is of the form package.module:function."""
    if not _FUNCTION.fullmatch(text):
        raise ValueError(f"{text!r} is not of the form package.module:function")
    return text


def parse_fraction(value: object) -> object:
    """Return a percentage such as "2%" as a fraction of one, here 0.02; return any other value unchanged.

    Raises ValueError for a percent sign that follows no number.
    """
    if isinstance(value, str) and value.strip().endswith("%"):
        return float(value.strip()[:-1]) / 100
    return value


def check_arguments(arguments: dict[str, Any]) -> dict[str, Any]:
    """Return `arguments` unchanged. Raises ValueError for one whose name, also within a mapping, says it is a secret.

    Arguments are kept with the release, for everybody who may read it. The error names no value.
    """
    for name, value in arguments.items():
        if _SECRET.search(str(name)):
            raise ValueError(
                f"argument {name!r} looks like a secret, and arguments are kept with the release: put it into an "
                "environment variable, name that in the setting child_variables, and let the function read it"
            )
        if isinstance(value, dict):
            check_arguments(value)
    return arguments


def likely_name(name: str, names: Iterable[str]) -> str:
    """Return "; did you mean 'x'?" with the member of `names` that is most like `name`, or "" if none is like it."""
    close = get_close_matches(name, names, n=1, cutoff=0.5)
    return f"; did you mean {close[0]!r}?" if close else ""


Arguments = Annotated[dict[str, Any], AfterValidator(check_arguments)]
FunctionName = Annotated[str, AfterValidator(check_function)]
PositiveInt = Annotated[int, Field(ge=1)]
NonNegativeInt = Annotated[int, Field(ge=0)]
PositiveFloat = Annotated[float, Field(gt=0)]
NonNegativeFloat = Annotated[float, Field(ge=0)]
# From 0 to 1, both included.
Share = Annotated[float, Field(ge=0, le=1)]
# Between 0 and 1; the release file may say it as a percentage.
Fraction = Annotated[float, Field(gt=0, lt=1), BeforeValidator(parse_fraction)]
