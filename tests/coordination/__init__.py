"""What the tests of several managers share: a real etcd, and a model of one whose network fails by a seed."""
