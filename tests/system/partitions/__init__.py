"""Several hosts on one machine: network namespaces around a router that loses, delays and resets what it is told to."""
