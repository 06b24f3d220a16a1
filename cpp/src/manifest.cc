#include "tvmflow/manifest.h"

#include <algorithm>
#include <set>

#include "host.h"
#include "json.h"
#include "tvmflow/error.h"

namespace tvmflow {
namespace {

// The version of the format that this library reads.
constexpr int64_t kFormat = 1;

// Text that may stand in messages: nothing in it breaks the line or steers a terminal.
const std::string& Printable(const Json& value) {
  for (char byte : value.Text()) {
    if (static_cast<unsigned char>(byte) < 0x20 || byte == 0x7F) throw Error("a name is not printable");
  }
  return value.Text();
}

std::vector<TensorSpec> Tensors(const Json& list) {
  std::vector<TensorSpec> result;
  for (const Json& item : list.List()) {
    TensorSpec spec{Printable(item.At("name")), {}, Printable(item.At("dtype"))};
    for (const Json& size : item.At("shape").List()) {
      spec.shape.push_back(size.IsText() ? Dimension(Printable(size)) : Dimension(size.Count()));
    }
    result.push_back(std::move(spec));
  }
  return result;
}

std::string Digest(const Json& value) {
  const std::string& text = Printable(value);
  if (text.size() != 64 || text.find_first_not_of("0123456789abcdef") != std::string::npos) {
    throw Error("'" + text + "' is not a SHA-256");
  }
  return text;
}

std::string Word(const Json& value, std::initializer_list<const char*> allowed) {
  for (const char* word : allowed) {
    if (value.Text() == word) return word;
  }
  throw Error("'" + Printable(value) + "' is unknown");
}

// The architecture of the code that the CPU runs.
std::string HostArchOf(const std::string& arch, const Json& target) {
  if (arch != "cuda") return arch;
  const Json* host = target.Find("host");
  const Json* triple = host == nullptr || host->IsText() ? nullptr : host->Find("mtriple");
  return triple == nullptr ? "" : Printable(*triple).substr(0, triple->Text().find('-'));
}

Manifest Read(const Json& document) {
  Manifest result;
  result.name = Printable(document.At("name"));
  result.target = Printable(document.At("target"));
  result.arch = Printable(document.At("arch"));
  result.host_arch = HostArchOf(result.arch, document.At("tvm_target"));
  for (const Json& item : document.At("cpu_features").List()) result.cpu_features.push_back(Printable(item));
  result.threads = document.At("threads").Count();
  if (result.threads < 1) throw Error("it is for no threads");
  result.inputs = Tensors(document.At("inputs"));
  result.outputs = Tensors(document.At("outputs"));
  for (const Member& item : document.At("dimensions").Members()) {
    const std::vector<Json>& range = item.value.List();
    if (range.size() != 2) throw Error("a dimension has no range");
    std::optional<int64_t> high;
    if (!range[1].IsNull()) high = range[1].Count();
    result.dimensions[item.name] = {range[0].Count(), high};
  }
  for (const Json& item : document.At("variants").List()) {
    Variant variant{Printable(item.At("function")), {}};
    for (const Member& size : item.At("sizes").Members()) variant.sizes[size.name] = size.value.Count();
    result.variants.push_back(std::move(variant));
  }
  result.weights_apart = Word(document.At("weights"), {"inside", "apart"}) == "apart";
  result.tvm_version = Printable(document.At("versions").At("tvm"));
  result.tvm_ffi_version = Printable(document.At("versions").At("tvm_ffi"));
  for (const Member& item : document.At("files").Members()) {
    result.files[Word(Json(item.name), {"mod.json", "mod.params", "mod.so", "sample.npz"})] = {
        Digest(item.value.At("sha256")), item.value.At("size").Count()};
  }
  for (const char* name : {"mod.json", "mod.so", "sample.npz"}) {
    if (result.files.count(name) == 0) throw Error(std::string("it names no ") + name);
  }
  if ((result.files.count("mod.params") != 0) != result.weights_apart) throw Error("it does not say where weights are");
  return result;
}

std::string Minor(const std::string& version) {
  size_t dot = version.find('.');
  return dot == std::string::npos ? version : version.substr(0, version.find('.', dot + 1));
}

void CheckVersion(const Manifest& manifest, const char* package, const std::string& built, const std::string& here) {
  if (Minor(built) == Minor(here)) return;
  throw Error("bundle '" + manifest.name + "' is built with " + package + " " + built + ", this program with " + here +
              "; build it with " + package + " " + built);
}

}  // namespace

Manifest ParseManifest(std::string_view json) {
  const Json document = Json::Parse(json);
  const int64_t format = document.At("format").Count();
  if (format == kFormat) return Read(document);
  throw Unusable("its format is " + std::to_string(format) + ", this program reads " + std::to_string(kFormat) +
                 "; take a newer program");
}

void CheckHost(const Manifest& manifest) {
  const std::string arch = HostArch();
  if (!manifest.host_arch.empty() && manifest.host_arch != arch) {
    throw Error("bundle '" + manifest.name + "' is built for " + manifest.host_arch + ", this machine is " + arch +
                "; take the bundle of this machine's target");
  }
  const std::set<std::string> features = HostFeatures();
  std::set<std::string> missing(manifest.cpu_features.begin(), manifest.cpu_features.end());
  for (const std::string& feature : features) missing.erase(feature);
  if (!missing.empty()) {
    std::string list;
    for (const std::string& feature : missing) list += (list.empty() ? "" : ", ") + feature;
    throw Error("bundle '" + manifest.name + "' for target '" + manifest.target + "' needs the CPU features " + list +
                ", which this machine lacks; take a bundle for a lower target");
  }
  const auto& needed = manifest.cpu_features;
  if (std::find(needed.begin(), needed.end(), "amx_tile") != needed.end() && !PermitAmx()) {
    throw Error("bundle '" + manifest.name + "' for target '" + manifest.target +
                "' uses AMX, which the system does not let this process do; take a bundle for a lower target, or allow "
                "arch_prctl in the sandbox that the process runs in");
  }
  CheckVersion(manifest, "apache-tvm", manifest.tvm_version, TVMFLOW_TVM_VERSION);
  CheckVersion(manifest, "apache-tvm-ffi", manifest.tvm_ffi_version, TVMFLOW_TVM_FFI_VERSION);
}

}  // namespace tvmflow
