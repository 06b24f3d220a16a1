"""Runs what the compiler's tests build for AVX-512 in an emulated processor, on a machine that has no such processor.

    python benchmarks/emulated.py                     all tests of the compiler
    python benchmarks/emulated.py norms quantised     those of tests/compiler/test_compiler_norms.py, ...
    python benchmarks/emulated.py --preset x86-64-v4-vnni --cpu corei7_icelake_u

The tests run with the plugin `emulated_record.py`, which builds each model for the preset and for AVX2, and keeps the
first library with the inputs and the outputs of the second. The emulator Bochs then starts a Linux kernel whose only
program, `emulated_guest.py`, runs the libraries and compares. Each difference and each illegal instruction is printed,
and the exit code is 1 if there is one.

Tests that run a library by other means than `CompiledModel.load` end with an illegal instruction here, and so does the
rest of their file: the table says which. AMX is left out, which Linux uses only with XSAVES, with which it does not
start in Bochs.

It needs Debian's packages bochsbios, vgabios, isolinux, genisoimage, cpio, busybox-static and linux-image-cloud-amd64,
and Bochs 3.0 or later. Debian's Bochs has no AVX-512, so build it from its sources, configured with

    --enable-x86-64 --enable-all-optimizations --enable-avx --enable-evex --with-nogui --without-x

Bochs 3.0 takes gathers and scatters for illegal whose index register is above 15: `assign_srcs` in
`cpu/decoder/fetchdecode32.cc` must clear bit 4 of `vvv` when it has set the index.
"""

import argparse
import os
import re
import shutil
import signal
import subprocess
import sys
import sysconfig
import tempfile
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from importlib.util import find_spec
from pathlib import Path

from tvmflow.errors import InputError

HERE = Path(__file__).parent
ROOT = HERE.parent
# The seconds that the tests of one file, and the emulator, may take.
_TESTS, _EMULATOR = 1800.0, 7200.0
# These run libraries in processes of their own, or have no builds for x86-64.
_OTHERS = {"amx", "architectures", "gpu", "guarded", "onnx_nodes", "splits", "threads"}
# Bits of CPUID, as Linux numbers them, with all of which Linux does not start in Bochs: SMAP, UMIP, PKU, RDPID, fast
# short REP MOVSB, XSAVES, and AMX, which needs XSAVES.
_HIDDEN = (308, 514, 515, 534, 580, 323, 600)
_MEGABYTES = 2048
_BIOS = Path("/usr/share/bochs/BIOS-bochs-latest")
_VIDEO_BIOS = Path("/usr/share/vgabios/vgabios.bin")
_BOOT_FILES = (Path("/usr/lib/ISOLINUX/isolinux.bin"), Path("/usr/lib/syslinux/modules/bios/ldlinux.c32"))
_SETTINGS = """\
display_library: nogui
megs: {megabytes}
romimage: file={bios}
vgaromimage: file={video_bios}
cpu: model={cpu}, count=1, ips=400000000, reset_on_triple_fault=0
ata0-master: type=cdrom, path={folder}/guest.iso, status=inserted
boot: cdrom
com1: enabled=1, mode=file, dev={folder}/output
clock: sync=none
log: {folder}/log
"""
_BOOT = """\
DEFAULT linux
LABEL linux
 KERNEL /vmlinuz
 APPEND initrd=/initrd console=ttyS0 quiet mitigations=off nokaslr no5lvl clearcpuid={hidden} random.trust_cpu=on
"""
_INIT = """\
#!/bin/sh
mount -t proc proc /proc
mount -t sysfs sys /sys
mount -t devtmpfs dev /dev
export PYTHONPATH=/site PYTHONDONTWRITEBYTECODE=1 OPENBLAS_NUM_THREADS=1 TVM_NUM_THREADS=1 LD_LIBRARY_PATH={libraries}
{python} -u /guest.py /records
# The serial line writes what it has.
sleep 2
poweroff -f
"""


