// Python bindings: addresses and sizes as whole numbers, since an array argument costs more than a small kernel.
// Only values inside tensors are checked here; outrider.kernels.ops checks shapes and types.
#include <nanobind/nanobind.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <cstdint>
#include <stdexcept>
#include <string>
#include <utility>

#include "blocks.h"
#include "chain.h"
#include "copies.h"
#include "cpu.h"
#include "likeliest.h"
#include "pool.h"
#include "scratch.h"
#include "stack.h"
#include "walk.h"

namespace nb = nanobind;

namespace outrider {
namespace {

using Address = std::uintptr_t;

// Above this many multiply-adds a call lets other Python threads run.
constexpr std::size_t kLongCall = std::size_t{1} << 27;

template <class T>
T* at(Address address) {
  return reinterpret_cast<T*>(address);
}

std::size_t as_size(std::int64_t number) { return static_cast<std::size_t>(number); }

void require(bool holds, const char* what, std::size_t row) {
  if (!holds) throw std::out_of_range(std::string(what) + " of row " + std::to_string(row) + " is outside the tensor");
}

void require_positions(const std::int64_t* positions, std::size_t rows, std::size_t table) {
  for (std::size_t row = 0; row < rows; ++row) require(positions[row] >= 0 && as_size(positions[row]) < table, "position", row);
}

void require_sight(const std::int32_t* lengths, const std::int32_t* starts, std::size_t rows, std::size_t slots, std::size_t positions) {
  for (std::size_t row = 0; row < rows; ++row) {
    require(lengths[row] >= 0 && as_size(lengths[row]) + slots <= positions, "length", row);
    require(!starts || (starts[row] >= 0 && starts[row] <= lengths[row]), "start", row);
  }
}

void dequantise_at(Address raw, Address out, std::size_t values, int type, int dtype) {
  nb::gil_scoped_release release;
  dequantise(at<std::uint8_t>(raw), at<void>(out), values, static_cast<GgmlType>(type), static_cast<Dtype>(dtype));
}

class Level {
 public:
  explicit Level(const std::string& name) : name_(name), kernels_(kernels_of(name)) {}

  const std::string& name() const { return name_; }
  const Kernels& kernels() const { return kernels_; }
  std::size_t panel() const { return kernels_.panel; }
  std::size_t wide_rows() const { return kernels_.wide_rows; }

  void pack(Address weight, Address packed, std::size_t n, std::size_t k, int dtype) const {
    nb::gil_scoped_release release;
    const std::size_t panels = (n + kernels_.panel - 1) / kernels_.panel;
    ask_for_large_pages(at<void>(packed), panels * kernels_.panel * k * (static_cast<Dtype>(dtype) == Dtype::kF32 ? 4 : 2));
    kernels_.pack(at<void>(weight), at<void>(packed), n, k, static_cast<Dtype>(dtype));
  }

  void linear(Address packed, Address bias, Address x, Address y, std::size_t rows, std::size_t n, std::size_t k, int dtype) const {
    const LinearJob job{at<void>(packed), at<float>(bias), at<float>(x), at<float>(y), rows, n, k, n, static_cast<Dtype>(dtype)};
    if (rows * n * k < kLongCall) return kernels_.linear(job);
    nb::gil_scoped_release release;
    kernels_.linear(job);
  }

  // Bytes of whole panels of `n` columns.
  std::size_t quant_bytes(std::size_t n, std::size_t k, int type) const {
    return (n + kernels_.panel - 1) / kernels_.panel * quant_panel_bytes(k, type);
  }

  // `rows`: an array of the addresses of n rows.
  void quant_pack_rows(Address rows, Address packed, std::size_t n, std::size_t k, int type) const {
    nb::gil_scoped_release release;
    ask_for_large_pages(at<void>(packed), quant_bytes(n, k, type));
    pack_quantised(at<const std::uint8_t*>(rows), at<std::uint8_t>(packed), n, k, kernels_.panel, static_cast<GgmlType>(type));
  }

  void quant_linear(Address packed, Address bias, Address x, Address y, std::size_t rows, std::size_t n, std::size_t k,
                    int type) const {
    const QuantLinearJob job{at<std::uint8_t>(packed), at<float>(bias), at<float>(x), at<float>(y), rows, n, k, n,
                             quant_panel_bytes(k, type), static_cast<GgmlType>(type)};
    if (rows * n * k < kLongCall) return kernels_.quant_linear(job);
    nb::gil_scoped_release release;
    kernels_.quant_linear(job);
  }

