"""Who is in the cluster and who owns which shard: the manager's decisions, and what a map means for a server.

Pure: events in, actions out, the clock an argument. The manager, the data server and the simulator run this code.
"""
