"""The benchmarks behind every figure that jaxft quotes, one command each."""
