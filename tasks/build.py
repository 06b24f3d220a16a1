"""Build: the library for one target, with the release file's pass context and the tuning records."""

import json
from dataclasses import asdict
from typing import Literal

from tasks.relax_import import ImportResult, load_imported
from tasks.step import Context, Job, as_options, step, variants
from tasks.tune import TuneResult
from tvmflow.process import Emit
from tvmflow.spec import Build
from tvmflow.target import Target
from tvmflow.workspace import Artifact, Outcome, Record, StepResult, run_step


class Inspect(Record):
    """What to keep of the build for a person to read, as `tvmflow.compiler.Inspection` has it."""

    before: tuple[str, ...] = ()
    after: tuple[str, ...] = ()
    code: tuple[Literal["ll", "asm", "relax", "tir"], ...] = ()


class BuildJob(Job):
    """The imported model, the records to apply, the target, the options, and what to keep to read."""

    imported: ImportResult
    records: Artifact
    target: Target
    build: Build
    variants: tuple[dict[str, int], ...]
    inspect: Inspect = Inspect()


class Algorithm(Record):
    """The functions that use an algorithm of fewer multiplications, and the largest of their error bounds.

    The bound of `winograd` is relative to the largest output that a convolution's weights could make of inputs as large
    as the largest one, that of `strassen` to the largest output of operands as large as the largest in each.
    """

    functions: int
    bound: float


class BuildResult(StepResult):
    """The library, the lowered IR, the weights when they are kept apart, and seconds per compiler pass.

    `schedules` counts the functions by the rule that scheduled them; `variants` are the sizes of the symbolic
    dimensions that the library has functions of their own for, by function; `inspected` holds what was asked to be
    kept: `passes`, a list of when, name and text, and `code` by its form.
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


def work(job: BuildJob, emit: Emit) -> BuildResult:
    """Build, in a process of its own."""
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
    built = compiler.build(imported, target, options, read_schedules(records), cache, inspect, choices)
    emit(2, 3, "linking")
    with workspace.scratch() as folder:
        built.export(folder / "mod.so")
        (folder / "mod.json").write_text(built.ir_json)
        (folder / "mod.txt").write_text(built.ir_text)
        timings = sorted(built.pass_timings, key=lambda item: -item[1])
        (folder / "pass_timings.json").write_text(json.dumps(dict(timings), indent=1))
        (folder / "inspected.json").write_text(json.dumps(asdict(built.inspected)))
        if job.build.weights == "apart":
            compiler.save_params(built.params, folder / "mod.params")
        rules = [rule for _, rule in built.schedules]
        return BuildResult(
            library=workspace.keep(folder / "mod.so"),
            ir=workspace.keep(folder / "mod.json"),
            text=workspace.keep(folder / "mod.txt"),
            params=workspace.keep(folder / "mod.params") if job.build.weights == "apart" else None,
            pass_timings=workspace.keep(folder / "pass_timings.json"),
            schedules={rule: rules.count(rule) for rule in sorted(set(rules))},
            variants=built.variants,
            algorithms={
                name: Algorithm(functions=used.functions, bound=used.bound) for name, used in built.algorithms.items()
            },
            llvm=str(get_global_func("target.llvm_version_major")()),
            inspected=workspace.keep(folder / "inspected.json"),
        )


@step
def build(
    context: Context,
    imported: Outcome[ImportResult],
    tuned: Outcome[TuneResult],
    target: Target,
    inspect: Inspect | None = None,
) -> Outcome[BuildResult]:
    """Build the model for a target. Raises TargetError when that is not possible here, BuildError when it fails."""
    job = BuildJob(
        home=context.workspace.folder,
        imported=imported.result,
        records=tuned.result.records,
        target=target,
        build=context.spec.build,
        variants=variants(context.spec, imported.result.inputs),
        inspect=inspect or Inspect(),
    )
    return run_step(
        context.workspace,
        "build",
        job.model_dump(mode="json", exclude={"home"}),
        BuildResult,
        lambda: context.call("tasks.build:work", job, BuildResult, target=target.name),
        target=target.name,
    )
