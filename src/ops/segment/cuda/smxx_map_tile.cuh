// A pass over narrow contiguous rows that are not made of whole pieces of 16 bytes: each gets a
// value from its segment (smxx_maps.cuh).
//
// A block makes the rows of its tile in shared memory (smxx_row_tile.cuh), out of what it has
// copied there of the tile's segments, whose rows of d_out and of what else is read follow each
// other.
#pragma once

#include "ops/segment/cuda/smxx_maps.cuh"
#include "ops/segment/cuda/smxx_row_tile.cuh"

namespace pullback::segment_cuda {

// Of the rows of the tile's segments that are read, where in shared memory that of the list's
// segment tile.first is, or would be.
struct SegmentImages {
  const unsigned char *d_out, *arg, *statistic;
};

// Takes what a map reads of a segment for what is to be copied.
struct SegmentCopies {
  const Params& p;
  const RowTile& rows;
  unsigned char*& to;  // where the next go: a multiple of 16 bytes
  SegmentImages& images;
  template <class T, int kCount>
  void d_out(Values<T, kCount>&) const {
    images.d_out = copy(p.d_out, sizeof(T));
  }
  template <class T, int kCount>
  void arg(Values<T, kCount>&) const {
    images.arg = copy(p.arg, sizeof(T));
  }
  template <class T, int kCount>
  void statistic(Values<T, kCount>&) const {
    images.statistic = copy(p.statistic, sizeof(T));
  }
  void length(int64_t&) const {}
  void begin(int64_t&) const {}

 private:
  const unsigned char* copy(const Matrix& from, int element_bytes) const {
    const int64_t row_bytes = p.columns * element_bytes;
    const int64_t first = Tile::problem_segment(rows.tile.first);
    const int64_t begin = clamped(first, 0, p.segments) * row_bytes;
    const int64_t stop = clamped(first + rows.end_count + 1, 0, p.segments) * row_bytes;
    const int64_t first_byte = begin & -kSectorBytes;
    unsigned char* const memory = to;
    copy_bytes<false>(memory, from.data, first_byte, stop, p.segments * row_bytes);
    const int bytes = static_cast<int>(stop - first_byte);
    if (bytes > 0) to += (bytes + kSectorBytes - 1) & -kSectorBytes;
    return memory + (first * row_bytes - first_byte);
  }
};

// What is read of segment k of the tile, from `column` on.
struct SegmentInputs {
  const RowTile& rows;
  const Segments& segments;
  const SegmentImages& images;
  int k, column;
  template <class V>
  void d_out(V& values) const {
    read(values, images.d_out);
  }
  template <class V>
  void arg(V& values) const {
    read(values, images.arg);
  }
  template <class V>
  void statistic(V& values) const {
    read(values, images.statistic);
  }
  void length(int64_t& many) const {
    many = rows.reaches_out(k) ? segments.length(rows.tile.first + k)
                               : rows.end_of(k) - rows.begin_of(k);
  }
  void begin(int64_t& row) const { row = segments.begin(rows.tile.first + k); }

 private:
  template <class T, int kCount>
  void read(Values<T, kCount>& values, const unsigned char* from) const {
    const int at = (k * static_cast<int>(rows.p.columns) + column) * static_cast<int>(sizeof(T));
    values = *reinterpret_cast<const Values<T, kCount>*>(from + at);
  }
};

template <class Map, class T, int kVector>
void map_tile(const Params& p) {
  using Row = typename Map::Row;
  using Piece = Values<T, kVector>;
  constexpr bool kReadsRows = requires(Row row) { row.x; };
  extern __shared__ __align__(128) unsigned char memory[];

  const auto [segments, tile] = begin_tile(p);
  RowTile rows(p, tile, sizeof(T));
  const int end_items = p.end_items, items = static_cast<int>(p.tile_items) + end_items;
  // What the segments take the place of in shared memory.
  rows.end_count =
      static_cast<int>(clamped(rows.end_count, 0, (items - rows.row_count) / end_items));
  const RowImage image{memory};
  if constexpr (kReadsRows) rows.copy_rows(image, p.x.data);
  unsigned char* const ends = memory + rows.image_bytes();
  SegmentImages images;
  typename Map::Raw copied;
  unsigned char* to = ends + ((2 * rows.end_count + kSectorBytes - 1) & -kSectorBytes);
  copied.load(SegmentCopies{p, rows, to, images});
  async_commit();
  rows.find_ends(segments, ends);
  async_wait<0>();

  rows.share_out<kVector, Parts::apart>(
      [&](int k, int column, int begin, int end, int rank, int step, int, int) {
        const uint32_t first =
            rows.skew + begin * rows.row_bytes + column * static_cast<int>(sizeof(T));
        const int many = end - begin;
        if (many <= 0) return;
        const bool inside = rows.in_problem(k);
        typename Map::Segment segment{};
        if (inside) {
          typename Map::Raw raw;
          raw.load(SegmentInputs{rows, segments, images, k, column});
          segment = Map::of(raw, rows.tile);
        }
#pragma unroll 4
        for (int at = rank; at < many; at += step) {
          const uint32_t place = first + at * rows.row_bytes;
          Row row;
          if constexpr (kReadsRows) row.x = image.load<Piece>(place);
          const int64_t number = rows.tile.row + begin + at;
          Piece values{};
          if (inside)
            values = Map::values(segment, row, {static_cast<uint32_t>(begin + at), number});
          image.store(place, values);
        }
      },
      [](int, int, int, int) {});
  __syncthreads();
  rows.store<T>(image, p.d_x.data, rows.skew, rows.skew + rows.row_count * rows.row_bytes);
}

}  // namespace pullback::segment_cuda
