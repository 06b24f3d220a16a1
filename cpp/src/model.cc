#include "tvmflow/model.h"

#include <dlfcn.h>
#include <pthread.h>
#include <unistd.h>
#ifdef __GLIBC__
#include <malloc.h>
#endif

#include <algorithm>
#include <charconv>
#include <chrono>
#include <cstdlib>
#include <fstream>
#include <mutex>
#include <optional>
#include <string_view>

#include "bundle.h"
#include "host.h"

namespace tvmflow {
namespace {

namespace ffi = tvm::ffi;

constexpr size_t kAlignment = 64;  // of inputs of a library that loads whole vectors from them
constexpr int kPooledAllocator = 2;
// Bytes; for larger outputs the virtual machine makes memory, which it uses again.
constexpr size_t kLargestDirect = 1 << 14;

bool OnCpu(const DLDevice& device) { return device.device_type == kDLCPU; }

// The bytes of memory that the process has; 0 where the system does not say so.
int64_t ResidentBytes() {
  int64_t total = 0, resident = 0;
  std::ifstream("/proc/self/statm") >> total >> resident;
  return resident * sysconf(_SC_PAGESIZE);
}

// The memory that virtual machines keep for later calls: TVM keeps each block for a call that needs one of exactly that
// size, and a model of free sizes needs other blocks at each size. It is estimated by the growth of the process, and given
// back to the system when it exceeds twice what the largest call needed, as in tvmflow/runtime/kept.py.
class KeptMemory {
 public:
  // TVM keeps the memory of all models of a process together.
  static KeptMemory& Global() {
    static KeptMemory memory;
    return memory;
  }

  // Gives the memory back if it is too much, before a call. Threads may call it at once.
  void Check() {
    const std::unique_lock<std::mutex> lock(mutex_, std::try_to_lock);
    const auto now = std::chrono::steady_clock::now();
    if (!lock.owns_lock() || now - time_ < kInterval) return;
    time_ = now;
    int64_t size = ResidentBytes();
    if (size - start_ > std::max(kLeast, 2 * largest_)) {
      static const ffi::Function clear = ffi::Function::GetGlobalRequired("vm.builtin.memory_manager.clear");
      clear();
#ifdef __GLIBC__
      malloc_trim(0);  // The C library keeps what TVM frees between blocks that are still in use.
#endif
      size = start_ = ResidentBytes();
    }
    latest_ = size;
  }

  // Learns what a call needed, after it. Threads may call it at once.
  void Learn() {
    const std::unique_lock<std::mutex> lock(mutex_, std::try_to_lock);
    // A shorter call needs little: the system clears each page at the first write.
    if (!lock.owns_lock() || std::chrono::steady_clock::now() - time_ < kInterval) return;
    largest_ = std::max(largest_, ResidentBytes() - latest_);
  }

  // Leaves out how the process grew since the last look, by the weights of a model for example.
  void LeaveOut() {
    const std::lock_guard<std::mutex> lock(mutex_);
    const int64_t size = ResidentBytes();
    start_ += size - latest_;
    latest_ = size;
  }

 private:
  // As much as a network for images or texts needs for one call, and the time between two looks.
  static constexpr int64_t kLeast = 1 << 28;
  static constexpr std::chrono::microseconds kInterval{2500};

