// The manifest `bundle.json`: what a bundle holds, what it was built with and which machine it needs.
#pragma once

#include <cstdint>
#include <map>
#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <variant>
#include <vector>

namespace tvmflow {

// A size in elements, or the name of a symbolic dimension.
using Dimension = std::variant<int64_t, std::string>;

// One input or output. `dtype` is NumPy's name of it.
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

// A function of the library built for fixed sizes of symbolic dimensions; `main` takes any.
struct Variant {
  std::string function;
  std::map<std::string, int64_t> sizes;
};

struct Manifest {
  std::string name;
  std::string target;
  std::string arch;
  // The architecture that runs the library's own code: of a GPU's bundle that of its host, empty if it does not say.
  std::string host_arch;
  std::vector<std::string> cpu_features;
  int64_t threads;
  std::vector<TensorSpec> inputs;
  std::vector<TensorSpec> outputs;
  // The least and the largest size of each symbolic dimension.
  std::map<std::string, std::pair<int64_t, std::optional<int64_t>>> dimensions;
  std::vector<Variant> variants;
  bool weights_apart;
  std::string tvm_version;
  std::string tvm_ffi_version;
  std::map<std::string, FileEntry> files;
};

// Reads a manifest. Throws Error for anything unexpected.
Manifest ParseManifest(std::string_view json);

// Throws Error if this machine, or the TVM that this library is built with, cannot run the bundle.
void CheckHost(const Manifest& manifest);

}  // namespace tvmflow
