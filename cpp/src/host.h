// What this machine is and what it can run.
#pragma once

#include <set>
#include <string>

namespace tvmflow {

// Its architecture as `uname -m` says it.
std::string HostArch();

// What its CPU can do, in the words of /proc/cpuinfo.
std::set<std::string> HostFeatures();

// Asks the kernel for AMX's tile registers, which a process may use only then; whether it may.
bool PermitAmx();

// The cores that this process may use.
int HostCores();

}  // namespace tvmflow
