"""Split learning with a server that is not trusted: it holds the blocks, and the client everything around them.

The two sides (`client`, `server`) know nothing of a network and run in one process as well; `transport` carries their
messages over gRPC with mutual TLS.
"""
