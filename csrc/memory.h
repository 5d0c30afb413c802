// Memory in whole pages from the system, for weights.
#pragma once

#include <cstddef>
#include <cstdint>

namespace outpace {

// Zeros, on huge pages where the system has them to give. Throws std::bad_alloc.
uint8_t* map_memory(size_t bytes);
void unmap_memory(uint8_t* at, size_t bytes);

}  // namespace outpace
