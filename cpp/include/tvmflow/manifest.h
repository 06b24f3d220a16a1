// The manifest `bundle.json`: the files of a bundle, the versions it was built with and the machine it needs.
#pragma once

#include <cstdint>
#include <map>
#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <variant>
#include <vector>

#include "tvmflow/release.h"

namespace tvmflow {

// A size in elements, or the name of a symbolic dimension.
using Dimension = std::variant<int64_t, std::string>;

// One input or output. `dtype` is NumPy's name of the element type.
struct TensorSpec {
  std::string name;
  std::vector<Dimension> shape;
  std::string dtype;
};

// One file of the bundle: the SHA-256 of its bytes in hexadecimal and its size in bytes.
struct FileEntry {
  std::string sha256;
  int64_t size;
};

// A function of the library that is built for fixed sizes of symbolic dimensions. The function `main` takes any size.
struct Variant {
  std::string function;
  std::map<std::string, int64_t> sizes;
};

struct Manifest {
  std::string name;
  std::string target;
  std::string arch;
  // The architecture of the CPU that the library runs on; for a GPU's bundle its host's, empty if the manifest names none.
  std::string host_arch;
  std::vector<std::string> cpu_features;
  // The threads that the code was chosen for, and the most to run on; none: as many as there are cores.
  int64_t threads;
  std::optional<int64_t> max_threads;
  // Whether every call writes all outputs to memory that nothing else uses; else one may be an input or a constant.
  bool fresh_outputs = false;
  // Whether the memory of inputs may begin at the address of any element; else it must be aligned to 64 bytes.
  bool unaligned_inputs = false;
  // The least and the largest integer of each input that the model looks up in a table.
  std::map<std::string, std::pair<int64_t, int64_t>> indices;
  std::vector<TensorSpec> inputs;
  std::vector<TensorSpec> outputs;
  // The smallest and the largest size of each symbolic dimension; without a largest, any size from the smallest.
  std::map<std::string, std::pair<int64_t, std::optional<int64_t>>> dimensions;
  std::vector<Variant> variants;
  // Whether the weights are a file of their own, `mod.params`, and not part of the library.
  bool weights_apart;
  // Whether the library's function `pack_weights` packs weights: those that it holds, or those of `mod.params`.
  bool weights_unpacked = false;
  std::string tvm_version;
  std::string tvm_ffi_version;
  std::map<std::string, FileEntry> files;
};

// Reads a manifest. Throws Error for text that is not a manifest as tvmflow writes it, Unusable for another format.
Manifest ParseManifest(std::string_view json);

// Throws Error if this machine, or the version of TVM that this library is built with, cannot run the bundle.
void CheckHost(const Manifest& manifest);

// Checks a bundle, a `.tar.gz` or a folder into which one was unpacked, and returns its manifest. Throws Error unless the
// bundle holds exactly the files of its manifest and each equals its digest. It executes nothing of the bundle and does
// not check that this machine can run it. With a `release`, the bundle must be an archive of it, see SignedRelease.
Manifest VerifyBundle(const std::string& bundle, const std::optional<SignedRelease>& release = std::nullopt);

}  // namespace tvmflow
