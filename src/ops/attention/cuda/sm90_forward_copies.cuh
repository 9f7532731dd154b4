// The first warpgroup of the forward pass on Hopper (sm90_forward.cuh): it goes through the tiles
// of queries, copies each with its keys and values, and notes down what the others have to know.
//
// Where the copy engine knows the tensors, the first thread asks for boxes, and all threads copy
// what there is of a bias; else all of them copy everything, by cp.async.
#pragma once

#include "device/boxes.cuh"
#include "device/shared_tile.cuh"
#include "device/warpgroup.cuh"
#include "ops/attention/cuda/sm90_forward_params.cuh"
#include "ops/attention/cuda/sm90_products.cuh"
#include "ops/attention/cuda/smxx_clear.cuh"

namespace pullback::attention {

// What those who work know of a tile of queries: where its rows begin in out and lse, in elements;
// batch · H + head; its number, and that of its owner with a block mask; how many columns outputs
// have before their own ones; of its steps, the first ones that each warpgroup has to take.
struct TileNote {
  int64_t out, lse, plane;
  SequenceBand band;
  uint32_t number;
  int32_t first_query, rows, owner, columns_before, steps[3];
};
// And of a step, which is a tile of keys: where its parts begin, which of their squares are seen
// with a block mask, whether the band hides any. `count`: the tile's steps, 0 at the end of all.
template <int kParts>
struct StepNote {
  uint32_t count;
  int32_t masked;
  int32_t key[kParts];
  uint32_t squares[kParts];
};

// The numbers of the tiles that a thread block takes, one after the other. A causal mask makes a
// pair's last tiles long and its first ones short: two of a unit, from either end, come to the same
// for all units, but for one in the middle. Where rounds of all thread blocks are whole pairs, each
// block would have the same unit of every pair: it takes the next one in each cycle.
template <bool kPersistent>
class TileNumbers {
 public:
  explicit TileNumbers(const ForwardParams& params) : params_(params) {}

  bool take(uint32_t& number) {
    const uint32_t tiles = params_.q_tiles;
    const uint32_t unit_tiles = kPersistent ? params_.unit_tiles : 1;
    const uint32_t unit = next_ / 2, is_second = next_ % 2;
    if (unit >= (kPersistent ? params_.units : gridDim.x)) return false;
    const uint32_t pair_units = (tiles + unit_tiles - 1) / unit_tiles;
    const uint32_t cycle = kPersistent ? unit / params_.cycle_units : 0;
    const uint32_t within = (unit + cycle) % pair_units, mirrored = tiles - 1 - within;
    number = unit / pair_units * tiles + (is_second ? mirrored : within);
    const bool has_second = unit_tiles == 2 && mirrored != within;
    next_ = has_second && !is_second ? next_ + 1 : 2 * (unit + gridDim.x);
    return true;
  }

 private:
  const ForwardParams& params_;
  uint32_t next_ = 2 * blockIdx.x;  // 2 · unit, and 1 for the second tile of it
};

template <class Forward>
class ForwardCopies {
  using T = typename Forward::Element;
  static constexpr int kKeys = Forward::kKeys, kSlots = Forward::kSlots;
  static constexpr int kParts = Forward::kParts, kPartKeys = Forward::kPartKeys;
  static constexpr int kPanels = Forward::kPanels, kQuerySlots = Forward::kQuerySlots;
  static constexpr bool kBlocks = Forward::kBlocks, kBias = Forward::kBias;
  static constexpr uint32_t kPanelBytes = kKeys * kPanelRow;  // of a tile of keys

  // One of the tiles of queries, and what of keys it sees.
  struct Tile {
    QueryTile queries;
    uint32_t number = 0;
    int rows = 0;
    SequenceBand band;
    KeyTiles<kPartKeys, kParts> keys;