def main(arguments: Sequence[str]) -> int:
    """Record, run and compare; return the exit code. Raises InputError for an unknown file and for a missing tool."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("tests", nargs="*", metavar="NAME", help="of tests/compiler/test_compiler_NAME.py (all)")
    parser.add_argument("--preset", default="x86-64-v4-bf16", help="the target to build for (%(default)s)")
    parser.add_argument("--cpu", default="sapphire_rapids", help="the processor that Bochs emulates (%(default)s)")
    parser.add_argument("--bochs", default="bochs", help="the emulator (%(default)s)")
    parser.add_argument("--kernel", type=Path, help="a Linux kernel (the newest one of /boot)")
    parser.add_argument(
        "--records",
        type=Path,
        help="a folder for what is recorded, which is kept; one that has records is run as it is",
    )
    options = parser.parse_args(arguments)
    kernel = options.kernel or _newest_kernel()
    tools = (options.bochs, "genisoimage", "cpio", "busybox")
    missing = [tool for tool in tools if shutil.which(tool) is None]
    missing += [str(path) for path in (kernel, _BIOS, _VIDEO_BIOS, *_BOOT_FILES) if not path.is_file()]
    if missing:
        raise InputError(f"{', '.join(missing)}: not found; install what {Path(__file__).name} names at its head")
    names = options.tests or sorted(
        path.stem.removeprefix("test_compiler_") for path in (ROOT / "tests/compiler").glob("test_compiler_*.py")
    )
    files = [ROOT / f"tests/compiler/test_compiler_{name}.py" for name in names if options.tests or name not in _OTHERS]
    for file in files:
        if not file.is_file():
            raise InputError(
                f"there is no {file.relative_to(ROOT)}; name files of tests/compiler without test_compiler_"
            )
    with tempfile.TemporaryDirectory(prefix="emulated-") as temporary:
        folder = Path(temporary)
        records = options.records or folder / "records"
        if not records.is_dir() or not any(records.iterdir()):
            records.mkdir(parents=True, exist_ok=True)
            _record(files, options.preset, records)
        _make_image(folder, records, kernel)
        return _emulate(folder, options.bochs, options.cpu)


def _newest_kernel() -> Path:
    kernels = sorted(Path("/boot").glob("vmlinuz-*"), key=lambda path: path.stat().st_mtime)
    if not kernels:
        raise InputError("there is no kernel in /boot; install linux-image-cloud-amd64, or name one with --kernel")
    return kernels[-1]


def _record(files: Sequence[Path], preset: str, records: Path) -> None:
    """Run the tests of each file with the plugin, and print how they ended."""
    environment = {
        **os.environ,
        "EMULATED_PRESET": preset,
        "EMULATED_FOLDER": str(records),
        "PYTHONPATH": str(HERE),
    }

    def run(file: Path) -> str:
        command = [sys.executable, "-m", "pytest", "-q", "-n", "0", "-p", "emulated_record", str(file)]
        try:
            result = subprocess.run(
                command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=_TESTS, check=False
            )
        except subprocess.TimeoutExpired:
            return f"took longer than {_TESTS / 60:.0f} minutes"
        if result.returncode < 0:
            place = re.search(r"in (test_\w+)$", result.stderr + result.stdout, re.MULTILINE)
            return f"ended in {place[1] if place else 'a test'} by signal {-result.returncode}"
        return (result.stdout.strip() or result.stderr.strip()).splitlines()[-1].strip("= ")

    with ThreadPoolExecutor(os.cpu_count()) as pool:
        for file, line in zip(files, pool.map(run, files), strict=True):
            print(f"{file.stem.removeprefix('test_compiler_'):<20} {line}", flush=True)


def _make_image(folder: Path, records: Path, kernel: Path) -> None:
    """Write `guest.iso`: a kernel, and a file system in memory with Python, TVM's runtime and the records."""
    root = folder / "root"
    for name in ("bin", "dev", "proc", "sys", "tmp", "site/tvm/lib", "site/tvmflow/runtime"):
        (root / name).mkdir(parents=True)
    shutil.copy(shutil.which("busybox") or "", root / "bin/busybox")
    for name in ("sh", "mount", "sleep", "poweroff"):
        (root / "bin" / name).symlink_to("busybox")
    python, library = Path(sys.executable).resolve(), Path(sysconfig.get_path("stdlib"))
    _copy(python, root)
    shutil.copytree(
        library,
        _place(library, root),
        ignore=shutil.ignore_patterns("test", "site-packages", "config-*", "*.a", "*.pyc", "idlelib", "ensurepip"),
    )
    for package in ("numpy", "numpy.libs", "tvm_ffi", "ml_dtypes"):
        source = _package("numpy").with_name(package)
        shutil.copytree(source, root / "site" / package, ignore=shutil.ignore_patterns("tests", "*.pyc", "*.a"))
    for source in _package("numpy").parent.glob("apache_tvm_ffi-*.dist-info"):
        shutil.copytree(source, root / "site" / source.name)
    shutil.copy(_package("typing_extensions"), root / "site")
    for name in ("libtvm_runtime.so", "libtvm_runtime_extra.so"):
        shutil.copy(_package("tvm") / "lib" / name, root / "site/tvm/lib")
    for name in ("errors.py", "runtime/library.py"):
        shutil.copy(ROOT / "tvmflow" / name, root / "site/tvmflow" / name)
    for name in ("tvm", "tvmflow", "tvmflow/runtime"):
        (root / "site" / name / "__init__.py").touch()
    programs = (python, root / "bin/busybox", *root.rglob("*.so*"))
    for path in {path for program in programs for path in _libraries_of(program)}:
        if not _place(path, root).exists():
            _copy(path, root)
    shutil.copytree(records, root / "records")
    shutil.copy(HERE / "emulated_guest.py", root / "guest.py")
    init = root / "init"
    init.write_text(_INIT.format(python=python, libraries=python.parent.with_name("lib")))
    init.chmod(0o755)
    disc = folder / "disc"
    (disc / "isolinux").mkdir(parents=True)
    for path in _BOOT_FILES:
        shutil.copy(path, disc / "isolinux")
    (disc / "isolinux/isolinux.cfg").write_text(_BOOT.format(hidden=",".join(map(str, _HIDDEN))))
    shutil.copy(kernel, disc / "vmlinuz")
    with (disc / "initrd").open("wb") as file:
        paths = "\n".join(str(path.relative_to(root)) for path in (root, *root.rglob("*")))
        command = ["cpio", "-o", "-H", "newc", "--quiet"]
        subprocess.run(command, cwd=root, input=paths.encode(), stdout=file, check=True)
    boot = ["-b", "isolinux/isolinux.bin", "-c", "isolinux/boot.cat", "-no-emul-boot", "-boot-load-size", "4"]
    command = ["genisoimage", "-quiet", "-o", str(folder / "guest.iso"), *boot, "-boot-info-table"]
    subprocess.run([*command, "-allow-limited-size", str(disc)], check=True)


