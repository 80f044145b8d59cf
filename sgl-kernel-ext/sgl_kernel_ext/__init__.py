"""Kernels of sglang-d3tree: one dispatch table over torch reference, C++ and Triton implementations."""
