// AMX by software, for processors without it: the instructions that the compiler's kernels use, as Intel's manual
// describes them (volume 2: LDTILECFG, TILEZERO, TILELOADD, TILESTORED, TDPBF16PS, TDPBUSD). What would raise a fault aborts.

#include <atomic>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <mutex>
#include <set>

namespace {

struct Tile {
  int rows = 0;
  int bytes = 0;  // of a row
  uint8_t data[16][64] = {};
};

struct State {
  bool configured = false;
  Tile tiles[8];
};

thread_local State state;
std::atomic<int> configurations{0};
std::mutex fetching;
std::set<uintptr_t> fetched_lines;

void Require(bool condition, const char* what) {
  if (condition) return;
  std::fprintf(stderr, "AMX: %s\n", what);
  std::abort();
}

Tile& Configured(int8_t tile) {
  Require(state.configured, "no configuration");
  Require(tile >= 0 && tile < 8, "no such tile");
  Require(state.tiles[tile].rows > 0, "a tile without rows");
  return state.tiles[tile];
}

float FromBf16(const uint8_t* at) {
  uint16_t half;
  std::memcpy(&half, at, sizeof half);
  uint32_t bits = static_cast<uint32_t>(half) << 16;
  float value;
  std::memcpy(&value, &bits, sizeof value);
  return value;
}

// The tiles of a product: results of rows of 32-bit numbers, left of rows of groups of four bytes, right a row for each
// of those groups.
template <typename Number, typename Add>
void Multiply(int8_t results, int8_t left, int8_t right, Add add) {
  Tile &c = Configured(results), &a = Configured(left), &b = Configured(right);
  Require(results != left && results != right && left != right, "one tile for two operands");
  Require(c.rows == a.rows && c.bytes == b.bytes && a.bytes == 4 * b.rows, "tiles that do not fit together");
  for (int row = 0; row < c.rows; ++row) {
    for (int lane = 0; lane < c.bytes / 4; ++lane) {
      Number sum;
      std::memcpy(&sum, &c.data[row][4 * lane], 4);
      for (int group = 0; group < b.rows; ++group) add(sum, &a.data[row][4 * group], &b.data[group][4 * lane]);
      std::memcpy(&c.data[row][4 * lane], &sum, 4);
    }
  }
}

}  // namespace

extern "C" {

void emulated_ldtilecfg(const uint8_t* configuration) {
  Require(configuration[0] == 1 && configuration[1] == 0, "another palette than 1, or a row to go on from");
  for (int i = 2; i < 16; ++i) Require(configuration[i] == 0, "reserved bytes");
  state = State{};
  for (int tile = 0; tile < 16; ++tile) {
    const int bytes = configuration[16 + 2 * tile] + 256 * configuration[17 + 2 * tile];
    const int rows = configuration[48 + tile];
    Require(bytes <= 64 && rows <= 16 && (tile < 8 || bytes + rows == 0), "a tile that is too large");
    Require((rows == 0) == (bytes == 0), "rows without bytes");
    if (tile < 8) state.tiles[tile].rows = rows, state.tiles[tile].bytes = bytes;
  }
  state.configured = true;
  ++configurations;
}

// How many times tiles were configured since the last call.
int emulated_configurations() { return configurations.exchange(0); }

void emulated_prefetch(const uint8_t* address, int32_t, int32_t, int32_t) {
  const std::lock_guard<std::mutex> lock(fetching);
  fetched_lines.insert(reinterpret_cast<uintptr_t>(address) / 64);
}

// The number of different lines of the cache that were fetched since the last call.
int emulated_fetched_lines() {
  const std::lock_guard<std::mutex> lock(fetching);
  const int count = static_cast<int>(fetched_lines.size());
  fetched_lines.clear();
  return count;
}

void emulated_tilerelease() { state = State{}; }

void emulated_tilezero(int8_t tile) {
  Tile& to = Configured(tile);
  std::memset(to.data, 0, sizeof to.data);
}

void emulated_tileloadd64(int8_t tile, const uint8_t* base, int64_t stride) {
  Tile& to = Configured(tile);
  std::memset(to.data, 0, sizeof to.data);
  for (int row = 0; row < to.rows; ++row) std::memcpy(to.data[row], base + row * stride, to.bytes);
}

void emulated_tilestored64(int8_t tile, uint8_t* base, int64_t stride) {
  Tile& from = Configured(tile);
  for (int row = 0; row < from.rows; ++row) std::memcpy(base + row * stride, from.data[row], from.bytes);
}

void emulated_tdpbf16ps(int8_t results, int8_t left, int8_t right) {
  Multiply<float>(results, left, right, [](float& sum, const uint8_t* a, const uint8_t* b) {
    sum += FromBf16(a) * FromBf16(b) + FromBf16(a + 2) * FromBf16(b + 2);
  });
}

void emulated_tdpbusd(int8_t results, int8_t left, int8_t right) {
  Multiply<int32_t>(results, left, right, [](int32_t& sum, const uint8_t* a, const uint8_t* b) {
    for (int i = 0; i < 4; ++i) sum += static_cast<int32_t>(a[i]) * static_cast<int8_t>(b[i]);
  });
}

}  // extern "C"
