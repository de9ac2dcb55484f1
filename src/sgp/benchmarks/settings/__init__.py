"""Settings and descriptions of the benchmarks. Importing this package does not import torch."""
