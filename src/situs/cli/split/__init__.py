"""Split learning: a client with the data, a server with the blocks."""
