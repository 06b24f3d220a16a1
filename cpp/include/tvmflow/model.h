// A bundle loaded into this process.
#pragma once

#include <tvm/ffi/container/tensor.h>
#include <tvm/ffi/extra/module.h>
#include <tvm/ffi/function.h>

#include <atomic>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "tvmflow/error.h"
#include "tvmflow/manifest.h"
#include "tvmflow/npz.h"
#include "tvmflow/release.h"

namespace tvmflow {

class Threads;

// A compiled model. Only one thread at a time may run it or a copy of it: give each thread a model of its own.
class Model {
 public:
  // Verifies a bundle, a `.tar.gz` or a folder into which one was unpacked, and loads its library.
  //
  // `threads` is the number of worker threads. For 0 it is TVM_NUM_THREADS, or, where that is not set, the number of
  // cores but at most the bundle's own bound. A model has threads of its own while it lives; models of one unpacked
  // folder share theirs, as many as the largest number. For a bundle that was built before libraries had threads, TVM
  // fixes the number for the whole process with its first parallel call.
  // With a `release`, the bundle must be an archive of it: a key of TVMFLOW_TRUSTED_KEYS has signed the statement, which
  // names the bundle's digest, and for a channel has not expired and is no older than the newest that this machine saw.
  // Throws Error when the bundle is damaged, is not of the release, or this machine cannot run it; nothing of it is
  // executed then.
  static Model Open(const std::string& bundle, int threads = 0,
                    const std::optional<SignedRelease>& release = std::nullopt);

  const Manifest& manifest() const { return manifest_; }

  // The inputs in the bundle's golden sample, by name.
  const std::map<std::string, Tensor>& sample() const { return sample_; }

  // Returns the inputs in the model's order. Throws Error for a missing or unknown input, and for a dtype or a shape
  // that the model does not take.
  std::vector<Tensor> CheckInputs(const std::map<std::string, Tensor>& inputs) const;

  // Runs the model on inputs in its order and returns its outputs in the order of the manifest.
  //
  // Inputs and outputs are in the CPU's memory. An output may share memory with an input. Memory that is kept for later
  // calls, other blocks for each size of the inputs, is given back to the system when it is more than 256 MiB and twice
  // what the largest call needed. Throws Error for an input that CheckInputs refuses, whose memory is not contiguous or not
  // aligned to an element (to 64 bytes where the manifest's `unaligned_inputs` is false), or whose integers are beyond the
  // table in which the model looks them up, and while another thread is in Run.
  std::vector<Tensor> Run(const std::vector<Tensor>& inputs);

 private:
  Model() = default;
  const tvm::ffi::Function& FunctionFor(const std::vector<Tensor>& inputs, std::map<std::string, int64_t>& sizes) const;
  std::vector<Tensor> DirectOutputs(const std::map<std::string, int64_t>& sizes) const;
  Tensor ToDevice(const Tensor& tensor) const;

  Manifest manifest_;
  std::map<std::string, Tensor> sample_;
  DLDevice device_{kDLCPU, 0};
  tvm::ffi::Optional<tvm::ffi::Module> library_;
  tvm::ffi::Optional<tvm::ffi::Module> machine_;
  // `main`, then the function of each variant in the manifest's order.
  std::vector<tvm::ffi::Function> functions_;
  std::vector<Tensor> weights_;
  // The direct form of `main`, if the library has one, and the constants that it takes between weights and outputs.
  tvm::ffi::Optional<tvm::ffi::Function> direct_;
  std::vector<Tensor> constants_;
  // Shared by copies, which have one virtual machine.
  std::shared_ptr<std::atomic<bool>> is_running_ = std::make_shared<std::atomic<bool>>(false);
  // Destroyed first: no thread may run when the library is unloaded.
  std::shared_ptr<Threads> threads_;
};

}  // namespace tvmflow