  void encode_q4_0(Address x, Address out, std::size_t blocks) const {
    nb::gil_scoped_release release;
    kernels_.encode_q4_0(at<float>(x), at<std::uint8_t>(out), blocks);
  }

  void rms_norm(Address x, Address delta, Address weight, Address out, std::size_t rows, std::size_t k, float eps) const {
    kernels_.rms_norm(at<float>(x), at<float>(delta), at<float>(weight), at<float>(out), rows, k, eps);
  }

  void swiglu(Address gate_up, Address out, std::size_t rows, std::size_t width) const {
    kernels_.swiglu(at<float>(gate_up), at<float>(out), rows, width);
  }

  void rope(Address x, Address cos, Address sin, Address positions, std::size_t table, std::size_t rows, std::size_t step,
            std::size_t heads, std::size_t width) const {
    const std::int64_t* position = at<std::int64_t>(positions);
    require_positions(position, rows, table);
    kernels_.rope(at<float>(x), at<float>(cos), at<float>(sin), position, rows, step, heads, width);
  }

  void attention(Address q, Address keys, Address values, Address out, Address lengths, Address starts, Address ancestors,
                 std::size_t positions, std::size_t rows, std::size_t q_step, std::size_t slots, std::size_t heads,
                 std::size_t kv_heads, std::size_t width, int dtype) const {
    const std::int32_t* length = at<std::int32_t>(lengths);
    const std::int32_t* start = at<std::int32_t>(starts);
    require_sight(length, start, rows, slots, positions);
    const AttentionJob job{at<float>(q), at<void>(keys), at<void>(values), at<float>(out), length, start,
                           at<std::uint8_t>(ancestors), rows, q_step, slots, heads, kv_heads, width, static_cast<Dtype>(dtype)};
    kernels_.attention(job);
  }

 private:
  std::size_t quant_panel_bytes(std::size_t k, int type) const {
    return panel_bytes(k, kernels_.panel, static_cast<GgmlType>(type));
  }

