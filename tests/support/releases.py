"""Releases for tests: documents with as much in them as a test needs."""

from pathlib import Path
from typing import Any

import numpy as np

from tvmflow.bundle import read_manifest, sha256_file
from tvmflow.comparison import Comparison, Conditions, Pair, Plan
from tvmflow.documents.figures import Deviation, Latency, Measurement, Measurements, Point
from tvmflow.documents.release import Blob, Provenance, Release, ReleaseTarget, TargetVerdict
from tvmflow.hardware.target import host


def make_release(name: str = "resnet", version: str = "1", *targets: ReleaseTarget, **fields: Any) -> Release:
    """A release of these targets."""
    release = Release(
        name=name,
        version=version,
        created_at="2026-11-22T10:00:00+00:00",
        tvmflow="0.1.0",
        mlflow_run_id="0" * 32,
        model="models:/resnet/1",
        provenance=Provenance(onnx="sha256:" + "0" * 64, opset=18),
        channels={},
        inputs=(),
        outputs=(),
        targets=targets,
    )
    return release.model_copy(update=fields)


def make_target(
    target: str = "native", sha256: str = "0" * 64, size: int = 8, *, metric: float | None = None, **fields: Any
) -> ReleaseTarget:
    """A target with a bundle of this digest, validated with a task metric, for any machine of this architecture."""
    target_entry = ReleaseTarget(
        target=target,
        tvm_target={"kind": "llvm"},
        arch=host().arch,
        cpu_features=(),
        bundle=Blob(sha256=sha256, size=size),
        verdict=make_verdict(metric),
        measurements=None,
        tuning=None,
    )
    return target_entry.model_copy(update=fields)


def describe_bundle(path: Path, target: str | None = None) -> ReleaseTarget:
    """A target with a bundle that exists; `target` is another name than the bundle's own."""
    manifest = read_manifest(path)
    return make_target(
        target or manifest.target,
        sha256_file(path),
        path.stat().st_size,
        tvm_target=manifest.tvm_target,
        arch=manifest.arch,
        cpu_features=manifest.cpu_features,
    )


def make_verdict(metric: float | None = None, *reasons: str) -> TargetVerdict:
    """A verdict with a task metric of the bundle, refused for these reasons."""
    deviation = Deviation(
        against="onnxruntime", max_abs_error=1.5e-6, max_rel_error=1e-6, cosine=1.0, top1_agreement=0.996, samples=360
    )
    return TargetVerdict(
        passed=not reasons,
        verified=True,
        reasons=reasons,
        algorithms={},
        comparisons=(deviation,),
        metric_name=None if metric is None else "metrics:f1",
        metric_original=metric,
        metric_bundle=metric,
    )


def make_measurements(p50: float) -> Measurements:
    """Measurements of a bundle without peers, with a median latency of `p50` ms."""
    latency = Latency(mean=p50, std=0.0, p50=p50, p90=p50 * 1.25, p99=None, min=p50, throughput=1e3 / p50)
    bundle = Measurement(
        latency_ms=latency,
        total_seconds=1.0,
        load_seconds=0.25,
        peak_memory=123_456_000,
        size=8,
        loads=(0.25, 0.21, 0.375),
        peaks=(123_456_000, 120_000_000, 121_000_000),
    )
    return Measurements(runs=64, threads=1, points=(Point(sizes={}, runners={"tvm": bundle}, ratio={}, noise=0.0),))


def make_compared(
    version: str,
    bundle: float,
    *,
    reference: float = 1.0,
    peer: float = 1.0,
    rounds: int = 3,
    sha256: str = "0" * 64,
    processor: str = "processor",
    threads: tuple[int, int] = (2, 1),
    **fields: Any,
) -> Release:
    """A release whose bundle, reference kernel and peer took these times in rounds that differ by up to 2 %."""
    pairs = tuple(
        Pair(
            candidate=bundle * way,
            baseline=peer * way,
            ratio=bundle / peer,
            runs=9,
            warmup=0,
            reference=reference * way,
        )
        for way in np.linspace(0.99, 1.01, rounds)
    )
    conditions = Conditions(processor=processor, cores=(0, 1), threads=threads, load=(0.0, 0.0))
    comparison = Comparison(plan=Plan.up_to(rounds), pairs=pairs, conditions=conditions)
    measurements = make_measurements(1.0).model_copy(update={"comparisons": {"onnxruntime": comparison}})
    return make_release("net", version, make_target(sha256=sha256, measurements=measurements), **fields)
