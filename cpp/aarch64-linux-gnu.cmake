# Toolchain: 64-bit ARM by Debian's cross compiler (package g++-aarch64-linux-gnu).
set(CMAKE_SYSTEM_NAME Linux)
set(CMAKE_SYSTEM_PROCESSOR aarch64)
set(CMAKE_CXX_COMPILER aarch64-linux-gnu-g++)
set(CMAKE_LIBRARY_ARCHITECTURE aarch64-linux-gnu)

set(TVMFLOW_SYSROOT "" CACHE PATH "Folder into which sysroot.py has unpacked the libraries for this architecture")
set(CMAKE_FIND_ROOT_PATH "${TVMFLOW_SYSROOT}" /usr/aarch64-linux-gnu)
set(CMAKE_FIND_ROOT_PATH_MODE_PROGRAM NEVER)
set(CMAKE_FIND_ROOT_PATH_MODE_LIBRARY ONLY)
set(CMAKE_FIND_ROOT_PATH_MODE_INCLUDE ONLY)
set(CMAKE_FIND_ROOT_PATH_MODE_PACKAGE ONLY)
# Debian keeps headers that differ between architectures in a folder of their own.
set(CMAKE_CXX_STANDARD_INCLUDE_DIRECTORIES "${TVMFLOW_SYSROOT}/usr/include/aarch64-linux-gnu")
