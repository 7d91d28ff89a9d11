"""What a worker looks up for its peers."""
