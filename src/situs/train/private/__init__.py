"""DP-SGD: each sample's gradient clipped, noise on their sum, samples drawn by chance, and what it promises (ε, δ)."""
