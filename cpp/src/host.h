// This machine: its architecture, its CPU's features and its cores.
#pragma once

#include <set>
#include <string>

namespace tvmflow {

// The architecture as `uname -m` prints it.
std::string HostArch();

// The CPU's features, as /proc/cpuinfo names them.
std::set<std::string> HostFeatures();

// Asks the kernel for the permission to use AMX's tile registers, which every process needs. Returns whether the kernel
// gives it.
bool PermitAmx();

// The number of cores for this process, at least 1: physical ones, within its affinity and the quota of its control
// group. A quota of 2.5 cores counts as 2. `root` is the folder in which /proc and /sys lie.
int HostCores(const std::string& root = "");

}  // namespace tvmflow
