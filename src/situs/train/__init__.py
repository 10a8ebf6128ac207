"""Loops, never ideas: one training engine for every method, on plain torch.

`fit` runs it; `checkpoint` is what it leaves on disk and comes back from, `export` what others load; `optim` decides
rates and parameter groups; `distributed` spreads it over ranks; `log` says how it goes. The loop knows a method, a
loader and hooks, none of them by name.
"""
