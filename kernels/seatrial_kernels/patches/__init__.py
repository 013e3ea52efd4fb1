"""The patches for SGLang on GPUs, and the one that both ends of a KV transfer need.

Each module names itself, its hooks for each version of SGLang, and has ``apply()``. None imports
torch or SGLang when it is loaded: the contract test reads them all without either.
"""
