"""SiMM: a distributed in-memory store for the KV cache of LLM inference."""

from __future__ import annotations

__version__ = "0.1.0"
