"""Block-diffusion speculative decoding with budgeted draft trees, as an extension of SGLang."""

__version__ = "0.1.0"
