"""What a manager needs besides :mod:`simm.cluster`: election of a leader, etcd, the state file, and status pages."""
