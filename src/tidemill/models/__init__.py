"""The decoder, family mappings, weight loading (safetensors, GGUF, dummy).

May import `ops`, `config`.
"""