  std::string name_;
  const Kernels& kernels_;
};

constexpr std::size_t kSpanFields = 7;

StackSpan span_of(const std::int64_t* field) {
  const auto address = [](std::int64_t number) { return static_cast<Address>(number); };
  return StackSpan{as_size(field[0]), at<void>(address(field[1])), as_size(field[2]), as_size(field[3]),
                   at<std::int32_t>(address(field[4])), at<std::int32_t>(address(field[5])), at<std::uint8_t>(address(field[6]))};
}

std::vector<StackSpan> spans_of(const std::vector<std::int64_t>& fields, std::size_t rows) {
  std::vector<StackSpan> spans;
  std::size_t covered = 0;
  for (std::size_t i = 0; i + kSpanFields <= fields.size(); i += kSpanFields) {
    const StackSpan span = span_of(fields.data() + i);
    require(span.length + span.rows <= span.positions, "cache row", covered);
    require_sight(span.lengths, span.starts, span.rows, span.ancestors ? span.rows : 0, span.positions);
    covered += span.rows;
    spans.push_back(span);
  }
  require(covered == rows, "span", covered);
  return spans;
}

std::vector<Matrix>& role_of(StackLayer& layer, const std::string& role) {
  if (role == "qkv") return layer.qkv;
  if (role == "o") return layer.o;
  if (role == "gate_up") return layer.gate_up;
  if (role == "down") return layer.down;
  throw std::invalid_argument("no matrix of a layer is called '" + role + "'");
}

Stack new_stack(const Level& level, std::size_t hidden, std::size_t feed, std::size_t heads, std::size_t kv_heads,
                std::size_t width, float eps, int cache) {
  return Stack(level.kernels(), {hidden, feed, heads, kv_heads, width, eps, static_cast<Dtype>(cache)});
}

void stack_layer(Stack& stack, Address attention_norm, Address q_norm, Address k_norm, Address feed_norm) {
  stack.add({at<float>(attention_norm), at<float>(q_norm), at<float>(k_norm), at<float>(feed_norm), {}, {}, {}, {}});
}

Matrix float_matrix(Address packed, Address bias, std::size_t n, std::size_t k, int dtype) {
  return {at<void>(packed), at<float>(bias), n, k, 0, static_cast<Dtype>(dtype), GgmlType{}};
}

Matrix quant_matrix(const Kernels& kernels, Address packed, Address bias, std::size_t n, std::size_t k, int type) {
  const GgmlType ggml_type = static_cast<GgmlType>(type);
  return {at<void>(packed), at<float>(bias), n, k, panel_bytes(k, kernels.panel, ggml_type), Dtype::kF32, ggml_type};
}

void set_matrix(Stack& stack, const std::string& role, const Matrix& matrix) { role_of(stack.last_layer(), role).push_back(matrix); }

void set_matrix(Walker& walker, const std::string&, const Matrix& matrix) { walker.set_matrix(matrix); }

void set_matrix(Chain& chain, const std::string& role, const Matrix& matrix) {
  role == "joint" ? chain.set_joint(matrix) : chain.set_head(matrix);
}

template <class Owner>
void add_linear(Owner& owner, const std::string& role, Address packed, Address bias, std::size_t n, std::size_t k, int dtype) {
  set_matrix(owner, role, float_matrix(packed, bias, n, k, dtype));
}

template <class Owner>
void add_quant_linear(Owner& owner, const std::string& role, Address packed, Address bias, std::size_t n, std::size_t k, int type) {
  set_matrix(owner, role, quant_matrix(owner.kernels(), packed, bias, n, k, type));
}

void run_stack(const Stack& stack, Address x, Address out, std::size_t rows, Address cos, Address sin, std::size_t table,
               Address positions, const std::vector<std::int64_t>& spans, const std::vector<std::size_t>& taps, Address features,
               Address read) {
  require_positions(at<std::int64_t>(positions), rows, table);
  const StackPass pass{at<float>(x), at<float>(out), rows, at<float>(cos), at<float>(sin), at<std::int64_t>(positions),
                       spans_of(spans, rows), taps, at<float>(features), at<float>(read)};
  if (rows * stack.row_work() < kLongCall) return stack.run(pass);
  nb::gil_scoped_release release;
  stack.run(pass);
}

bool softmax_at(Address row, Address out, std::size_t size, float temperature) {
  return softmax(at<float>(row), at<double>(out), size, temperature);
}

// (tokens matched, the token behind them there).
std::pair<std::size_t, std::int64_t> find_copy_at(Address text, std::size_t size) {
  const Copy copy = find_copy(at<std::int64_t>(text), size, kMostCopied);
  return {copy.matched, copy.token};
}

Walker new_walker(const Level& level, std::size_t size, std::size_t tokens, Address ids, Address table) {
  return Walker(level.kernels(), size, tokens, at<std::int64_t>(ids), at<float>(table));
}

// `pairs`: three addresses a sequence.
void run_walker(const Walker& walker, Address logits, Address counts, Address before, std::size_t sequences,
                const std::vector<Address>& pairs, std::size_t ways, Address columns, Address tops, Address shares) {
  std::vector<WalkPairs> of_sequences;
  for (std::size_t i = 0; i + 3 <= pairs.size(); i += 3)
    of_sequences.push_back({at<std::int32_t>(pairs[i]), at<std::int64_t>(pairs[i + 1]), at<float>(pairs[i + 2])});
  of_sequences.resize(sequences, WalkPairs{});
  const WalkPass pass{at<float>(logits), sequences, ways, at<std::int64_t>(counts), at<std::int64_t>(before), of_sequences.data(),
                      at<std::int64_t>(columns), at<float>(tops), at<float>(shares)};
  if (sequences * walker.row_work() < kLongCall) return walker.run(pass);
  nb::gil_scoped_release release;
  walker.run(pass);
}

Chain new_chain(const Stack& stack, std::size_t hidden, float eps, Address embedded_norm, Address handed_norm, Address joint_norm,
                bool adds_to_norm, bool hands_norm, Address table, Address row_of, std::size_t tokens, Address ids) {
  const ChainShape shape{hidden, eps, at<float>(embedded_norm), at<float>(handed_norm), at<float>(joint_norm), adds_to_norm, hands_norm};
  return Chain(stack, shape, {at<float>(table), at<std::int32_t>(row_of), tokens}, at<std::int64_t>(ids));
}

constexpr std::size_t kChainFields = 9;

std::vector<ChainSpan> chain_spans_of(const std::vector<std::int64_t>& fields, const std::vector<std::vector<std::int64_t>>& stops,
                                      const std::vector<double>& leasts, const std::vector<float>& temperatures,
                                      const std::vector<std::vector<double>>& uniforms, const std::vector<double>& copies,
                                      std::size_t table) {
  require(leasts.size() == stops.size() && temperatures.size() == stops.size() && uniforms.size() == stops.size() &&
              copies.size() == stops.size(),
          "number", 0);
  std::vector<ChainSpan> spans;
  for (std::size_t i = 0; i < stops.size(); ++i) {
    const std::int64_t* field = fields.data() + i * kChainFields;
    const ChainSpan span{as_size(field[0]), at<void>(static_cast<Address>(field[1])), as_size(field[2]), as_size(field[3]), field[4],
                         as_size(field[5]), as_size(field[6]), stops[i], leasts[i], temperatures[i], uniforms[i],
                         at<std::int64_t>(static_cast<Address>(field[7])), as_size(field[8]), copies[i]};
    const std::size_t end = span.length + span.rows + span.limit - 1;
    require(span.rows > 0 && span.limit > 0 && end <= span.positions, "cache row", i);
    require(span.first >= 0 && as_size(span.first) + end <= table, "position", i);
    spans.push_back(span);
  }
  return spans;
}

// `fields`: nine numbers a sequence, those of ChainSpan that are whole or addresses.
void run_chain(const Chain& chain, Address embedded, Address handed, Address cos, Address sin, std::size_t table,
               const std::vector<std::int64_t>& fields, const std::vector<std::vector<std::int64_t>>& stops,
               const std::vector<double>& leasts, const std::vector<float>& temperatures,
               const std::vector<std::vector<double>>& uniforms, const std::vector<double>& copies, std::size_t most, Address tokens,
               Address shares, Address weights, Address counts, Address carried) {
  const ChainPass pass{at<float>(embedded), at<float>(handed), at<float>(cos), at<float>(sin),
                       chain_spans_of(fields, stops, leasts, temperatures, uniforms, copies, table), most, at<std::int64_t>(tokens),
                       at<double>(shares), at<double>(weights), at<std::int64_t>(counts), at<float>(carried)};
  if (stops.size() * most * chain.row_work() < kLongCall) return chain.run(pass);
  nb::gil_scoped_release release;
  chain.run(pass);
}

}  // namespace

NB_MODULE(_kernels, m) {
  using namespace nb::literals;
  nb::set_leak_warnings(false);  // the chosen level lives until the process ends
  m.def("available_levels", &available_levels);
  m.def("amx_refused", &amx_refused);
  m.def("set_threads", &set_threads);
  m.def("threads", &threads);
  m.def("physical_cores", &physical_cores);
  m.def("dequantise", &dequantise_at);
  m.def("softmax", &softmax_at);
  m.def("find_copy", &find_copy_at);
  nb::class_<Level>(m, "Level")
      .def(nb::init<const std::string&>())
      .def_prop_ro("name", &Level::name)
      .def_prop_ro("panel", &Level::panel)
      .def_prop_ro("wide_rows", &Level::wide_rows)
      .def("pack", &Level::pack)
      .def("linear", &Level::linear)
      .def("quant_bytes", &Level::quant_bytes)
      .def("quant_pack_rows", &Level::quant_pack_rows)
      .def("quant_linear", &Level::quant_linear)
      .def("encode_q4_0", &Level::encode_q4_0)
      .def("rms_norm", &Level::rms_norm)
      .def("swiglu", &Level::swiglu)
      .def("rope", &Level::rope)
      .def("attention", &Level::attention)
      .def("stack", &new_stack)
      .def("walker", &new_walker);
  nb::class_<Stack>(m, "Stack")
      .def("layer", &stack_layer)
      .def("linear", &add_linear<Stack>)
      .def("quant_linear", &add_quant_linear<Stack>)
      .def("chain", &new_chain)
      .def("last_norm", [](Stack& stack, Address norm) { stack.set_last_norm(at<float>(norm)); })
      .def("run", &run_stack, "x"_a, "out"_a, "rows"_a, "cos"_a, "sin"_a, "table"_a, "positions"_a, "spans"_a, "taps"_a,
           "features"_a, "read"_a = 0);
  nb::class_<Walker>(m, "Walker")
      .def("linear", &add_linear<Walker>)
      .def("quant_linear", &add_quant_linear<Walker>)
      .def("run", &run_walker);
  nb::class_<Chain>(m, "Chain")
      .def("linear", &add_linear<Chain>)
      .def("quant_linear", &add_quant_linear<Chain>)
      .def("run", &run_chain);
}

}  // namespace outrider
