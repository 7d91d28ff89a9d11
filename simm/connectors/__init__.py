"""Adapters that let released inference engines use SiMM as they are. Each one is loaded by its engine, never by SiMM.

``sglang.py`` is a storage backend for SGLang's HiCache, ``lmcache.py`` a remote storage of LMCache, and
``lmcache_server.py`` an L2 adapter of its server, ``vllm.py`` a tier of vLLM's offloading. ``vllm_connector.py`` is a
KV connector of vLLM; ``vllm_scheduler.py`` and ``vllm_worker.py`` are its halves. ``keyspace.py`` keeps apart what must
not be mixed up, and flushes it. ``hicache/`` is what SGLang's backend is made of. ``vllm_plan.py`` decides how much of
a prefix vLLM can restore, ``vllm_facts.py`` which of its settings decide what blocks hold.
docs/engines.md is the user's page.
"""
