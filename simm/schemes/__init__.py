"""Key schemes: from token ids to the keys under which each connector stores the pages of a prompt.

    encodings   the bytes that engines hash: token ids, CBOR, pickle, MessagePack
    sglang      SGLang: page hashes, and the keys of its backends ``simm`` and ``mooncake`` and of the unified scheme
    vllm        vLLM: block hashes, what its events say of them, the keys of its offload tiers and Mooncake connector
    lmcache     LMCache: chunk hashes and keys, of the engine's process and of the server
    llmd        llm-d's router: the keys of its own index
    scheme      how one deployment makes its keys: the scheme's fields, and the keys of a prompt by it
    registry    what connectors register in the store, so that others can make their keys
    stored      what a store has of a prompt now

Pure functions without state: no sockets, no clock, and nothing to install. Token ids are any sequence of integers, a
numpy array being the fastest. Tokens beyond the last full page have no key.
"""
