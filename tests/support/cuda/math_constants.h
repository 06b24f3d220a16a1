// CUDA's constants that TVM's code names.
#include <cmath>

#define CUDART_INF_F INFINITY
#define CUDART_INF static_cast<double>(INFINITY)
#define CUDART_NAN_F NAN
#define CUDART_NAN static_cast<double>(NAN)