  std::mutex mutex_;
  std::chrono::steady_clock::time_point time_;
  // The size of the process when memory was last given back and at the last look, and its largest growth in a call.
  int64_t start_ = ResidentBytes(), latest_ = start_, largest_ = 0;
};

bool HasFreeSizes(const Manifest& manifest) {
  return std::any_of(manifest.dimensions.begin(), manifest.dimensions.end(),
                     [](const auto& item) { return item.second.second != item.second.first; });
}

// Returns what `call` returns; an error of TVM becomes an Error that begins with `sentence`.
template <typename Call>
auto TranslateErrors(const std::string& sentence, const Call& call) {
  try {
    return call();
  } catch (const ffi::Error& error) {
    const std::string message = error.message();
    throw Error(sentence + " (" + message.substr(0, message.find('\n')) + ")");
  }
}

std::string ShapeText(const TensorSpec& spec) {
  std::string text = "[";
  for (const Dimension& size : spec.shape) {
    if (text.size() > 1) text += ", ";
    const int64_t* fixed = std::get_if<int64_t>(&size);
    text += fixed != nullptr ? std::to_string(*fixed) : std::get<std::string>(size);
  }
  return text + "]";
}

std::string ShapeText(const Tensor& tensor) {
  TensorSpec spec;
  for (int i = 0; i < tensor.ndim(); ++i) spec.shape.emplace_back(tensor.size(i));
  return ShapeText(spec);
}

std::string Signature(const Manifest& manifest) {
  std::string text;
  for (const TensorSpec& spec : manifest.inputs) {
    text += (text.empty() ? "" : ", ") + spec.name + " " + spec.dtype + ShapeText(spec);
  }
  return text;
}

// Checks one input, and adds the sizes of its symbolic dimensions to `sizes`.
void CheckInput(const Manifest& manifest, const TensorSpec& spec, const Tensor& tensor,
                std::map<std::string, int64_t>& sizes) {
  const std::string name = "input '" + spec.name + "'";
  const std::string dtype = DtypeName(tensor.dtype());
  if (dtype != spec.dtype) throw Error(name + " is " + dtype + ", expected " + spec.dtype + "; convert it first");
  const auto refuse = [&] {
    throw Error(name + " has shape " + ShapeText(tensor) + ", expected " + ShapeText(spec));
  };
  if (static_cast<size_t>(tensor.ndim()) != spec.shape.size()) refuse();
  for (int i = 0; i < tensor.ndim(); ++i) {
    const int64_t size = tensor.size(i);
    if (const int64_t* fixed = std::get_if<int64_t>(&spec.shape[i])) {
      if (size != *fixed) refuse();
      continue;
    }
    const std::string& symbol = std::get<std::string>(spec.shape[i]);
    const auto range = manifest.dimensions.find(symbol);
    static const std::pair<int64_t, std::optional<int64_t>> kAnySize{1, std::nullopt};
    const auto& [low, high] = range == manifest.dimensions.end() ? kAnySize : range->second;
    if (size < low || (high && size > *high)) {
      throw Error(name + ": dimension '" + symbol + "' is " + std::to_string(size) + ", expected " +
                  std::to_string(low) + " to " + (high ? std::to_string(*high) : "any"));
    }
    const auto [earlier, is_first] = sizes.emplace(symbol, size);
    if (!is_first && earlier->second != size) {
      throw Error(name + ": dimension '" + symbol + "' is " + std::to_string(size) + ", but " +
                  std::to_string(earlier->second) + " in another input");
    }
  }
}

// Checks that the numbers of a contiguous tensor are within limits.
template <typename Number>
void CheckNumbers(const std::string& name, const Tensor& tensor, const std::pair<int64_t, int64_t>& limits) {
  if (tensor.numel() == 0) return;
  const auto* numbers = static_cast<const Number*>(tensor.data_ptr());
  const auto [least, largest] = std::minmax_element(numbers, numbers + tensor.numel());
  for (const Number* number : {least, largest}) {
    if (*number >= limits.first && *number <= limits.second) continue;
    throw Error("input '" + name + "' holds " + std::to_string(*number) + "; the model takes " +
                std::to_string(limits.first) + " to " + std::to_string(limits.second));
  }
}

// Checks that the integers of a contiguous input are in the table in which the model looks them up.
void CheckIndices(const Manifest& manifest, const TensorSpec& spec, const Tensor& tensor) {
  const auto limits = manifest.indices.find(spec.name);
  if (limits == manifest.indices.end()) return;
  if (spec.dtype == "int64") CheckNumbers<int64_t>(spec.name, tensor, limits->second);
  if (spec.dtype == "int32") CheckNumbers<int32_t>(spec.name, tensor, limits->second);
}

// The value of an environment variable, a number of at least `least`; none where it is not set.
std::optional<int64_t> NumberIn(const char* variable, int64_t least) {
  const char* text = std::getenv(variable);
  if (text == nullptr) return std::nullopt;
  const std::string_view digits(text);
  int64_t number = -1;
  const auto [end, error] = std::from_chars(digits.data(), digits.data() + digits.size(), number);
  if (error != std::errc() || end != digits.data() + digits.size() || number < least) {
    throw Error("the environment variable " + std::string(variable) + " is '" + text + "', expected a " +
                (least > 0 ? "positive number" : "number"));
  }
  return number;
}

// The number of threads of a call. `threads` is the number that the caller demands, or 0.
int64_t CountThreads(int threads, std::optional<int64_t> most) {
  if (threads > 0) return threads;
  const int64_t cores = std::min<int64_t>(most.value_or(HostCores()), HostCores());
  return NumberIn("TVM_NUM_THREADS", 1).value_or(cores);
}

// How many times an idle worker looks for work before it sleeps: for a millisecond or two. With TVM's own 300000 a
// process on a busy machine takes minutes to end.
int64_t CountLooks() { return NumberIn("TVM_THREAD_POOL_SPIN_COUNT", 0).value_or(4000); }

// Sets the environment variables of TVM's thread pool, for a library from before they had threads of their own.
void ReserveWorkers(int64_t threads, int64_t looks) {
  setenv("TVM_NUM_THREADS", std::to_string(threads).c_str(), 1);
  setenv("TVM_THREAD_POOL_SPIN_COUNT", std::to_string(looks).c_str(), 1);
  // With one worker TVM would bind the calling thread to the first core.
  if (threads == 1) setenv("TVM_BIND_THREADS", "0", 0);
}

// Loads TVM's runtime for CUDA, a separate library that needs NVIDIA's driver.
void LoadCuda(const std::string& bundle) {
  if (dlopen("libtvm_runtime_cuda.so", RTLD_NOW | RTLD_GLOBAL) == nullptr) {
    throw Error("bundle '" + bundle + "' needs an NVIDIA GPU with its driver and CUDA's runtime (" + dlerror() + ")");
  }
}

}  // namespace

// The threads of a library, from its start until the last copy of the model is gone.
class Threads {
 public:
  // Starts the threads of `library`; where it has none of its own, TVM's pool gets as many.
  static std::shared_ptr<Threads> Start(const ffi::Module& library, int64_t threads, int64_t looks) {
    const auto start = library->GetFunction("tvmflow_start_threads", true);
    if (!start.has_value()) {
      ReserveWorkers(threads, looks);
      return nullptr;
    }
    static uint32_t latest_library = 0;  // shared by the threads of all libraries: the one that ran a loop last
    (*start)(threads, looks, reinterpret_cast<int64_t>(&pthread_create), reinterpret_cast<int64_t>(&pthread_join),
             reinterpret_cast<int64_t>(&latest_library));
    return std::shared_ptr<Threads>(new Threads(library->GetFunction("tvmflow_stop_threads", true).value()));
  }