    Tile() = default;
    Tile(const Problem& p, const QueryTile& tile, uint32_t its_number)
        : queries(tile),
          number(its_number),
          rows(TileRows(tile, Forward::kTileRows).valid),
          band(p.band, tile.sequence),
          keys(keys_of(p)) {}
    int first() const { return static_cast<int>(queries.first); }
    KeyTiles<kPartKeys, kParts> keys_of(const Problem& p) const {
      if constexpr (kBlocks) {
        return {p.blocks, queries.batch, queries.head, queries.owner};
      } else {
        return {band, first(), first() + rows - 1};
      }
    }
    // A tile that sees no keys has a step, too, of keys that do not exist.
    int steps() const { return keys.count > 0 ? keys.count : 1; }
    // Of a warpgroup: none without rows, and none of the last ones, beyond what its rows see.
    int steps_of(int group) const {
      const int first_row = group * Forward::kRows, end_row = first_row + Forward::kRows;
      if (first_row >= rows) return 0;
      if (kBlocks) return steps();
      const int end_key = band.end_key(first() + (end_row < rows ? end_row : rows) - 1);
      const int own = (end_key + kKeys - 1) / kKeys - keys.first;
      return own < 1 ? 1 : own < steps() ? own : steps();
    }
    // Of the n-th step, as a list has it: an entry is far away, and is not waited for to be
    // multiplied.
    int entry(int n, int part) const {
      if constexpr (kBlocks) {
        const int at = n * kParts + part;
        return at < keys.parts ? keys.listed[at].tile : keys.kNoKey / kPartKeys;
      } else {
        return keys.count > 0 ? keys.key(n, part) : keys.kNoKey;
      }
    }
    static int key_of(int entry) { return kBlocks ? entry * kPartKeys : entry; }
    uint32_t squares(int n, int part) const { return keys.count > 0 ? keys.squares(n, part) : 0; }
    // Whether the band hides some of a step's keys from some of the queries.
    bool hides(int n, const int (&key)[kParts]) const {
      if constexpr (!kBlocks) return n >= keys.whole;
      const KeySpan unmasked = seen_by_all(band, first(), first() + rows - 1);
      bool hidden = false;
#pragma unroll
      for (int part = 0; part < kParts; ++part) {
        hidden = hidden || !unmasked.covers(key[part], kPartKeys);
      }
      return hidden;
    }
  };

  // A head's rows of a sequence.
  struct Source {
    const TensorMap& map;
    const HeadRows& tensor;
    int64_t begin;
    int rows, columns, head, batch, columns_before;

    // Made anew each time: this warpgroup has few registers.
    const T* first() const {
      int own_head = head;
      asm volatile("" : "+r"(own_head));
      return static_cast<const T*>(tensor.data) + batch * tensor.batch + begin * tensor.row +
             own_head * tensor.head;
    }
  };

 public:
  // That tell that a tile is there, some of which may be copied by all threads. The first thread's
  // own one comes after its notes.
  static uint32_t arrivals(bool some_by_all) { return some_by_all ? kWarpgroupSize + 1 : 1; }
  static uint32_t arrivals_of_keys(const Forward& own) {
    return arrivals(kBias || !own.has_maps());
  }

  explicit ForwardCopies(const Forward& own)
      : own_(own), params_(own.params), maps_(own.has_maps()), numbers_(own.params) {}

  void run() {
    if (!kBias && maps_ && threadIdx.x >= kWarpSize) return;
    Tile tile;
    if constexpr (Forward::kPersistent) {
      do {
        // The next tile is found while slots are full, and its queries come as soon as the tile
        // before this one is likely to be done, whose place they take. Neither is to keep keys
        // waiting. Before the first tile there is one without rows.
        Tile next;
        const int steps = tile.rows > 0 ? tile.steps() : 0;
        copy_keys(tile, steps, [&](int n) {
          if (n == 0) find_tile(next);
          if (next.rows > 0 && n == (steps > 2 ? 2 : steps > 0 ? steps - 1 : 0)) copy_queries(next);
        });
        tile = next;
      } while (tile.rows > 0);
    } else if (find_tile(tile); tile.rows > 0) {
      copy_queries(tile);
      copy_keys(tile, tile.steps(), [](int) {});
    }
    // The end: a step of nothing.
    const uint32_t slot = await_slot();
    if (threadIdx.x == 0) own_.shared.steps[note_].count = 0;
    tell_coming(own_.shared.full[slot], 0);
    tell_full(own_.shared.full[slot], kBias || !maps_);
    async_wait<0>();
  }

