// The Python module outpace._native (typed in src/outpace/_native.pyi). Everything that comes in is checked here, in
// stack.cpp, head.cpp or weights.cpp before it is used; the GIL is released while anything is computed.
#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/array.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/string_view.h>
#include <nanobind/stl/vector.h>

#include <cstring>
#include <limits>
#include <memory>
#include <optional>

#include "head.h"
#include "measure.h"
#include "model.h"
#include "sampler.h"
#include "vocabulary.h"

namespace nb = nanobind;
using namespace nb::literals;
using namespace outpace;

namespace {

template <class T, int N> using Array = nb::ndarray<T, nb::numpy, nb::ndim<N>, nb::c_contig, nb::device::cpu>;
using Unlocked = nb::call_guard<nb::gil_scoped_release>;

int size(size_t n) {
    if (n > static_cast<size_t>(std::numeric_limits<int>::max() / 64)) throw std::invalid_argument("an array is too large");
    return static_cast<int>(n);
}

struct GroupShape { int out, in; };

GroupShape check_groups(const Array<const int8_t, 2>& q, const Array<const float, 2>& scale,
                        const std::optional<Array<const float, 2>>& offset, int in) {
    const size_t out = q.shape(0), groups = q.shape(1) / GROUP;
    if (out == 0 || groups == 0 || q.shape(1) % GROUP) {
        throw std::invalid_argument("q must be [out, in] with in a multiple of 32");
    }
    if (in < 1 || (static_cast<size_t>(in) + GROUP - 1) / GROUP != groups) {
        throw std::invalid_argument("the number of inputs does not fit the width of q");
    }
    const auto fits = [&](const Array<const float, 2>& a) { return a.shape(0) == out && a.shape(1) == groups; };
    if (!fits(scale) || (offset && !fits(*offset))) throw std::invalid_argument("scale and offset must be [out, in / 32]");
    size(q.shape(1));
    return {size(out), in};
}

// The kind of a name, of those that `wanted` admits.
Matrix::Kind kind_of(const std::string& name, bool (*wanted)(Matrix::Kind)) {
    static constexpr std::pair<const char*, Matrix::Kind> KINDS[] = {
        {"f16", Matrix::Kind::f16},   {"bf16", Matrix::Kind::bf16}, {"q3_k", Matrix::Kind::q3_k},
        {"q4_k", Matrix::Kind::q4_k}, {"q5_k", Matrix::Kind::q5_k}, {"q6_k", Matrix::Kind::q6_k}};
    for (const auto& [known, kind] : KINDS) {
        if (name == known && wanted(kind)) return kind;
    }
    throw std::invalid_argument("no such kind: " + name);
}

using Small = std::optional<Array<const int8_t, 2>>;
using Factors = std::optional<Array<const uint16_t, 2>>;

// Views of arrays that fit the kind and each other: q [out, in], factors [out, in / 256], scales [out, in / 32] or
// [out, in / 16].
Supers check_supers(Matrix::Kind kind, const Array<const int8_t, 2>& q, const Array<const uint16_t, 2>& d,
                    const Array<const int8_t, 2>& scale, const Factors& dmin, const Small& minimum) {
    const size_t out = q.shape(0), in = q.shape(1), scales = in / (Matrix::halves(kind) ? 16 : GROUP);
    if (out == 0 || in == 0 || in % SUPER) throw std::invalid_argument("q must be [out, in] with in a multiple of 256");
    size(out);
    size(in);
    const auto fits = [&](const auto& a, size_t width) { return a.shape(0) == out && a.shape(1) == width; };
    const bool minima = !Matrix::halves(kind);
    if (!fits(d, in / SUPER) || !fits(scale, scales) || dmin.has_value() != minima || minimum.has_value() != minima ||
        (minima && !(fits(*dmin, in / SUPER) && fits(*minimum, scales)))) {
        throw std::invalid_argument("factors and scales do not fit q and its kind");
    }
    return {q.data(), d.data(), scale.data(), minima ? dmin->data() : nullptr, minima ? minimum->data() : nullptr};
}

nb::object owned(std::vector<float> values, size_t rows, size_t columns) {
    auto* kept = new std::vector<float>(std::move(values));
    nb::capsule owner(kept, [](void* p) noexcept { delete static_cast<std::vector<float>*>(p); });
    return nb::cast(nb::ndarray<nb::numpy, float>(kept->data(), {rows, columns}, owner));
}

// `count` GGUF strings (length in 8 bytes, UTF-8) that begin at byte `at` of data: the strings that are whole, and the
// byte after them. Raises UnicodeDecodeError for what is not UTF-8.
nb::tuple strings(const Array<const uint8_t, 1>& data, size_t at, size_t count) {
    const size_t size = data.shape(0);
    Texts found;
    while (count-- && at <= size && size - at >= 8) {
        uint64_t length;
        std::memcpy(&length, data.data() + at, 8);
        if (length > size - at - 8) break;
        found.add({reinterpret_cast<const char*>(data.data()) + at + 8, static_cast<size_t>(length)});
        at += 8 + length;
    }
    const auto decoded = [](std::string_view text) {
        PyObject* object = PyUnicode_DecodeUTF8(text.data(), static_cast<Py_ssize_t>(text.size()), nullptr);
        if (!object) throw nb::python_error();
        return nb::steal(object);
    };
    decoded(found.all());
    if (!found.whole_characters()) {
        for (size_t i = 0; i < found.size(); ++i) decoded(found[i]);  // raises for one of them
    }
    return nb::make_tuple(nb::cast(std::move(found)), at);
}

// A text of a list of Python strings. Raises TypeError for what is none, UnicodeEncodeError for lone surrogates.
Texts texts_of(const nb::sequence& items) {
    Texts texts;
    for (const nb::handle item : items) {
        Py_ssize_t size = 0;
        const char* text = PyUnicode_AsUTF8AndSize(item.ptr(), &size);
        if (!text) throw nb::python_error();
        texts.add({text, static_cast<size_t>(size)});
    }
    return texts;
}

nb::str text_at(const Texts& texts, Py_ssize_t i) {
    const auto count = static_cast<Py_ssize_t>(texts.size());
    if (i < 0) i += count;
    if (i < 0 || i >= count) throw nb::index_error("no such text");
    const std::string_view text = texts[static_cast<size_t>(i)];
    return nb::str(text.data(), text.size());
}

// Runs a matrix product alone, as the model would: for tests.
template <class Multiply> nb::object product(int rows, int out, int blocks, int threads, const Multiply& multiply) {
    if (threads < 1 || threads > 256) throw std::invalid_argument("threads must be in 1 .. 256");
    std::vector<float> y(static_cast<size_t>(rows) * out);
    {
        nb::gil_scoped_release release;
        Pool pool(threads);
        pool.split(blocks, 1, [&](int first, int last) { multiply(first, last, y.data()); });
    }
    return owned(std::move(y), static_cast<size_t>(rows), static_cast<size_t>(out));
}

// x rounded to 8 bits, times w.
nb::object product_int8(const Kernels& kernels, const Array<const float, 2>& x, const Matrix& w, int threads) {
    const int rows = size(x.shape(0));
    Panels p;
    p.rows = rows;
    const int tiles = (rows + kernels.tile - 1) / kernels.tile;
    p.tile = (rows + tiles - 1) / tiles;
    p.groups = w.groups;
    std::vector<int8_t> bytes(static_cast<size_t>(rows) * w.groups * GROUP);
    std::vector<float> meta(static_cast<size_t>(rows) * w.groups * Panels::FIELDS);
    p.q = bytes.data();
    p.meta = meta.data();
    for (int r = 0; r < rows; ++r) kernels.quantise(x.data() + static_cast<size_t>(r) * w.in, w.in, p, r, 0, p.groups);
    return product(rows, w.out, w.blocks, threads,
                   [&](int first, int last, float* y) { kernels.matmul_int8(w, p, first, last, y, w.out); });
}

nb::object matmul_int8(const Array<const float, 2>& x, const Array<const int8_t, 2>& q, const Array<const float, 2>& scale,
                       const std::optional<Array<const float, 2>>& offset, int threads, bool allow_int4) {
    const auto [out, in] = check_groups(q, scale, offset, size(x.shape(1)));
    if (x.shape(0) < 1) throw std::invalid_argument("x must have rows");
    const Kernels& kernels = choose_kernels();
    Arena arena;
    const Matrix w = pack_int8(arena, q.data(), scale.data(), offset ? offset->data() : nullptr, out, in,
                               kernels.unsigned_bytes, allow_int4);
    return product_int8(kernels, x, w, threads);
}

nb::object matmul_super(const Array<const float, 2>& x, const std::string& name, const Array<const int8_t, 2>& q,
                        const Array<const uint16_t, 2>& d, const Array<const int8_t, 2>& scale, const Factors& dmin,
                        const Small& minimum, int threads) {
    const Matrix::Kind kind = kind_of(name, Matrix::super);
    const Supers from = check_supers(kind, q, d, scale, dmin, minimum);
    if (x.shape(0) < 1 || x.shape(1) != q.shape(1)) throw std::invalid_argument("x must be [rows, in] with rows");
    Arena arena;
    const Matrix w = pack_super(arena, from, kind, size(q.shape(0)), size(q.shape(1)));
    return product_int8(choose_kernels(), x, w, threads);
}

nb::object product_f32(const Array<const float, 2>& x, const Matrix& w, int threads) {
    const Kernels& kernels = choose_kernels();
    const int rows = size(x.shape(0));
    return product(rows, w.out, w.blocks, threads, [&](int first, int last, float* y) {
        kernels.matmul_f32(w, x.data(), w.in, rows, first, last, y, w.out);
    });
}

template <class T> void check_product(const Array<const float, 2>& x, const Array<const T, 2>& weight) {
    if (size(x.shape(0)) < 1 || size(weight.shape(0)) < 1 || size(weight.shape(1)) < 1 || x.shape(1) != weight.shape(1)) {
        throw std::invalid_argument("x must be [rows, in] and weight [out, in], none of them 0");
    }
}

nb::object matmul_f32(const Array<const float, 2>& x, const Array<const float, 2>& weight, int threads) {
    check_product(x, weight);
    Arena arena;
    return product_f32(x, pack_f32(arena, weight.data(), size(weight.shape(0)), size(weight.shape(1))), threads);
}

nb::object matmul_16(const Array<const float, 2>& x, const std::string& name, const Array<const uint16_t, 2>& weight,
                     int threads) {
    const Matrix::Kind kind = kind_of(name, Matrix::floats);
    check_product(x, weight);
    Arena arena;
    return product_f32(x, pack_16(arena, weight.data(), kind, size(weight.shape(0)), size(weight.shape(1))), threads);
}

CacheKind cache_kind(const std::string& name) {
    if (name == "f32") return CacheKind::f32;
    if (name == "f16") return CacheKind::f16;
    if (name == "q8") return CacheKind::q8;
    throw std::invalid_argument("the cache must be f32, f16 or q8, got " + name);
}

// A matrix's form as numbers: kind, out, in, half, offset, base. A vector's is empty.
std::vector<int> form_of(const Matrix& m) {
    return {static_cast<int>(m.kind), m.out, m.in, m.half, m.offset, m.base};
}

Matrix matrix_like(const std::vector<int>& form) {
    if (form.size() != 6 || form[0] < 0 || form[0] > static_cast<int>(Matrix::LAST)) {
        throw std::invalid_argument("no packed matrix is like that");
    }
    Matrix m;
    m.kind = static_cast<Matrix::Kind>(form[0]);
    m.out = form[1];
    m.in = form[2];
    m.half = form[3] != 0;
    m.offset = form[4] != 0;
    m.base = form[5];
    return m;
}

// All weights as (name, form, bytes); the bytes are views that keep the model alive.
nb::list packed(nb::handle_t<Stack> self) {
    const Stack& model = nb::cast<const Stack&>(self);
    nb::list found;
    const auto add = [&](const std::string& name, const std::vector<int>& form, const void* data, size_t bytes) {
        nb::ndarray<nb::numpy, const uint8_t> view(data, {bytes}, self);
        found.append(nb::make_tuple(name, form, view));
    };
    for (const auto& [name, m] : model.matrices()) add(name, form_of(m), m.data, m.bytes());
    for (const auto& [name, v] : model.vectors()) add(name, {}, v.data(), v.size() * sizeof(float));
    return found;
}

int narrow(int64_t value) {  // out of range stays out of range
    return static_cast<int>(value < -2 ? -2 : value > (1 << 30) ? (1 << 30) : value);
}

using Indices = Array<const int64_t, 1>;

std::vector<int> narrowed(const Indices& values) {
    std::vector<int> found;
    for (size_t i = 0; i < values.shape(0); ++i) found.push_back(narrow(values.data()[i]));
    return found;
}

// The shares of a pass: counts[s] rows of slots[s].
template <class Kind> std::vector<Kind> shares_of(const std::vector<int>& slots, const std::vector<int>& counts,
                                                  const Indices& tokens, const Indices& parents) {
    const size_t rows = tokens.shape(0);
    if (parents.shape(0) != rows || slots.size() != counts.size()) {
        throw std::invalid_argument("tokens and parents, slots and counts must go together");
    }
    std::vector<Kind> shares(slots.size());
    size_t at = 0;
    for (size_t s = 0; s < slots.size(); ++s) {
        if (counts[s] < 0 || static_cast<size_t>(counts[s]) > rows - at) {
            throw std::invalid_argument("counts do not add up to the rows");
        }
        shares[s].slot = slots[s];
        for (int i = 0; i < counts[s]; ++i, ++at) {
            shares[s].tokens.push_back(narrow(tokens.data()[at]));
            shares[s].parents.push_back(narrow(parents.data()[at]));
        }
    }
    if (at != rows) throw std::invalid_argument("counts do not add up to the rows");
    return shares;
}

template <class T> void check_shape(const char* name, const Array<T, 2>& a, size_t rows, size_t columns) {
    if (a.shape(0) == rows && a.shape(1) == columns) return;
    throw std::invalid_argument(std::string(name) + " must be [" + std::to_string(rows) + ", " + std::to_string(columns) +
                                "], got [" + std::to_string(a.shape(0)) + ", " + std::to_string(a.shape(1)) + "]");
}

void forward(Model& model, const std::vector<int>& slots, const std::vector<int>& counts, const Indices& tokens,
             const Indices& parents, const Indices& wanted, Array<float, 2> logits, const std::vector<int>& taps,
             Array<float, 3> tapped) {
    const Config& config = model.config();
    const size_t rows = tokens.shape(0), vocab = config.vocab_size, hidden = config.hidden_size;
    check_shape("logits", logits, wanted.shape(0), vocab);
    if (tapped.shape(0) != taps.size() || (!taps.empty() && (tapped.shape(1) != rows || tapped.shape(2) != hidden))) {
        throw std::invalid_argument("tapped must be [taps, rows, hidden_size]");
    }
    const auto shares = shares_of<Share>(slots, counts, tokens, parents);
    const std::vector<int> rows_wanted = narrowed(wanted);
    nb::gil_scoped_release release;
    model.forward(shares, rows_wanted, logits.data(), taps, tapped.data());
}

void head_forward(Head& head, const std::vector<int>& slots, const std::vector<int>& counts, const Indices& tokens,
                  const Indices& parents, const std::vector<bool>& append, const std::vector<bool>& own,
                  const Array<const float, 2>& features, const Array<const float, 2>& owned, const Indices& wanted,
                  Array<float, 2> logits, Array<float, 2> hidden) {
    auto shares = shares_of<HeadShare>(slots, counts, tokens, parents);
    if (append.size() != shares.size() || own.size() != shares.size()) {
        throw std::invalid_argument("append and own need one entry a slot");
    }
    size_t fused = 0, kept = 0;
    for (size_t s = 0; s < shares.size(); ++s) {
        shares[s].append = append[s];
        shares[s].own = own[s];
        (own[s] ? kept : fused) += shares[s].tokens.size();
    }
    const size_t width = static_cast<size_t>(head.config().hidden_size);
    check_shape("features", features, fused, static_cast<size_t>(head.feature_width()));
    check_shape("owned", owned, kept, width);
    check_shape("logits", logits, wanted.shape(0), static_cast<size_t>(head.shape().draft_vocab_size));
    check_shape("hidden", hidden, wanted.shape(0), width);
    const std::vector<int> rows_wanted = narrowed(wanted);
    nb::gil_scoped_release release;
    head.forward(shares, rows_wanted, features.data(), owned.data(), logits.data(), hidden.data());
}

// What may be missing in a map of settings is what the program says it is: all are given.
template <class T> T setting(const nb::dict& settings, const char* name) { return nb::cast<T>(settings[name]); }

template <class T> T one_of(const std::string& name, std::initializer_list<std::pair<const char*, T>> known) {
    for (const auto& [text, value] : known) {
        if (name == text) return value;
    }
    throw std::invalid_argument("no such kind of head: " + name);
}

HeadShape head_shape(const nb::dict& d) {
    using S = HeadShape;
    S shape{};
    shape.algorithm = one_of<S::Algorithm>(setting<std::string>(d, "algorithm"), {{"mtp", S::Algorithm::mtp},
        {"eagle3", S::Algorithm::eagle3}, {"dflash", S::Algorithm::dflash}});
    shape.taps = setting<int>(d, "taps");
    shape.target_hidden_size = setting<int>(d, "target_hidden_size");
    shape.draft_vocab_size = setting<int>(d, "draft_vocab_size");
    shape.norm_output = setting<bool>(d, "norm_output");
    shape.norm_before_residual = setting<bool>(d, "norm_before_residual");
    shape.embedding_first = setting<bool>(d, "embedding_first");
    shape.feature_norm = one_of<S::FeatureNorm>(setting<std::string>(d, "feature_norm"), {{"none", S::FeatureNorm::none},
        {"whole", S::FeatureNorm::whole}, {"each", S::FeatureNorm::each}});
    shape.block_size = setting<int>(d, "block_size");
    shape.mask_token = setting<int>(d, "mask_token");
    shape.causal_windows = setting<bool>(d, "causal_windows");
    shape.markov = one_of<S::Markov>(setting<std::string>(d, "markov"), {{"none", S::Markov::none},
        {"vanilla", S::Markov::vanilla}, {"gated", S::Markov::gated}, {"rnn", S::Markov::rnn}});
    shape.markov_rank = setting<int>(d, "markov_rank");
    shape.confidence = setting<bool>(d, "confidence");
    shape.confidence_reads_markov = setting<bool>(d, "confidence_reads_markov");
    return shape;
}

}  // namespace

