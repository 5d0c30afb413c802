#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <thread>

#include "check.h"
#include "head.h"
#include "model.h"
#include "pool.h"
#include "sampler.h"

namespace outpace {
namespace {

// FNV-1a over the bits of floats and whole numbers.
class Digest {
  public:
    void add(uint32_t bits) {
        for (int i = 0; i < 4; ++i) hash_ = (hash_ ^ (bits >> (8 * i) & 255)) * 0x100000001b3ull;
    }
    void add(const std::vector<float>& values) {
        for (float v : values) add(bits_of(v));
    }
    uint64_t value() const { return hash_; }

  private:
    uint64_t hash_ = 0xcbf29ce484222325ull;
};

struct Kind {
    const char* name;
    int low, high;   // of the weights as bytes; 0, 0: float32
    bool offset;
    CacheKind cache;
    Config config;
};

Config config_of(int hidden, int inner, int heads, int kv_heads, int head_dim) {
    Config c{};
    c.vocab_size = 131;
    c.hidden_size = hidden;
    c.intermediate_size = inner;
    c.layers = 2;
    c.heads = heads;
    c.kv_heads = kv_heads;
    c.head_dim = head_dim;
    c.eps = 1e-6f;
    c.qk_norm = true;
    c.expert_scale = 1.0f;
    c.norm_topk = true;
    c.windows = {0, 0};
    c.moe = {0, 0};
    c.rotary_factor = 1.0f;
    float frequency = 1.0f;  // no pow: every system's mathematics library has its own last bit
    for (int i = 0; i < head_dim / 2; ++i, frequency *= 0.75f) c.frequencies.push_back(frequency);
    return c;
}

std::vector<Kind> kinds() {
    std::vector<Kind> found = {{"int8", -127, 127, false, CacheKind::f16, config_of(72, 100, 6, 2, 20)},
                               {"int4", -8, 7, false, CacheKind::q8, config_of(64, 96, 5, 1, 64)},
                               {"int4 with offsets", 0, 15, true, CacheKind::f32, config_of(96, 64, 4, 4, 24)},
                               {"float32", 0, 0, false, CacheKind::f32, config_of(50, 41, 4, 2, 18)},
                               {"experts", -127, 127, false, CacheKind::q8, config_of(64, 64, 4, 2, 16)}};
    found[1].config.windows[1] = 290;
    found[3].config.tied = true;
    Config& experts = found[4].config;
    experts.moe[1] = 1;
    experts.experts = 6;
    experts.experts_used = 2;
    experts.expert_ffn_size = 40;
    experts.shared_ffn_size = 33;
    return found;
}

// All tensors of decoder layers and what stands around them. inputs: what the first layer's q, k and v read.
template <class More> void fill(Stack& model, const Kind& kind, int inputs, const More& more) {
    Random random(7);
    const Config& c = model.config();
    const auto floats = [&](const std::string& name, int out, int in) {
        model.put_f32(name + ".weight", random.reals(static_cast<size_t>(out) * in, 0.2f).data(), out, in);
    };
    const auto matrix = [&](const std::string& name, int out, int in) {
        if (!kind.high) return floats(name, out, in);
        const size_t groups = static_cast<size_t>((in + GROUP - 1) / GROUP), n = static_cast<size_t>(out) * groups;
        const auto q = random.bytes(n * GROUP, kind.low, kind.high);
        const auto scale = random.reals(n, 0.3f / static_cast<float>(kind.high)), offset = random.reals(n, 0.1f);
        model.put_int8(name + ".weight", q.data(), scale.data(), kind.offset ? offset.data() : nullptr, out, in);
    };
    const auto norm = [&](const std::string& name, int n) {
        auto v = random.reals(n, 0.2f);
        for (float& x : v) x += 1.0f;
        model.put_vector(name + ".weight", v.data(), n);
    };
    const auto mlp = [&](const std::string& prefix, int inner) {
        matrix(prefix + "gate_proj", inner, c.hidden_size);
        matrix(prefix + "up_proj", inner, c.hidden_size);
        matrix(prefix + "down_proj", c.hidden_size, inner);
    };
    more(matrix, norm);
    norm("model.norm", c.hidden_size);
    for (int i = 0; i < c.layers; ++i) {
        const std::string prefix = "model.layers." + std::to_string(i) + ".", self = prefix + "self_attn.";
        norm(prefix + "input_layernorm", c.hidden_size);
        norm(prefix + "post_attention_layernorm", c.hidden_size);
        norm(self + "q_norm", c.head_dim);
        norm(self + "k_norm", c.head_dim);
        const int width = i ? c.hidden_size : inputs;
        matrix(self + "q_proj", c.heads * c.head_dim, width);
        matrix(self + "k_proj", c.kv_heads * c.head_dim, width);
        matrix(self + "v_proj", c.kv_heads * c.head_dim, width);
        matrix(self + "o_proj", c.hidden_size, c.heads * c.head_dim);
        const auto bias = random.reals(static_cast<size_t>(c.heads) * c.head_dim, 0.1f);
        model.put_vector(self + "q_proj.bias", bias.data(), c.heads * c.head_dim);
        if (!c.moe[i]) {
            mlp(prefix + "mlp.", c.intermediate_size);
            continue;
        }
        floats(prefix + "mlp.gate", c.experts, c.hidden_size);
        for (int e = 0; e < c.experts; ++e) mlp(prefix + "mlp.experts." + std::to_string(e) + ".", c.expert_ffn_size);
        mlp(prefix + "mlp.shared_expert.", c.shared_ffn_size);
        floats(prefix + "mlp.shared_expert_gate", 1, c.hidden_size);
    }
    model.ready();
}

// Learned heads on the model: the rows, a tree and its hidden states of one that steps, the blocks of one that guesses
// them whole.
void heads(const Model& model, const Kind& kind, Random& random, Digest& digest) {
    using S = HeadShape;
    Config layers = kind.config;
    layers.layers = 1;
    layers.windows = {5};
    layers.moe = {0};
    const int hidden = layers.hidden_size, taps = 3, rank = 12, drafts = 47, rows = 70;
    const size_t width = static_cast<size_t>(taps) * hidden, count = rows;
    for (const auto algorithm : {S::Algorithm::eagle3, S::Algorithm::dflash}) {
        const bool steps = algorithm == S::Algorithm::eagle3;
        HeadShape shape{algorithm, taps, hidden, drafts, false, true, true, S::FeatureNorm::none, 4, 7, true,
                S::Markov::vanilla, rank, false, false};  // gates use the system's exp and tanh
        if (steps) shape.markov = S::Markov::none, shape.markov_rank = 0;
        Kind own = kind;
        own.config = layers;
        Head head(model, layers, shape, 2, 300, 80, kind.cache);
        fill(head, own, steps ? 2 * hidden : hidden, [&](const auto& matrix, const auto& norm) {
            matrix("lm_head", drafts, hidden);
            matrix("fc", hidden, static_cast<int>(width));
            norm("hidden_norm", hidden);
            if (steps) return;
            matrix("markov_w1", layers.vocab_size, rank);
            matrix("markov_w2", drafts, rank);
        });
        const int slot = head.open();
        const std::vector<float> features = random.reals(count * width, 1.0f);
        std::vector<float> logits(count * drafts), states(count * hidden);
        if (!steps) {
            std::vector<float> state(rank), bias(drafts);
            head.read(slot, rows, features.data());
            logits.resize(4 * drafts);
            states.resize(4 * static_cast<size_t>(hidden));
            head.block({slot}, {3}, 4, logits.data(), states.data());
            head.markov(5, states.data(), state.data(), bias.data());
            digest.add(bias);
        } else {
            HeadShare share;
            share.slot = slot;
            std::vector<int> all;
            for (int i = 0; i < rows; ++i) {
                all.push_back(i);
                share.tokens.push_back(random.within(0, layers.vocab_size - 1));
                share.parents.push_back(i - 1);
            }
            head.forward({share}, all, features.data(), nullptr, logits.data(), states.data());
            head.commit(slot, all);
            share.own = true;
            share.tokens.resize(5);
            share.parents = {-1, -1, 0, 0, 1};
            head.forward({share}, {0, 1, 2, 3, 4}, nullptr, states.data(), logits.data(), states.data());
            share.append = true;
            share.parents = {4, 4, 2, 5, 5};
            head.forward({share}, {0, 1, 2, 3, 4}, nullptr, states.data(), logits.data(), states.data());
        }
        digest.add(logits);
        digest.add(states);
    }
}

// A prompt in uneven pieces over the edge of a chunk of attention, then a tree, its longest path, a fork beside it, and
// rows one by one: the digest of all logits, of the last layer's states, and of tokens that are drawn from them.
uint64_t passes(const Kind& kind, int threads) {
    Model model(kind.config, 3, 400, 128, threads, kind.cache);
    const int width = kind.config.hidden_size;
    fill(model, kind, width, [&](const auto& matrix, const auto&) {
        matrix("model.embed_tokens", kind.config.vocab_size, width);
        if (!kind.config.tied) matrix("lm_head", kind.config.vocab_size, width);
    });
    Random random(11);
    Digest digest;
    const size_t vocabulary = static_cast<size_t>(kind.config.vocab_size), hidden = static_cast<size_t>(kind.config.hidden_size);
    const auto share = [&](int slot, int rows, bool tree) {
        Share s;
        s.slot = slot;
        for (int i = 0; i < rows; ++i) {
            s.tokens.push_back(random.within(0, kind.config.vocab_size - 1));
            s.parents.push_back(tree && i ? random.within(i < 3 ? -1 : i - 3, i - 1) : i - 1);
        }
        return s;
    };
    const auto run = [&](const std::vector<Share>& shares) {
        std::vector<int> wanted;
        for (const Share& s : shares) {
            for (size_t i = 0; i < s.tokens.size(); ++i) wanted.push_back(static_cast<int>(wanted.size()));
        }
        std::vector<float> logits(wanted.size() * vocabulary), states(wanted.size() * hidden);
        model.forward(shares, wanted, logits.data(), {kind.config.layers - 1}, states.data());
        digest.add(logits);
        digest.add(states);
        digest.add(static_cast<uint32_t>(choose(logits.data(), vocabulary, nullptr, {0.8, 20, 0.9, 0.0}, random.next())));
        digest.add(static_cast<uint32_t>(choose(logits.data(), vocabulary, nullptr, {1.0, 0, 1.0, 0.0}, random.next())));
    };
    const auto all = [](int n) {
        std::vector<int> rows;
        for (int i = 0; i < n; ++i) rows.push_back(i);
        return rows;
    };
    const int a = model.open();
    for (int rows : {1, 97, 128, 5, 61, 17}) {
        run({share(a, rows, false)});
        model.commit(a, all(rows));
    }
    const Share tree = share(a, 13, true);
    run({tree});
    std::vector<int> path;
    for (int row = 12; row >= 0; row = tree.parents[static_cast<size_t>(row)]) path.insert(path.begin(), row);
    model.commit(a, path);
    const int b = model.fork(a);
    run({share(b, 3, false), share(a, 6, true)});
    model.commit(b, all(3));
    model.commit(a, {});
    model.truncate(a, 255);
    for (int i = 0; i < 3; ++i) {
        run({share(a, 1, false), share(b, 1, false)});
        model.commit(a, {0});
        model.commit(b, {0});
    }
    heads(model, kind, random, digest);
    return digest.value();
}

// Every task runs once, and what tasks write is there when `run` returns, whether the workers spin, yield or sleep.
void check_pool() {
    Random random(3);
    Pool pool(4);
    std::vector<int> done;
    long total = 0;
    for (int round = 0; round < 3000; ++round) {
        done.assign(static_cast<size_t>(random.within(0, 40)), 0);
        pool.run(static_cast<int>(done.size()), [&](int i) { ++done[static_cast<size_t>(i)]; });
        for (int times : done) expect(times == 1, "the pool ran a task " + std::to_string(times) + " times");
        total += static_cast<long>(done.size());
        if (round % 100 == 0) std::this_thread::sleep_for(std::chrono::milliseconds(2));
    }
    std::printf("pool: %ld tasks, each run once\n", total);
}

void force(const char* family) {
#ifdef _WIN32
    _putenv_s("OUTPACE_ISA", family);
#else
    setenv("OUTPACE_ISA", family, 1);
#endif
}

void check_all(int rounds, int models) {
    const auto families = available_kernels();
    std::printf("families:");
    for (const Kernels* family : families) std::printf(" %s", family->name);
    std::printf("\n");
    for (const Kernels* family : families) check_kernels(*family, 1, rounds);
    std::printf("kernels: equal to portable over %d random shapes\n", rounds);
    check_pool();
    for (const Kind& kind : kinds()) {
        if (models-- <= 0) break;
        uint64_t expected = 0;
        for (const Kernels* family : families) {
            force(family->name);
            for (int threads : {1, 3}) {
                const uint64_t found = passes(kind, threads);
                if (!expected) expected = found;
                expect(found == expected, std::string(kind.name) + ": passes of " + family->name + " with " +
                                              std::to_string(threads) + " threads differ from " + families[0]->name);
            }
        }
        std::printf("digest: %s %016llx\n", kind.name, static_cast<unsigned long long>(expected));
        std::fflush(stdout);
    }
}

}  // namespace
}  // namespace outpace

// outpace_check [random shapes a family] [models]
int main(int count, char** words) {
    try {
        outpace::check_all(count > 1 ? std::atoi(words[1]) : 300, count > 2 ? std::atoi(words[2]) : 100);
    } catch (const std::exception& error) {
        std::fflush(stdout);
        std::fprintf(stderr, "FAILED: %s\n", error.what());
        return 1;
    }
    return 0;
}
