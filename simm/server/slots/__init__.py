"""The workers of a data server's supervisor: how one gets its sockets and processes, and how another one is added."""
