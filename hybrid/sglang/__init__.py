"""This project's tree and eviction inside SGLang: `--radix-cache-backend hybrid`.

SGLang loads `hybrid.sglang.plugin` through its entry points. What needs SGLang is imported when a cache is built.
"""
