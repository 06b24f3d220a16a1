#include "tvmflow/manifest.h"

#include <algorithm>
#include <limits>
#include <set>

#include "host.h"
#include "json.h"
#include "text.h"
#include "tvmflow/error.h"

namespace tvmflow {
namespace {

// The newest format that this library reads; it reads the older ones too.
constexpr int64_t kFormat = 3;

TensorSpec ReadTensor(const Field& field) {
  TensorSpec spec;
  spec.name = field.At("name").Text();
  spec.dtype = field.At("dtype").Word({"bool", "bfloat16", "float16", "float32", "float64", "int8", "int16", "int32",
                                       "int64", "uint8", "uint16", "uint32", "uint64"});
  for (const Field& size : field.At("shape").Items()) {
    spec.shape.push_back(size.IsText() ? Dimension(size.Text()) : Dimension(size.Count()));
  }
  return spec;
}

std::vector<TensorSpec> ReadTensors(const Field& field) {
  std::vector<TensorSpec> specs;
  for (const Field& item : field.Items()) specs.push_back(ReadTensor(item));
  return specs;
}

std::pair<int64_t, std::optional<int64_t>> ReadRange(const Field& field) {
  const std::vector<Field> bounds = field.Items();
  if (bounds.size() != 2) field.Refuse("a pair of bounds");
  const int64_t low = bounds[0].Count();
  if (bounds[1].IsNull()) return {low, std::nullopt};
  return {low, bounds[1].Count(low)};
}

Variant ReadVariant(const Field& field, const std::set<std::string>& symbols) {
  Variant variant{field.At("function").Text(), {}};
  for (const auto& [symbol, size] : field.At("sizes").Members()) {
    if (symbols.count(symbol) == 0) size.Refuse("the size of a dimension of an input");
    variant.sizes[symbol] = size.Count();
  }
  return variant;
}

FileEntry ReadFileEntry(const Field& field) {
  const std::string& digest = field.At("sha256").Text();
  if (digest.size() != 64 || digest.find_first_not_of("0123456789abcdef") != std::string::npos) {
    field.At("sha256").Refuse("a SHA-256 in hexadecimal");
  }
  return {digest, field.At("size").Count()};
}

// The members of an object whose keys are printable.
std::vector<std::pair<std::string, Field>> PrintableMembers(const Field& field) {
  auto members = field.Members();
  for (const auto& [key, value] : members) {
    if (!IsPrintable(key)) field.Refuse("an object with printable keys");
  }
  return members;
}

// The architecture of the code that the CPU runs; empty if the manifest does not say.
std::string HostArchOf(const std::string& arch, const Field& target) {
  if (arch != "cuda") return arch;
  for (const auto& [key, host] : target.Members()) {
    if (key != "host" || !host.IsObject()) continue;
    for (const auto& [host_key, triple] : host.Members()) {
      if (host_key == "mtriple") return triple.Text().substr(0, triple.Text().find('-'));
    }
  }
  return "";
}

std::map<std::string, std::pair<int64_t, int64_t>> ReadIndices(const Field& field,
                                                               const std::vector<TensorSpec>& inputs) {
  constexpr int64_t kLeast = -std::numeric_limits<int64_t>::max();
  std::map<std::string, std::pair<int64_t, int64_t>> indices;
  for (const auto& [name, limits] : PrintableMembers(field)) {
    const auto has_name = [&name = name](const TensorSpec& spec) { return spec.name == name; };
    if (std::none_of(inputs.begin(), inputs.end(), has_name)) limits.Refuse("the integers of an input");
    const std::vector<Field> bounds = limits.Items();
    if (bounds.size() != 2) limits.Refuse("a pair of bounds");
    indices[name] = {bounds[0].Count(kLeast), bounds[1].Count(kLeast)};
  }
  return indices;
}

Manifest ReadManifest(const Field& document) {
  Manifest manifest;
  manifest.name = document.At("name").Text();
  manifest.target = document.At("target").Text();
  manifest.arch = document.At("arch").Text();
  const Field target = document.At("tvm_target");
  target.Members();
  manifest.host_arch = HostArchOf(manifest.arch, target);
  for (const Field& feature : document.At("cpu_features").Items()) manifest.cpu_features.push_back(feature.Text());
  manifest.threads = document.At("threads").Count(1);
  manifest.inputs = ReadTensors(document.At("inputs"));
  // A bundle that does not name the most threads runs on those it was built for.
  manifest.max_threads = manifest.threads;
  for (const auto& [key, value] : document.Members()) {
    if (key == "max_threads") manifest.max_threads = value.IsNull() ? std::nullopt : std::optional(value.Count(1));
    if (key == "fresh_outputs") manifest.fresh_outputs = value.Flag();
    if (key == "unaligned_inputs") manifest.unaligned_inputs = value.Flag();
    if (key == "indices") manifest.indices = ReadIndices(value, manifest.inputs);
  }
  manifest.outputs = ReadTensors(document.At("outputs"));
  for (const auto& [symbol, range] : PrintableMembers(document.At("dimensions"))) {
    manifest.dimensions[symbol] = ReadRange(range);
  }
  std::set<std::string> symbols;
  for (const TensorSpec& input : manifest.inputs) {
    for (const Dimension& size : input.shape) {
      if (const auto* symbol = std::get_if<std::string>(&size)) symbols.insert(*symbol);
    }
  }
  for (const Field& item : document.At("variants").Items()) manifest.variants.push_back(ReadVariant(item, symbols));
  const int64_t format = document.At("format").Count();
  const Field place = document.At("weights");
  const std::string& weights = format == 1   ? place.Word({"inside", "apart"})
                               : format == 2 ? place.Word({"unpacked"})
                                             : place.Word({"shared"});
  manifest.weights_apart = weights == "apart" || weights == "shared";
  manifest.weights_unpacked = weights == "unpacked" || weights == "shared";
  const Field versions = document.At("versions");
  for (const char* package : {"tvmflow", "llvm"}) versions.At(package).Text();
  manifest.tvm_version = versions.At("tvm").Text();
  manifest.tvm_ffi_version = versions.At("tvm_ffi").Text();
  for (const auto& [key, value] : PrintableMembers(document.At("provenance"))) value.Text();
  const Field files = document.At("files");
  for (const auto& [name, entry] : PrintableMembers(files)) {
    static const std::set<std::string> kNames = {"mod.json", "mod.params", "mod.so", "sample.npz"};
    if (kNames.count(name) == 0) entry.Refuse("a file of a bundle");
    manifest.files[name] = ReadFileEntry(entry);
  }
  for (const char* name : {"mod.json", "mod.so", "sample.npz"}) files.At(name);
  if ((manifest.files.count("mod.params") != 0) != manifest.weights_apart) {
    throw Error("'weights' and 'files' in its manifest contradict each other");
  }
  return manifest;
}

// The major and minor number of a version.
std::string MinorVersion(const std::string& version) {
  const size_t dot = version.find('.');
  return dot == std::string::npos ? version : version.substr(0, version.find('.', dot + 1));
}

void CheckVersion(const Manifest& manifest, const std::string& package, const std::string& bundle_version,
                  const std::string& program_version) {
  if (MinorVersion(bundle_version) == MinorVersion(program_version)) return;
  throw Error("bundle '" + manifest.name + "' is built with " + package + " " + bundle_version +
              ", this program with " + program_version + "; build it with " + package + " " + bundle_version);
}

}  // namespace

Manifest ParseManifest(std::string_view json) {
  const Document document(json, "its manifest");
  const int64_t format = document.root().At("format").Count();
  if (format < 1 || format > kFormat) {
    throw Unusable("its format is " + std::to_string(format) + ", this program reads " + std::to_string(kFormat) +
                   "; take a newer program");
  }
  document.CheckSpelling(json);
  return ReadManifest(document.root());
}

void CheckHost(const Manifest& manifest) {
  const std::string arch = HostArch();
  if (!manifest.host_arch.empty() && manifest.host_arch != arch) {
    throw Error("bundle '" + manifest.name + "' is built for " + manifest.host_arch + ", this machine is " + arch +
                "; take the bundle of this machine's target");
  }
  const auto& needed = manifest.cpu_features;
  std::set<std::string> missing(needed.begin(), needed.end());
  for (const std::string& feature : HostFeatures()) missing.erase(feature);
  if (!missing.empty()) {
    std::string list;
    for (const std::string& feature : missing) list += (list.empty() ? "" : ", ") + feature;
    throw Error("bundle '" + manifest.name + "' for target '" + manifest.target + "' needs the CPU features " + list +
                ", which this machine lacks; take a bundle for a lower target");
  }
  if (std::find(needed.begin(), needed.end(), "amx_tile") != needed.end() && !PermitAmx()) {
    throw Error("bundle '" + manifest.name + "' for target '" + manifest.target +
                "' uses AMX, which the system does not let this process do; take a bundle for a lower target, or allow "
                "arch_prctl in the sandbox that the process runs in");
  }
  CheckVersion(manifest, "apache-tvm", manifest.tvm_version, TVMFLOW_TVM_VERSION);
  CheckVersion(manifest, "apache-tvm-ffi", manifest.tvm_ffi_version, TVMFLOW_TVM_FFI_VERSION);
}

}  // namespace tvmflow
