#include "host.h"

#include <sched.h>
#include <sys/syscall.h>
#include <sys/utsname.h>
#include <unistd.h>

#include <algorithm>
#include <cctype>
#include <fstream>
#include <iterator>
#include <optional>
#include <sstream>
#include <string_view>
#include <thread>
#include <utility>
#include <vector>

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

namespace {

// The text of a file without white space at its end; empty where it cannot be read.
std::string ReadText(const std::string& path) {
  std::ifstream file(path);
  std::string text((std::istreambuf_iterator<char>(file)), std::istreambuf_iterator<char>());
  while (!text.empty() && std::isspace(static_cast<unsigned char>(text.back()))) text.pop_back();
  return text;
}

// The hardware threads that this process may run on.
std::vector<int> Processors() {
  std::vector<int> processors;
  cpu_set_t set;
  CPU_ZERO(&set);
  const bool is_known = sched_getaffinity(0, sizeof set, &set) == 0;
  const int count = is_known ? CPU_SETSIZE : static_cast<int>(std::thread::hardware_concurrency());
  for (int cpu = 0; cpu < count; ++cpu) {
    if (!is_known || CPU_ISSET(cpu, &set)) processors.push_back(cpu);
  }
  return processors;
}

// The cores that hardware threads belong to: those of one core share its multiply-adds.
int CountPhysical(const std::vector<int>& processors, const std::string& root) {
  std::set<std::string> cores;
  for (int cpu : processors) {
    const std::string name = std::to_string(cpu);
    const std::string siblings = ReadText(root + "/sys/devices/system/cpu/cpu" + name + "/topology/thread_siblings_list");
    cores.insert(siblings.empty() ? name : siblings);
  }
  return static_cast<int>(cores.size());
}

// The quota in cores that files of a control group hold: one file with quota and period, or two with one number each.
std::optional<double> QuotaIn(const std::string& group, const std::vector<std::string>& files) {
  std::string text;
  for (const std::string& name : files) text += ReadText(group + "/" + name) + " ";
  std::istringstream numbers(text);
  double quota = 0, period = 0;
  // `max` and -1 mean no quota.
  if (!(numbers >> quota >> period) || quota <= 0 || period <= 0) return std::nullopt;
  return quota / period;
}

// The smallest quota in cores of the process's control group and of the groups around it, by versions 1 and 2.
std::optional<double> ReadQuota(const std::string& root) {
  std::optional<double> least;
  std::istringstream lines(ReadText(root + "/proc/self/cgroup"));
  for (std::string line; std::getline(lines, line);) {
    // A line is NUMBER:CONTROLLERS:PATH; version 2 has no controllers.
    const size_t first = line.find(':'), second = line.find(':', first + 1);
    if (first == std::string::npos || second == std::string::npos) continue;
    const std::string controllers = line.substr(first + 1, second - first - 1);
    std::vector<std::string> places{""}, files{"cpu.max"};
    if (!controllers.empty()) {
      if (("," + controllers + ",").find(",cpu,") == std::string::npos) continue;
      places = {"/" + controllers, "/cpu"};
      files = {"cpu.cfs_quota_us", "cpu.cfs_period_us"};
    }
    for (const std::string& place : places) {
      // A container sees its own group as the topmost one.
      for (std::string path = line.substr(second + 1);; path.erase(path.rfind('/'))) {
        const std::optional<double> quota = QuotaIn(root + "/sys/fs/cgroup" + place + path, files);
        if (quota && (!least || *quota < *least)) least = quota;
        if (path.rfind('/') == std::string::npos) break;
      }
    }
  }
  return least;
}

}  // namespace

int HostCores(const std::string& root) {
  const int cores = CountPhysical(Processors(), root);
  return std::max(1, std::min(cores, static_cast<int>(ReadQuota(root).value_or(cores))));
}

}  // namespace tvmflow
