// Fixed-width names and the 16-bit float types, without any header: NVRTC then compiles a kernel in
// tens of milliseconds.
#pragma once

using int8_t = signed char;
using uint8_t = unsigned char;
using int16_t = short;
using uint16_t = unsigned short;
using int32_t = int;
using uint32_t = unsigned int;
using int64_t = long long;
using uint64_t = unsigned long long;
