"""What a worker looks up for its peers, and whom an entry is for."""
