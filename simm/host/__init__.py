"""What Linux gives one process: NUMA nodes and their processors, memory limits, pages, and callers' buffers.

No sockets, no settings, nothing of SiMM's own structures.
"""
