"""The guard inside engines of federated learning: a mod for Flower clients, a result filter for NVFlare.

Each engine is imported by its own module alone: `situs.engines.flower`, `situs.engines.nvflare`.
"""
