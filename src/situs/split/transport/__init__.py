"""Messages between client and server: gRPC over bytes, with certificates on both sides."""
