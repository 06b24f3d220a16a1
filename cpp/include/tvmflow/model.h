// A bundle loaded into this process.
#pragma once

#include <tvm/ffi/container/tensor.h>
#include <tvm/ffi/extra/module.h>
#include <tvm/ffi/function.h>

#include <map>
#include <string>
#include <vector>

#include "tvmflow/error.h"
#include "tvmflow/manifest.h"
#include "tvmflow/npz.h"

namespace tvmflow {

// A compiled model. Not to be called by two threads at once: give each a model of its own.
class Model {
 public:
  // Verifies a bundle, a `.tar.gz` or a folder into which one was unpacked, and loads its library.
  //
  // `threads` is the number of worker threads; 0 takes TVM_NUM_THREADS, else the bundle's own, as far as the machine
  // has the cores. TVM fixes the number for the whole process with its first parallel call. Throws Error when the
  // bundle is damaged or this machine cannot run it; nothing of it is executed then.
  static Model Open(const std::string& bundle, int threads = 0);

  const Manifest& manifest() const { return manifest_; }

  // The inputs of the golden sample, by name, as far as it holds those of the model.
  const std::map<std::string, Tensor>& sample() const { return sample_; }

  // The inputs in the model's order, each of the right dtype and shape. Throws Error for a missing, unknown, wrongly
  // shaped or typed one.
  std::vector<Tensor> CheckInputs(const std::map<std::string, Tensor>& inputs) const;

  // Runs the model on inputs in its order, in the CPU's memory, and returns its outputs in order, there as well.
  //
  // They are checked as by CheckInputs; one that is not contiguous and aligned to 64 bytes is refused. An output may
  // share memory with an input.
  std::vector<Tensor> Run(const std::vector<Tensor>& inputs);

 private:
  Model() = default;
  const tvm::ffi::Function& FunctionFor(const std::vector<Tensor>& inputs) const;
  Tensor ToDevice(const Tensor& tensor) const;

  Manifest manifest_;
  std::map<std::string, Tensor> sample_;
  DLDevice device_{kDLCPU, 0};
  tvm::ffi::Optional<tvm::ffi::Module> library_;
  tvm::ffi::Optional<tvm::ffi::Module> machine_;
  // `main`, then those of the variants in order.
  std::vector<tvm::ffi::Function> functions_;
  std::vector<Tensor> weights_;
};

}  // namespace tvmflow
