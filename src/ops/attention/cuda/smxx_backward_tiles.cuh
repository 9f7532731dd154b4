// Which tiles of keys and queries meet, for every kernel of the backward pass. Whoever loops over
// tiles asks here, and nowhere else.
#pragma once

#include "ops/attention/cuda/backward_params.cuh"
#include "ops/attention/cuda/backward_tuning.cuh"
#include "ops/attention/cuda/smxx_sequences.cuh"

namespace pullback::attention {

// A tile of rows of one plane or pair, and its sequence.
struct TilePlace {
  int64_t batch;             // the sequence's number
  int64_t q_begin, k_begin;  // rows of the tensors
  int64_t first_tile;        // of the sequence among the q tiles of a plane
  int q_length, k_length;
  int lowest, highest;  // query i sees key j when lowest <= j - i <= highest
  int head;             // query head or key/value head
  int tile;             // within the sequence
  int extent;           // rows from the tile's first one on that are ours to write
  bool exists;
};

// `tile` counts all tiles of the plane (or pair) `index` of `heads` a batch item. By whole warps.
template <bool kQueries>
TilePlace place_of(const BackwardParams& p, int64_t index, int heads, int tile, int rows) {
  const Problem& problem = p.problem;
  TilePlace place;
  Sequence sequence = {0, problem.query, 0, problem.key};
  int64_t extent = kQueries ? problem.query : problem.key;
  place.exists = true;
  if (problem.sequences == nullptr) {
    // Planes and pairs lie in a grid: 32 bits.
    place.batch = static_cast<uint32_t>(index) / static_cast<uint32_t>(heads);
    place.head = static_cast<int>(static_cast<uint32_t>(index) % static_cast<uint32_t>(heads));
    place.tile = tile;
    place.first_tile = 0;
  } else {
    const int64_t b = sequence_of_tile(
        problem.sequences, problem.batch,
        kQueries ? &PackedSequence::first_q_tile : &PackedSequence::first_k_tile, tile);
    place.exists = b <= problem.batch;
    if (!place.exists) return place;
    const PackedSequence& packed = problem.sequences[b];
    sequence = packed.rows;
    extent = kQueries ? packed.q_extent : packed.k_extent;
    place.batch = b;
    place.head = static_cast<int>(index);
    place.tile = static_cast<int>(tile - (kQueries ? packed.first_q_tile : packed.first_k_tile));
    place.first_tile = packed.first_q_tile;
  }
  place.extent = static_cast<int>(extent - static_cast<int64_t>(place.tile) * rows);
  place.q_begin = sequence.q_begin;
  place.k_begin = sequence.k_begin;
  place.q_length = static_cast<int>(sequence.q_length);
  place.k_length = static_cast<int>(sequence.k_length);
  const int64_t o = diagonal(problem.band, sequence);
  place.lowest = static_cast<int>(
      detail::clamped(o - problem.band.left, -sequence.q_length, sequence.k_length));
  place.highest = static_cast<int>(
      detail::clamped(o + problem.band.right, -sequence.q_length, sequence.k_length));
  return place;
}

// Of `size` queries from `first` on, those whose rows of d_q are ours to write.
inline int own_query_rows(const BackwardParams& p, const TilePlace& place, int first, int size) {
  const int64_t left =
      (p.problem.sequences == nullptr ? int64_t{place.q_length}
                                      : p.problem.sequences[place.batch].q_extent) -
      first;
  return static_cast<int>(left < size ? left : size);
}

struct TileRange {
  int begin, end;
};

namespace detail {
// The tiles with the positions [first, last] of `length`.
inline TileRange tiles_of(int64_t first, int64_t last, int length, int size) {
  if (first < 0) first = 0;
  if (last > length - 1) last = length - 1;
  if (first > last) return {0, 0};
  return {static_cast<int>(first) / size, static_cast<int>(last) / size + 1};
}
inline int64_t last_of(int first, int size, int length) {
  const int64_t end = static_cast<int64_t>(first) + size;
  return (end < length ? end : length) - 1;
}
}  // namespace detail

// Both answers agree: query tile i is in the range of key tile j when j is in that of i, since the
// keys that neighbouring queries see leave no gap between them.
inline TileRange query_tiles_of(const TilePlace& place, int key_tile, int keys, int queries) {
  const int first = key_tile * keys;
  if (first >= place.k_length) return {0, 0};
  return detail::tiles_of(static_cast<int64_t>(first) - place.highest,
                          detail::last_of(first, keys, place.k_length) - place.lowest,
                          place.q_length, queries);
}

inline TileRange key_tiles_of(const TilePlace& place, int query_tile, int keys, int queries) {
  const int first = query_tile * queries;
  if (first >= place.q_length) return {0, 0};
  return detail::tiles_of(static_cast<int64_t>(first) + place.lowest,
                          detail::last_of(first, queries, place.q_length) + place.highest,
                          place.k_length, keys);
}

// The tiles of queries that all exist and see all of a tile of keys, which exist too.
inline TileRange whole_tiles_of(const TilePlace& place, int keys, int queries) {
  const int64_t first = static_cast<int64_t>(place.tile) * keys, last = first + keys - 1;
  if (last >= place.k_length) return {0, 0};
  const int64_t least = last - place.highest, most = first - place.lowest + 1;
  const int64_t end = most < place.q_length ? most : place.q_length;
  return {static_cast<int>(least > 0 ? (least + queries - 1) / queries : 0),
          static_cast<int>(end > 0 ? end / queries : 0)};
}

enum class Seen { none, some, all };

// How many of the pairs of `keys` keys and `queries` queries, from the first ones on, exist and see
// each other.
inline Seen pairs_seen(const TilePlace& place, int key, int query, int keys, int queries) {
  const int64_t last_key = static_cast<int64_t>(key) + keys - 1;
  const int64_t last_query = static_cast<int64_t>(query) + queries - 1;
  if (key >= place.k_length || query >= place.q_length || last_key - query < place.lowest ||
      key - last_query > place.highest) {
    return Seen::none;
  }
  const bool all = last_key < place.k_length && last_query < place.q_length &&
                   key - last_query >= place.lowest && last_key - query <= place.highest;
  return all ? Seen::all : Seen::some;
}

}  // namespace pullback::attention
