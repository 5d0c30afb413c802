// Plain C++, for every other processor. Not fast where the processor has no fused multiply-add: the same bits come first.
#include "kernels_impl.h"

#include <cstdlib>
#include <stdexcept>

namespace outpace {

const Kernels* kernels_portable() {
    static constexpr Kernels kernels = family("portable", false);
    return &kernels;
}

std::vector<const Kernels*> available_kernels() {
    std::vector<const Kernels*> found;
    for (const Kernels* kernels : {kernels_avx512vnni(), kernels_avx2(), kernels_portable()}) {
        if (kernels) found.push_back(kernels);
    }
    return found;
}

const Kernels& choose_kernels() {
    const auto found = available_kernels();
    const char* wanted = std::getenv("OUTPACE_ISA");
    if (!wanted || !*wanted) return *found.front();
    std::string names;
    for (const Kernels* kernels : found) {
        if (std::string(wanted) == kernels->name) return *kernels;
        names += names.empty() ? kernels->name : std::string(", ") + kernels->name;
    }
    throw std::invalid_argument("OUTPACE_ISA=" + std::string(wanted) + " cannot run here; this machine has: " + names);
}

}  // namespace outpace
