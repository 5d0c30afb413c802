"""Backends run the passes: native (C++ on the CPU) and reference (NumPy, the oracle). Both keep base.Backend."""
