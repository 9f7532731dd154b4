// The same header as C++, beside the C++ headers.
// clang-format off
#include "pullback/pullback.h"
#include "pullback/export.hpp"
// clang-format on

pullback_entmax_problem entmax_defaults();
pullback_entmax_problem entmax_defaults() { return PULLBACK_ENTMAX_PROBLEM_INIT; }
