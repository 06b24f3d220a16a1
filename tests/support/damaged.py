"""Damaged ONNX files: how to make them, and the steps that read a model, in a process that may crash.

`mutate` damages a model by a seed; `attempt` is the function of a child process, see `children.Child`.
"""

import random
import resource
import traceback
from pathlib import Path
from typing import Any, Literal

import onnx
from google.protobuf.message import Message
from pydantic import BaseModel

from tvmflow.errors import TvmflowError, naming_model

# A damaged size must not take the machine's memory.
_MOST_MEMORY = 10 << 30
_INTEGERS = (0, 1, -1, 2, 3, 7, 16, 127, 255, 1 << 20, 1 << 31, -(1 << 31), (1 << 62) - 1, -(1 << 63))
_TEXTS = ("", "x", "y", "w", "Relu", "Loop", "LSTM", "com.microsoft", "\0", "../x", "%s{}", "ü" * 40, "axis", "N")
_FLOATS = (0.0, -1.0, 1e30, float("inf"), float("nan"))


def mutate(model: bytes, generator: random.Random) -> bytes:
    """Damage a model's bytes, or fields of its protobuf message, in one to three places."""
    for _ in range(generator.randint(1, 3)):
        change = generator.choice((_flip, _truncate, _insert, _remove, *[_change_field] * 6))
        model = change(model, generator)
    return model


def _flip(data: bytes, generator: random.Random) -> bytes:
    if not data:
        return data
    place = generator.randrange(len(data))
    return data[:place] + bytes([data[place] ^ (1 << generator.randrange(8))]) + data[place + 1 :]


def _truncate(data: bytes, generator: random.Random) -> bytes:
    return data[: generator.randint(0, len(data))]


def _insert(data: bytes, generator: random.Random) -> bytes:
    place = generator.randint(0, len(data))
    return data[:place] + generator.randbytes(generator.randint(1, 8)) + data[place:]


def _remove(data: bytes, generator: random.Random) -> bytes:
    place = generator.randint(0, len(data))
    return data[:place] + data[place + generator.randint(1, 8) :]


def _change_field(data: bytes, generator: random.Random) -> bytes:
    """Change a field of a random message inside the model; bytes that are no model stay as they are."""
    model = onnx.ModelProto()
    try:
        model.ParseFromString(data)
    except Exception:
        return data
    message: Any = model
    while True:
        fields = message.ListFields()
        inner = [
            item
            for _, value in fields
            for item in ([value] if isinstance(value, Message) else value if _is_repeated(value) else ())
            if isinstance(item, Message)
        ]
        if not inner or generator.random() < 0.15:
            break
        message = generator.choice(inner)
    fields = message.ListFields()
    if fields:
        field, value = generator.choice(fields)
        _change(message, field.name, value, generator)
    return model.SerializeToString()


def _is_repeated(value: Any) -> bool:
    return hasattr(value, "__len__") and not isinstance(value, str | bytes)


def _change(message: Any, name: str, value: Any, generator: random.Random) -> None:
    if _is_repeated(value):
        place = generator.randrange(len(value))
        if isinstance(value[place], Message):
            if generator.random() < 0.5:
                del value[place]
            else:
                value.add().CopyFrom(value[generator.randrange(len(value))])
        elif generator.random() < 0.3:
            del value[place]
        else:
            value[place] = _other(value[place], generator)
    elif isinstance(value, Message) or generator.random() < 0.3:
        message.ClearField(name)
    else:
        other = _other(value, generator)
        try:
            setattr(message, name, other)
        except ValueError:  # A number that the field cannot hold.
            message.ClearField(name)


def _other(value: Any, generator: random.Random) -> Any:
    if isinstance(value, bool | int):
        return generator.choice(_INTEGERS) if generator.random() < 0.5 else int(value) + generator.choice((-1, 1))
    if isinstance(value, float):
        return generator.choice(_FLOATS)
    text = generator.choice(_TEXTS)
    return text.encode() if isinstance(value, bytes) else text


class Attempt(BaseModel):
    """A model file to compile, and the state folder to compile it in."""

    file: Path
    home: Path


class End(BaseModel):
    """How an attempt ended: `failed` is an exception that no TvmflowError announces, with its traceback."""

    outcome: Literal["built", "refused", "failed"]
    message: str = ""


def attempt(job: Attempt, emit: Any) -> End:
    """Export, import and build the model as the steps of `tvmflow compile` do, for this machine."""
    resource.setrlimit(resource.RLIMIT_AS, (_MOST_MEMORY, resource.getrlimit(resource.RLIMIT_AS)[1]))
    try:
        with naming_model(str(job.file)):
            _compile(job)
    except TvmflowError as error:
        return End(outcome="refused", message=str(error))
    except MemoryError:
        return End(outcome="refused", message=f"{job.file}: out of memory, as tvmflow.processes.children tells")
    except Exception:
        return End(outcome="failed", message=traceback.format_exc())
    return End(outcome="built")


def _compile(job: Attempt) -> None:
    from tasks import export, relax_import
    from tasks.original import find_original
    from tvmflow import compiler, spec
    from tvmflow.hardware.target import resolve
    from tvmflow.workspace import Workspace

    def emit(done: float, total: float, message: str) -> None:
        """Ignore progress."""

    folders = {"home": job.home, "folder": job.file.parent}
    workspace = Workspace(job.home)
    document = {"name": "damaged", "model": {"onnx": str(job.file)}, "validate": {"samples": 1}}
    release = spec.parse(document, job.file.parent)
    export_job = export.ExportJob.of(release, find_original(release, workspace)).model_copy(update=folders)
    exported = export.work(export_job, emit)
    import_job = relax_import.ImportJob.of(release, exported).model_copy(update=folders)
    imported = relax_import.load_imported(workspace, relax_import.work(import_job, emit))
    compiler.build(imported, resolve("native"))
