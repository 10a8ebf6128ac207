"""Split learning with an untrusted server: the server has the blocks, and the client has everything around them.

The two sides (`client`, `server`) know nothing of a network and run in one process as well; `transport` carries their
messages over gRPC with mutual TLS.
"""
