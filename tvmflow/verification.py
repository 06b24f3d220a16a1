"""The verification of a bundle in another process: a bundle that crashes cannot end the caller."""

import json
import os
import resource
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tvmflow.bundle import Manifest
from tvmflow.bundle.signature import TRUSTED_KEYS_VARIABLE
from tvmflow.errors import BundleError, SettingsError, UncheckedBundleError, VerdictError, from_data, to_data
from tvmflow.processes.supervisor import ChildProcess, visible_environment

if TYPE_CHECKING:
    from tvmflow.arrays import Array

# The tolerance for an element of an output: relative to the original's, and absolute.
_RTOL, _ATOL = 1e-2, 1e-3
# The same relative to the output's largest magnitude, for bundles that compute in a reduced precision or whose model
# rounds its activations.
_REDUCED_RTOL = 1e-1
# What the provenance of a bundle says of such a model's activations, and what that of earlier versions said.
ROUNDED, _QUANTISED = "rounded", "quantised"
_REPLY = "reply.json"
_LARGEST_REPLY = 1 << 22
_REFUSALS = (BundleError, VerdictError, SettingsError)


@dataclass(frozen=True)
class Verification:
    """A bundle that is complete, can run on this machine, and gives the original's outputs on its golden sample.

    `max_abs_error` is the largest absolute difference between its outputs and the original's.
    """

    manifest: Manifest
    max_abs_error: float


def verify(bundle: Path, *, trusted: Sequence[Path] | None = None, timeout: float = 300.0) -> Verification:
    """Check a bundle's digests, signature and requirements, then run its golden sample, all in another process.

    `trusted` are files with public keys, one of which must have signed it, by default those that TVMFLOW_TRUSTED_KEYS
    names. Raises BundleError when the bundle is refused or crashes, UncheckedBundleError when it takes longer than
    `timeout` seconds or this machine has no room for it, VerdictError when its outputs differ from the original's, and
    SettingsError when a file of keys cannot be read.
    """
    with tempfile.TemporaryDirectory(prefix="tvmflow-", ignore_cleanup_errors=True) as scratch:
        reply = Path(scratch) / _REPLY
        with ChildProcess(
            "tvmflow.verification",
            str(bundle),
            str(reply),
            environment=_environment(trusted, Path(scratch)),
            log=Path(scratch) / "log.txt",
        ) as child:
            try:
                code = child.wait(time.monotonic() + timeout)
            except TimeoutError as error:
                raise UncheckedBundleError(
                    f"bundle {str(bundle)!r} did not finish its golden sample within {timeout:g} seconds; "
                    f"do not use it, or give it more time"
                ) from error
            child.kill()
            if code == os.EX_CANTCREAT:
                raise UncheckedBundleError(
                    f"bundle {str(bundle)!r}: its verdict cannot be written; free space, or set TMPDIR anew"
                )
            try:
                return _read_reply(reply, code)
            except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
                # A library that runs may also write anything into the file of the reply.
                raise BundleError(
                    f"bundle {str(bundle)!r}: the process that ran its golden sample {child.describe_end()}; "
                    "do not use it, build it again"
                ) from error


def _environment(trusted: Sequence[Path] | None, scratch: Path) -> dict[str, str]:
    """The whole environment of the process that runs a bundle's library."""
    # The child unpacks into the scratch folder, so that nothing stays when it is killed.
    environment = {**visible_environment(), "TVM_USE_RUNTIME_LIB": "1", "TMPDIR": str(scratch)}
    if trusted is not None:
        environment[TRUSTED_KEYS_VARIABLE] = os.pathsep.join(str(path.absolute()) for path in trusted)
    return environment


def _read_reply(reply: Path, exit_code: int) -> Verification:
    """Return the child's reply.

    Raises the error with which it refused the bundle, and ValueError or the like for any other.
    """
    if exit_code != 0:
        raise ValueError("the child did not end by itself")
    with reply.open("rb") as stream:
        document = json.loads(stream.read(_LARGEST_REPLY))
    if "error" not in document:
        return Verification(Manifest.parse(document["manifest"].encode()), float(document["max_abs_error"]))
    error = from_data(document["error"])
    if not isinstance(error, _REFUSALS):
        raise ValueError(f"no refusal of a bundle: {type(error).__name__}")
    raise error


def _run_sample(bundle: Path) -> dict[str, Any]:
    """Load the bundle, run its golden sample, and compare the outputs; this is the child's side."""
    import numpy as np

    from tvmflow import runtime

    with runtime.load(bundle) as model:
        inputs, expected = model.sample
        outputs, undecided = model(**inputs), model.undecided
        manifest = model.manifest
    if set(expected) != {item.name for item in manifest.outputs}:
        raise BundleError(
            f"bundle {str(bundle)!r}: its golden sample has other outputs than the bundle; build it again"
        )
    reduced = _precision(manifest) != "fp32" or manifest.provenance.get("activations") in (ROUNDED, _QUANTISED)
    worst = 0.0
    for name, array in expected.items():
        golden, output = array.astype(np.float64), outputs[name].astype(np.float64)
        if golden.shape != output.shape:
            raise VerdictError(f"bundle {str(bundle)!r}: output {name!r} has shape {output.shape}, not {golden.shape}")
        if name in undecided:
            output = np.where(undecided[name], golden, output)
        difference = np.abs(output - golden)
        worst = max(worst, float(np.nanmax(difference, initial=0.0)))
        if not accepts(array, output, reduced=reduced):
            raise VerdictError(f"bundle {str(bundle)!r}: output {name!r} differs from the original's by {worst:.3g}")
    return {"manifest": manifest.to_json().decode(), "max_abs_error": worst}


def accepts(expected: "Array", output: "Array", *, reduced: bool = False) -> bool:
    """Whether a device that checks a bundle's golden sample accepts an output; never one of another shape.

    `reduced` is true for a bundle that computes in a reduced precision, or whose model rounds its activations.
    """
    import numpy as np

    from tvmflow.tolerance import absolute_tolerance

    if expected.shape != output.shape:
        return False
    doubles = expected.astype(np.float64)
    atol = absolute_tolerance(expected, _ATOL) + (
        _REDUCED_RTOL * float(np.nanmax(np.abs(doubles), initial=0.0)) if reduced else 0.0
    )
    return bool(np.allclose(output.astype(np.float64), doubles, rtol=_RTOL, atol=atol, equal_nan=True))


def _precision(manifest: Manifest) -> str:
    """The precision in which the bundle computes its products, "fp32" where its provenance names none."""
    try:
        return str(json.loads(manifest.provenance.get("options", "{}"))["build"]["precision"])
    except (ValueError, KeyError, TypeError):
        return "fp32"


def _main(bundle: Path, reply: Path) -> None:
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    document: dict[str, Any]
    try:
        document = _run_sample(bundle)
    except _REFUSALS as error:
        document = {"error": to_data(error)}
    except Exception as error:
        words = " ".join(f"{type(error).__name__}: {error}".split())[:300]
        refusal = BundleError(f"bundle {str(bundle)!r} cannot run its golden sample ({words}); build it again")
        document = {"error": to_data(refusal)}
    try:
        reply.write_text(json.dumps(document))
    except OSError:
        os._exit(os.EX_CANTCREAT)
    # Without the exit handlers of a library that is not trusted yet.
    os._exit(0)


if __name__ == "__main__":
    _main(Path(sys.argv[1]), Path(sys.argv[2]))
