"""Tests of simm/tracing: what needs no client."""