NB_MODULE(_native, m) {
    m.doc() = "The forward pass of a decoder-only model on this processor (csrc/).";
    nb::exception<Full>(m, "Full");

    m.attr("LAYOUT") = LAYOUT;
    m.def("unsigned_bytes", [] { return choose_kernels().unsigned_bytes; });
    m.def("strings", &strings, "data"_a.noconvert(), "at"_a, "count"_a);
    nb::class_<Texts>(m, "Texts")
        .def("__init__", [](Texts* self, const nb::sequence& items) { new (self) Texts(texts_of(items)); }, "items"_a)
        .def("__len__", &Texts::size)
        .def_prop_ro("longest", &Texts::longest)
        .def("__getitem__", &text_at, "index"_a)
        .def("__eq__", [](const Texts& self, const Texts& other) { return self == other; }, nb::is_operator())
        .def("__eq__", [](const Texts& self, const nb::list& other) { return nb::list(nb::cast(self)).equal(other); },
             nb::is_operator());
    nb::module_::import_("collections.abc").attr("Sequence").attr("register")(m.attr("Texts"));
    nb::class_<Bpe>(m, "Bpe")
        .def(nb::init<const Texts&, const Texts&>(), "tokens"_a, "merges"_a, nb::keep_alive<1, 2>(), Unlocked())
        .def("encode", &Bpe::encode, "word"_a, "ignore_merges"_a);
    m.def("isa", [] { return std::string(choose_kernels().name); }, "The kernel family in use (OUTPACE_ISA decides).");
    m.def("isas", [] {
        std::vector<std::string> names;
        for (const Kernels* kernels : available_kernels()) names.emplace_back(kernels->name);
        return names;
    }, "The kernel families that can run here, fastest first.");
    m.def("matmul_int8", &matmul_int8, "x"_a.noconvert(), "q"_a.noconvert(), "scale"_a.noconvert(),
          "offset"_a.noconvert().none(), "threads"_a = 1, "allow_int4"_a = true);
    m.def("matmul_super", &matmul_super, "x"_a.noconvert(), "kind"_a, "q"_a.noconvert(), "d"_a.noconvert(),
          "scale"_a.noconvert(), "dmin"_a.noconvert().none(), "minimum"_a.noconvert().none(), "threads"_a = 1);
    m.def("matmul_f32", &matmul_f32, "x"_a.noconvert(), "weight"_a.noconvert(), "threads"_a = 1);
    m.def("matmul_16", &matmul_16, "x"_a.noconvert(), "kind"_a, "weight"_a.noconvert(), "threads"_a = 1);

    nb::class_<Config>(m, "Config")
        .def("__init__",
             [](Config* self, int vocab_size, int hidden_size, int intermediate_size, int layers, int heads, int kv_heads,
                int head_dim, float eps, bool tied, bool qk_norm, int experts, int experts_used, int expert_ffn_size,
                int shared_ffn_size, float expert_scale, bool norm_topk, std::vector<int> windows, std::vector<int> moe,
                std::vector<float> frequencies, float rotary_factor) {
                 new (self) Config{vocab_size, hidden_size, intermediate_size, layers, heads, kv_heads, head_dim, eps,
                                   tied, qk_norm, experts, experts_used, expert_ffn_size, shared_ffn_size, expert_scale,
                                   norm_topk, std::move(windows), std::move(moe), std::move(frequencies), rotary_factor};
             },
             nb::kw_only(), "vocab_size"_a, "hidden_size"_a, "intermediate_size"_a, "layers"_a, "heads"_a, "kv_heads"_a,
             "head_dim"_a, "eps"_a, "tied"_a, "qk_norm"_a, "experts"_a, "experts_used"_a, "expert_ffn_size"_a,
             "shared_ffn_size"_a, "expert_scale"_a, "norm_topk"_a, "windows"_a, "moe"_a, "frequencies"_a,
             "rotary_factor"_a);
    nb::class_<Stack>(m, "Stack")
        .def("put_int8",
             [](Stack& self, const std::string& name, const Array<const int8_t, 2>& q, const Array<const float, 2>& scale,
                const std::optional<Array<const float, 2>>& offset, int in) {
                 const auto shape = check_groups(q, scale, offset, in);
                 nb::gil_scoped_release release;
                 self.put_int8(name, q.data(), scale.data(), offset ? offset->data() : nullptr, shape.out, shape.in);
             },
             "name"_a, "q"_a.noconvert(), "scale"_a.noconvert(), "offset"_a.noconvert().none(), "inputs"_a)
        .def("put_f32",
             [](Stack& self, const std::string& name, const Array<const float, 2>& w) {
                 if (w.shape(0) == 0 || w.shape(1) == 0) throw std::invalid_argument("tensor " + name + " is empty");
                 const int out = size(w.shape(0)), in = size(w.shape(1));
                 nb::gil_scoped_release release;
                 self.put_f32(name, w.data(), out, in);
             },
             "name"_a, "weight"_a.noconvert())
        .def("put_16",
             [](Stack& self, const std::string& name, const std::string& kind, const Array<const uint16_t, 2>& w) {
                 if (w.shape(0) == 0 || w.shape(1) == 0) throw std::invalid_argument("tensor " + name + " is empty");
                 const Matrix::Kind of = kind_of(kind, Matrix::floats);
                 const int out = size(w.shape(0)), in = size(w.shape(1));
                 nb::gil_scoped_release release;
                 self.put_16(name, w.data(), of, out, in);
             },
             "name"_a, "kind"_a, "weight"_a.noconvert())
        .def("put_super",
             [](Stack& self, const std::string& name, const std::string& kind, const Array<const int8_t, 2>& q,
                const Array<const uint16_t, 2>& d, const Array<const int8_t, 2>& scale, const Factors& dmin,
                const Small& minimum) {
                 const Matrix::Kind of = kind_of(kind, Matrix::super);
                 const Supers from = check_supers(of, q, d, scale, dmin, minimum);
                 const int out = size(q.shape(0)), in = size(q.shape(1));
                 nb::gil_scoped_release release;
                 self.put_super(name, from, of, out, in);
             },
             "name"_a, "kind"_a, "q"_a.noconvert(), "d"_a.noconvert(), "scale"_a.noconvert(),
             "dmin"_a.noconvert().none(), "minimum"_a.noconvert().none())
        .def("put_packed",
             [](Stack& self, const std::string& name, const std::vector<int>& form, const Array<const uint8_t, 1>& data) {
                 self.put_packed(name, matrix_like(form), data.data(), data.shape(0));
             },
             nb::keep_alive<1, 4>(), "name"_a, "form"_a, "data"_a.noconvert())
        .def("packed", &packed)
        .def("put_vector",
             [](Stack& self, const std::string& name, const Array<const float, 1>& v) {
                 self.put_vector(name, v.data(), size(v.shape(0)));
             },
             "name"_a, "vector"_a.noconvert())
        .def("ready", &Stack::ready)
        .def("forget", [](Stack& self) { self.forget(); })
        .def("new_slot", &Stack::open, Unlocked())
        .def("free_slot", &Stack::close, Unlocked(), "slot"_a)
        .def("fork_slot", &Stack::fork, Unlocked(), "slot"_a)
        .def("length", &Stack::length, Unlocked(), "slot"_a)
        .def("pending", &Stack::pending, Unlocked(), "slot"_a)
        .def("commit", &Stack::commit, Unlocked(), "slot"_a, "rows"_a)
        .def("truncate", &Stack::truncate, Unlocked(), "slot"_a, "length"_a)
        .def("fill_slot", &Stack::fill, Unlocked(), "slot"_a, "length"_a)
        .def("cached",
             [](Stack& self, int slot, int layer) {
                 const size_t columns = static_cast<size_t>(self.config().head_dim);
                 std::vector<float> found = self.cached(slot, layer);
                 const size_t rows = found.size() / columns;
                 return owned(std::move(found), rows, columns);
             },
             "slot"_a, "layer"_a)
        .def_prop_ro("threads", &Stack::threads)
        .def_prop_ro("isa", [](const Stack& self) { return std::string(self.kernels().name); })
        .def_prop_ro("weight_bytes", &Stack::weight_bytes)
        .def_prop_ro("cache_bytes", &Stack::cache_bytes)
        .def_prop_ro("pass_bytes", &Stack::pass_bytes)
        .def("time_stages", &Stack::time_stages, Unlocked(), "on"_a);
    nb::class_<Model, Stack>(m, "Model")
        .def("__init__",
             [](Model* self, const Config& config, int slots, int positions, int rows, int threads,
                const std::string& cache) {
                 new (self) Model(config, slots, positions, rows, threads, cache_kind(cache));
             },
             "config"_a, nb::kw_only(), "slots"_a, "positions"_a, "rows"_a, "threads"_a, "cache"_a)
        .def("forward", &forward, "slots"_a, "counts"_a, "tokens"_a.noconvert(), "parents"_a.noconvert(),
             "wanted"_a.noconvert(), "logits"_a.noconvert(), "taps"_a, "tapped"_a.noconvert());
    nb::class_<Head, Stack>(m, "Head")
        .def("__init__",
             [](Head* self, const Model& target, const Config& config, const nb::dict& shape, int slots, int positions,
                int rows, const std::string& cache) {
                 new (self) Head(target, config, head_shape(shape), slots, positions, rows, cache_kind(cache));
             },
             nb::keep_alive<1, 2>(), "target"_a, "config"_a, "shape"_a, nb::kw_only(), "slots"_a, "positions"_a, "rows"_a,
             "cache"_a)
        .def("forward", &head_forward, "slots"_a, "counts"_a, "tokens"_a.noconvert(), "parents"_a.noconvert(), "append"_a,
             "own"_a, "features"_a.noconvert(), "owned"_a.noconvert(), "wanted"_a.noconvert(), "logits"_a.noconvert(),
             "hidden"_a.noconvert())
        .def("read",
             [](Head& self, int slot, const Array<const float, 2>& features) {
                 check_shape("features", features, features.shape(0), static_cast<size_t>(self.feature_width()));
                 const int count = size(features.shape(0));
                 nb::gil_scoped_release release;
                 self.read(slot, count, features.data());
             },
             "slot"_a, "features"_a.noconvert())
        .def("block",
             [](Head& self, const std::vector<int>& slots, const std::vector<int>& anchors, int rows,
                Array<float, 2> logits, Array<float, 2> hidden) {
                 within(rows, 1, self.shape().block_size, "rows of a block");
                 const size_t all = slots.size() * static_cast<size_t>(rows);
                 check_shape("logits", logits, all, static_cast<size_t>(self.shape().draft_vocab_size));
                 check_shape("hidden", hidden, all, static_cast<size_t>(self.config().hidden_size));
                 nb::gil_scoped_release release;
                 self.block(slots, anchors, rows, logits.data(), hidden.data());
             },
             "slots"_a, "anchors"_a, "rows"_a, "logits"_a.noconvert(), "hidden"_a.noconvert())
        .def("markov",
             [](Head& self, int before, const Array<const float, 1>& hidden, Array<float, 1> state, Array<float, 1> bias) {
                 if (hidden.shape(0) != static_cast<size_t>(self.config().hidden_size) ||
                     state.shape(0) != static_cast<size_t>(self.shape().markov_rank) ||
                     bias.shape(0) != static_cast<size_t>(self.shape().draft_vocab_size)) {
                     throw std::invalid_argument("hidden must be [H], state [R] and bias [draft vocabulary]");
                 }
                 nb::gil_scoped_release release;
                 self.markov(before, hidden.data(), state.data(), bias.data());
             },
             "before"_a, "hidden"_a.noconvert(), "state"_a.noconvert(), "bias"_a.noconvert())
        .def("confidence",
             [](Head& self, int before, const Array<const float, 1>& hidden) {
                 if (hidden.shape(0) != static_cast<size_t>(self.config().hidden_size)) {
                     throw std::invalid_argument("hidden must be [H]");
                 }
                 nb::gil_scoped_release release;
                 return self.confidence(before, hidden.data());
             },
             "before"_a, "hidden"_a.noconvert());
    nb::class_<Reader>(m, "Reader")
        .def(nb::init<size_t, int>(), Unlocked(), "bytes"_a, "threads"_a)
        .def("read", &Reader::read, Unlocked())
        .def_prop_ro("bytes", &Reader::bytes);
    m.def("int8_peak",
          [](int threads, double seconds) { return int8_peak(choose_kernels().name, threads, seconds); },
          Unlocked(), "threads"_a, "seconds"_a);
    m.def("choose",
          [](const Array<const float, 1>& logits, double temperature, int64_t top_k, double top_p, double min_p, uint64_t key) {
              return choose(logits.data(), logits.shape(0), nullptr, {temperature, top_k, top_p, min_p}, key);
          },
          Unlocked(), "logits"_a.noconvert(), "temperature"_a, "top_k"_a, "top_p"_a, "min_p"_a, "key"_a);
    m.def("candidates",
          [](const Array<const float, 1>& logits, double temperature, int64_t top_k, double top_p, double min_p, uint64_t key,
             size_t count, const std::optional<Indices>& ids) {
              if (ids && ids->shape(0) != logits.shape(0)) throw std::invalid_argument("logits and ids must go together");
              std::vector<TokenShare> found;
              {
                  nb::gil_scoped_release release;
                  found = candidates(logits.data(), logits.shape(0), ids ? ids->data() : nullptr,
                                     {temperature, top_k, top_p, min_p}, key, count);
              }
              nb::list pairs;
              for (const TokenShare& each : found) pairs.append(nb::make_tuple(each.token, each.share));
              return pairs;
          },
          "logits"_a.noconvert(), "temperature"_a, "top_k"_a, "top_p"_a, "min_p"_a, "key"_a, "count"_a,
          "ids"_a.noconvert().none() = nb::none());
}
