"""The release file that `tvmflow init` writes: every key with a comment."""

from textwrap import wrap

import yaml

from tvmflow.errors import SpecError
from tvmflow.hardware.target import presets
from tvmflow.spec.fields import NAME_RULE, is_name

# Where a comment goes on that does not fit a line.
_NEXT_LINE = "\n" + 32 * " " + "# "


def template(name: str) -> str:
    """Return the text of a new, commented release file. Raises SpecError for a name that no release can have."""
    if not is_name(name):
        raise SpecError(f"name {name!r} {NAME_RULE}; give another")
    # Quoted where YAML would read a number, a date or a truth value.
    line = yaml.safe_dump({"name": name}).strip()
    return _TEMPLATE.format(line=line, name=name, presets=_NEXT_LINE.join(wrap(" | ".join(presets()), 87)))


_TEMPLATE = """\
# A release file: what `tvmflow release` ships. Every key is shown; what is commented out shows its default.

{line}

model:                          # exactly one of factory, pt2, onnx, mlflow
  factory: model:create         # package.module:function returning a torch.nn.Module, looked up beside this file
  # arguments: {{width: 32}}      # keyword arguments of the factory
  # weights: weights.pt         # a state dict loaded into the module
  # pt2: model.pt2              # a torch.export ExportedProgram
  # onnx: model.onnx            # an ONNX file
  # mlflow: models:/NAME@ALIAS  # a pytorch or onnx model of the MLflow registry
  # trust: pickle               # lets a registered PyTorch model be unpickled, which can run any code
  # operators: [module:name]    # operators of your own, from modules beside this file

# train:                        # makes the weights of the factory's model
#   function: train:train       # function(output: Path, **arguments) writes a state dict
#   arguments: {{epochs: 5}}
#   reads: [data.csv]           # when one of these files changes, the model is trained again

inputs:
  - name: input
    shape: [batch, 3, 224, 224] # a name is a symbolic dimension
    dtype: float32
    samples: {{kind: normal}}     # ones | uniform (low, high) | normal (mean, std) | integers (low, high) | lengths
                                # | categories (categories) | npz (file, key)
                                # | function (package.module:function(shape, seed) -> array)

dimensions:
  batch: {{min: 1, max: 64, tune: 1, measure: [1]}}

# outputs: [logits]             # names, in the model's order

# export:
#   opset: 18
#   optimize: true
#   options: {{}}                 # further arguments of torch.onnx.export
#   rtol: 1.0e-3                # ONNX Runtime against PyTorch
#   atol: null                  # 1e-4, times an output's root mean square where that is above 1

targets: [native]               # {presets}
                                # or a full TVM target: {{kind: llvm, mtriple: x86_64-linux-gnu, mcpu: znver4}}

# build:
#   opt_level: 3
#   required_passes: []
#   disabled_passes: []
#   config: {{}}                  # PassContext options
#   exec_mode: bytecode         # bytecode | compiled
#   weights: inside             # inside the library | apart
#   precision: fp32             # of convolutions and products: fp32 | bf16 | fp16 (ARM) | int8 (of a quantised model)
#   threads: null               # the most that a bundle runs on; default: one for each physical core, or fewer if tuned
#   fast_algorithms: allow      # forbid: without Winograd's, which multiplies less and rounds more

tune:
  trials: 0                     # total over all workloads; or minutes: 10; or until: 2%, the saving of a further minute
  # tuner: xgb                  # xgb | ga | random | grid
  # early_stopping: 256         # leave a workload alone after so many trials that were not faster
  # seed: 0

validate:
  samples: 4
  rtol: 1.0e-3
  # atol: null                  # 1e-4, times an output's root mean square where that is above 1
  # max_relative_error: null    # in the place of rtol and atol, of an output's largest value; reduced precision: 0.05
  top1_agreement: 1.0           # null: the outputs are not class scores
  # seed: 0
  # task:                       # a metric on held-out data
  #   dataset: data:held_out    # function returning (inputs by name, labels)
  #   metric: accuracy          # or package.module:function(outputs by name, labels), higher is better
  #   drop: 0.0                 # how much lower than the original it may be
  #   arguments: {{}}
  #   batch: 64
  # show: null                  # or package.module:function(inputs by name) -> the text of a sample for the report

# benchmark:
#   repeats: 50                 # per round
#   rounds: 3
#   warmup: 10
#   threads: 2                  # default: the target's
#   peers: [onnxruntime, pytorch]
#   callers: []                 # as [2, 8]: numbers of threads that call the model at once

# gates:                        # a release out of bounds is not published
#   max_latency_ms: 20
#   max_ratio_onnxruntime: 1.0
#   max_ratio_pytorch: 0.5
#   max_bundle_mb: 200
#   unverified_targets: refuse  # targets this machine cannot run: refuse | allow

# channels:                     # pointers that devices follow, with the policies proposed for them; none: any is free
#   staging: {{automatic: true}}  # every release is promoted to it
#   production:
#     automatic: false
#     approval: none            # required: a person says yes; another: not the one who asked
#     signature: optional       # required: every bundle is signed with a key that is trusted where it is promoted
#     rebuild: optional         # required: every bundle is the same when it is built again where it is promoted
#     by_hand: wish             # an alias that somebody sets by hand in MLflow: wish | refuse
#     keep: 5                   # releases that the channel held last, which `tvmflow gc --releases` keeps for rollbacks
#     after: staging            # the channel that must have held the release before
#     gates:                    # a release out of bounds is not promoted
#       max_ratio_current: 1.1  # latency over that of the release which the channel holds, measured side by side
#       max_ratio_onnxruntime: 1.0   # latency over ONNX Runtime's when the release was made; also max_ratio_pytorch
#       max_latency_ms: 20      # also min_throughput, max_load_ms, max_memory_mb, max_bundle_mb
#       max_relative_error: 1e-3     # of an output over its largest value; also min_top1_agreement
#       max_metric_drop: 0.01   # how much lower than that release's the task metric may be
#       min_metric: 0.9
#       max_vulnerabilities: 0  # of the packages that its bundles need, by the setting advisories

# retrain:                      # when a retrained model is released: needs train and validate.task
#   channel: production         # the release that it holds is the champion
#   min_gain: 0.0               # how much better on the held-out data the new model must be; may be negative
#   source: {name}-source       # the model of the MLflow registry that it becomes a version of

# registry: {{experiment: tvmflow, model: {name}, tags: {{}}}}
# store: {{endpoint: null, bucket: tvmflow, prefix: ""}}   # the machine's settings (TVMFLOW_S3_...) come first
"""
