"""What a worker does at a request, by topic."""
