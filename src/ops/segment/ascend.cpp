#include "ops/segment/index.hpp"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "ops/segment/ascend.cpp"
#include <hwy/foreach_target.h>
#include <hwy/highway.h>

HWY_BEFORE_NAMESPACE();
namespace pullback::HWY_NAMESPACE {
namespace {

namespace hn = hwy::HWY_NAMESPACE;

// Of `count` + 1 offsets, the first of which is not negative. By signs: where no offset is
// negative, no difference overflows.
template <class Index>
bool Ascends(const Index* HWY_RESTRICT offsets, std::int64_t count) {
  const hn::ScalableTag<Index> d;
  const auto step = static_cast<std::int64_t>(hn::Lanes(d));
  const auto signs_of = [&](std::int64_t s) HWY_ATTR {
    const auto next = hn::LoadU(d, offsets + s + 1);
    return hn::Or(next, hn::Sub(next, hn::LoadU(d, offsets + s)));
  };
  auto even = hn::Zero(d), odd = even;
  std::int64_t s = 0;
  for (; s + 2 * step <= count; s += 2 * step) {
    even = hn::Or(even, signs_of(s));
    odd = hn::Or(odd, signs_of(s + step));
  }
  if (!hn::AllFalse(d, hn::Lt(hn::Or(even, odd), hn::Zero(d)))) return false;
  bool ok = true;
  for (; s < count; ++s) ok &= offsets[s] <= offsets[s + 1];
  return ok;
}

bool AscendAs(const IndexView& offsets, std::int64_t begin, std::int64_t count) {
  return offsets.wide ? Ascends(static_cast<const std::int64_t*>(offsets.data) + begin, count)
                      : Ascends(static_cast<const std::int32_t*>(offsets.data) + begin, count);
}

}  // namespace
}  // namespace pullback::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace pullback {

HWY_EXPORT(AscendAs);

bool ascend(const Segments& segments, std::int64_t begin, std::int64_t end) {
  const IndexView& offsets = segments.offsets;
  if (offsets[begin] < 0 || offsets[end] > segments.rows) return false;
  if (offsets.stride == 1) return HWY_DYNAMIC_DISPATCH(AscendAs)(offsets, begin, end - begin);
  bool ok = true;
  for (std::int64_t s = begin; s < end; ++s) ok &= offsets[s] <= offsets[s + 1];
  return ok;
}

}  // namespace pullback
#endif
