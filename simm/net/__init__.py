"""Sockets and processes: the event loop of the servers, the blocking channel of the clients, and HTTP pages.

Knows frames, but no message's meaning.
"""
