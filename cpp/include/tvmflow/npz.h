// Reading and writing arrays in NumPy's files: `.npy`, and `.npz` with or without compression.
#pragma once

#include <tvm/ffi/container/tensor.h>

#include <cstdint>
#include <string>
#include <utility>
#include <vector>

namespace tvmflow {

using tvm::ffi::Tensor;

// Arrays by name, in the file's order.
using Arrays = std::vector<std::pair<std::string, Tensor>>;

// Returns an uninitialised tensor in the CPU's memory, aligned to 64 bytes as TVM's generated code needs it.
Tensor Allocate(const std::vector<int64_t>& shape, DLDataType dtype);

// Returns NumPy's name of a dtype. Throws Error for a dtype that NumPy does not have.
std::string DtypeName(DLDataType dtype);

// Reads one array of numbers in native byte order and C order. Throws Error for anything else and for a damaged file.
Tensor ReadNpy(const std::string& path);
// Reads all arrays of a file; each must be as for ReadNpy.
Arrays ReadNpz(const std::string& path);

// Writes arrays as `numpy.savez` does. Throws Error if the file cannot be written.
void WriteNpz(const std::string& path, const Arrays& arrays);

}  // namespace tvmflow
