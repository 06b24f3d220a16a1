"""The part of the compiler for NVIDIA's GPUs: matrix products on tensor cores, schedules, and code by nvcc."""
