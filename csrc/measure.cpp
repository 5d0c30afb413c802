#include "measure.h"

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <cstring>
#include <stdexcept>

#include "cpu.h"
#include "kernels.h"

// Compilers that can compile one function for a processor with dot products; the others measure no peak there.
#if defined(__x86_64__)
#include <immintrin.h>
#if defined(__clang__) ? __clang_major__ >= 12 : __GNUC__ >= 11
#define OUTPACE_AVXVNNI __attribute__((target("avx2,avxvnni")))
#endif
#elif defined(__aarch64__) && (defined(__ARM_FEATURE_DOTPROD) || !defined(__clang__))
#include <arm_neon.h>
#if defined(__ARM_FEATURE_DOTPROD)
#define OUTPACE_DOTPROD
#else
#define OUTPACE_DOTPROD __attribute__((target("arch=armv8.2-a+dotprod")))
#endif
#endif

namespace outpace {
namespace {

using Clock = std::chrono::steady_clock;

double since(Clock::time_point start) { return std::chrono::duration<double>(Clock::now() - start).count(); }

std::atomic<uint64_t> unused;  // where results go that only have to be computed

// ------------------------------------------------------------------------------------------------ reading

constexpr size_t AHEAD = 4096;  // bytes that are asked for before they are read
constexpr size_t STRIP = 256;

// Every 64-byte line once, in order, by eight-byte words: memory is the limit, not the width of a load.
void read_words(const uint8_t* from, const uint8_t* to) {
    uint64_t sums[8] = {};
    for (; from < to; from += 64) {
#if defined(__GNUC__)
        __builtin_prefetch(from + AHEAD);
#endif
        uint64_t words[8];
        std::memcpy(words, from, 64);
        for (int i = 0; i < 8; ++i) sums[i] += words[i];
    }
    unused.fetch_add(sums[0] ^ sums[1] ^ sums[2] ^ sums[3] ^ sums[4] ^ sums[5] ^ sums[6] ^ sums[7]);
}

#if defined(__x86_64__)
__attribute__((target("avx512f"))) void read_avx512(const uint8_t* from, const uint8_t* to) {
    __m512i sums[4] = {};
    for (; from < to; from += STRIP) {
        for (int i = 0; i < 4; ++i) {
            _mm_prefetch(reinterpret_cast<const char*>(from + AHEAD + i * 64), _MM_HINT_T0);
            sums[i] = _mm512_add_epi64(sums[i], _mm512_loadu_si512(from + i * 64));
        }
    }
    const __m512i all = _mm512_add_epi64(_mm512_add_epi64(sums[0], sums[1]), _mm512_add_epi64(sums[2], sums[3]));
    unused.fetch_add(static_cast<uint64_t>(_mm512_reduce_add_epi64(all)));
}

__attribute__((target("avx2"))) void read_avx2(const uint8_t* from, const uint8_t* to) {
    __m256i sums[8] = {};
    for (; from < to; from += STRIP) {
        for (int i = 0; i < 8; ++i) {
            if (i % 2 == 0) _mm_prefetch(reinterpret_cast<const char*>(from + AHEAD + i * 32), _MM_HINT_T0);
            sums[i] = _mm256_add_epi64(sums[i], _mm256_loadu_si256(reinterpret_cast<const __m256i*>(from + i * 32)));
        }
    }
    __m256i all = sums[0];
    for (int i = 1; i < 8; ++i) all = _mm256_add_epi64(all, sums[i]);
    unused.fetch_add(static_cast<uint64_t>(_mm256_extract_epi64(all, 0) ^ _mm256_extract_epi64(all, 3)));
}
#endif

using Read = void (*)(const uint8_t*, const uint8_t*);

Read best_read() {
#if defined(__x86_64__)
    if (cpu().avx512) return read_avx512;
    if (cpu().avx2) return read_avx2;
#endif
    return read_words;
}

// ------------------------------------------------------------------------------------------------ multiplying

// Each does `rounds` rounds of independent multiply-adds in registers and returns the operations of a round.
using Multiply = double (*)(int rounds);

#if defined(__x86_64__)
__attribute__((target("avx512f,avx512vnni"))) double multiply_avx512vnni(int rounds) {
    __m512i sums[12] = {};
    const __m512i a = _mm512_set1_epi8(3), b = _mm512_set1_epi8(-5);
    for (int r = 0; r < rounds; ++r) {
#define DOT(i) asm volatile("vpdpbusd %2, %1, %0" : "+v"(sums[i]) : "v"(a), "v"(b))
        DOT(0); DOT(1); DOT(2); DOT(3); DOT(4); DOT(5); DOT(6); DOT(7); DOT(8); DOT(9); DOT(10); DOT(11);
#undef DOT
    }
    __m512i all = sums[0];
    for (int i = 1; i < 12; ++i) all = _mm512_add_epi32(all, sums[i]);
    unused.fetch_add(static_cast<uint64_t>(_mm512_reduce_add_epi64(all)));
    return 12 * 64 * 2;
}

// Without VNNI a dot product takes three instructions.
__attribute__((target("avx2"))) double multiply_avx2(int rounds) {
    __m256i sums[8] = {};
    const __m256i a = _mm256_set1_epi8(3), b = _mm256_set1_epi8(-5), ones = _mm256_set1_epi16(1);
    for (int r = 0; r < rounds; ++r) {
#define DOT(i)                                                                                                       \
    {                                                                                                                \
        __m256i pairs;                                                                                               \
        asm volatile("vpmaddubsw %2, %1, %0" : "=x"(pairs) : "x"(a), "x"(b));                                        \
        sums[i] = _mm256_add_epi32(sums[i], _mm256_madd_epi16(pairs, ones));                                         \
    }
        DOT(0) DOT(1) DOT(2) DOT(3) DOT(4) DOT(5) DOT(6) DOT(7)
#undef DOT
    }
    __m256i all = sums[0];
    for (int i = 1; i < 8; ++i) all = _mm256_add_epi32(all, sums[i]);
    unused.fetch_add(static_cast<uint64_t>(_mm256_extract_epi64(all, 0)));
    return 8 * 32 * 2;
}

#if defined(OUTPACE_AVXVNNI)
OUTPACE_AVXVNNI double multiply_avxvnni(int rounds) {
    __m256i sums[12] = {};
    const __m256i a = _mm256_set1_epi8(3), b = _mm256_set1_epi8(-5);
    for (int r = 0; r < rounds; ++r) {
        for (int i = 0; i < 12; ++i) {
            sums[i] = _mm256_dpbusd_avx_epi32(sums[i], a, b);
            asm volatile("" : "+x"(sums[i]));
        }
    }
    __m256i all = sums[0];
    for (int i = 1; i < 12; ++i) all = _mm256_add_epi32(all, sums[i]);
    unused.fetch_add(static_cast<uint64_t>(_mm256_extract_epi64(all, 0)));
    return 12 * 32 * 2;
}
#endif
#elif defined(OUTPACE_DOTPROD)
OUTPACE_DOTPROD double multiply_neon(int rounds) {
    int32x4_t sums[16] = {};
    const int8x16_t a = vdupq_n_s8(3), b = vdupq_n_s8(-5);
    for (int r = 0; r < rounds; ++r) {
        for (int i = 0; i < 16; ++i) {
            sums[i] = vdotq_s32(sums[i], a, b);
            asm volatile("" : "+w"(sums[i]));
        }
    }
    int32x4_t all = sums[0];
    for (int i = 1; i < 16; ++i) all = vaddq_s32(all, sums[i]);
    unused.fetch_add(static_cast<uint64_t>(vaddvq_s32(all)));
    return 16 * 16 * 2;
}
#endif

Multiply multiply_of(const char* isa) {
#if defined(__x86_64__)
    if (!std::strcmp(isa, "avx512vnni") && cpu().avx512vnni) return multiply_avx512vnni;
    if (!std::strcmp(isa, "avx2") && cpu().avx2) return multiply_avx2;
#if defined(OUTPACE_AVXVNNI)
    if (!std::strcmp(isa, "avxvnni") && cpu().avxvnni) return multiply_avxvnni;
#endif
#elif defined(OUTPACE_DOTPROD)
    if (!std::strcmp(isa, "neon") && cpu().dotprod) return multiply_neon;
#endif
    (void)isa;
    return nullptr;
}

int checked(int threads) {
    if (threads < 1 || threads > 256) throw std::invalid_argument("threads must be in 1 .. 256");
    return threads;
}

}  // namespace

Reader::Reader(size_t bytes, int threads)
    : pool_(checked(threads)), parts_(4 * threads), part_(bytes / static_cast<size_t>(parts_) / STRIP * STRIP) {
    if (part_ == 0 || bytes > size_t(1) << 40) throw std::invalid_argument("the buffer is too small or too large");
    data_ = arena_.take(this->bytes());
    pool_.run(parts_, [&](int i) { std::memset(data_ + part_ * static_cast<size_t>(i), i + 1, part_); });
}

void Reader::read() {
    const Read read = best_read();
    pool_.run(parts_, [&](int i) {
        const uint8_t* from = data_ + part_ * static_cast<size_t>(i);
        read(from, from + part_);
    });
}

double int8_peak(const char* isa, int threads, double seconds) {
    checked(threads);
    if (!(seconds > 0 && seconds <= 60)) throw std::invalid_argument("seconds must be above 0 and at most 60");
    const Multiply multiply = multiply_of(isa);
    if (!multiply) return 0;
    Pool pool(threads);
    constexpr int ROUNDS = 20000;
    const int parts = 4 * threads;
    double best = 0;
    const auto start = Clock::now();
    do {
        double operations = 0;  // of a round
        const auto begin = Clock::now();
        pool.run(parts, [&](int i) {
            const double own = multiply(ROUNDS);
            if (i == 0) operations = own;
        });
        best = std::max(best, operations * ROUNDS * parts / since(begin));
    } while (since(start) < seconds);
    return best;
}

}  // namespace outpace
