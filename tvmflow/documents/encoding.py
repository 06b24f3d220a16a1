"""Documents that outlive the tvmflow that wrote them: their bytes, and readers of every format ever written."""

import json
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Annotated, Any, ClassVar, TypeVar

from pydantic import AliasChoices, Field, ValidationError

from tvmflow.errors import StoreError
from tvmflow.spec.messages import printable
from tvmflow.workspace import Record

Reader = Callable[[Mapping[str, Any]], Mapping[str, Any]]
"""Turns the JSON of one format into that of the next; may raise whatever a damaged document leads to."""


Message = Annotated[str, Field(validation_alias=AliasChoices("message", "told"), serialization_alias="told")]
"""A sentence about a value, for people; its key in JSON is `told`, as documents of all formats have it."""


_HALF_PAIR = re.compile("[\ud800-\udfff]")


class Document(Record):
    """A value that is kept as a file. `format` is the number of its form, and its default the newest number.

    A document has the keys of its format and no others. So the number is raised whenever a key comes, goes or changes
    its meaning, and `older` gets a reader of the previous one.
    """

    older: ClassVar[Mapping[int, Reader]] = {}

    format: int

    @property
    def label(self) -> str:
        """The words that name this document in messages, as "release digits 3"."""
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
        if fault := _find_fault(document):
            raise StoreError(f"{place} is damaged ({printable(fault)}): {remedy}.")
        current = json.dumps({**document, "format": newest})
        return kind.model_validate_json(current, strict=True)
    except ValidationError as error:
        problem = error.errors()[0]
        field = _join(problem["loc"])
        if problem["type"] == "extra_forbidden":
            raise StoreError(
                f"{place} has a field that this tvmflow does not know, {printable(field)}: upgrade tvmflow."
            ) from error
        fault = printable(f"{field}: {problem['msg']}")
        raise StoreError(f"{place} is damaged ({fault}): {remedy}.") from error
    except (ValueError, LookupError, TypeError, AttributeError, RecursionError) as error:
        raise StoreError(f"{place} is damaged ({printable(str(error))}): {remedy}.") from error


def _find_fault(value: Any, *keys: str) -> str | None:
    """The first value or key of a document that cannot be written as JSON again: the keys to it, and its fault."""
    items = value.items() if isinstance(value, Mapping) else enumerate(value) if isinstance(value, list) else ()
    for key, item in items:
        path = (*keys, str(key))
        if problem := _describe_fault(key) or _describe_fault(item):
            return f"{_join(path)}: {problem}"
        if fault := _find_fault(item, *path):
            return fault
    return None


def _join(keys: Sequence[int | str]) -> str:
    """The keys that lead to a value of a document, as one text; an empty key as two quotes."""
    return ".".join(str(key) or "''" for key in keys)


def _describe_fault(value: Any) -> str | None:
    if isinstance(value, str) and _HALF_PAIR.search(value):
        return "it has half of a surrogate pair"
    if isinstance(value, float | int) and not abs(value) <= sys.float_info.max:
        return "it is not a finite number"
    return None


R = TypeVar("R", bound=Record)


def narrow(kind: type[R], value: R) -> R:
    """Return an instance of `kind`, a base class of the value's class, with the fields of this class.

    For example, the result of a step loses its `sources`.
    """
    return kind(**{name: getattr(value, name) for name in kind.model_fields})
