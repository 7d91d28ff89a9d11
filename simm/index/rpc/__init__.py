"""The index by gRPC, an extra of its own (``library``): the service ``indexer.v1`` and its messages."""
