"""DP-SGD: Poisson sampling, each sample's gradient clipped, noise on their sum, and the guarantee (ε, δ)."""
