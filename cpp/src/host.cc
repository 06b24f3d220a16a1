#include "host.h"

#include <sched.h>
#include <sys/syscall.h>
#include <sys/utsname.h>
#include <unistd.h>

#include <fstream>
#include <sstream>
#include <string_view>
#include <thread>
#include <utility>

#if defined(__aarch64__)
#include <asm/hwcap.h>
#include <sys/auxv.h>
#endif

namespace tvmflow {

std::string HostArch() {
  utsname name{};
  return uname(&name) == 0 ? name.machine : "unknown";
}

#if defined(__aarch64__)

// Under emulation /proc/cpuinfo describes the machine that emulates, so the kernel's own call is asked.
std::set<std::string> HostFeatures() {
  static constexpr std::pair<unsigned long, const char*> kFirst[] = {
      {HWCAP_FP, "fp"},         {HWCAP_ASIMD, "asimd"},     {HWCAP_AES, "aes"},         {HWCAP_PMULL, "pmull"},
      {HWCAP_SHA1, "sha1"},     {HWCAP_SHA2, "sha2"},       {HWCAP_CRC32, "crc32"},     {HWCAP_ATOMICS, "atomics"},
      {HWCAP_FPHP, "fphp"},     {HWCAP_ASIMDHP, "asimdhp"}, {HWCAP_ASIMDRDM, "asimdrdm"}, {HWCAP_FCMA, "fcma"},
      {HWCAP_ASIMDDP, "asimddp"}, {HWCAP_SVE, "sve"},       {HWCAP_ASIMDFHM, "asimdfhm"}};
  static constexpr std::pair<unsigned long, const char*> kSecond[] = {
      {HWCAP2_SVE2, "sve2"}, {HWCAP2_I8MM, "i8mm"}, {HWCAP2_BF16, "bf16"}};
  std::set<std::string> features;
  for (auto [bit, word] : kFirst) {
    if (getauxval(AT_HWCAP) & bit) features.insert(word);
  }
  for (auto [bit, word] : kSecond) {
    if (getauxval(AT_HWCAP2) & bit) features.insert(word);
  }
  return features;
}

#else

// The kernel's list leaves out features that it does not let processes use; the CPUID instruction does not.
std::set<std::string> HostFeatures() {
  std::ifstream file("/proc/cpuinfo");
  for (std::string line; std::getline(file, line);) {
    size_t colon = line.find(':');
    if (line.rfind("flags", 0) != 0 || colon == std::string::npos) continue;
    std::istringstream words(line.substr(colon + 1));
    std::set<std::string> features;
    for (std::string word; words >> word;) features.insert(word);
    return features;
  }
  return {};
}

#endif

#if defined(__x86_64__)

bool PermitAmx() {
  constexpr long kRequestPermission = 0x1023;  // ARCH_REQ_XCOMP_PERM
  constexpr long kTileData = 18;               // XFEATURE_XTILEDATA
  return syscall(SYS_arch_prctl, kRequestPermission, kTileData) == 0;
}

#else

bool PermitAmx() { return false; }

#endif

int HostCores() {
  cpu_set_t set;
  CPU_ZERO(&set);
  if (sched_getaffinity(0, sizeof set, &set) == 0) return CPU_COUNT(&set);
  unsigned cores = std::thread::hardware_concurrency();
  return cores ? static_cast<int>(cores) : 1;
}

}  // namespace tvmflow
