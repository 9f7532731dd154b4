#include "support/case_test.hpp"

PULLBACK_CASE_TESTS(entmax)
PULLBACK_OTHER_VARIANT_TESTS(entmax)
