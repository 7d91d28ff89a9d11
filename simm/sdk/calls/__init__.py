"""Calls of the client and of ``simm.kv`` by topic, each a base class of ``Client`` or of ``Store``."""