 private:
  // The next tile with rows; one without if there is none.
  void find_tile(Tile& tile) {
    const Problem& p = params_.problem;
    uint32_t number;
    do {
      tile = {};
      if (!numbers_.take(number)) return;
      QueryTile found;
      if (!find_query_tile<kBlocks>(p, params_.q_tiles, params_.pair_group, Forward::kTileRows,
                                    found, number)) {
        continue;
      }
      tile = Tile(p, found, number);
      const TileRows rows(found, Forward::kTileRows);
      // Of packed tensors, which no maps describe: all threads are here.
      if (rows.valid < rows.extent) {
        clear_rows<T>(params_, found, rows.valid, rows.extent, kWarpgroupSize);
      }
    } while (tile.rows == 0);
  }

  void copy_queries(const Tile& tile) {
    const Problem& p = params_.problem;
    const uint32_t slot = tile_count_ % kQuerySlots, round = tile_count_ / kQuerySlots;
    ++tile_count_;
    if (round > 0) barrier_wait(&own_.shared.queries_empty[slot], (round - 1) & 1);
    if (threadIdx.x == 0) note_tile(own_.shared.tiles[slot], tile);
    uint64_t& full = own_.shared.queries_full[slot];
    tell_coming(full, Forward::kGroups * Forward::kQueryBytes);
    const QueryTile& queries = tile.queries;
    const Source q =
        source(own_.hopper.q, params_.q, tile, queries.head, queries.sequence.q_begin,
               static_cast<int>(queries.sequence.q_length), p.head_dim, own_.hopper.k_begins);
#pragma unroll
    for (int group = 0; group < Forward::kGroups; ++group) {
      constexpr int kRows = Forward::kRows;
      copy_rows<kRows, kRows * kPanelRow, false>(q, own_.queries_of(slot, group),
                                                 queries.first + group * kRows, full);
    }
    tell_full(full, !maps_);
  }

  // A tile's keys and values, and something else after each step.
  template <class Work>
  void copy_keys(const Tile& tile, int steps, const Work& work) {
    const Problem& p = params_.problem;
    const int kv_head = tile.queries.head / p.group;
    const int64_t k_begin = tile.queries.sequence.k_begin;
    const Source k = source(own_.hopper.k, params_.k, tile, kv_head, k_begin, tile.band.keys,
                            p.head_dim, own_.hopper.k_begins);
    const Source v = source(own_.hopper.v, params_.v, tile, kv_head, k_begin, tile.band.keys,
                            p.value_dim, own_.hopper.v_begins);
    int key[kParts], next_entry[kParts];
    uint32_t squares[kParts], next_squares[kParts];
    const auto find_keys = [&](int n) {
#pragma unroll
      for (int part = 0; part < kParts; ++part) {
        next_entry[part] = tile.entry(n, part);
        next_squares[part] = kBlocks ? tile.squares(n, part) : 0;
      }
    };
    const auto copy_step = [&](int n) {
#pragma unroll
      for (int part = 0; part < kParts; ++part) {
        key[part] = Tile::key_of(next_entry[part]);
        squares[part] = next_squares[part];
      }
      if (n + 1 < steps) find_keys(n + 1);
      const uint32_t k_slot = await_slot();
      if (threadIdx.x == 0) {
        note_step(own_.shared.steps[note_], tile, n, key, squares);
      }
      copy_parts(k, key, k_slot, kBias || !maps_, [&] {
        if constexpr (kBias) copy_bias(tile, key[0]);
      });
      copy_parts(v, key, await_slot(!maps_ || threadIdx.x < kWarpSize), !maps_, [] {});
      if (++note_ == kSlots) note_ = 0;
    };
    if (steps > 0) find_keys(0);
    int n = 0;
#pragma unroll 1
    do {
      if (n < steps) copy_step(n);
      work(n);
    } while (++n < steps);
  }

  Source source(const TensorMap& map, const HeadRows& of, const Tile& tile, int head, int64_t begin,
                int rows, int columns, const HalfSectors& begins) const {
    return {map, of, begin, rows, columns, head, tile.queries.batch, columns_before(tile, begins)};
  }
  int columns_before(const Tile& tile, const HalfSectors& begins) const {
    if (!Forward::kShifts || !begins.any()) return 0;
    const QueryTile& queries = tile.queries;
    return begins.columns(queries.head / params_.problem.group, queries.batch);
  }

