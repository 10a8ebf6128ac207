"""Loops, never ideas: one training engine for every method, on plain torch.

`fit` runs it; `checkpoint` writes and restores its state, `export` writes the model for other libraries; `optim` sets
rates and parameter groups; `distributed` runs it on several ranks; `log` reports. The loop knows a method, a loader and
hooks, none of them by name.
"""
