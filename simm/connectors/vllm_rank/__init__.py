"""What the workers' half of SiMM's connector for vLLM is made of, besides that half (``connectors/vllm_worker.py``).

    jobs  copies, loads and stores that are under way

Nothing here imports an engine.
"""
