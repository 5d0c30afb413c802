#include "kernels.h"

#include <cstdlib>
#include <stdexcept>

#include "cpu.h"

namespace outpace {

std::vector<const Kernels*> available_kernels() {
    const struct {
        bool runs;
        const Kernels* kernels;
    } families[] = {{cpu().avx512vnni, kernels_avx512vnni},
                    {cpu().avxvnni, kernels_avxvnni},
                    {cpu().avx2, kernels_avx2},
                    {cpu().dotprod, kernels_neon},
                    {true, kernels_portable}};
    std::vector<const Kernels*> found;
    for (const auto& family : families) {
        if (family.runs && family.kernels) found.push_back(family.kernels);
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
