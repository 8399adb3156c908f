// Marks the functions that the CPU loops and the CUDA kernels both compile.
#pragma once

#ifdef __CUDACC__
#define ZEROCORE_HOST_DEVICE __host__ __device__ __forceinline__
#else
#define ZEROCORE_HOST_DEVICE inline
#endif
