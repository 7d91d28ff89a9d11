"""GPU memory as source and destination of values: the CUDA driver, copies, pinned host memory, and GPUDirect RDMA.

Loaded with the first GPU memory that a caller passes; servers never load it.
"""
