#include "support/case_test.hpp"

PULLBACK_CASE_TESTS(entmax)
