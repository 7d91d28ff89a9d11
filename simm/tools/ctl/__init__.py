"""``simm ctl``: see inside the data servers of this host, and why clients find nothing. No manager is needed."""
