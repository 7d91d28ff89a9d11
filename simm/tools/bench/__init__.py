"""``simm bench``: the load, the floor it is compared with, the replay of traces, and the report."""
