"""AngelSpec on Triton: lossless speculative decoding for any Hugging Face causal LM."""

__version__ = "0.1.0"
