"""Candidates: the tuned and the untuned build of a target, of which the faster one is shipped."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

from tasks.build import BuildJob, BuildResult, Inspect, build
from tasks.choose import (
    Candidate,
    Choice,
    ChooseJob,
    ThreadsJob,
    choose,
    comparison_fields,
    fewer_threads,
)
from tasks.export import ExportResult
from tasks.package import PackageJob, PackageResult, package
from tasks.reference import ReferenceResult
from tasks.relax_import import ImportResult
from tasks.step import StepRunner
from tasks.tune import TuneResult, part_of, skip_tuning, with_threads
from tasks.validate import ValidateJob, validate, why_not_here
from tvmflow.bundle import public_key
from tvmflow.hardware.target import Target, host
from tvmflow.spec import Spec
from tvmflow.tuning.best_records import PARTS, Part
from tvmflow.workspace import Outcome, Workspace

Build = tuple[TuneResult, Outcome[BuildResult]]
"""A build, and the tuning that it was built with."""


def tunings_to_build(workspace: Workspace, tuned: TuneResult) -> tuple[TuneResult, ...]:
    """Return `tuned` and a tuning without records, in this order; only the latter if `tuned` itself has no records."""
    nothing = skip_tuning(workspace)
    return (nothing,) if tuned.records.sha256 == nothing.records.sha256 else (tuned, nothing)


def distinct_builds(builds: Iterable[Build]) -> tuple[Build, ...]:
    """Return `builds` without each tuned build whose library and weights are those of the untuned one, the last."""
    *tuned, plain = builds

    def code(build: Build) -> object:
        return build[1].result.library, build[1].result.params

    return (*(item for item in tuned if code(item) != code(plain)), plain)


@dataclass(frozen=True)
class TargetBuilder:
    """The builder of one target of a release on this machine.

    `signing_key` is the file of the private key that signs bundles, None for unsigned ones. `reference` has the outputs
    of the original and of ONNX Runtime on the held-out data, and `inspect` names the parts of a build that a person
    wants to read.
    """

    runner: StepRunner
    spec: Spec
    exported: ExportResult
    imported: ImportResult
    target: Target
    reference: ReferenceResult | None = None
    signing_key: Path | None = None
    inspect: Inspect | None = None

    def candidates(self, tunings: Sequence[TuneResult]) -> tuple[Candidate, ...]:
        """Build, package and validate the model with each of the `tunings`, of which the last has no records.

        Returns the candidates in the same order. A tuned build with the same library and weights as the untuned one is
        left out. Raises TargetError, BuildError and StepError.
        """
        return tuple(self._candidate(*item) for item in distinct_builds([self._build(tuned) for tuned in tunings]))

    def best(self, candidates: Sequence[Candidate]) -> tuple[Candidate, Outcome[Choice] | None]:
        """Return the candidate to ship, which may be a new one, and the choice that says why.

        The choice is None where there was nothing to choose. There are one or two `candidates`. Of two, the tuned one
        comes first, and both are measured unless this machine cannot run them or validation refused just one. If the
        measured tuned one is not faster, new candidates with a part of the tuning are built and measured. If the
        release has a budget for tuning, the best candidate, also a single one, is measured on half as many threads, and
        on half of these again as long as it gets faster; the choice then gives its number of threads. Raises
        BuildError, BundleError for a build that does not run here, and StepError for a process that is killed, crashes
        or takes too long.
        """
        best, choice = candidates[-1], None
        if len(candidates) > 1:
            tuned, plain = candidates
            choice = self._choose(tuned, plain, "all")
            best = tuned if choice.result.shipped == "tuned" else plain
            if best is plain and choice.result.ratio is not None:
                best, choice = self._try_parts(tuned, plain) or (best, choice)
        if self.spec.tune.has_budget:
            best, choice = self._try_fewer_threads(best, choice)
        return best, choice

    def _try_parts(self, tuned: Candidate, plain: Candidate) -> tuple[Candidate, Outcome[Choice]] | None:
        """Return the build with a part of the tuning, and its choice, if it is faster than the untuned one."""
        workspace = self.runner.workspace
        for part in PARTS:
            tuning = part_of(workspace, tuned.tuned, part)
            if tuning.records in (plain.tuned.records, tuned.tuned.records):
                continue
            plain_build = Outcome(plain.build, "cached", 0.0)
            partly, *others = distinct_builds([self._build(tuning), (plain.tuned, plain_build)])
            if others:
                candidate = self._candidate(*partly)
                choice = self._choose(candidate, plain, part)
                if choice.result.shipped == "tuned":
                    return candidate, choice
        return None

    def _try_fewer_threads(
        self, best: Candidate, choice: Outcome[Choice] | None
    ) -> tuple[Candidate, Outcome[Choice] | None]:
        runs_here = why_not_here(self.target, self.spec.build.precision) is None and best.verdict.passed
        threads = min(self.target.threads, host().cores) if runs_here else 1
        while threads > 1:
            threads //= 2
            tuning = with_threads(self.runner.workspace, best.tuned, threads)
            packaged = self._package(tuning, best.build).result
            narrow = best.model_copy(update={"tuned": tuning, "packaged": packaged})
            fields = comparison_fields(self.spec, self.exported, narrow, best, self.target)
            fewer = fewer_threads(self.runner, ThreadsJob(**fields, threads=threads))
            check = fewer.result.check
            if not check.passed:
                break
            candidate = self._candidate(tuning, Outcome(best.build, "cached", 0.0))
            if not candidate.verdict.passed:
                break
            before = choice or Outcome(Choice(shipped="untuned", message=""), fewer.status, 0.0)
            message = "; ".join(filter(None, (before.result.message, check.message)))
            changes = {"threads": threads, "message": message, "checks": (*before.result.checks, check)}
            result = before.result.model_copy(update=changes)
            best, choice = candidate, replace(before, result=result, seconds=before.seconds + fewer.seconds)
        return best, choice

    def _build(self, tuned: TuneResult) -> Build:
        return tuned, build(self.runner, BuildJob.of(self.spec, self.imported, tuned, self.target, self.inspect))

    def _package(self, tuned: TuneResult, build: BuildResult) -> Outcome[PackageResult]:
        job = PackageJob.of(
            self.spec,
            self.runner.workspace,
            self.exported,
            self.imported,
            tuned,
            build,
            self.target,
            signer=None if self.signing_key is None else public_key(self.signing_key),
        )
        return package(self.runner, job, self.signing_key)

    def _candidate(self, tuned: TuneResult, build: Outcome[BuildResult]) -> Candidate:
        packaged = self._package(tuned, build.result)
        job = ValidateJob.of(self.spec, self.exported, packaged.result, self.reference, self.target)
        verdict = validate(self.runner, job)
        return Candidate(
            tuned=tuned,
            build=build.result,
            packaged=packaged.result,
            verdict=verdict.result,
            steps={"build": build.summary, "package": packaged.summary, "validate": verdict.summary},
        )

    def _choose(self, tuned: Candidate, plain: Candidate, part: Part | Literal["all"]) -> Outcome[Choice]:
        fields = comparison_fields(self.spec, self.exported, tuned, plain, self.target)
        return choose(self.runner, ChooseJob(**fields, part=part))
