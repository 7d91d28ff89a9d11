"""What operations consist of: reads at several owners, parts of values by each path, expected times, two copies."""