  Threads(const Threads&) = delete;
  Threads& operator=(const Threads&) = delete;
  ~Threads() {
    try {
      stop_();
    } catch (const std::exception&) {
      // The function has no error; a destructor may throw none.
    }
  }

 private:
  explicit Threads(ffi::Function stop) : stop_(std::move(stop)) {}

  ffi::Function stop_;
};

Model Model::Open(const std::string& bundle, int threads, const std::optional<SignedRelease>& release) {
  const OpenBundle files(bundle, release);
  Model model;
  model.manifest_ = files.manifest();
  const Manifest& manifest = model.manifest_;
  CheckHost(manifest);
  const int64_t count = CountThreads(threads, manifest.max_threads), looks = CountLooks();
  if (manifest.arch == "cuda") {
    LoadCuda(manifest.name);
    model.device_ = {kDLCUDA, 0};
  }
  const std::string sentence = "bundle '" + manifest.name + "': its library cannot be loaded";
  TranslateErrors(sentence, [&] {
    // The library stays mapped when its file is removed with the temporary folder.
    model.library_ = ffi::Module::LoadFromFile(files.PathOf("mod.so").string());
    if (OnCpu(model.device_)) model.threads_ = Threads::Start(model.library_.value(), count, looks);
    const auto load = model.library_.value()->GetFunction("vm_load_executable");
    if (!load.has_value()) throw Error(sentence + " (it is no executable of Relax)");
    model.machine_ = (*load)().cast<ffi::Module>();
    const ffi::Function initialise = model.machine_.value()->GetFunction("vm_initialization").value();
    if (OnCpu(model.device_)) {
      initialise(static_cast<int>(kDLCPU), 0, kPooledAllocator);
    } else {
      initialise(static_cast<int>(model.device_.device_type), 0, kPooledAllocator, static_cast<int>(kDLCPU), 0,
                 kPooledAllocator);
    }
  });
  std::vector<std::string> names{"main"};
  for (const Variant& variant : manifest.variants) names.push_back(variant.function);
  for (const std::string& name : names) {
    auto function = model.machine_.value()->GetFunction(name);
    if (!function.has_value()) throw Error("bundle '" + manifest.name + "' has no function '" + name + "'");
    model.functions_.push_back(*function);
  }
  if (manifest.weights_apart) {
    for (const auto& [name, tensor] : ReadNpz(files.PathOf("mod.params").string())) {
      model.weights_.push_back(model.ToDevice(tensor));
    }
  }
  const auto tensors_of = [&](const std::string& name, const std::vector<ffi::AnyView>& arguments,
                              const std::string& failure) {
    const auto function = model.machine_.value()->GetFunction(name);
    if (!function.has_value()) throw Error("bundle '" + manifest.name + "' has no function '" + name + "'");
    return TranslateErrors("bundle '" + manifest.name + "': " + failure, [&] {
      std::vector<Tensor> tensors;
      ffi::Any result;
      (*function).CallPacked(arguments.data(), static_cast<int32_t>(arguments.size()), &result);
      for (const ffi::Any& item : result.cast<ffi::Array<ffi::Any>>()) tensors.push_back(item.cast<Tensor>());
      return tensors;
    });
  };
  if (manifest.weights_unpacked) {
    const std::vector<ffi::AnyView> arguments(model.weights_.begin(), model.weights_.end());
    model.weights_ = tensors_of("pack_weights", arguments, "its weights cannot be packed");
  }
  if (OnCpu(model.device_)) model.direct_ = model.library_.value()->GetFunction("direct_main", true);
  if (model.direct_.has_value()) model.constants_ = tensors_of("main_constants", {}, "its constants cannot be read");
  for (auto& [name, tensor] : ReadNpz(files.PathOf("sample.npz").string())) {
    constexpr std::string_view kPrefix = "input:";
    if (name.rfind(kPrefix, 0) == 0) model.sample_.emplace(name.substr(kPrefix.size()), std::move(tensor));
  }
  KeptMemory::Global().LeaveOut();
  return model;
}

std::vector<Tensor> Model::CheckInputs(const std::map<std::string, Tensor>& inputs) const {
  std::vector<Tensor> ordered;
  std::map<std::string, int64_t> sizes;
  for (const TensorSpec& spec : manifest_.inputs) {
    const auto input = inputs.find(spec.name);
    if (input == inputs.end()) {
      throw Error("input '" + spec.name + "' is missing; the model takes " + Signature(manifest_));
    }
    CheckInput(manifest_, spec, input->second, sizes);
    ordered.push_back(input->second);
  }
  for (const auto& [name, tensor] : inputs) {
    const auto has_name = [&name = name](const TensorSpec& spec) { return spec.name == name; };
    if (std::none_of(manifest_.inputs.begin(), manifest_.inputs.end(), has_name)) {
      throw Error("model '" + manifest_.name + "' has no input '" + name + "'; it takes " + Signature(manifest_));
    }
  }
  return ordered;
}

// Returns the function for the sizes of these inputs, a variant or `main`, and adds those of their symbolic dimensions
// to `sizes`.
const ffi::Function& Model::FunctionFor(const std::vector<Tensor>& inputs,
                                        std::map<std::string, int64_t>& sizes) const {
  if (inputs.size() != manifest_.inputs.size()) {
    throw Error(std::to_string(inputs.size()) + " inputs are given; the model takes " + Signature(manifest_));
  }
  for (size_t i = 0; i < inputs.size(); ++i) {
    CheckInput(manifest_, manifest_.inputs[i], inputs[i], sizes);
    const size_t element = (inputs[i].dtype().bits + 7) / 8;
    const size_t alignment = manifest_.unaligned_inputs ? element : kAlignment;
    if (!OnCpu(inputs[i].device()) || !inputs[i].IsContiguous() || !inputs[i].IsAligned(alignment)) {
      throw Error("input '" + manifest_.inputs[i].name + "' is not contiguous memory of the CPU, aligned to " +
                  std::to_string(alignment) + (alignment == 1 ? " byte" : " bytes"));
    }
    CheckIndices(manifest_, manifest_.inputs[i], inputs[i]);
  }
  for (size_t i = 0; i < manifest_.variants.size(); ++i) {
    const std::map<std::string, int64_t>& variant = manifest_.variants[i].sizes;
    const bool fits = std::all_of(variant.begin(), variant.end(), [&sizes](const auto& item) {
      const auto size = sizes.find(item.first);
      return size != sizes.end() && size->second == item.second;
    });
    if (fits) return functions_[i + 1];
  }
  return functions_[0];
}

// Returns new tensors to which the direct form of `main` writes the outputs; none where the virtual machine has to run:
// without a direct form, for a size that does not follow from the inputs, and for large outputs.
std::vector<Tensor> Model::DirectOutputs(const std::map<std::string, int64_t>& sizes) const {
  if (!direct_.has_value()) return {};
  std::vector<Tensor> outputs;
  for (const TensorSpec& spec : manifest_.outputs) {
    std::vector<int64_t> shape;
    for (const Dimension& dimension : spec.shape) {
      const int64_t* fixed = std::get_if<int64_t>(&dimension);
      const auto size = fixed != nullptr ? sizes.end() : sizes.find(std::get<std::string>(dimension));
      if (fixed == nullptr && size == sizes.end()) return {};
      shape.push_back(fixed != nullptr ? *fixed : size->second);
    }
    const DLDataType dtype = ffi::StringToDLDataType(spec.dtype);
    size_t bytes = (dtype.bits + 7) / 8;
    for (const int64_t size : shape) {
      if (size < 0 || size > static_cast<int64_t>(kLargestDirect)) return {};
      bytes *= static_cast<size_t>(size);
      if (bytes > kLargestDirect) return {};
    }
    outputs.push_back(Allocate(shape, dtype));
  }
  return outputs;
}

Tensor Model::ToDevice(const Tensor& tensor) const {
  if (OnCpu(device_)) return tensor;
  static const ffi::Function allocate = ffi::Function::GetGlobalRequired("runtime.TVMTensorAllocWithScope");
  static const ffi::Function copy = ffi::Function::GetGlobalRequired("runtime.TVMTensorCopyFromTo");
  Tensor result = allocate(ffi::Shape(tensor.shape()), tensor.dtype(), device_, nullptr).cast<Tensor>();
  copy(tensor, result);
  return result;
}

std::vector<Tensor> Model::Run(const std::vector<Tensor>& inputs) {
  if (is_running_->exchange(true)) {
    throw Error("another thread runs model '" + manifest_.name + "'; give each thread a model of its own");
  }
  // Calls one after the other may come from several threads: the next one sees what this one has stored.
  const auto end = [](std::atomic<bool>* is_running) { is_running->store(false); };
  const std::unique_ptr<std::atomic<bool>, decltype(end)> running(is_running_.get(), end);
  std::map<std::string, int64_t> sizes;
  const ffi::Function& function = FunctionFor(inputs, sizes);
  return TranslateErrors("model '" + manifest_.name + "' failed", [&] {
    const bool is_main = &function == &functions_[0];
    if (std::vector<Tensor> outputs = is_main ? DirectOutputs(sizes) : std::vector<Tensor>(); !outputs.empty()) {
      std::vector<ffi::AnyView> arguments(inputs.begin(), inputs.end());
      arguments.insert(arguments.end(), weights_.begin(), weights_.end());
      arguments.insert(arguments.end(), constants_.begin(), constants_.end());
      arguments.insert(arguments.end(), outputs.begin(), outputs.end());
      ffi::Any nothing;
      direct_.value().CallPacked(arguments.data(), static_cast<int32_t>(arguments.size()), &nothing);
      return outputs;
    }
    const bool is_free = OnCpu(device_) && HasFreeSizes(manifest_);
    if (is_free) KeptMemory::Global().Check();
    std::vector<Tensor> on_device;
    for (const Tensor& input : inputs) on_device.push_back(ToDevice(input));
    std::vector<ffi::AnyView> arguments(on_device.begin(), on_device.end());
    arguments.insert(arguments.end(), weights_.begin(), weights_.end());
    ffi::Any result;
    function.CallPacked(arguments.data(), static_cast<int32_t>(arguments.size()), &result);
    if (is_free) KeptMemory::Global().Learn();
    std::vector<Tensor> outputs;
    if (auto one = result.try_cast<Tensor>()) {
      outputs.push_back(*one);
    } else {
      for (const ffi::Any& item : result.cast<ffi::Array<ffi::Any>>()) outputs.push_back(item.cast<Tensor>());
    }
    if (outputs.size() != manifest_.outputs.size()) {
      throw Error("bundle '" + manifest_.name + "' returns " + std::to_string(outputs.size()) + " outputs, not the " +
                  std::to_string(manifest_.outputs.size()) + " of its manifest");
    }
    if (!OnCpu(device_)) {
      static const ffi::Function copy = ffi::Function::GetGlobalRequired("runtime.TVMTensorCopyToBytes");
      for (Tensor& output : outputs) {
        Tensor on_cpu = Allocate({output.shape().begin(), output.shape().end()}, output.dtype());
        copy(output, on_cpu.data_ptr(), static_cast<int64_t>(ffi::GetDataSize(on_cpu)));
        output = on_cpu;
      }
    }
    return outputs;
  });
}

}  // namespace tvmflow
