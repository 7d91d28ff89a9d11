"""Fixtures: a CUDA driver in software."""

from __future__ import annotations

from tests.support.gpu_fixtures import both, devices, fake, shared_library

__all__ = ["both", "devices", "fake", "shared_library"]
