"""Reading release files, and replacing values in one."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml
from pydantic import ValidationError
from yaml.constructor import ConstructorError

from tvmflow.errors import SpecError, TargetError
from tvmflow.hardware.target import explain_missing_unit
from tvmflow.spec.document import Spec
from tvmflow.spec.messages import describe, printable


def load(path: Path) -> Spec:
    """Read and validate a release file.

    Raises SpecError for a file that cannot be read or is not valid. Its sentence names the file, the key and, for an
    unknown key, the likely one.
    """
    try:
        text = path.read_text(encoding="utf-8")
    except OSError as error:
        raise SpecError(
            f"release file {str(path)!r} cannot be read ({error.strerror}); `tvmflow init` writes one"
        ) from error
    except UnicodeDecodeError as error:
        raise SpecError(f"release file {str(path)!r} is not UTF-8 text; `tvmflow init` writes a good one") from error
    try:
        document = read_yaml(text)
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        line = f" at line {mark.line + 1}" if mark is not None else ""
        problem = printable(" ".join(str(getattr(error, "problem", None) or error).split()))
        raise SpecError(f"release file {str(path)!r} is not valid YAML{line}: {problem}") from error
    return parse(document, path.resolve().parent, str(path))


def read_yaml(text: str) -> Any:
    """Return what a text in YAML says. A key that is given twice or is no plain text is refused.

    Raises yaml.YAMLError.
    """
    try:
        return yaml.load(text, _Loader)  # noqa: S506 - a safe loader
    except (ValueError, OverflowError, RecursionError) as error:
        raise yaml.YAMLError(str(error)) from error


def parse(document: object, folder: Path, source: str = "release file") -> Spec:
    """Validate the document of a release file; its relative paths are looked up in `folder`.

    Raises SpecError, whose sentence begins with `source`, for a key or value that is wrong, for a target that is
    impossible or that cannot compute in the precision, and for a file that does not exist.
    """
    if not isinstance(document, Mapping):
        raise SpecError(f"{source} must be a mapping with name, model and inputs; `tvmflow init` writes one")
    try:
        spec = Spec.model_validate(dict(document))
    except ValidationError as error:
        raise SpecError(printable(f"{source}: {describe(error)}")) from error
    for section in type(spec).model_fields:
        try:
            spec.model_dump_json(include={section})
        except ValueError as error:  # Text that is no Unicode, or bytes that are no text.
            raise SpecError(f"{source}: {section}: a value cannot be written as JSON; use plain text") from error
    spec._folder = folder
    try:
        targets = spec.resolve_targets()
    except TargetError as error:
        raise SpecError(f"{source}: targets: {error}") from error
    for target in targets:
        reason = explain_missing_unit(target, spec.build.precision)
        if reason is not None:
            raise SpecError(f"{source}: build.precision: {reason}")
    for key, file in (
        ("model.onnx", spec.model.onnx),
        ("model.pt2", spec.model.pt2),
        ("model.weights", spec.model.weights),
        *((f"inputs.{item.name}.samples.file", item.samples.file) for item in spec.inputs),
        *(("train.reads", file) for file in (spec.train.reads if spec.train else ())),
    ):
        if file is not None and not _is_file(spec.path(file)):
            raise SpecError(printable(f"{source}: {key}: there is no file {str(spec.path(file))!r}"))
    return spec


def amend(spec: Spec, changes: Mapping[str, object], source: str = "release file") -> Spec:
    """Return a specification with some values replaced, validated like a release file.

    A key of `changes` names a section, as "targets", or a key in a section, as "tune.trials"; the value is the one in
    the release file, with None for YAML's null. Keys that the release file does not set remain unset. Raises SpecError,
    whose sentence begins with `source`, for a key or value that is wrong, for a target that is impossible or that
    cannot compute in the precision, and for a file that does not exist.
    """
    document = spec.model_dump(by_alias=True, exclude_unset=True)
    for key, value in changes.items():
        section, _, name = key.partition(".")
        document[section] = {**(document.get(section) or {}), name: value} if name else value
    return parse(document, spec.folder, source)


def to_document(spec: Spec) -> dict[str, Any]:
    """Return a specification as JSON data that `parse` reads; keys that the release file does not set are left out."""
    return spec.model_dump(mode="json", by_alias=True, exclude_unset=True)


def _is_file(path: Path) -> bool:
    try:
        return path.is_file()
    except OSError:  # The name is too long, or the folder may not be read.
        return False


class _Loader(yaml.SafeLoader):
    """YAML's safe loader that refuses a key that is given twice, where PyYAML takes the last, and one that is no text.

    Keys are checked before mappings are merged, since a merged mapping may give a key again.
    """

    def compose_mapping_node(self, anchor: Any) -> yaml.MappingNode:
        node = super().compose_mapping_node(anchor)
        keys = set()
        for key, _ in node.value:
            if not isinstance(key, yaml.ScalarNode):
                raise ConstructorError(None, None, "a key is a list or a mapping; quote it as text", key.start_mark)
            if key.tag != "tag:yaml.org,2002:merge" and key.value in keys:
                raise ConstructorError(None, None, f"{key.value!r} is given twice", key.start_mark)
            keys.add(key.value)
        return node

    def construct_object(self, node: yaml.Node, deep: bool = False) -> Any:
        try:
            return super().construct_object(node, deep)
        except (ValueError, KeyError, AttributeError) as error:
            kind = node.tag.rpartition(":")[2]
            problem = f"{node.value!r:.60} is no {kind}; correct it, or quote it as text"
            raise ConstructorError(None, None, problem, node.start_mark) from error
