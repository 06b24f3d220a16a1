"""The errors that a user can meet, one tree with `TvmflowError` at its top.

    TvmflowError
    ├── SpecError            the release file is missing, malformed or contradicts itself
    ├── SettingsError        a setting of this machine is missing or wrong
    ├── TargetError          a target is unknown or impossible
    │   └── MachineError     this machine cannot build for a target, or cannot run it
    ├── TrainError           the training function failed
    ├── ExportError          the model cannot be loaded or exported to ONNX
    ├── ModelImportError     the ONNX file cannot be read or imported into Relax
    │   └── UnsupportedOperatorError
    ├── TuneError            tuning failed as a whole
    ├── BuildError           TVM or the linker could not build the library
    │   └── OptionError      a pass or an option of the build is unknown or has a wrong value
    ├── BundleError          a bundle is damaged, unsafe or not for this machine
    ├── InputError           an input has the wrong name, shape or dtype
    ├── RemoteError          an RPC tracker or server is gone, refuses or does not answer
    ├── VerdictError         the release was measured and refused; the verdict says why
    ├── StoreError           the S3 endpoint is down, refuses, or holds something else
    │   └── StatementError   a release, a channel or a verdict lacks the signed statement that this machine demands
    ├── RegistryError        MLflow is down or refuses
    ├── PrefectError         Prefect is down or refuses, or a deployment is not registered
    ├── StackError           a server of the local stack does not start
    ├── StepError            a step's process was killed, crashed or ran out of time
    └── UnavailableError     a server does not answer now; also a StoreError, RegistryError or PrefectError

Every message is one sentence that names the file or value, what was expected, and what to do next.

`to_data` and `from_data` carry an error from one process to another as JSON.
"""

import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any, TypedDict


class TvmflowError(Exception):
    """An error that the user can correct: shown as one sentence, with exit code `exit_code`."""

    exit_code = 1


class SpecError(TvmflowError):
    """The release file is missing, malformed or contradicts itself."""

    exit_code = 2


class SettingsError(TvmflowError):
    """A setting of this machine is missing or wrong."""

    exit_code = 2


class TargetError(TvmflowError):
    """A target is unknown or impossible."""

    exit_code = 2


class MachineError(TargetError):
    """This machine cannot build for a target, or cannot run it."""

    exit_code = 1


class TrainError(TvmflowError):
    """The training function failed."""


class ExportError(TvmflowError):
    """The model cannot be loaded or exported to ONNX."""


class ModelImportError(TvmflowError):
    """The ONNX file cannot be read or imported into Relax."""


class UnsupportedOperatorError(ModelImportError):
    """The ONNX model uses an operator that TVM's importer does not support."""


class TuneError(TvmflowError):
    """Tuning failed as a whole; single failed trials are no error."""


class BuildError(TvmflowError):
    """TVM or the linker could not build the library."""


class OptionError(BuildError):
    """A pass or an option of the build is unknown, or has a wrong value."""

    exit_code = 2


class BundleError(TvmflowError):
    """A bundle is damaged, unsafe or not for this machine."""


class UncheckedBundleError(BundleError):
    """This machine has no room or time for a bundle now, which may be sound: the same may succeed later."""


class InputError(TvmflowError):
    """An input has the wrong name, shape or dtype."""


class RemoteError(TvmflowError):
    """An RPC tracker or server is gone, refuses or does not answer."""


class VerdictError(TvmflowError):
    """A release, bundle or promotion was measured and refused; the message says why. Nothing was published or moved."""

    exit_code = 3


class StoreError(TvmflowError):
    """The S3 endpoint is down, refuses the credentials, or holds other content than expected."""


class StatementError(StoreError):
    """A release, a channel or a verdict lacks a signed statement that this machine demands, or the two differ."""


class RegistryError(TvmflowError):
    """MLflow is down or refuses."""


class PrefectError(TvmflowError):
    """Prefect's server is down or refuses, or has no such deployment."""


class UnavailableError(TvmflowError):
    """A server does not answer now, or is overloaded: the same request may succeed later."""


class StoreUnavailableError(StoreError, UnavailableError):
    """The S3 endpoint does not answer now, or is overloaded."""


class RegistryUnavailableError(RegistryError, UnavailableError):
    """MLflow does not answer now."""


class PrefectUnavailableError(PrefectError, UnavailableError):
    """Prefect's server does not answer now, or is failing."""


class StackError(TvmflowError):
    """A server of the local stack does not start."""


class StepError(TvmflowError):
    """A step's process was killed, crashed or ran out of time."""

    end: str = ""
    """The end of a process that gave no result, as "was killed by SIGSEGV", without files and output; else ""."""


class ErrorData(TypedDict):
    """An error as JSON.

    `types` are the names of its class and of the bases of that class, the nearest first, up to `TvmflowError`;
    `message` is its sentence; `fields` are its attributes by name.
    """

    types: list[str]
    message: str
    fields: dict[str, Any]


def to_data(error: TvmflowError) -> ErrorData:
    """Return an error as JSON data, for `from_data` in another process, without attributes that JSON cannot hold."""
    return {
        "types": [kind.__name__ for kind in type(error).__mro__ if issubclass(kind, TvmflowError)],
        "message": str(error),
        "fields": {name: value for name, value in vars(error).items() if _is_json(value)},
    }


def from_data(data: Mapping[str, Any]) -> TvmflowError:
    """Return the error that `to_data` wrote in another process, without its traceback and its cause.

    An error of a class that this module does not define becomes one of its nearest base class that this module defines.
    Raises ValueError when `data` does not describe an error.
    """
    try:
        names, message, fields = list(data["types"]), str(data["message"]), dict(data["fields"])
    except (KeyError, TypeError, ValueError) as problem:
        raise ValueError("not the data of an error; expected what `tvmflow.errors.to_data` returns") from problem
    kinds = (globals().get(name) for name in names if isinstance(name, str))
    kind = next((item for item in kinds if isinstance(item, type) and issubclass(item, TvmflowError)), TvmflowError)
    # A subclass may take other arguments than its message, so its constructor is not called.
    error = kind.__new__(kind, message)
    vars(error).update(fields)
    return error


@contextmanager
def naming_model(label: str) -> Iterator[None]:
    """Put `model 'LABEL': ` before the message of each TvmflowError of the body, unless the message has the label."""
    try:
        yield
    except TvmflowError as error:
        if label not in str(error):
            error.args = (f"model {label!r}: {error}",)
        raise


def _is_json(value: object) -> bool:
    try:
        json.dumps(value)
    except (TypeError, ValueError):
        return False
    return True
