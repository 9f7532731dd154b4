// Rows that GPUs hold tiles of in shared memory.
#include <string>
#include <vector>

#include "ops/segment/case_setup.hpp"

namespace pullback::driver::segment_setup {

namespace {

// Segments about the borders of tiles, of which the least have 128 rows and ends, and longer ones.
Lengths about_tiles() {
  Lengths lengths = {125, 1,  126, 0,  0,  127, 254, 3, 1,   0, 122,
                     40,  60, 90,  33, 32, 31,  700, 1, 250, 0, 0};
  lengths.resize(lengths.size() + 300);
  lengths.push_back(129);
  return lengths;
}

void add(std::vector<Case>& cases, const std::string& name, const std::string& reduce,
         const Shape& shape, Values values, const OptionMap& options = {}) {
  const std::string full = name + " D=" + std::to_string(shape.columns);
  cases.push_back(make_case(full, reduce, shape, options, values));
  cases.back().finite_differences = false;
}

}  // namespace

// Kernels that hold tiles of rows: segments about their borders, longer ones, which warps share,
// and for softmax those too long for that.
void tiles(std::vector<Case>& cases, const Lengths& skewed) {
  const auto add = [&](const std::string& name, const std::string& reduce, const Shape& shape,
                       Values values, const OptionMap& options = {}) {
    segment_setup::add(cases, name, reduce, shape, values, options);
  };
  const Lengths about = about_tiles();
  for (const std::int64_t columns : {1, 2, 3, 4, 12, 33, 128}) {
    add("about tiles", "softmax", {about, columns, Form::ids_i32, 130, 5}, Values::normal);
    add("special short", "softmax", {skewed, columns, Form::offsets_i32}, Values::special);
    add("wide short", "softmax", {skewed, columns, Form::offsets_i64, 3, 200}, Values::wide);
  }
  for (const std::int64_t columns : {1, 2, 3, 4, 6, 8, 12, 16, 50, 67, 70, 100, 128}) {
    add("long", "softmax", {{27000 / columns, 1, 27000 / columns}, columns}, Values::normal);
  }
  for (const std::string reduce : {"sum", "mean", "max", "min", "logsumexp"}) {
    const auto values = extreme(reduce) ? Values::integers : Values::normal;
    for (const std::int64_t columns : {2, 3, 50}) {
      add("about tiles", reduce, {about, columns, Form::ids_i32, 130, 5}, values);
    }
    add("special about tiles", reduce, {about, 3, Form::offsets_i32, 130, 5}, Values::special);
    add("long", reduce, {{0, 900, 3, 257, 256, 700, 5}, 6, Form::offsets_i64, 9, 300}, values);
    if (reduce == "min" || reduce == "mean") continue;
    // Enough rows for tiles of more than a warp's part of a segment on a large GPU.
    add("many long", reduce, {Lengths(600, 300), 3}, values);
  }
  // So many segments that they tell where tiles of some 32 rows begin: of no tile, some and many.
  Lengths telling(1100, 1);
  telling.insert(telling.begin() + 400, 20, 170);
  telling.insert(telling.begin() + 900, 600);
  add("telling", "sum", {telling, 129, Form::offsets_i32, 3, 70}, Values::integers);
  add("telling", "max", {telling, 129, Form::offsets_i64, 0, 0}, Values::integers);
  for (const std::string reduce : {"max", "min"}) {
    const OptionMap options = {{"ties", "last"}, {"arg-dtype", "i32"}};
    add("last about tiles", reduce, {about, 3}, Values::integers, options);
    add("last long", reduce, {{900, 3, 257, 0, 700, 5}, 10}, Values::integers, options);
  }
}

// The mask of max and min, of all ties in one pass, and where it is made from arg, tile by tile.
void mask_tiles(std::vector<Case>& cases, const Lengths& skewed) {
  const Lengths about = about_tiles();
  for (const std::string reduce : {"max", "min"}) {
    for (const std::string ties : {"first", "last", "even"}) {
      const OptionMap options = {{"ties", ties}, {"saved", "mask"}, {"arg-dtype", "none"}};
      const auto tied = [&](const std::string& name, const Shape& shape, Values values) {
        add(cases, ties + " mask " + name, reduce, shape, values, options);
      };
      for (const std::int64_t columns : {1, 2, 3, 4, 8, 12, 33, 50, 128}) {
        tied("about tiles", {about, columns, Form::ids_i32, 130, 5}, Values::integers);
        if (ties != "even") continue;
        tied("special short", {skewed, columns, Form::offsets_i32, 3, 200}, Values::special);
      }
      tied("long", {{0, 900, 3, 257, 256, 700, 5}, 6, Form::offsets_i64, 9, 300}, Values::integers);
      tied("many columns", {{3, 0, 70, 1, 9, 40}, 1030}, Values::integers);
    }
  }
}

}  // namespace pullback::driver::segment_setup
