// Arrays in NumPy's files: `.npy`, and `.npz`, stored or deflated.
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

// An uninitialised tensor in the CPU's memory, aligned as TVM's generated code needs it.
Tensor Allocate(const std::vector<int64_t>& shape, DLDataType dtype);

// NumPy's name of a dtype. Throws Error for one that NumPy does not have.
std::string DtypeName(DLDataType dtype);

// Read arrays of numbers in native byte order and C order. Throw Error for anything else and for a damaged file.
Tensor ReadNpy(const std::string& path);
Arrays ReadNpz(const std::string& path);

// Writes arrays as `numpy.savez` does. Throws Error if the file cannot be written.
void WriteNpz(const std::string& path, const Arrays& arrays);

}  // namespace tvmflow
