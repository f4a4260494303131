// The codes and scales of packed quantised weights, vector by vector. Layout: quantised.h.

namespace outrider {
namespace {

constexpr std::size_t kVectorBytes = 4 * Vec::kLanes;
constexpr std::size_t kSlotBytes = kVectors * kVectorBytes;

// How many quads the level's accumulator takes before it must be emptied into 32 bits: quads * 2 * 127 * largest code < 2^15.
constexpr int flush_after(int quads) { return Vec::kWideDots ? 8 : quads; }

// The codes of a group, slot after slot of a quad or two. `quad` unpacks four inputs of each column of the vector whose slots
// begin at `codes`.

struct Nibbles {
  static constexpr std::size_t kBytes = 4 * kSlotBytes;
  static constexpr bool kByteCodes = false;
  static constexpr int kFlush = flush_after(8);
  template <int Quad>
  static Vec::B quad(const std::uint8_t* codes) {
    const Vec::B both = Vec::bytes(codes + Quad / 2 * kSlotBytes);
    return Quad % 2 ? Vec::high_nibbles(both) : Vec::low_nibbles(both);
  }
};

struct FiveBits {
  static constexpr std::size_t kBytes = 5 * kSlotBytes;
  static constexpr bool kByteCodes = false;
  static constexpr int kFlush = flush_after(4);
  template <int Quad>
  static Vec::B quad(const std::uint8_t* codes) {
    const Vec::B bits = Vec::bytes(codes + 4 * kSlotBytes);
    return Vec::either(Nibbles::quad<Quad>(codes), Vec::template move_bits<4 - Quad>(bits, 0x10));
  }
};

struct SixBits {
  static constexpr std::size_t kBytes = 6 * kSlotBytes;
  static constexpr bool kByteCodes = false;
  static constexpr int kFlush = flush_after(2);
  template <int Quad>
  static Vec::B quad(const std::uint8_t* codes) {
    const Vec::B bits = Vec::bytes(codes + (4 + Quad / 4) * kSlotBytes);
    return Vec::either(Nibbles::quad<Quad>(codes), Vec::template move_bits<4 - Quad % 4 * 2>(bits, 0x30));
  }
};

struct EightBits {
  static constexpr std::size_t kBytes = 8 * kSlotBytes;
  static constexpr bool kByteCodes = true;
  static constexpr int kFlush = flush_after(0);
  template <int Quad>
  static Vec::B quad(const std::uint8_t* codes) {
    return Vec::bytes(codes + Quad * kSlotBytes);
  }
};

// The scales of one vector: a group has kParts parts of equal length with a scale each; a weight is
// scale x (code - kZero) + offset. Fields of a panel follow one another, so those of vector v begin v vectors later.

inline const std::uint8_t* halves_field(const std::uint8_t* at, std::size_t field, std::size_t v) {
  return at + 2 * (field * kPanel + v * Vec::kLanes);
}

inline const std::uint8_t* bytes_field(const std::uint8_t* at, std::size_t field, std::size_t v) {
  return at + field * kPanel + v * Vec::kLanes;
}

template <int Zero>
struct PlainScale {
  static constexpr std::size_t kGroups = 1, kHeadBytes = 0, kGroupBytes = 2 * kPanel;
  static constexpr int kParts = 1, kZero = Zero;
  static constexpr bool kOffset = false;
  std::size_t v;
  PlainScale(const std::uint8_t*, std::size_t vector) : v(vector) {}
  Vec::F scale(const std::uint8_t* at, int) const { return Vec::halves(halves_field(at, 0, v)); }
  Vec::F offset(const std::uint8_t*) const { return Vec::all(0.0f); }
};

struct ScaleAndOffset {
  static constexpr std::size_t kGroups = 1, kHeadBytes = 0, kGroupBytes = 4 * kPanel;
  static constexpr int kParts = 1, kZero = 0;
  static constexpr bool kOffset = true;
  std::size_t v;
  ScaleAndOffset(const std::uint8_t*, std::size_t vector) : v(vector) {}
  Vec::F scale(const std::uint8_t* at, int) const { return Vec::halves(halves_field(at, 0, v)); }
  Vec::F offset(const std::uint8_t* at) const { return Vec::halves(halves_field(at, 1, v)); }
};

struct NestedScaleAndMinimum {
  static constexpr std::size_t kGroups = 8, kHeadBytes = 4 * kPanel, kGroupBytes = 2 * kPanel;
  static constexpr int kParts = 1, kZero = 0;
  static constexpr bool kOffset = true;
  std::size_t v;
  Vec::F unit, minus_minimum;
  NestedScaleAndMinimum(const std::uint8_t* head, std::size_t vector)
      : v(vector), unit(Vec::halves(halves_field(head, 0, v))), minus_minimum(Vec::all(0.0f) - Vec::halves(halves_field(head, 1, v))) {}
  Vec::F scale(const std::uint8_t* at, int) const { return unit * Vec::unsigned_bytes(bytes_field(at, 0, v)); }
  Vec::F offset(const std::uint8_t* at) const { return minus_minimum * Vec::unsigned_bytes(bytes_field(at, 1, v)); }
};

struct NestedHalfScales {
  static constexpr std::size_t kGroups = 8, kHeadBytes = 2 * kPanel, kGroupBytes = 2 * kPanel;
  static constexpr int kParts = 2, kZero = 32;
  static constexpr bool kOffset = false;
  std::size_t v;
  Vec::F unit;
  NestedHalfScales(const std::uint8_t* head, std::size_t vector) : v(vector), unit(Vec::halves(halves_field(head, 0, v))) {}
  Vec::F scale(const std::uint8_t* at, int part) const { return unit * Vec::signed_bytes(bytes_field(at, static_cast<std::size_t>(part), v)); }
  Vec::F offset(const std::uint8_t*) const { return Vec::all(0.0f); }
};

// Product<Code, Scale>::run(job) for the job's type.
template <template <class Code, class Scale> class Product>
void run_for_type(const QuantLinearJob& job) {
  switch (job.type) {
    case GgmlType::kQ4_0: return Product<Nibbles, PlainScale<8>>::run(job);
    case GgmlType::kQ4_1: return Product<Nibbles, ScaleAndOffset>::run(job);
    case GgmlType::kQ5_0: return Product<FiveBits, PlainScale<16>>::run(job);
    case GgmlType::kQ5_1: return Product<FiveBits, ScaleAndOffset>::run(job);
    case GgmlType::kQ8_0: return Product<EightBits, PlainScale<128>>::run(job);
    case GgmlType::kQ4_K: return Product<Nibbles, NestedScaleAndMinimum>::run(job);
    case GgmlType::kQ5_K: return Product<FiveBits, NestedScaleAndMinimum>::run(job);
    case GgmlType::kQ6_K: return Product<SixBits, NestedHalfScales>::run(job);
  }
}

}  // namespace
}  // namespace outrider