  // The slot of the next item, which is free if the thread is to copy to it.
  uint32_t await_slot(bool copies = true) const {
    if (copies && round_ > 0) barrier_wait(&own_.shared.empty[slot_], (round_ - 1) & 1);
    return slot_;
  }
  // Before boxes are asked for.
  void tell_coming(uint64_t& full, uint32_t bytes) const {
    if (maps_ && threadIdx.x == 0) barrier_expect_bytes(&full, bytes);
  }
  // After copies were asked for: the engine tells of its own.
  void tell_full(uint64_t& full, bool some_by_all) const {
    if (!some_by_all) return;
    barrier_arrive_after_copies(&full);
    if (!maps_ && threadIdx.x == 0) barrier_arrive(&full);
  }

  void note_tile(TileNote& note, const Tile& tile) const {
    const QueryTile& queries = tile.queries;
    const int64_t first = queries.sequence.q_begin + queries.first;
    note = {.out = queries.batch * params_.out.batch + first * params_.out.row +
                   queries.head * params_.out.head,
            .lse = queries.batch * params_.lse.batch + queries.head * params_.lse.head +
                   first * params_.lse.row,
            .plane = int64_t{queries.batch} * params_.problem.heads + queries.head,
            .band = tile.band,
            .number = tile.number,
            .first_query = tile.first(),
            .rows = tile.rows,
            .owner = queries.owner,
            .columns_before = columns_before(tile, own_.hopper.v_begins)};
#pragma unroll
    for (int group = 0; group < Forward::kGroups; ++group) note.steps[group] = tile.steps_of(group);
  }
  void note_step(StepNote<kParts>& note, const Tile& tile, int n, const int (&key)[kParts],
                 const uint32_t (&squares)[kParts]) const {
    note.count = tile.steps();
    note.masked = tile.hides(n, key);
#pragma unroll
    for (int part = 0; part < kParts; ++part) {
      note.key[part] = key[part];
      note.squares[part] = squares[part];
    }
  }

  // The next item, and what else comes with it.
  template <class Copy>
  void copy_parts(const Source& from, const int (&key)[kParts], uint32_t slot, bool some_by_all,
                  const Copy& more) {
    uint64_t& full = own_.shared.full[slot];
    tell_coming(full, Forward::kSlotBytes);
#pragma unroll
    for (int part = 0; part < kParts; ++part) {
      copy_rows<kPartKeys, kPanelBytes, Forward::kInterleaved>(
          from, own_.slot(slot) + part * (kPartKeys * kPanelRow), key[part], full);
    }
    more();
    tell_full(full, some_by_all);
    if (++slot_ == kSlots) slot_ = 0, ++round_;
  }
  // To panels that are kPanelStep bytes apart.
  template <int kRows, uint32_t kPanelStep, bool kInterleaved>
  void copy_rows(const Source& from, uint32_t to, int64_t row, uint64_t& full) const {
    if (maps_) {
      if (threadIdx.x != 0) return;
#pragma unroll
      for (int panel = 0; panel < kPanels; ++panel) {
        load_box(to + panel * kPanelStep, from.map, panel * kPanel - from.columns_before,
                 static_cast<int>(row), from.head, from.batch, &full);
      }
    } else {
      const T* const first = from.first();
#pragma unroll 1
      for (int panel = 0; panel < kPanels; ++panel) {
        const int column = panel * kPanel;
        TileLoader<T, kRows, kPanel, kWarpgroupSize, true, kInterleaved>(
            first + column, from.tensor.row, 1, from.columns - column)
            .load(to + panel * kPanelStep, row, from.rows - static_cast<int>(row));
      }
    }
  }

  void copy_bias(const Tile& tile, int key) const {
    const Plane& bias = params_.bias;
    const T* const from = static_cast<const T*>(bias.data) + tile.queries.batch * bias.batch +
                          tile.queries.head * bias.head + tile.queries.first * bias.query +
                          key * bias.key;
#pragma unroll 1
    for (int group = 0; group < Forward::kGroups; ++group) {
      const int first = group * Forward::kRows;
      Forward::Bias::template load<false>(own_.bias_tile(note_, group), from + first * bias.query,
                                          bias, tile.rows - first, tile.band.keys - key, true);
    }
  }

  const Forward& own_;
  const ForwardParams& params_;
  const bool maps_;
  TileNumbers<Forward::kPersistent> numbers_;
  // Of the next item, and how many had its slot before; where the next step's note goes.
  uint32_t slot_ = 0, round_ = 0, note_ = 0;
  uint32_t tile_count_ = 0;
};

}  // namespace pullback::attention
