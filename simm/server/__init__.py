"""The processes of a data server under :mod:`simm.dataserver`: worker, stream, mover, RDMA endpoint.

With what their supervisor needs to start, watch and announce them.
"""
