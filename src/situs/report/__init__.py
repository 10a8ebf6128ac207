"""Reports: results in, files out. Nothing here computes a metric."""
