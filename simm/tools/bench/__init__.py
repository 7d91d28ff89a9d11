"""``simm bench``: the load, the floor it is compared with, and the report."""
