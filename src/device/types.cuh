// Fixed-width names and the 16-bit float types, without any header: NVRTC then compiles a kernel in
// tens of milliseconds. What host and device share (params.cuh, tuning.hpp) includes this on both
// sides.
#pragma once

#ifndef __CUDACC_RTC__
#include <stdint.h>
#else

using int8_t = signed char;
using uint8_t = unsigned char;
using int16_t = short;
using uint16_t = unsigned short;
using int32_t = int;
using uint32_t = unsigned int;
using int64_t = long long;
using uint64_t = unsigned long long;
#endif
