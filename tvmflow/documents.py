"""Documents that outlive the tvmflow that wrote them: their bytes, and readers of every format ever written."""

import json
from collections.abc import Callable, Mapping
from typing import Any, ClassVar, TypeVar

from pydantic import ValidationError

from tvmflow.errors import StoreError
from tvmflow.workspace import Record

Reader = Callable[[Mapping[str, Any]], Mapping[str, Any]]
"""Turns the JSON of one format into that of the next; may raise whatever a damaged document leads to."""


class Document(Record):
    """A value that is kept as a file. `format` is the number of its form, and its default the newest number.

    A document has the keys of its format and no others. So the number is raised whenever a key comes, goes or changes
    its meaning, and `older` gets a reader of the previous one.
    """

    older: ClassVar[Mapping[int, Reader]] = {}

    format: int

    @property
    def label(self) -> str:
        """The document in words, as "release digits 3"."""
        raise NotImplementedError


D = TypeVar("D", bound=Document)


def encode(document: Document) -> bytes:
    """Return a document as canonical JSON: equal documents give equal bytes.

    Raises StoreError for a value that JSON cannot hold, such as NaN.
    """
    try:
        content = document.model_dump(mode="json")
        text = json.dumps(content, sort_keys=True, ensure_ascii=False, indent=2, allow_nan=False)
        return f"{text}\n".encode()
    except ValueError as error:
        raise StoreError(f"The {document.label} cannot be written as JSON: {error}.") from error


def decode(kind: type[D], content: bytes, place: str, remedy: str = "restore it from a backup") -> D:
    """Read a document of any format that was ever written; `place` names the file in errors.

    A document without a format is one of the first. Raises StoreError for a document that is damaged, with the field
    and the `remedy`, and for one of a newer format or with a field that this tvmflow does not know.
    """
    newest = kind.model_fields["format"].default
    try:
        document: Mapping[str, Any] = json.loads(content)
        if not isinstance(document, dict):
            raise ValueError("it is not a JSON object")
        number = document.get("format", 1)
        if type(number) is not int or number < 1:
            raise ValueError(f"its format {number!r} is not a number")
        if number > newest:
            raise StoreError(f"{place} has format {number}, this tvmflow reads up to {newest}; upgrade tvmflow.")
        for step in range(number, newest):
            document = kind.older[step](document)
        current = json.dumps({**document, "format": newest}, allow_nan=False)
        return kind.model_validate_json(current, strict=True)
    except ValidationError as error:
        problem = error.errors()[0]
        field = ascii(".".join(map(str, problem["loc"])))[1:-1]
        if problem["type"] == "extra_forbidden":
            raise StoreError(
                f"{place} has a field that this tvmflow does not know, {field}: upgrade tvmflow."
            ) from error
        raise StoreError(f"{place} is damaged ({field}: {problem['msg']}): {remedy}.") from error
    except (ValueError, LookupError, TypeError, AttributeError, RecursionError) as error:
        raise StoreError(f"{place} is damaged ({str(error)!a}): {remedy}.") from error


R = TypeVar("R", bound=Record)


def narrow(kind: type[R], value: R) -> R:
    """Return the part of a value that its base class `kind` has, such as a step's result without its sources."""
    return kind(**{name: getattr(value, name) for name in kind.model_fields})