def _package(name: str) -> Path:
    """The folder or the file of an installed package."""
    spec = find_spec(name)
    if spec is None or spec.origin is None:
        raise InputError(f"{name} is not installed; run make setup")
    place = Path(spec.origin)
    return place.parent if place.name == "__init__.py" else place


def _place(path: Path, root: Path) -> Path:
    return root / path.relative_to("/")


def _copy(path: Path, root: Path) -> None:
    _place(path, root).parent.mkdir(parents=True, exist_ok=True)
    shutil.copy(path, _place(path, root))


def _libraries_of(file: Path) -> Iterator[Path]:
    """The shared libraries of this machine that a file needs."""
    listed = subprocess.run(
        [shutil.which("ldd") or "ldd", str(file)], capture_output=True, text=True, check=False
    ).stdout
    for path in re.findall(r"(/\S+\.so\S*)", listed):
        if Path(path).is_file() and not Path(path).is_relative_to(tempfile.gettempdir()):
            yield Path(path)


def _emulate(folder: Path, bochs: str, cpu: str) -> int:
    """Start the image in Bochs and print the lines of its program; 1 for a difference or an early end, else 0."""
    (folder / "settings").write_text(
        _SETTINGS.format(folder=folder, cpu=cpu, megabytes=_MEGABYTES, bios=_BIOS, video_bios=_VIDEO_BIOS)
    )
    process = subprocess.Popen(
        [bochs, "-q", "-f", str(folder / "settings")],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )
    lines: list[str] = []
    try:
        for line in _follow(folder / "output", process):
            if line.startswith(("DIFFERS", "ENDED", "RUN", "DONE")):
                print(line, flush=True)
            if line.startswith("DONE"):
                return int(not line.endswith(", 0 faults"))
            lines.append(line)
    finally:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
    log = folder / "log"
    last = lines or (log.read_text(errors="replace").splitlines() if log.is_file() else [])
    print("the emulated machine ended early:", *last[-5:], sep="\n  ")
    return 1


def _follow(output: Path, process: "subprocess.Popen[bytes]") -> Iterator[str]:
    """Yield the whole lines of a file as a process writes them, until it ends or takes too long."""
    count, end = 0, time.monotonic() + _EMULATOR
    has_ended = False
    while not has_ended and time.monotonic() < end:
        has_ended = process.poll() is not None
        lines = output.read_text(errors="replace").splitlines(keepends=True) if output.is_file() else []
        whole = [line.rstrip() for line in lines if line.endswith("\n")]
        yield from whole[count:]
        count = len(whole)
        time.sleep(1.0)


if __name__ == "__main__":
    try:
        sys.exit(main(sys.argv[1:]))
    except InputError as error:
        sys.exit(f"error: {error}")
