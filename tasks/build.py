"""Build: compile the library for one target with the release file's options and the tuning records."""

import json
from dataclasses import asdict
from typing import TYPE_CHECKING, Any, Literal

from tasks.options import as_options, variants
from tasks.relax_import import ImportResult, load_imported
from tasks.step import ChildStep, TargetJob
from tasks.tune import TuneResult
from tvmflow.bundle import WEIGHTS_IN_FILE, Weights
from tvmflow.documents.figures import Algorithm
from tvmflow.hardware.target import Target
from tvmflow.processes.children import Emit
from tvmflow.spec import Build, Spec
from tvmflow.workspace import Artifact, Record, StepResult

if TYPE_CHECKING:
    from tvmflow.compiler import Choices


class Inspect(Record):
    """The parts of a build that a person wants to read, as in `tvmflow.compiler.Inspection`.

    `before` and `after` name compiler passes: the IR before or after these is kept. `code` names the forms of the code
    to keep.
    """

    before: tuple[str, ...] = ()
    after: tuple[str, ...] = ()
    code: tuple[Literal["ll", "asm", "relax", "tir"], ...] = ()


class BuildJob(TargetJob):
    """The imported model, the tuning records to apply, the target, the compiler's options, and the parts to inspect.

    `variants` are sizes of symbolic dimensions, by name, for which the build makes specialised functions.
    """

    imported: ImportResult
    records: Artifact
    build: Build
    variants: tuple[dict[str, int], ...]
    inspect: Inspect = Inspect()

    @property
    def needs_compiler(self) -> bool:
        """True: the step compiles."""
        return True

    @classmethod
    def of(
        cls, spec: Spec, imported: ImportResult, tuned: TuneResult, target: Target, inspect: Inspect | None = None
    ) -> "BuildJob":
        """Return the job that builds a release file's model for a target.

        `inspect` names the parts of the build that a person wants to read; None means none.
        """
        return cls(
            imported=imported,
            records=tuned.records,
            target=target,
            build=spec.build,
            variants=variants(spec, imported.inputs),
            inspect=inspect or Inspect(),
        )


class BuildResult(StepResult):
    """The library, the lowered IR, the weights if they are not in the library, and figures of the build.

    `ir` is the IR as TVM's JSON, `text` the IR to read. `pass_timings` is a JSON file of seconds per compiler pass,
    `llvm` LLVM's major version. `schedules` maps each scheduling rule to the number of functions that it scheduled.
    `variants` maps the name of each specialised function to its sizes of the symbolic dimensions. `algorithms` maps the
    name of each algorithm with fewer multiplications, such as `winograd`, to its use in the build. `inspected` is a
    JSON file with the parts that the job's `inspect` asks for: `passes`, a list of when, name and text, and `code`,
    texts by their form. Its `decisions` are the decisions of the cost model: kind, subject, the estimated cycles by
    option, and the choice. `fresh_outputs` and `weights` are the fields of `tvmflow.bundle.Manifest` with these names.
    """

    library: Artifact
    ir: Artifact
    text: Artifact
    params: Artifact | None
    pass_timings: Artifact
    schedules: dict[str, int]
    variants: dict[str, dict[str, int]]
    algorithms: dict[str, Algorithm]
    llvm: str
    inspected: Artifact
    fresh_outputs: bool
    weights: Weights


def work(job: BuildJob, emit: Emit) -> BuildResult:
    """Build the model for a target.

    The step calls this in a child process. Raises TargetError when this machine cannot build for the target, BuildError
    when the build fails.
    """
    from tvm_ffi import get_global_func

    from tvmflow import compiler
    from tvmflow.tuning.best_records import read_decisions, read_schedules

    workspace, target = job.workspace, job.target
    emit(0, 3, "checking the target")
    compiler.can_build(target)
    imported = load_imported(workspace, job.imported)
    emit(1, 3, "compiling")
    options = as_options(job.build, job.variants)
    # A retrained model has the same functions, and so the same code.
    cache = workspace.folder / "code"
    inspect = compiler.Inspection(**job.inspect.model_dump())
    records = workspace.path(job.records)
    choices = compiler.Choices(read_decisions(records))
    model = compiler.build(imported, target, options, read_schedules(records), cache, inspect, choices)
    emit(2, 3, "linking")
    with workspace.scratch() as folder:
        model.export(folder / "mod.so")
        (folder / "mod.json").write_text(model.ir_json)
        (folder / "mod.txt").write_text(model.ir_text)
        timings = sorted(model.pass_timings, key=lambda item: -item[1])
        (folder / "pass_timings.json").write_text(json.dumps(dict(timings), indent=1))
        inspected = {**asdict(model.inspected), "decisions": _decisions(choices)}
        (folder / "inspected.json").write_text(json.dumps(inspected))
        is_apart = model.weights in WEIGHTS_IN_FILE
        if is_apart:
            compiler.save_params(model.params, folder / "mod.params")
        rules = [rule for _, rule in model.schedules]
        return BuildResult(
            library=workspace.keep(folder / "mod.so"),
            ir=workspace.keep(folder / "mod.json"),
            text=workspace.keep(folder / "mod.txt"),
            params=workspace.keep(folder / "mod.params") if is_apart else None,
            pass_timings=workspace.keep(folder / "pass_timings.json"),
            schedules={rule: rules.count(rule) for rule in sorted(set(rules))},
            variants=model.variants,
            algorithms={
                name: Algorithm(functions=use.functions, bound=use.bound) for name, use in model.algorithms.items()
            },
            llvm=str(get_global_func("target.llvm_version_major")()),
            inspected=workspace.keep(folder / "inspected.json"),
            fresh_outputs=model.fresh_outputs,
            weights=model.weights,
        )


def _decisions(choices: "Choices") -> list[dict[str, Any]]:
    """The decisions that the build met and the cost model estimated, in their order."""
    return [
        {
            "kind": site.kind,
            "subject": site.subject,
            "cycles": dict(zip(site.options, site.cycles, strict=True)),
            "choice": choices.option_of(site),
        }
        for site in choices.sites.values()
        if len(site.cycles) == len(site.options) > 1
    ]


build = ChildStep("build", BuildResult, work)
