"""The sentence that reports a release file that breaks a rule."""

from typing import get_origin

from pydantic import BaseModel, ValidationError

from tvmflow.spec.document import Spec
from tvmflow.spec.fields import likely_name


def printable(text: str) -> str:
    """Return a text with escapes in the place of line breaks and control characters, which names may hold."""
    return "".join(letter if letter.isprintable() else repr(letter)[1:-1] for letter in text)


def describe(error: ValidationError) -> str:
    """Return the first problem of a release file in one sentence, and the number of further ones.

    An unknown key comes before other problems.
    """
    problems = sorted(error.errors(), key=lambda item: item["type"] != "extra_forbidden")
    first = problems[0]
    where = ".".join(str(part) for part in first["loc"])
    more = f" (and {len(problems) - 1} more)" if len(problems) > 1 else ""
    if first["type"] == "extra_forbidden":
        keys = _keys_at(first["loc"][:-1])
        hint = likely_name(str(first["loc"][-1]), keys) or f"; known here are {', '.join(sorted(keys))}"
        return f"unknown key {where!r}{hint}{more}"
    # Pydantic's words are Python's; the file's are YAML's.
    message = first["msg"].removeprefix("Value error, ").replace("tuple", "list").replace("dictionary", "mapping")
    if first["type"] == "missing":
        message = "is required"
    return f"{where}: {message}{more}" if where else f"{message}{more}"


def _keys_at(location: tuple[int | str, ...]) -> set[str]:
    """Return the keys that the release file can have at a location."""
    model: type[BaseModel] = Spec
    is_users_name = False  # whether the next part is a name that the user gave: a dimension's, a channel's
    for part in location:
        if isinstance(part, int) or is_users_name:
            is_users_name = False
            continue
        fields = {(info.alias or name): info for name, info in model.model_fields.items()}
        annotation = fields[part].annotation
        models = [item for item in _classes_in(annotation) if issubclass(item, BaseModel)]
        if models:
            model = models[0]
            is_users_name = get_origin(annotation) is dict
    return {(info.alias or name) for name, info in model.model_fields.items()}


def _classes_in(annotation: object) -> list[type]:
    """Return all classes anywhere in a type annotation."""
    if isinstance(annotation, type) and not getattr(annotation, "__args__", ()):
        return [annotation]
    return [item for part in getattr(annotation, "__args__", ()) for item in _classes_in(part)]
