"""Verifying a bundle in a process of its own: nothing in it can take the caller down."""

import contextlib
import json
import os
import resource
import signal
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tvmflow.bundle import Manifest
from tvmflow.bundle.signature import TRUSTED_KEYS_VARIABLE
from tvmflow.errors import BundleError, SettingsError, VerdictError

# How far an element of an output may be from the original's: relative to it, and absolute.
_RTOL, _ATOL = 1e-2, 1e-3
# The same relative to the output's largest magnitude, for bundles that compute in a reduced precision.
_REDUCED_RTOL = 1e-1
_LARGEST_ANSWER = 1 << 22
_REFUSALS = {kind.__name__: kind for kind in (BundleError, VerdictError, SettingsError)}


@dataclass(frozen=True)
class Verification:
    """A bundle that is whole, may run here, and gives the original's outputs on its golden sample.

    `max_abs_error` is the largest absolute difference from these.
    """

    manifest: Manifest
    max_abs_error: float


def verify(bundle: Path, *, trusted: Sequence[Path] | None = None, timeout: float = 300.0) -> Verification:
    """Check a bundle's form, digests, signature and needs, then run its golden sample, all in another process.

    `trusted` are files with public keys, one of which must have signed it, by default those that TVMFLOW_TRUSTED_KEYS
    names. Raises BundleError when it is refused, crashes or takes longer than `timeout` seconds, and VerdictError when
    its outputs are not the original's.
    """
    environment = {**os.environ, "TVM_USE_RUNTIME_LIB": "1"}
    if trusted is not None:
        environment[TRUSTED_KEYS_VARIABLE] = os.pathsep.join(str(path.absolute()) for path in trusted)
    with tempfile.TemporaryDirectory(prefix="tvmflow-", ignore_cleanup_errors=True) as scratch:
        answer, said = Path(scratch) / "answer.json", Path(scratch) / "said.txt"
        # The child unpacks here, so that what it leaves when it is killed goes as well.
        environment["TMPDIR"] = scratch
        with said.open("wb") as output:
            child = subprocess.Popen(
                [sys.executable, "-m", "tvmflow.verification", str(bundle), str(answer), str(timeout)],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                env=environment,
                start_new_session=True,
            )
            try:
                code = child.wait(timeout)
            except subprocess.TimeoutExpired as error:
                raise BundleError(
                    f"bundle {str(bundle)!r} did not finish its golden sample within {timeout:g} seconds; "
                    f"do not use it, or give it more time"
                ) from error
            finally:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(child.pid, signal.SIGKILL)
                child.wait()
        try:
            if code != 0:
                raise ValueError("it did not end by itself")
            with answer.open("rb") as stream:
                document = json.loads(stream.read(_LARGEST_ANSWER))
            if "error" not in document:
                return Verification(Manifest.parse(document["manifest"].encode()), float(document["max_abs_error"]))
            refusal = _REFUSALS[document["error"]](str(document["message"]))
        except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            # A library that runs may write anything there, too.
            raise _died(bundle, code, said) from error
    raise refusal


def _died(bundle: Path, code: int, said: Path) -> BundleError:
    if code < 0:
        known = {int(item): item.name for item in signal.Signals}
        cause = f"was killed by {known.get(-code, f'signal {-code}')}"
    else:
        with said.open("rb") as stream:
            stream.seek(max(0, said.stat().st_size - 4096))
            lines = stream.read().decode(errors="replace").strip().splitlines() or ["no last words"]
        last = "".join(letter for letter in lines[-1] if letter.isprintable())[:200]
        cause = f"ended with exit code {code} ({last})"
    return BundleError(
        f"bundle {str(bundle)!r}: the process that ran its golden sample {cause}; do not use it, build it again"
    )


def _work(bundle: Path) -> dict[str, Any]:
    """The child's side: open, load, run, compare."""
    import numpy as np

    from tvmflow import runtime

    with runtime.load(bundle) as model:
        inputs, expected = model.sample
        computed = model(**inputs)
        manifest = model.manifest
    if set(expected) != {item.name for item in manifest.outputs}:
        raise BundleError(f"bundle {str(bundle)!r}: its golden sample is not of its outputs; build it again")
    reduced = _precision(manifest) != "fp32"
    worst = 0.0
    for name, array in expected.items():
        wanted, got = array.astype(np.float64), computed[name].astype(np.float64)
        if wanted.shape != got.shape:
            raise VerdictError(f"bundle {str(bundle)!r}: output {name!r} has shape {got.shape}, not {wanted.shape}")
        difference = np.abs(got - wanted)
        worst = max(worst, float(np.nanmax(difference, initial=0.0)))
        atol = _ATOL + (_REDUCED_RTOL * float(np.nanmax(np.abs(wanted), initial=0.0)) if reduced else 0.0)
        if not np.allclose(got, wanted, rtol=_RTOL, atol=atol, equal_nan=True):
            raise VerdictError(f"bundle {str(bundle)!r}: output {name!r} differs from the original's by {worst:.3g}")
    return {"manifest": manifest.to_json().decode(), "max_abs_error": worst}


def _precision(manifest: Manifest) -> str:
    """What the bundle's products compute in, as far as its provenance says."""
    try:
        return str(json.loads(manifest.provenance.get("options", "{}"))["build"]["precision"])
    except (ValueError, KeyError, TypeError):
        return "fp32"


def _main(bundle: Path, answer: Path, timeout: float) -> None:
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    # Ends this process also where the one that waits for it is gone.
    signal.alarm(int(timeout) + 5)
    try:
        document = _work(bundle)
    except (BundleError, VerdictError, SettingsError) as error:
        document = {"error": type(error).__name__, "message": str(error)}
    except Exception as error:
        words = " ".join(f"{type(error).__name__}: {error}".split())[:300]
        told = f"bundle {str(bundle)!r} cannot run its golden sample ({words}); build it again"
        document = {"error": "BundleError", "message": told}
    answer.write_text(json.dumps(document))
    # Not by way of the exit handlers of a library that is not trusted yet.
    os._exit(0)


if __name__ == "__main__":
    _main(Path(sys.argv[1]), Path(sys.argv[2]), float(sys.argv[3]))
