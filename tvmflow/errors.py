"""The errors that a user can meet, one tree with `TvmflowError` at its top.

    TvmflowError
    ├── SpecError            the release file is missing, malformed or contradicts itself
    ├── SettingsError        a setting of this machine is missing or wrong
    ├── TargetError          a target is unknown, or this TVM cannot build for it
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
    ├── RegistryError        MLflow is down or refuses
    ├── PrefectError         Prefect is down or refuses, or a deployment is not registered
    ├── StackError           a server of the local stack does not start
    └── StepError            a step's process was killed, crashed or ran out of time

Every message is one sentence that names the file or value, what was expected, and what to do next.
"""


class TvmflowError(Exception):
    """Something the user can act on: shown as one sentence, with exit code `exit_code`."""

    exit_code = 1


class SpecError(TvmflowError):
    """The release file is missing, malformed or contradicts itself."""

    exit_code = 2


class SettingsError(TvmflowError):
    """A setting of this machine is missing or wrong."""

    exit_code = 2


class TargetError(TvmflowError):
    """A target is unknown, or this TVM cannot build for it."""


class TrainError(TvmflowError):
    """The training function failed."""


class ExportError(TvmflowError):
    """The model cannot be loaded or exported to ONNX."""


class ModelImportError(TvmflowError):
    """The ONNX file cannot be read or imported into Relax."""


class UnsupportedOperatorError(ModelImportError):
    """The ONNX model uses an operator that TVM's importer does not know."""


class TuneError(TvmflowError):
    """Tuning failed as a whole; single failed trials are no error."""


class BuildError(TvmflowError):
    """TVM or the linker could not build the library."""


class OptionError(BuildError):
    """A pass or an option of the build is unknown, or has a value that it cannot have."""

    exit_code = 2


class BundleError(TvmflowError):
    """A bundle is damaged, unsafe or not for this machine."""


class InputError(TvmflowError):
    """An input has the wrong name, shape or dtype."""


class RemoteError(TvmflowError):
    """An RPC tracker or server is gone, refuses or does not answer."""


class VerdictError(TvmflowError):
    """The release was measured and refused; the verdict says why. Nothing was published."""

    exit_code = 3


class StoreError(TvmflowError):
    """The S3 endpoint is down, refuses the credentials, or holds something else than expected."""


class RegistryError(TvmflowError):
    """MLflow is down or refuses."""


class PrefectError(TvmflowError):
    """Prefect's server is down or refuses, or has no such deployment."""


class StackError(TvmflowError):
    """A server of the local stack does not start."""


class StepError(TvmflowError):
    """A step's process was killed, crashed or ran out of time."""
