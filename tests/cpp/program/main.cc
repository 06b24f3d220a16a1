// `program run BUNDLE [OFFSET]` runs a bundle with one input of 8 numbers on 0 to 7, whose address is OFFSET bytes beyond
// a multiple of 64, and prints the outputs. `program sizes BUNDLE` runs a bundle with one input of 8 columns at 60 numbers
// of rows from 16000 on, and prints by how many MiB the process grew. `program threads BUNDLE` runs a bundle with one input
// of 8 numbers on two threads until one is refused, a minute at most, prints why, and runs it once more. `program verify` reads the paths of bundles, one a
// line, and prints for each `intact` or why it is refused; behind tabs a line may have the address of a release and the
// file of its statement.
#include <tvmflow/model.h>

#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdlib>
#include <cstring>
#include <fstream>
#include <iostream>
#include <optional>
#include <sstream>
#include <string>
#include <thread>

// Memory of a caller, which is not the library's to free.
struct Memory {
  void* data;
  void AllocData(DLTensor* tensor) { tensor->data = data; }
  void FreeData(DLTensor*) {}
};

int64_t ResidentPages() {
  int64_t total = 0, resident = 0;
  std::ifstream("/proc/self/statm") >> total >> resident;
  return resident;
}

int main(int argc, char** argv) {
  if (argc == 2 && argv[1] == std::string("verify")) {
    for (std::string line; std::getline(std::cin, line);) {
      std::istringstream words(line);
      std::string path, address, statement;
      std::getline(std::getline(std::getline(words, path, '\t'), address, '\t'), statement);
      try {
        std::optional<tvmflow::SignedRelease> release;
        if (!address.empty()) release = {address, statement};
        tvmflow::VerifyBundle(path, release);
        std::cout << "intact" << std::endl;
      } catch (const tvmflow::Error& error) {
        std::cout << error.what() << std::endl;
      }
    }
    return 0;
  }
  try {
    tvmflow::Model model = tvmflow::Model::Open(argv[2]);
    if (argv[1] == std::string("sizes")) {
      const int64_t before = ResidentPages();
      for (int64_t rows = 16000; rows < 16960; rows += 16) {
        tvmflow::Tensor input = tvmflow::Allocate({rows, 8}, {kDLFloat, 32, 1});
        std::fill_n(static_cast<float*>(input.data_ptr()), rows * 8, 1.0f);
        model.Run({input});
      }
      std::cout << (ResidentPages() - before) * sysconf(_SC_PAGESIZE) / (1 << 20) << std::endl;
      return 0;
    }
    if (argv[1] == std::string("threads")) {
      const auto end = std::chrono::steady_clock::now() + std::chrono::minutes(1);
      std::atomic<bool> is_refused{false};
      std::string reason;
      const auto run = [&] {
        tvmflow::Tensor input = tvmflow::Allocate({1, 8}, {kDLFloat, 32, 1});
        std::fill_n(static_cast<float*>(input.data_ptr()), 8, 1.0f);
        try {
          while (!is_refused && std::chrono::steady_clock::now() < end) model.Run({input});
        } catch (const tvmflow::Error& error) {
          if (!is_refused.exchange(true)) reason = error.what();
        }
      };
      std::thread other(run);
      run();
      other.join();
      is_refused = true;
      std::cout << reason << std::endl;
      return model.Run({tvmflow::Allocate({1, 8}, {kDLFloat, 32, 1})}).size() == 1 ? 0 : 1;
    }
    alignas(64) char memory[128];
    char* start = memory + (argc > 3 ? std::atoi(argv[3]) : 0);
    for (int i = 0; i < 8; ++i) {
      const float number = static_cast<float>(i);
      std::memcpy(start + i * sizeof(number), &number, sizeof(number));
    }
    tvmflow::Tensor input = tvmflow::Tensor::FromNDAlloc(Memory{start}, {1, 8}, {kDLFloat, 32, 1}, {kDLCPU, 0});
    for (const tvmflow::Tensor& output : model.Run({input})) {
      for (int64_t i = 0; i < output.numel(); ++i) std::cout << static_cast<float*>(output.data_ptr())[i] << " ";
    }
    std::cout << std::endl;
    return 0;
  } catch (const tvmflow::Error& error) {
    std::cerr << error.what() << std::endl;
    return 1;
  }
}
