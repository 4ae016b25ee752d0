"""Decoder-only transformers: GPT-2, Llama, Qwen and relatives by configuration."""
