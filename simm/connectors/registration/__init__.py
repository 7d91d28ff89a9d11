"""How connectors tell others the schemes of their keys: registrations in the store (``simm.schemes.registry``).

    registrar   registers a scheme, and again now and then, in a thread
    callers     who calls a connector that is told little: the engine's objects on the stack
    of_vllm     what vLLM's configuration says of keys
    of_lmcache  what LMCache's configuration says of them
    of_sglang   what SGLang's configuration says of them
    of_mooncake who uses the face of Mooncake's store, and what its keys are

Nothing here imports an engine. What an engine's modules say is asked for in ``sys.modules``, where the engine is.
"""
