"""Verification in another process: a library that crashes, hangs or lies is one error, and this process goes on."""

import dataclasses
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path

import numpy as np
import psutil
import pytest

from support.processes import SECRETS, mentioned_secrets
from support.waits import wait_until
from tvmflow import npz, verification
from tvmflow.bundle import extract, installed_versions, keygen, pack, read_manifest, sign
from tvmflow.errors import BundleError, UncheckedBundleError, VerdictError
from tvmflow.hardware.target import host
from tvmflow.verification import ROUNDED, verify

GOOD = Path(__file__).parents[1] / "bundle" / "files" / "format-1.tar.gz"
Bundle = Callable[..., Path]


@pytest.fixture
def bundle_of(tmp_path: Path) -> Bundle:
    """A bundle for this machine whose library does something as it is loaded, or with another golden sample."""

    def make(code: str | None = None, provenance: dict[str, str] | None = None, **sample: np.ndarray) -> Path:
        folder = tmp_path / "files"
        folder.mkdir()
        manifest = extract(GOOD, folder, trusted=())
        if code is not None:
            source = tmp_path / "mod.cc"
            source.write_text(
                f"#include <signal.h>\n#include <unistd.h>\n__attribute__((constructor)) void run() {{ {code} }}"
            )
            compiler = shutil.which("c++") or "c++"
            subprocess.run([compiler, "-shared", "-fPIC", "-o", str(folder / "mod.so"), str(source)], check=True)
            manifest = dataclasses.replace(
                manifest, arch=host().arch, cpu_features=(), versions=installed_versions("22")
            )
        manifest = dataclasses.replace(manifest, provenance=manifest.provenance | (provenance or {}))
        if sample:
            npz.write(
                folder / "sample.npz",
                npz.read(folder / "sample.npz") | {k.replace("_", ":"): v for k, v in sample.items()},
            )
        pack(tmp_path / "bundle.tar.gz", manifest, {path.name: path for path in folder.iterdir()})
        return tmp_path / "bundle.tar.gz"

    return make


@pytest.fixture
def runnable() -> None:
    try:
        read_manifest(GOOD).check_host()
    except BundleError as error:
        pytest.skip(str(error))


@pytest.mark.parametrize(
    ("code", "cause"),
    [
        ("raise(SIGSEGV);", "SIGSEGV"),
        ("raise(SIGILL);", "SIGILL"),
        ("raise(SIGKILL);", "SIGKILL"),
        ("raise(40);", "signal 40"),
        ("_exit(0);", "exit code 0"),
        ('write(2, "far too \\033[31mred\\n", 17); _exit(7);', r"exit code 7, last output 'far too \x1b[31mred'"),
    ],
)
def test_a_library_that_ends_its_process_is_refused_with_the_cause(bundle_of: Bundle, code: str, cause: str) -> None:
    path = bundle_of(code)
    with pytest.raises(BundleError) as caught:
        verify(path, trusted=())
    assert str(caught.value).isprintable()
    assert cause in str(caught.value)
    assert str(path) in str(caught.value)


def has_ended(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


@pytest.mark.long
def test_a_library_that_hangs_is_given_up(bundle_of: Bundle, tmp_path: Path) -> None:
    pid = tmp_path / "pid"
    # The child's own child is ended as well.
    code = f'if (!fork()) {{ execl("/bin/sh", "sh", "-c", "echo $$ > {pid}; exec sleep 600", 0); }} for (;;) pause();'
    with pytest.raises(UncheckedBundleError, match=r"within 4 seconds"):
        verify(bundle_of(code), trusted=(), timeout=4)
    child = int(pid.read_text())
    # A process that is killed ends a moment later.
    wait_until(lambda: has_ended(child), timeout=60)


def test_a_verdict_that_cannot_be_written_is_none_of_the_bundle(monkeypatch: pytest.MonkeyPatch) -> None:
    """The disk may be full."""
    monkeypatch.setattr(verification, "_REPLY", "absent/reply.json")
    with pytest.raises(UncheckedBundleError, match="its verdict cannot be written; free space"):
        verify(GOOD, trusted=())


def test_a_library_that_was_not_built_by_tvm_is_refused(bundle_of: Bundle) -> None:
    with pytest.raises(BundleError, match="bundle ") as caught:
        verify(bundle_of(""), trusted=())
    assert str(caught.value).isprintable()


@pytest.mark.usefixtures("runnable")
def test_a_good_bundle_is_verified_with_its_error(bundle_of: Bundle) -> None:
    path = bundle_of()
    verified = verify(path, trusted=())
    assert verified.manifest == read_manifest(path)
    assert 0 <= verified.max_abs_error < 1e-5


@pytest.mark.usefixtures("runnable")
def test_other_outputs_than_the_originals_are_a_verdict(bundle_of: Bundle) -> None:
    with pytest.raises(VerdictError, match="output 'y'"):
        verify(bundle_of(output_y=np.full((1, 4), 9, np.float32)), trusted=())


@pytest.mark.usefixtures("runnable")
@pytest.mark.parametrize("activations", [ROUNDED, "quantised"], ids=["now", "by earlier versions"])
def test_outputs_of_rounded_activations_may_differ_by_levels(bundle_of: Bundle, activations: str) -> None:
    levels = np.array([[0.3916757, 0.0969395, 0.01, 0.0]], np.float32)
    verified = verify(bundle_of(provenance={"activations": activations}, output_y=levels), trusted=())
    assert 0.009 < verified.max_abs_error < 0.011


@pytest.mark.usefixtures("runnable")
def test_outputs_of_another_shape_are_a_verdict(bundle_of: Bundle) -> None:
    with pytest.raises(VerdictError, match=r"output 'y' .*\(1, 4\).*\(2, 4\)"):
        verify(bundle_of(output_y=np.zeros((2, 4), np.float32)), trusted=())


@pytest.mark.usefixtures("runnable")
def test_a_sample_of_other_outputs_is_refused(bundle_of: Bundle) -> None:
    with pytest.raises(BundleError, match="its golden sample"):
        verify(bundle_of(output_z=np.zeros(3, np.float32)), trusted=())


def test_an_unsigned_library_sees_no_credentials(
    bundle_of: Bundle, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in SECRETS.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("TVM_NUM_THREADS", "1")
    command = f'execl("/bin/sh", "sh", "-c", "env >{tmp_path}/environment", (char*)0);'
    with pytest.raises(BundleError, match="ended with exit code 0"):
        verify(bundle_of(command), trusted=())
    environment = (tmp_path / "environment").read_text()
    assert "TVM_NUM_THREADS=1\n" in environment
    assert mentioned_secrets(environment) == []


def test_only_what_the_given_keys_have_signed_is_run(bundle_of: Bundle, tmp_path: Path) -> None:
    public, other = keygen(tmp_path / "key"), keygen(tmp_path / "other")
    path = bundle_of("_exit(7);")
    with pytest.raises(BundleError, match="is not signed"):
        verify(path, trusted=[public])
    sign(path, tmp_path / "key", path)
    with pytest.raises(BundleError, match="which is not trusted here"):
        verify(path, trusted=[other])
    with pytest.raises(BundleError, match="ended with exit code 7"):
        verify(path, trusted=[public])


def test_a_damaged_bundle_is_refused_as_it_is_when_it_is_opened(tmp_path: Path) -> None:
    (tmp_path / "cut.tar.gz").write_bytes(GOOD.read_bytes()[:-100])
    with pytest.raises(BundleError, match="it ends too early"):
        verify(tmp_path / "cut.tar.gz")
